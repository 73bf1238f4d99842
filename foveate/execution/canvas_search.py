"""Find the strongest window of each class on a canvas, in bf16 on a GPU by Triton kernels.

An image of an object on a constant background has many windows that show only background. Their
logits are equal, so one of them is computed, and the windows that show something else.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, T tiles, K classes.

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.execution.precision import autocast_dtype
from foveate.execution.triton_common import KERNEL_DEVICES, power
from foveate.execution.windows import group_first, regroup_second
from foveate.models.backbone import ConvNet

if TYPE_CHECKING:
    from foveate.execution.triton_canvas import Launcher, Stage

WIDTHS = (16, 32, 64)  # filters for which the kernels' tiles fit into registers
MOST_UNITS = 256
MOST_CLASSES = 64
TILE = (8, 16)  # height and width of the tiles of a map


class Place(NamedTuple):
    """Position and size of a grid on the canvas, in pixels."""

    top: int
    left: int
    height: int
    width: int


def applies(backbone: ConvNet, canvas: Tensor) -> bool:
    """Whether the kernels support a network without batch norm and a canvas."""
    convs = _convolutions(backbone)
    strides = [conv.stride[0] for conv in convs]
    shaped = all(conv.out_channels in WIDTHS for conv in convs) and convs[0].out_channels == 16
    shaped = shaped and strides[:2] == [1, 2] and canvas.shape[1] <= 4
    shaped = shaped and backbone.size % backbone.stride == 0
    head = backbone.hidden.out_features <= MOST_UNITS and backbone.head.out_features <= MOST_CLASSES
    exact = canvas.dtype == autocast_dtype(canvas) == torch.bfloat16
    return canvas.device.type in KERNEL_DEVICES and exact and shaped and head


def needed_windows(canvas: Tensor, places: Sequence[Place], size: int, stride: int) -> Tensor:
    """Return the windows of each grid on a canvas (B, C, H, W) that can have the largest logit.

    The result (B, S, 4), int32, has their first and last row, and first and last column, among the
    windows of the canvas. They contain every window that is not constant, and a constant one if
    there is any. The stride of the windows divides the positions of the grids.
    """
    found = []
    for top, left, height, width in places:
        grid = canvas[..., top : top + height, left : left + width]
        other = (grid != grid[..., :1, :1]).any(1)
        rows, columns = (
            _span(other.any(axis), (length - size) // stride, size, stride)
            for axis, length in ((2, height), (1, width))
        )
        # A row of windows beside those with content is constant; if there is none, a column is.
        wide = (rows[0] == 0) & (rows[1] == (height - size) // stride)
        rows = _widened(*rows, (height - size) // stride)
        wider = _widened(*columns, (width - size) // stride)
        before, after = (torch.where(wide, *both) for both in zip(wider, columns, strict=True))
        corner = [top // stride] * 2 + [left // stride] * 2
        found.append(
            torch.stack([*rows, before, after], 1) + torch.tensor(corner).to(canvas.device)
        )
    return torch.stack(found, 1).int()


def _span(content: Tensor, most: int, size: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return the first and last of windows 0 to `most` that cover a pixel (B, n) with content."""
    pixel, count = torch.arange(content.shape[1], device=content.device), content.shape[1]
    begin = torch.where(content, pixel, count).amin(1)
    end = torch.where(content, pixel, 0).amax(1)
    last = (end // stride).clamp(max=most)
    first = ((begin - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    return torch.minimum(first, last), last


def _widened(first: Tensor, last: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return a range of windows with one more, if there is one."""
    wider = torch.where(first == 0, last + 1, last).clamp(max=most)
    return (first - 1).clamp(min=0), wider


def strongest(
    backbone: ConvNet,
    canvas: Tensor,
    needed: Tensor,
    mask: Tensor | None,
    places: Sequence[Place],
) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each class in each tile of the canvas, and its window.

    Logits in float32 and positions of windows have the shape (B, T, K); `grid_slices` gives the
    tiles of each grid. Tiles without needed windows have -inf. The canvas (B, C, H, W) is in bf16,
    `needed` is the result of `needed_windows`, and the dropout mask is (B, units).
    """
    classes, units = backbone.head.out_features, backbone.hidden.out_features
    if mask is None:
        mask = canvas.new_ones(len(canvas), units)
    with torch.autocast(canvas.device.type, enabled=False):
        # Products in bf16, biases in float32.
        layers = [
            (layer if number % 2 else layer.bfloat16()).detach().contiguous()
            for number, layer in enumerate(arranged(backbone))
        ]
        given = (canvas, needed, layers, padded(mask.float()), *numbers(backbone, places))
        # Outside compiled code the function itself is called: operators import the compiler.
        compiling = torch.compiler.is_compiling()
        values, positions = (strongest_windows if compiling else _strongest_windows)(*given)
    return values[..., :classes], positions[..., :classes]


def grid_slices(places: Sequence[Place], size: int, stride: int) -> list[slice]:
    """Return the tiles of each grid among the T tiles of `strongest`."""
    ends = [0]
    for _, _, height, width in places:
        tall, wide = ((length - size) // stride + 1 for length in (height, width))
        ends.append(ends[-1] + math.ceil(tall / TILE[0]) * math.ceil(wide / TILE[1]))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def arranged(backbone: ConvNet, of: Callable[[Tensor], Tensor] = lambda p: p) -> list[Tensor]:
    """Return weight and bias of each layer as the kernels read them, padded with zeros.

    `of` maps each parameter to the tensor of its shape that is arranged, by default itself.
    """
    convs = _convolutions(backbone)
    kernels, shifts = [of(conv.weight) for conv in convs], [of(conv.bias) for conv in convs]
    found = [group_first(kernels[0]), shifts[0].repeat(4)]
    found += [regroup_second(kernels[1]).permute(2, 3, 1, 0), shifts[1]]
    for kernel, shift in zip(kernels[2:], shifts[2:], strict=True):
        found += [kernel.permute(2, 3, 1, 0), shift]
    side, hidden, head = backbone.side, backbone.hidden, backbone.head
    more = power(hidden.out_features) - hidden.out_features
    extra = power(head.out_features) - head.out_features
    kernel = of(hidden.weight).unflatten(1, (-1, side, side)).permute(2, 3, 1, 0)
    found += [F.pad(kernel, (0, more)), F.pad(of(hidden.bias), (0, more))]
    found += [F.pad(of(head.weight).mT, (0, extra, 0, more)), F.pad(of(head.bias), (0, extra))]
    return found


def padded(mask: Tensor) -> Tensor:
    """Return a dropout mask (B, units) with the units of the kernels."""
    return F.pad(mask, (0, power(mask.shape[1]) - mask.shape[1]))


def numbers(backbone: ConvNet, places: Sequence[Place]) -> tuple[list[int], list[int], int]:
    """Return strides, places in one list, and size, as `strongest_windows` takes them."""
    flat = [number for place in places for number in place]
    return [conv.stride[0] for conv in _convolutions(backbone)], flat, backbone.size


def _convolutions(backbone: ConvNet) -> list[Any]:
    return [layer for layer in backbone.trunk if isinstance(layer, nn.Conv2d)]


def _strongest_windows(
    canvas: Tensor,
    needed: Tensor,
    layers: list[Tensor],
    mask: Tensor,
    strides: list[int],
    places: list[int],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Compute `strongest` from arranged layers; `places` has four numbers per grid."""
    with torch.cuda.device_of(canvas):  # Triton launches on the current device
        return search(canvas, needed, layers, mask, strides, places, size)


strongest_windows = torch.library.custom_op(
    "foveate::strongest_windows", _strongest_windows, mutates_args=()
)


def search(
    canvas: Tensor,
    needed: Tensor,
    layers: list[Tensor],
    mask: Tensor,
    strides: list[int],
    places: list[int],
    size: int,
    **how: "Launcher",
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `strongest_windows`, now or as `launch` in `how` does."""
    from foveate.execution import triton_canvas as kernels

    side = layers[-4].shape[0]
    area, grids = canvas.shape[2:], _places(places)
    second, *others, last = _stages(area, canvas.device, tuple(strides), side, grids, size)
    maps = kernels.first_blocks(canvas, layers[:4], second, needed, **how)
    for number, stage in enumerate(others, start=2):
        pair = layers[2 * number : 2 * number + 2]
        maps = kernels.convolution(maps, pair, strides[number], stage, needed, **how)
    return kernels.classify(maps, layers[-4:], mask, last, needed, **how)


@strongest_windows.register_fake
def _strongest_fake(
    canvas: Tensor,
    needed: Tensor,
    layers: list[Tensor],
    mask: Tensor,
    strides: list[int],
    places: list[int],
    size: int,
) -> tuple[Tensor, Tensor]:
    tiles = grid_slices(_places(places), size, math.prod(strides))[-1].stop
    shape = (len(canvas), tiles, len(layers[-1]))
    return (
        canvas.new_empty(shape, dtype=torch.float32),
        canvas.new_empty(shape, dtype=torch.int32),
    )


def _places(flat: Sequence[int]) -> tuple[Place, ...]:
    return tuple(map(Place, *(flat[axis::4] for axis in range(4))))


@lru_cache(maxsize=16)
def _stages(
    area: torch.Size,
    device: torch.device,
    strides: tuple[int, ...],
    side: int,
    places: tuple[Place, ...],
    size: int,
) -> list["Stage"]:
    """Return the maps after the second and each further convolution, and that of the windows."""
    from foveate.execution.triton_canvas import Stage

    found, whole = [], math.prod(strides)
    for depth in range(2, len(strides) + 2):
        # The last map is that of the windows, after a convolution of `side` pixels.
        layers = [(3, stride) for stride in strides[:depth]]
        layers += [(side, 1)] if depth > len(strides) else []
        passed = math.prod(strides[:depth])
        tiles = []
        for grid, (top, left, height, width) in enumerate(places):
            corner = (top // passed, left // passed)
            bottom, right = corner[0] + _after(height, layers), corner[1] + _after(width, layers)
            tiles += [
                (grid, y, x, min(y + TILE[0], bottom), min(x + TILE[1], right))
                for y in range(corner[0], bottom, TILE[0])
                for x in range(corner[1], right, TILE[1])
            ]
        table = torch.tensor(tiles, dtype=torch.int32, device=device)
        tall, wide = (_after(length, layers) for length in area)
        found.append(Stage(tall, wide, table, whole // passed, _after(size, layers)))
    return found


def _after(length: int, layers: Sequence[tuple[int, int]]) -> int:
    """Return the side of the map after unpadded convolutions of (size, stride)."""
    for size, stride in layers:
        length = (length - size) // stride + 1
    return length
