"""Grids of many sizes on one canvas, so that one pass of a network serves all scales.

A sliding window over 17 grids is 17 small networks' worth of kernels; over one canvas it is one.
Windows that straddle two grids are computed too and left out afterwards.
"""
# Shape letters: B batch, C image channel, P window pixels, K classes, h w positions.

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a grid lies on the canvas, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Layout(NamedTuple):
    """A canvas and the places of all grids on it."""

    height: int
    width: int
    places: tuple[Place, ...]


def arrange(sides: Sequence[tuple[int, int]]) -> Layout:
    """Place grids of (height, width) side by side, small ones below each other.

    Largest first, each goes under the first column that has room. Sides that are multiples of a
    stride get places that are multiples of it.
    """
    canvas = max(height for height, _ in sides)
    columns: list[list[int]] = []  # left, width, height used
    places: dict[int, Place] = {}
    for index in sorted(range(len(sides)), key=lambda k: sides[k], reverse=True):
        height, width = sides[index]
        room = (c for c in columns if c[1] >= width and c[2] + height <= canvas)
        column = next(room, None)
        if column is None:
            column = [sum(c[1] for c in columns), width, 0]
            columns.append(column)
        places[index] = Place(column[2], column[0], height, width)
        column[2] += height
    total = sum(column[1] for column in columns)
    return Layout(canvas, total, tuple(places[k] for k in range(len(sides))))


def paint(grids: Sequence[Tensor], layout: Layout) -> Tensor:
    """Put grids (B, C, height, width) onto one canvas; between them it is 0."""
    canvas = grids[0].new_zeros(*grids[0].shape[:2], layout.height, layout.width)
    for grid, (top, left, height, width) in zip(grids, layout.places, strict=True):
        canvas[..., top : top + height, left : left + width] = grid
    return canvas


def cut(maps: Tensor, layout: Layout, size: int, stride: int) -> list[Tensor]:
    """Give each grid its positions (B, K, h, w) of the maps of windows over the whole canvas."""
    return [maps[..., rows, columns] for rows, columns in _positions(layout, size, stride)]


def strongest(maps: Tensor, layout: Layout, size: int, stride: int) -> Tensor:
    """Find the window with the highest value of each map: (B, K) positions in h · w."""
    row, column = (torch.arange(n, device=maps.device) for n in maps.shape[-2:])
    inside = torch.zeros(maps.shape[-2:], dtype=torch.bool, device=maps.device)
    for rows, columns in _positions(layout, size, stride):
        tall = (row >= rows.start) & (row < rows.stop)
        wide = (column >= columns.start) & (column < columns.stop)
        inside = inside | (tall[:, None] & wide)
    return maps.masked_fill(~inside, -torch.inf).flatten(2).argmax(2)


def windows_at(canvas: Tensor, chosen: Tensor, size: int, stride: int) -> Tensor:
    """Cut windows (B, K, C, P, P) out of a canvas, at positions (B, K) of its maps."""
    width = canvas.shape[-1]
    across = (width - size) // stride + 1
    corner = (chosen // across) * stride * width + (chosen % across) * stride
    pixel = torch.arange(size, device=canvas.device)
    offset = pixel[:, None] * width + pixel
    at = (corner[..., None, None] + offset)[:, :, None]  # (B, K, 1, P, P)
    at = at.expand(-1, -1, canvas.shape[1], -1, -1).transpose(1, 2).flatten(2)
    found = canvas.flatten(2).gather(2, at)
    return found.unflatten(2, (chosen.shape[1], size, size)).transpose(1, 2)  # type: ignore[no-any-return]


def _positions(layout: Layout, size: int, stride: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the maps whose windows lie within one grid."""
    return [
        (
            slice(top // stride, (top + height - size) // stride + 1),
            slice(left // stride, (left + width - size) // stride + 1),
        )
        for top, left, height, width in layout.places
    ]
