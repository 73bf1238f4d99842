"""Triton kernels for the first blocks of a trunk in bf16: forward pass and weight gradients.

Gradients are sums over millions of positions. Each program sums a fixed range of positions and
stores its part, and a second kernel adds the parts in a fixed order. The ranges depend only on the
shapes, so the results are deterministic.
"""
# Shape letters: R rows, C image channel, O filters, N images, I input channels, H W pixels.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.execution.trunk_ops import Launch

LOW = tl.constexpr(tl.bfloat16)  # type of activations, slopes and rounded weights


# The fastest of 5 to 12 launches on one H200, for FovAvg with batch 128 and a cold cache: 29 µs for
# the forward pass, 44 for the gradients of the third convolution, 82 for those of the first blocks.
FORWARD = Launch(128, 0, 4, 1)  # one program for each block
KERNEL = Launch(128, 528, 4, 2)
PAIR = Launch(64, 528, 4, 3)
ADDED = 32  # outputs per program of `_add`
PARTS = 64  # partial sums that it loads at once


@triton.jit  # type: ignore[untyped-decorator]
def _selected(at, indices, total, PER: tl.constexpr):  # type: ignore[no-untyped-def]
    row = at
    if PER > 0:
        row = tl.load(indices + at // PER, at < total, other=0) * PER + at % PER
    return row


@triton.jit(do_not_specialize=["total"])  # type: ignore[untyped-decorator]
def first_block_kernel(  # type: ignore[no-untyped-def]
    rows, indices, weight, shift, active, total, WIDTH: tl.constexpr, FILTERS: tl.constexpr,
    BLOCK: tl.constexpr, PER: tl.constexpr = 0
):  # fmt: skip
    """Compute the first block. With `PER` rows per image, `indices` selects the images."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column, out = tl.arange(0, 16), tl.arange(0, FILTERS)
    inside = (at < total)[:, None]
    row = _selected(at, indices, total, PER)
    value = tl.zeros([BLOCK, FILTERS], tl.float32)
    for start in range(0, WIDTH, 16):
        source = rows + row[:, None] * WIDTH + (start + column)[None, :]
        pixels = tl.load(source, inside, other=0.0)
        filters = tl.load(weight + out[None, :] * WIDTH + (start + column)[:, None])
        value = tl.dot(pixels, filters, value, input_precision="tf32x3")
    value += tl.load(shift + out)[None, :]
    value = tl.where(value <= 0, 0.0, value)  # tl.maximum would replace NaN by 0
    tl.store(active + at[:, None] * FILTERS + out[None, :], value.to(LOW), inside)


@triton.jit(do_not_specialize=["total", "steps"])  # type: ignore[untyped-decorator]
def _kernel_gradient(  # type: ignore[no-untyped-def]
    images, slopes, parts, total, steps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # Every pixel is read with its SIDE - 1 neighbours to the right, which are adjacent in memory,
    # and multiplied by the slopes of the outputs in the SIDE rows that use it.
    TALL: tl.constexpr = HEIGHT - SIDE + 1
    BROAD: tl.constexpr = WIDTH - SIDE + 1
    program = tl.program_id(0)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    up, out = (column // OUT)[None, :], (column % OUT)[None, :]
    value = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias = tl.zeros([COLUMNS], tl.float32)
    for step in range(steps):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (at < total)[:, None]
        image, y, x = at // (HEIGHT * BROAD), at // BROAD % HEIGHT, at % BROAD
        source = images + ((image * HEIGHT + y) * WIDTH + x)[:, None] * IN + row[None, :]
        pixels = tl.load(source, inside & (row < SIDE * IN)[None, :], other=0.0)
        below = y[:, None] - up
        there = inside & (below >= 0) & (below < TALL) & (column < SIDE * OUT)[None, :]
        place = ((image[:, None] * TALL + below) * BROAD + x[:, None]) * OUT + out
        slope = tl.load(slopes + place, there, other=0.0)
        value = tl.dot(tl.trans(pixels), slope, value)
        bias += tl.sum(slope.to(tl.float32), 0)
    part = parts + program * (SIDE * SIDE * IN * OUT + OUT)
    target = part + row[:, None] * (SIDE * OUT) + column[None, :]
    tl.store(target, value, (row < SIDE * IN)[:, None] & (column < SIDE * OUT)[None, :])
    tl.store(part + SIDE * SIDE * IN * OUT + column, bias, column < OUT)  # those without a shift


@triton.jit(do_not_specialize=["total", "steps"])  # type: ignore[untyped-decorator]
def pair_kernel(  # type: ignore[no-untyped-def]
    rows, indices, active, slopes, weight, parts, total, steps, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr, OUT: tl.constexpr,
    SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr = True, PER: tl.constexpr = 0
):  # fmt: skip
    """Sum the gradients of the first block and of the convolution after it.

    Without `BIAS`, that of the convolution's bias is 0. For `PER`, see `first_block_kernel`.
    """
    TALL: tl.constexpr = HEIGHT - SIDE + 1
    BROAD: tl.constexpr = WIDTH - SIDE + 1
    TAPS: tl.constexpr = SIDE * SIDE * OUT
    program = tl.program_id(0)
    pixel, column, filter = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, FILTERS)
    tap, out = column // OUT, column % OUT
    up, left, used = (tap // SIDE)[None, :], (tap % SIDE)[None, :], (column < TAPS)[None, :]
    given = weight + (out * SIDE * SIDE + tap)[:, None] * FILTERS + filter[None, :]
    second = tl.load(given, (column < TAPS)[:, None], other=0.0)
    second_sum = tl.zeros([FILTERS, COLUMNS], tl.float32)
    bias = tl.zeros([COLUMNS], tl.float32)
    first_sum = tl.zeros([ROWS, FILTERS], tl.float32)
    shift = tl.zeros([FILTERS], tl.float32)
    for step in range(steps):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (at < total)[:, None]
        image, y, x = at // (HEIGHT * WIDTH), at // WIDTH % HEIGHT, at % WIDTH
        below, right = y[:, None] - up, x[:, None] - left
        there = inside & (below >= 0) & (below < TALL) & (right >= 0) & (right < BROAD)
        place = ((image[:, None] * TALL + below) * BROAD + right) * OUT + out[None, :]
        above = tl.load(slopes + place, there & used, other=0.0)
        value = tl.load(active + at[:, None] * FILTERS + filter[None, :], inside, other=0.0)
        second_sum = tl.dot(tl.trans(value), above, second_sum)
        if BIAS:
            bias += tl.sum(above.to(tl.float32), 0)
        # Rounded to bf16, as the gradient of the input of a convolution in bf16. As the first
        # factor of the next products, transposed, Triton 3.6 compiles it wrongly.
        slope = tl.where(value <= 0, 0.0, tl.dot(above, second)).to(LOW)
        row = _selected(at, indices, total, PER)
        source = rows + row[:, None] * PIXELS + pixel[None, :]
        pixels = tl.load(source, inside & (pixel < PIXELS)[None, :], other=0.0)
        # Two bf16 values hold 16 bits of a pixel. TF32 would hold 11.
        high = pixels.to(LOW)
        low = (pixels - high.to(tl.float32)).to(LOW)
        first_sum = tl.dot(tl.trans(high), slope, first_sum)
        first_sum = tl.dot(tl.trans(low), slope, first_sum)
        shift += tl.sum(slope.to(tl.float32), 0)
    part = parts + program * (FILTERS * TAPS + OUT + FILTERS * PIXELS + FILTERS)
    tl.store(
        part + filter[:, None] * TAPS + column[None, :], second_sum, used & (filter >= 0)[:, None]
    )
    part += FILTERS * TAPS
    tl.store(part + column, bias, column < OUT)  # the slopes without a shift
    part += OUT
    kept = (pixel < PIXELS)[:, None] & (filter >= 0)[None, :]
    tl.store(part + filter[None, :] * PIXELS + pixel[:, None], first_sum, kept)
    tl.store(part + FILTERS * PIXELS + filter, shift)


@triton.jit(do_not_specialize=["count", "size"])  # type: ignore[untyped-decorator]
def _add(parts, sums, count, size, ADDED: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    value = tl.zeros([PARTS, ADDED], tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (at < size)[None, :]
        value += tl.load(parts + part[:, None] * size + at[None, :], inside, other=0.0)
    tl.store(sums + at, tl.sum(value, 0), at < size)


def first_block(rows: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """Compute relu(rows (R, 16 C) @ weight.mT + shift), rounded once to bf16: (R, 4 O)."""
    active = rows.new_empty(len(rows), len(weight), dtype=torch.bfloat16)
    if active.numel():
        first_block_kernel[(triton.cdiv(len(rows), FORWARD.block),)](
            rows.contiguous(), None, weight.contiguous(), shift.contiguous(), active, len(rows),
            WIDTH=rows.shape[1], FILTERS=len(weight), **_options(FORWARD)
        )  # fmt: skip
    return active


def kernel_gradient(images: Tensor, slopes: Tensor, side: int) -> Tensor:
    """Compute the gradients of a convolution's weight, in the order (x, I, y, O), and of its bias.

    They are returned as one flat tensor.
    """
    _, channels, height, width = images.shape
    count, filters, _, across = slopes.shape
    total = count * height * across
    programs, steps = _split(total, KERNEL)
    parts = images.new_empty(
        programs, side * side * channels * filters + filters, dtype=torch.float32
    )
    last = torch.channels_last
    _kernel_gradient[(programs,)](
        images.contiguous(memory_format=last), slopes.contiguous(memory_format=last), parts, total,
        steps, HEIGHT=height, WIDTH=width, IN=channels, OUT=filters, SIDE=side,
        ROWS=triton.next_power_of_2(side * channels),
        COLUMNS=triton.next_power_of_2(side * filters), **_options(KERNEL)
    )  # fmt: skip
    return _added(parts)


def pair_gradient(rows: Tensor, active: Tensor, slopes: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradients of the first block and of a convolution after it, as one flat tensor.

    The activations (N, 4 O, H, W) are read once for all of them: of the convolution's weight, in
    the order (I, y, x, O), and bias, and of the first block's weight (4 O, 16 C) and shift (4 O,).
    """
    filters, height, width = active.shape[1:]
    total, pixels = rows.shape
    above, side = weight.shape[0], weight.shape[2]
    taps = side * side * above
    programs, steps = _split(total, PAIR)
    parts = rows.new_empty(programs, filters * (taps + pixels + 1) + above)
    last = torch.channels_last
    pair_kernel[(programs,)](
        rows.contiguous(), None, active.contiguous(memory_format=last),
        slopes.contiguous(memory_format=last), weight.contiguous(memory_format=last), parts, total,
        steps, HEIGHT=height, WIDTH=width, PIXELS=pixels, FILTERS=filters, OUT=above, SIDE=side,
        ROWS=triton.next_power_of_2(pixels), COLUMNS=triton.next_power_of_2(taps), **_options(PAIR)
    )  # fmt: skip
    return _added(parts)


def _split(total: int, launch: Launch) -> tuple[int, int]:
    """Return the number of programs, and the blocks of each, that cover `total` positions."""
    blocks = triton.cdiv(total, launch.block)
    steps = max(1, triton.cdiv(blocks, launch.programs))
    return max(1, triton.cdiv(blocks, steps)), steps


def _added(parts: Tensor) -> Tensor:
    count, size = parts.shape
    sums = parts.new_empty(size)
    _add[(triton.cdiv(size, ADDED),)](parts, sums, count, size, ADDED=ADDED, PARTS=PARTS)
    return sums


def _options(launch: Launch) -> dict[str, Any]:
    return {"BLOCK": launch.block, "num_warps": launch.warps, "num_stages": launch.stages}
