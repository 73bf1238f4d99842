"""Triton kernels that classify the windows of a canvas in bf16, without gradients.

Each program computes one tile of a feature map. Tiles lie within one grid of the canvas, and those
that no needed window covers are left out: their values are undefined and never used.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, T tiles, K classes.

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.execution.canvas_search import TILE
from foveate.execution.triton_step import rectified

Launcher: TypeAlias = Callable[..., None]
WARPS = {"first": 4, "convolution": 4, "classify": 8}


class Stage(NamedTuple):
    """A feature map of the canvas, and its tiles."""

    height: int
    width: int
    tiles: Tensor  # (T, 5), int32: grid, top, left, bottom and right of each tile
    step: int  # rows from one window to the next
    reach: int  # rows that one window covers

    def options(self, needed: Tensor) -> dict[str, Any]:
        """Return the arguments of a kernel that writes this map."""
        return {
            "TALL": self.height, "BROAD": self.width, "STEP": self.step, "REACH": self.reach,
            "GRIDS": needed.shape[1], "TILE_Y": TILE[0], "TILE_X": TILE[1],
        }  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _tile(tiles, needed, GRIDS: tl.constexpr, STEP: tl.constexpr, REACH: tl.constexpr):  # type: ignore[no-untyped-def]
    # The needed windows are those of the rows first to last and the columns before to after.
    tile = tiles + tl.program_id(0) * 5
    top, left = tl.load(tile + 1), tl.load(tile + 2)
    bottom, right = tl.load(tile + 3), tl.load(tile + 4)
    box = needed + (tl.program_id(1) * GRIDS + tl.load(tile)) * 4
    first, last = tl.load(box), tl.load(box + 1)
    before, after = tl.load(box + 2), tl.load(box + 3)
    used = (bottom > STEP * first) & (top < STEP * last + REACH)
    used = used & (right > STEP * before) & (left < STEP * after + REACH)
    return top, left, bottom, right, used


@triton.jit  # type: ignore[untyped-decorator]
def _first_blocks(  # type: ignore[no-untyped-def]
    canvas, first, shift, second, bias, maps, tiles, needed, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, FILTERS: tl.constexpr, OUT: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, STEP: tl.constexpr, REACH: tl.constexpr,
    GRIDS: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr
):  # fmt: skip
    # The second convolution takes the activations of 2 x 2 windows of 4 x 4 pixels.
    top, left, bottom, right, used = _tile(tiles, needed, GRIDS, STEP, REACH)
    if used:
        image = tl.program_id(1).to(tl.int64)
        at = tl.arange(0, TILE_Y * TILE_X)
        y, x = top + at // TILE_X, left + at % TILE_X
        inside = ((y < bottom) & (x < right))[:, None]
        pixel, filter, out = tl.arange(0, 16), tl.arange(0, FILTERS), tl.arange(0, OUT)
        window = ((pixel // 4) * WIDTH + pixel % 4)[None, :]
        offset = tl.load(shift + filter)[None, :]
        value = tl.zeros([TILE_Y * TILE_X, OUT], tl.float32)
        for tap in tl.static_range(4):
            corner = (2 * (y + tap // 2) * WIDTH + 2 * (x + tap % 2))[:, None]
            active = tl.zeros([TILE_Y * TILE_X, FILTERS], tl.float32)
            for channel in tl.static_range(CHANNELS):
                start = canvas + (image * CHANNELS + channel) * (HEIGHT * WIDTH)
                pixels = tl.load(start + corner + window, inside, other=0.0)
                row = filter[None, :] * (16 * CHANNELS) + channel * 16 + pixel[:, None]
                active = tl.dot(pixels, tl.load(first + row), active)
            active = rectified(active + offset).to(tl.bfloat16)
            row = (tap * FILTERS + filter)[:, None] * OUT + out[None, :]
            value = tl.dot(active, tl.load(second + row), value)
        value = rectified(value + tl.load(bias + out)[None, :])
        place = maps + image * (TALL * BROAD * OUT) + (y * BROAD + x)[:, None] * OUT + out[None, :]
        tl.store(place, value.to(tl.bfloat16), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _convolution(  # type: ignore[no-untyped-def]
    given, weight, bias, maps, tiles, needed, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, TALL: tl.constexpr,
    BROAD: tl.constexpr, STEP: tl.constexpr, REACH: tl.constexpr, GRIDS: tl.constexpr,
    TILE_Y: tl.constexpr, TILE_X: tl.constexpr
):  # fmt: skip
    top, left, bottom, right, used = _tile(tiles, needed, GRIDS, STEP, REACH)
    if used:
        image = tl.program_id(1).to(tl.int64)
        at = tl.arange(0, TILE_Y * TILE_X)
        y, x = top + at // TILE_X, left + at % TILE_X
        inside = ((y < bottom) & (x < right))[:, None]
        channel, out = tl.arange(0, IN), tl.arange(0, OUT)
        source = given + image * (HEIGHT * WIDTH * IN) + channel[None, :]
        source += (y * STRIDE * WIDTH + x * STRIDE)[:, None] * IN
        row = weight + channel[:, None] * OUT + out[None, :]
        value = tl.zeros([TILE_Y * TILE_X, OUT], tl.float32)
        for tap in tl.static_range(9):
            pixels = tl.load(source + (tap // 3 * WIDTH + tap % 3) * IN, inside, other=0.0)
            value = tl.dot(pixels, tl.load(row + tap * IN * OUT), value)
        value = rectified(value + tl.load(bias + out)[None, :])
        place = maps + image * (TALL * BROAD * OUT) + (y * BROAD + x)[:, None] * OUT + out[None, :]
        tl.store(place, value.to(tl.bfloat16), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _classify(  # type: ignore[no-untyped-def]
    given, hidden, shift, mask, head, bias, values, positions, tiles, needed,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, SIDE: tl.constexpr,
    UNITS: tl.constexpr, CLASSES: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr,
    STEP: tl.constexpr, REACH: tl.constexpr, GRIDS: tl.constexpr, TILE_Y: tl.constexpr,
    TILE_X: tl.constexpr
):  # fmt: skip
    top, left, bottom, right, used = _tile(tiles, needed, GRIDS, STEP, REACH)
    image, kind = tl.program_id(1).to(tl.int64), tl.arange(0, CLASSES)
    place = (image * tl.num_programs(0) + tl.program_id(0)) * CLASSES + kind
    best = tl.full([CLASSES], float("-inf"), tl.float32)
    which = tl.zeros([CLASSES], tl.int32)
    if used:
        box = needed + (tl.program_id(1) * GRIDS + tl.load(tiles + tl.program_id(0) * 5)) * 4
        at = tl.arange(0, TILE_Y * TILE_X)
        y, x = top + at // TILE_X, left + at % TILE_X
        inside = (y < bottom) & (x < right)
        channel, unit = tl.arange(0, IN), tl.arange(0, UNITS)
        source = given + image * (HEIGHT * WIDTH * IN) + channel[None, :]
        source += (y * WIDTH + x)[:, None] * IN
        row = hidden + channel[:, None] * UNITS + unit[None, :]
        value = tl.zeros([TILE_Y * TILE_X, UNITS], tl.float32)
        for tap in range(SIDE * SIDE):
            step = (tap // SIDE * WIDTH + tap % SIDE) * IN
            pixels = tl.load(source + step, inside[:, None], other=0.0)
            value = tl.dot(pixels, tl.load(row + tap * IN * UNITS), value)
        value = rectified(value + tl.load(shift + unit)[None, :])
        value = (value * tl.load(mask + image * UNITS + unit)[None, :]).to(tl.bfloat16)
        logits = tl.dot(value, tl.load(head + unit[:, None] * CLASSES + kind[None, :]))
        logits += tl.load(bias + kind)[None, :]
        asked = inside & (y >= tl.load(box)) & (y <= tl.load(box + 1))
        asked = asked & (x >= tl.load(box + 2)) & (x <= tl.load(box + 3))
        logits = tl.where(asked[:, None], logits, float("-inf"))
        best, which = tl.max(logits, 0, return_indices=True)
    tl.store(values + place, best)
    row = top + which // TILE_X
    tl.store(positions + place, row * BROAD + left + which % TILE_X)


def launch_now(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
    """Launch a kernel."""
    kernel[grid](*given, **options)


def first_blocks(
    canvas: Tensor,
    layers: Sequence[Tensor],
    stage: Stage,
    needed: Tensor,
    launch: Launcher = launch_now,
) -> Tensor:
    """Compute the first two blocks of a trunk on a canvas (B, C, H, W) in bf16.

    The layers are weight (4 O, 16 C) and shift of the first block on windows of 4 × 4 pixels, and
    weight (2, 2, 4 O, I) and bias of the second. `needed` is the result of `needed_windows`. The
    map has the shape (B, height, width, I).
    """
    first, shift, second, bias = layers
    count, channels, height, width = canvas.shape
    maps = canvas.new_empty(count, stage.height, stage.width, second.shape[3])
    launch(
        _first_blocks, (len(stage.tiles), count), canvas, first, shift, second, bias, maps,
        stage.tiles, needed, HEIGHT=height, WIDTH=width,
        CHANNELS=channels, FILTERS=len(first), OUT=second.shape[3], num_warps=WARPS["first"],
        **stage.options(needed)
    )  # fmt: skip
    return maps


def convolution(
    given: Tensor,
    layers: Sequence[Tensor],
    stride: int,
    stage: Stage,
    needed: Tensor,
    launch: Launcher = launch_now,
) -> Tensor:
    """Compute a block with weight (3, 3, I, O) and bias (O,) on a map (B, H, W, I)."""
    weight, bias = layers
    count, height, width, channels = given.shape
    maps = given.new_empty(count, stage.height, stage.width, len(bias))
    launch(
        _convolution, (len(stage.tiles), count), given, weight, bias, maps, stage.tiles, needed,
        HEIGHT=height, WIDTH=width, IN=channels,
        OUT=len(bias), STRIDE=stride, num_warps=WARPS["convolution"], **stage.options(needed)
    )  # fmt: skip
    return maps


def classify(
    given: Tensor,
    layers: Sequence[Tensor],
    mask: Tensor,
    stage: Stage,
    needed: Tensor,
    launch: Launcher = launch_now,
) -> tuple[Tensor, Tensor]:
    """Apply the linear layers to all needed windows of a map (B, H, W, I).

    The layers are weight (side, side, I, units) and bias of the hidden layer, and weight (units, K)
    and bias of the head. The dropout mask is (B, units).

    Return the largest logit of each class in each tile, float32, and the position of its window,
    int32, both (B, T, K). Tiles without needed windows have -inf.
    """
    hidden, shift, head, bias = layers
    count, height, width, channels = given.shape
    size = (count, len(stage.tiles), len(bias))
    values = given.new_empty(size, dtype=torch.float32)
    positions = given.new_empty(size, dtype=torch.int32)
    launch(
        _classify, (len(stage.tiles), count), given, hidden, shift, mask, head, bias, values,
        positions, stage.tiles, needed,
        HEIGHT=height, WIDTH=width, IN=channels, SIDE=len(hidden), UNITS=len(shift),
        CLASSES=len(bias), num_warps=WARPS["classify"], **stage.options(needed)
    )  # fmt: skip
    return values, positions
