"""Plan for sliding windows: one pass over a canvas that contains the image at all scales.

A sliding window over 17 grids launches the kernels of 17 small networks; over one canvas it
launches them once. Windows that overlap two grids are computed as well and discarded. Batch norm
would include the seams between grids, so networks with batch norm are computed grid by grid.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P window pixels, K classes,
# h w positions.

import math
from collections.abc import Sequence
from itertools import combinations
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foveate.errors import ConfigError
from foveate.execution import canvas_search, convnet
from foveate.execution.canvas_search import Place, needed_windows
from foveate.execution.exact import matching_convnet, require_convnet
from foveate.models.outputs import Outputs
from foveate.models.sliding import SlidingChannels, extent

MOST_LAYOUTS = 256


def fits(net: nn.Module, images: Tensor) -> bool:
    """Whether this is an unmodified sliding network without batch norm.

    On a CPU the canvas is faster in training only. In evaluation it exceeds the cache: SWMax on 16
    images of 112 pixels takes 1,070 ms on one core, and 600 ms grid by grid.
    """
    if not isinstance(net, SlidingChannels) or (images.device.type == "cpu" and not net.training):
        return False
    backbone = matching_convnet(net, images)
    return backbone is not None and not any(
        isinstance(layer, nn.BatchNorm2d) for layer in backbone.modules()
    )


def prepare(net: nn.Module, images: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the canvas, and find the windows that can be the strongest.

    An empty tensor (B, 0, H, W) carries the image size in its shape.
    """
    assert isinstance(net, SlidingChannels)
    layout, backbone = layout_of(net, *images.shape[-2:]), net.backbone
    canvas = fill_canvas(list(net.grids(images)), layout)
    canvas = canvas.to(dtype) if images.is_cuda else canvas
    size = images.new_empty(len(images), 0, *images.shape[2:])
    return canvas, size, needed_windows(canvas, layout.places, backbone.size, backbone.stride)


