"""Grids of many sizes on one canvas, so that one pass of a network serves all scales.

A sliding window over 17 grids is 17 small networks' worth of kernels; over one canvas it is one.
Windows that straddle two grids are computed too and left out afterwards.
"""
# Shape letters: B batch, C image channel, K classes, h w positions.

from collections.abc import Sequence
from typing import NamedTuple

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
    parts = []
    for top, left, height, width in layout.places:
        rows = slice(top // stride, (top + height - size) // stride + 1)
        columns = slice(left // stride, (left + width - size) // stride + 1)
        parts.append(maps[..., rows, columns])
    return parts
