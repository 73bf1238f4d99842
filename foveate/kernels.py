"""The resampling op as one GPU kernel: every patch pixel gathers its four image pixels."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import triton
import triton.language as tl
from torch import Tensor

TILE = 32  # patch pixels along each side that one program makes


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    images, patches, row, row_weight, column, column_weight, fill, pixels, width, channels, scales,
    tap_stride, tiles, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    # The scales of one image are neighbours in launch order, so it is read from memory once.
    program = tl.program_id(0)
    tile, scale = program % (tiles * tiles), (program // (tiles * tiles)) % scales
    image = (program // (tiles * tiles * scales)).to(tl.int64)
    batch, channel = image // channels, image % channels
    y = (tile // tiles) * TILE + tl.arange(0, TILE)
    x = (tile % tiles) * TILE + tl.arange(0, TILE)
    taps = batch * tap_stride + scale * SIZE
    at_y, at_x = (taps + y) * 2, (taps + x) * 2
    top, bottom = tl.load(row + at_y, y < SIZE, 0), tl.load(row + at_y + 1, y < SIZE, 0)
    left, right = tl.load(column + at_x, x < SIZE, 0), tl.load(column + at_x + 1, x < SIZE, 0)
    up, down = tl.load(row_weight + at_y, y < SIZE), tl.load(row_weight + at_y + 1, y < SIZE)
    near = tl.load(column_weight + at_x, x < SIZE)
    far = tl.load(column_weight + at_x + 1, x < SIZE)
    upper = images + image * pixels + (top * width)[:, None]
    lower = images + image * pixels + (bottom * width)[:, None]
    inside = (y < SIZE)[:, None] & (x < SIZE)[None, :]
    above = near[None, :] * tl.load(upper + left[None, :], inside).to(tl.float32)
    above += far[None, :] * tl.load(upper + right[None, :], inside).to(tl.float32)
    below = near[None, :] * tl.load(lower + left[None, :], inside).to(tl.float32)
    below += far[None, :] * tl.load(lower + right[None, :], inside).to(tl.float32)
    value = up[:, None] * above + down[:, None] * below
    value += fill * (1 - (up + down)[:, None] * (near + far)[None, :])
    start = ((batch * scales + scale) * channels + channel) * SIZE * SIZE
    target = patches + start + y[:, None] * SIZE + x[None, :]
    tl.store(target, value.to(patches.dtype.element_ty), inside)


def gather_patches(
    images: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], fill: float
) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, S, C, P, P).

    `rows` and `columns` are the indices (int32) and weights (float32) of the two pixels that each
    patch pixel takes on each axis: (S, P, 2), or (B, S, P, 2) where every image has its own.
    """
    batch, channels, height, width = images.shape
    scales, size = rows[0].shape[-3:-1]
    patches = images.new_empty(batch, scales, channels, size, size)
    tiles = triton.cdiv(size, TILE)
    stride = scales * size if rows[0].ndim == 4 else 0
    if patches.numel():
        _gather[(batch * channels * scales * tiles**2,)](
            images.contiguous(), patches, *rows, *columns, fill, height * width, width, channels,
            scales, stride, tiles, SIZE=size, TILE=TILE
        )  # fmt: skip
    return patches