def outputs(net: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Run the network over the canvas."""
    assert isinstance(net, SlidingChannels)
    backbone, (canvas, size, needed) = require_convnet(net), inputs
    layout = layout_of(net, *size.shape[2:])
    if tuple(canvas.shape[2:]) != layout[:2]:
        raise ConfigError("the scales changed after the inputs were prepared; call prepare again")
    mask = backbone.draw_mask(canvas)
    if net.pool == "max" and torch.is_grad_enabled():
        return Outputs(_max_logits(net, canvas, layout, mask, needed))
    windows = (backbone.size, backbone.stride)
    if net.pool == "max" and canvas_search.applies(backbone, canvas):
        values, _ = canvas_search.strongest(backbone, canvas, needed, mask, layout.places)
        parts = canvas_search.grid_slices(layout.places, *windows)
        channels = torch.stack([values[:, part].amax(1) for part in parts], 1)
    else:
        maps = convnet.dense(backbone, canvas, mask)
        channels = net.pool_space(split_maps(maps, layout, *windows))
    return Outputs(net.combine(channels), channels)


def _max_logits(
    net: SlidingChannels, canvas: Tensor, layout: "Layout", mask: Tensor | None, needed: Tensor
) -> Tensor:
    """Return the logits (B, K), with gradients at almost no extra cost.

    A maximum over space and scale is the logit of one window and has the gradient of that window.
    All windows are therefore computed without a graph. Then the strongest window of each class is
    recomputed with gradients.
    """
    backbone = net.backbone
    size, stride = backbone.size, backbone.stride
    with torch.no_grad():
        if canvas_search.applies(backbone, canvas):
            found = canvas_search.strongest(backbone, canvas, needed, mask, layout.places)
            tile = found[0].argmax(1, keepdim=True)
            positions = found[1].gather(1, tile).squeeze(1).long()
        else:
            positions = argmax_windows(convnet.dense(backbone, canvas, mask), layout, size, stride)
    windows = windows_at(canvas, positions, size, stride)
    logits = backbone.classify(convnet.features(backbone, windows.flatten(0, 1)), mask)
    return logits.unflatten(0, positions.shape).diagonal(dim1=1, dim2=2)  # type: ignore[no-any-return]


class Layout(NamedTuple):
    """Size of a canvas and the places of all grids on it."""

    height: int
    width: int
    places: tuple[Place, ...]


# Keyed by everything that determines a layout; torch.compile cannot trace an lru_cache.
_layouts: dict[tuple[object, ...], Layout] = {}


def layout_of(net: SlidingChannels, height: int, width: int) -> Layout:
    """Return the layout of the canvas for images of `height` by `width` pixels."""
    sides, size, stride = (index(height), index(width)), net.backbone.size, net.backbone.stride
    key = (sides, net.scales, size, stride)
    layout = _layouts.get(key)  # only once: another thread can clear the dictionary
    if layout is None:
        if len(_layouts) >= MOST_LAYOUTS:
            _layouts.clear()
        tall, wide = ([extent(n / s, size, stride) for s in net.scales] for n in sides)
        layout = _layouts[key] = pack_grids(list(zip(tall, wide, strict=True)), stride)
    return layout


def pack_grids(grids: Sequence[tuple[int, int]], stride: int) -> Layout:
    """Arrange grids of (height, width) on a small canvas, at multiples of the stride.

    Canvases of several heights are tried. The 17 grids of SWMax fill 96 % of the smallest.
    """
    sides = [
        (math.ceil(height / stride) * stride, math.ceil(width / stride) * stride)
        for height, width in grids
    ]
    tallest = sorted((height for height, _ in sides), reverse=True)[:6]
    heights = {sum(some) for count in (1, 2, 3) for some in combinations(tallest, count)}
    heights = {height for height in heights if height >= tallest[0]}
    layouts = [_pack_within(sides, height) for height in sorted(heights)]
    best = min(layouts, key=lambda layout: layout.height * layout.width)
    corners = (place[:2] for place in best.places)
    places = (Place(*corner, *grid) for corner, grid in zip(corners, grids, strict=True))
    return best._replace(places=tuple(places))


def _pack_within(sides: Sequence[tuple[int, int]], height: int) -> Layout:
    """Place grids, the largest first, at the leftmost free position of a canvas of this height."""
    free = [Place(0, 0, height, sum(width for _, width in sides))]
    places: dict[int, Place] = {}
    for which in sorted(range(len(sides)), key=lambda k: sides[k], reverse=True):
        tall, wide = sides[which]
        space = [rest for rest in free if rest.height >= tall and rest.width >= wide]
        corner = min(space, key=lambda rest: (rest.left, rest.top))
        places[which] = Place(corner.top, corner.left, tall, wide)
        free = _free_outside(places[which], free)
    ends = [(place.top + place.height, place.left + place.width) for place in places.values()]
    bottom, right = map(max, zip(*ends, strict=True))
    return Layout(bottom, right, tuple(places[k] for k in range(len(sides))))


def _free_outside(place: Place, free: Sequence[Place]) -> list[Place]:
    """Return the largest rectangles of the free space that remain outside a place."""
    bottom, right = place.top + place.height, place.left + place.width
    parts = []
    for top, left, height, width in free:
        below, beside = top + height, left + width
        if bottom <= top or below <= place.top or right <= left or beside <= place.left:
            parts.append(Place(top, left, height, width))
            continue
        parts += [
            Place(top, left, place.top - top, width),
            Place(bottom, left, below - bottom, width),
            Place(top, left, height, place.left - left),
            Place(top, right, height, beside - right),
        ]
    kept = [part for part in dict.fromkeys(parts) if part.height > 0 and part.width > 0]
    return [a for a in kept if not any(a != b and _contains(b, a) for b in kept)]


def _contains(outer: Place, inner: Place) -> bool:
    tall = outer.top <= inner.top and inner.top + inner.height <= outer.top + outer.height
    return (
        tall and outer.left <= inner.left and inner.left + inner.width <= outer.left + outer.width
    )


def fill_canvas(grids: Sequence[Tensor], layout: Layout) -> Tensor:
    """Copy grids (B, C, height, width) onto one canvas, with zeros between them."""
    canvas = grids[0].new_zeros(*grids[0].shape[:2], layout.height, layout.width)
    for grid, (top, left, height, width) in zip(grids, layout.places, strict=True):
        canvas[..., top : top + height, left : left + width] = grid
    return canvas


def split_maps(maps: Tensor, layout: Layout, size: int, stride: int) -> list[Tensor]:
    """Return the part (B, K, h, w) of the canvas maps that belongs to each grid."""
    return [maps[..., rows, columns] for rows, columns in _positions(layout, size, stride)]


def argmax_windows(maps: Tensor, layout: Layout, size: int, stride: int) -> Tensor:
    """Return the position (B, K), in h · w, of the window with the largest value of each map."""
    row, column = (torch.arange(n, device=maps.device) for n in maps.shape[-2:])
    inside = torch.zeros(maps.shape[-2:], dtype=torch.bool, device=maps.device)
    for rows, columns in _positions(layout, size, stride):
        tall = (row >= rows.start) & (row < rows.stop)
        wide = (column >= columns.start) & (column < columns.stop)
        inside = inside | (tall[:, None] & wide)
    return maps.masked_fill(~inside, -torch.inf).flatten(2).argmax(2)


def windows_at(canvas: Tensor, positions: Tensor, size: int, stride: int) -> Tensor:
    """Cut windows (B, K, C, P, P) from a canvas at positions (B, K) of its maps."""
    width = canvas.shape[-1]
    across = (width - size) // stride + 1
    corner = (positions // across) * stride * width + (positions % across) * stride
    pixel = torch.arange(size, device=canvas.device)
    offset = pixel[:, None] * width + pixel
    at = (corner[..., None, None] + offset)[:, :, None]  # (B, K, 1, P, P)
    at = at.expand(-1, -1, canvas.shape[1], -1, -1).transpose(1, 2).flatten(2)
    found = canvas.flatten(2).gather(2, at)
    return found.unflatten(2, (positions.shape[1], size, size)).transpose(1, 2)  # type: ignore[no-any-return]


def _positions(layout: Layout, size: int, stride: int) -> list[tuple[slice, slice]]:
    """Return the rows and columns of the maps whose windows lie within each grid."""
    return [
        (
            slice(top // stride, (top + height - size) // stride + 1),
            slice(left // stride, (left + width - size) // stride + 1),
        )
        for top, left, height, width in layout.places
    ]
