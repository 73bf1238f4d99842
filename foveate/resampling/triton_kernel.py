"""The resampling op as one GPU kernel: every patch pixel gathers its four image pixels."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.resampling.definition import View

# Measured on one H200, 4096 images and 17 scales: 256 pixels in 4 warps for groups of 4 images take
# 0.167 ms; one image at a time 0.24 ms, 1024 pixels 0.22 ms, a copy of as many bytes 0.105 ms.
BLOCK = 256  # patch pixels that one program makes, in each of a group of images
GROUP = 4  # images that share the arithmetic of positions and weights
PADDINGS = {"border": 0, "reflect": 1, "constant": 2}


@triton.jit  # type: ignore[untyped-decorator]
def _taps(p, scale, rest, whole, part, length, SIZE: tl.constexpr, PADDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two pixels of an axis and their weights for patch pixels p; the centre is whole + part."""
    offset = p.to(tl.float32) + (0.5 - SIZE / 2)
    below = tl.floor(offset * scale + (whole + part))
    # The product is rounded once, less whole pixels: as exact as float64 rounded at the end. The
    # floor of the rounded position may have been one off.
    far = tl.fma(offset, scale, whole - below) + (part + offset * rest)
    below += tl.floor(far)
    far = tl.fma(offset, scale, whole - below) + (part + offset * rest)
    near = 1 - far
    first = below.to(tl.int32)
    second = first + 1
    if PADDING == 2:
        near = tl.where((first >= 0) & (first < length), near, 0.0)
        far = tl.where((second >= 0) & (second < length), far, 0.0)
    if PADDING == 1:
        period = tl.maximum(2 * (length - 1), 1)
        first = (first % period + period) % period
        second = (second % period + period) % period
        first = length - 1 - tl.abs(length - 1 - first)
        second = length - 1 - tl.abs(length - 1 - second)
    first = tl.minimum(tl.maximum(first, 0), length - 1)
    second = tl.minimum(tl.maximum(second, 0), length - 1)
    return first, second, near, far


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    images, patches, scales, centres, whole_y, part_y, whole_x, part_x, fill, height, width, total,
    channels, count, blocks, SIZE: tl.constexpr, PADDING: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    # The scales of some images are neighbours in launch order, so these are read once.
    program = tl.program_id(0)
    block, which = program % blocks, (program // blocks) % count
    start = (program // (blocks * count)).to(tl.int64) * GROUP
    scale, rest = tl.load(scales + which), tl.load(scales + count + which)
    if not CENTRED:
        middle = centres + 2 * (start // channels)
        middle_y, middle_x = tl.load(middle), tl.load(middle + 1)
        whole_y, whole_x = tl.floor(middle_y), tl.floor(middle_x)
        part_y, part_x = middle_y - whole_y, middle_x - whole_x
    at = block * BLOCK + tl.arange(0, BLOCK)
    top, bottom, up, down = _taps(at // SIZE, scale, rest, whole_y, part_y, height, SIZE, PADDING)
    left, right, near, far = _taps(at % SIZE, scale, rest, whole_x, part_x, width, SIZE, PADDING)
    for step in tl.static_range(GROUP):
        image = start + step
        inside = (at < SIZE * SIZE) & (image < total)
        source = images + image * height * width
        above = near * tl.load(source + (top * width + left), inside).to(tl.float32)
        above += far * tl.load(source + (top * width + right), inside).to(tl.float32)
        below = near * tl.load(source + (bottom * width + left), inside).to(tl.float32)
        below += far * tl.load(source + (bottom * width + right), inside).to(tl.float32)
        value = up * above + down * below
        if PADDING == 2:
            value += fill * (1 - (up + down) * (near + far))
        place = ((image // channels) * count + which) * channels + image % channels
        target = patches + place * SIZE * SIZE + at
        tl.store(target, value.to(patches.dtype.element_ty), inside)


def _table(scales: tuple[float, ...], device: torch.device) -> Tensor:
    """The scales in float32, and what the rounding left out: (2, S)."""
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        # Filled in place, and not kept: a graph can hold no copy from the CPU, and what is made
        # while it is captured has no values before it is replayed.
        exact = [torch.full((1,), s, dtype=torch.float64, device=device) for s in scales]
        return _rounded(torch.cat(exact))
    return _kept_table(scales, device)


@lru_cache(maxsize=64)
def _kept_table(scales: tuple[float, ...], device: torch.device) -> Tensor:
    return _rounded(torch.tensor(scales, dtype=torch.float64)).to(device)


def _rounded(exact: Tensor) -> Tensor:
    near = exact.float()
    return torch.stack([near, (exact - near).float()])


def gather_patches(images: Tensor, view: View) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, S, C, P, P), as `foveate` without antialiasing."""
    scales, size, padding, _, centres = view
    batch, channels, height, width = images.shape
    count, table = len(scales), _table(scales, images.device)
    patches = images.new_empty(batch, count, channels, size, size)
    if not patches.numel():
        return patches
    kind = padding if isinstance(padding, str) else "constant"
    fill = 0.0 if isinstance(padding, str) else float(padding)
    points = table if centres is None else (centres - 0.5).to(table).contiguous()
    middle = [part for length in (height, width) for part in divmod(length / 2 - 0.5, 1.0)]
    group = GROUP if centres is None else 1  # images with centres of their own share nothing
    blocks = triton.cdiv(size * size, BLOCK)
    total = batch * channels
    _gather[(triton.cdiv(total, group) * count * blocks,)](
        images.contiguous(), patches, table, points, *middle, fill, height, width, total, channels,
        count, blocks, SIZE=size, PADDING=PADDINGS[kind], CENTRED=centres is None, BLOCK=BLOCK,
        GROUP=group
    )  # fmt: skip
    return patches
