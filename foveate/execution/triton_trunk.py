"""Triton kernels in bf16 for the first block of a trunk, and for the gradients of the first two."""
# Shape letters: R rows, C image channel, O filters.

import torch
import triton
import triton.language as tl
from torch import Tensor

LOW = tl.constexpr(tl.bfloat16)  # type of activations, slopes and rounded weights
BLOCK = 128  # rows per program; the fastest of 5 on one H200, 29 µs for FovAvg with batch 128


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
def pair_kernel(  # type: ignore[no-untyped-def]
    rows, indices, active, slopes, weight, parts, total, steps, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr, OUT: tl.constexpr,
    SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PER: tl.constexpr = 0
):  # fmt: skip
    """Sum the gradients of the first block and of the weight of the convolution after it.

    For `PER`, see `first_block_kernel`.
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
    part = parts + program * (FILTERS * TAPS + FILTERS * PIXELS + FILTERS)
    tl.store(
        part + filter[:, None] * TAPS + column[None, :], second_sum, used & (filter >= 0)[:, None]
    )
    part += FILTERS * TAPS
    kept = (pixel < PIXELS)[:, None] & (filter >= 0)[None, :]
    tl.store(part + filter[None, :] * PIXELS + pixel[:, None], first_sum, kept)
    tl.store(part + FILTERS * PIXELS + filter, shift)


def first_block(rows: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """Compute relu(rows (R, 16 C) @ weight.mT + shift), rounded once to bf16: (R, 4 O)."""
    active = rows.new_empty(len(rows), len(weight), dtype=torch.bfloat16)
    if active.numel():
        with torch.cuda.device_of(rows):  # Triton launches on the current device
            first_block_kernel[(triton.cdiv(len(rows), BLOCK),)](
                rows.contiguous(), None, weight.contiguous(), shift.contiguous(), active, len(rows),
                WIDTH=rows.shape[1], FILTERS=len(weight), BLOCK=BLOCK, num_warps=4, num_stages=1
            )  # fmt: skip
    return active
