"""The resampling op as one GPU kernel: every patch pixel gathers its four image pixels."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # patch pixels, of all scales of an image, that one program makes
PADDINGS = {"border": 0, "reflect": 1, "constant": 2}


@triton.jit  # type: ignore[untyped-decorator]
def _taps(p, scale, rest, centre, length, SIZE: tl.constexpr, PADDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two pixels of an axis and their weights for patch pixels p."""
    offset = p.to(tl.float32) + (0.5 - SIZE / 2)
    below = tl.floor(offset * scale + centre)
    # One rounding of a number near 1 keeps the position as exact as float64 would; the floor of
    # the rounded position may have been one off.
    far = tl.fma(offset, scale, centre - below) + offset * rest
    below += tl.floor(far)
    far = tl.fma(offset, scale, centre - below) + offset * rest
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
    images, patches, scales, centres, middle_y, middle_x, fill, height, width, channels, count,
    blocks, SIZE: tl.constexpr, PADDING: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # All patches of an image are neighbours in launch order, so it is read from memory once.
    program = tl.program_id(0)
    block, image = program % blocks, (program // blocks).to(tl.int64)
    batch, channel = image // channels, image % channels
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count * SIZE * SIZE
    which, at = at // (SIZE * SIZE), at % (SIZE * SIZE)
    scale = tl.load(scales + which, inside, 1.0)
    rest = tl.load(scales + count + which, inside, 0.0)
    if not CENTRED:
        middle_y, middle_x = tl.load(centres + 2 * batch), tl.load(centres + 2 * batch + 1)
    top, bottom, up, down = _taps(at // SIZE, scale, rest, middle_y, height, SIZE, PADDING)
    left, right, near, far = _taps(at % SIZE, scale, rest, middle_x, width, SIZE, PADDING)
    upper = images + image * height * width + top * width
    lower = images + image * height * width + bottom * width
    above = near * tl.load(upper + left, inside).to(tl.float32)
    above += far * tl.load(upper + right, inside).to(tl.float32)
    below = near * tl.load(lower + left, inside).to(tl.float32)
    below += far * tl.load(lower + right, inside).to(tl.float32)
    value = up * above + down * below
    if PADDING == 2:
        value += fill * (1 - (up + down) * (near + far))
    start = ((batch * count + which) * channels + channel) * SIZE * SIZE
    tl.store(patches + start + at, value.to(patches.dtype.element_ty), inside)


def gather_patches(
    images: Tensor, scales: Tensor, size: int, padding: str | float, centres: Tensor | None
) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, S, C, P, P), as `foveate` without antialiasing.

    `scales` is (2, S) float32: the scales, and what rounding them to float32 left out.
    """
    batch, channels, height, width = images.shape
    count = scales.shape[1]
    patches = images.new_empty(batch, count, channels, size, size)
    if not patches.numel():
        return patches
    kind = padding if isinstance(padding, str) else "constant"
    points = scales if centres is None else (centres - 0.5).to(scales).contiguous()
    blocks = triton.cdiv(count * size * size, BLOCK)
    _gather[(batch * channels * blocks,)](
        images.contiguous(), patches, scales, points, height / 2 - 0.5, width / 2 - 0.5,
        0.0 if isinstance(padding, str) else float(padding), height, width, channels, count, blocks,
        SIZE=size, PADDING=PADDINGS[kind], CENTRED=centres is None, BLOCK=BLOCK
    )  # fmt: skip
    return patches
