"""The resampling op and its transpose on a GPU, as gather kernels in Triton."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.resampling.definition import PADDINGS, PatchSpec, axis_matrices, split_by_scale

# Measured on one H200 with 4096 images and 17 scales: blocks of 256 pixels in 4 warps for groups of
# 4 images take 0.167 ms, single images 0.24 ms, blocks of 1024 pixels 0.22 ms, and a copy of the
# same number of bytes 0.105 ms.
BLOCK = 256  # patch pixels per program, for each image of a group
GROUP = 4  # images that share computed positions and weights
TILE = 32  # image pixels along an axis for which one program computes gradients
CHUNK = 16  # patch pixels along an axis that it reads at once; the minimum of tl.dot
# Photographs have many sizes. By default, Triton compiles a kernel again for each combination of
# arguments that are and are not multiples of 16.
UNSPECIALISED = ["height", "width", "total"]


@triton.jit  # type: ignore[untyped-decorator]
def _position(p, scale, rest, whole, part, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pixel below the sample point of patch pixel p, and the distance to it.

    The centre of the window is whole + part.
    """
    offset = p.to(tl.float32) + (0.5 - SIZE / 2)
    below = tl.floor(offset * scale + (whole + part))
    # Subtracting whole pixels inside the fma rounds the product once, which is as accurate as
    # float64 rounded at the end. The floor of the rounded position can be off by one.
    far = tl.fma(offset, scale, whole - below) + (part + offset * rest)
    below += tl.floor(far)
    far = tl.fma(offset, scale, whole - below) + (part + offset * rest)
    return below.to(tl.int32), far.to(tl.float32)  # torch.compile passes the centre as float64


@triton.jit  # type: ignore[untyped-decorator]
def _folded(index, length, PADDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map any pixel index to a pixel of an image with `length` pixels."""
    if PADDING == 1:
        period = tl.maximum(2 * (length - 1), 1)
        index = (index % period + period) % period
        index = length - 1 - tl.abs(length - 1 - index)
    return tl.minimum(tl.maximum(index, 0), length - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _taps(p, scale, rest, whole, part, length, SIZE: tl.constexpr, PADDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return two pixels of an axis and their weights for patch pixels p."""
    first, far = _position(p, scale, rest, whole, part, SIZE)
    near = 1 - far
    second = first + 1
    if PADDING == 2:
        near = tl.where((first >= 0) & (first < length), near, 0.0)
        far = tl.where((second >= 0) & (second < length), far, 0.0)
    return _folded(first, length, PADDING), _folded(second, length, PADDING), near, far


@triton.jit  # type: ignore[untyped-decorator]
def _tap(step, first, far, half, length, PADDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return one pixel under a triangle kernel, its weight inside the image, and in total."""
    weight = tl.maximum(1 - tl.abs(step - far) / half, 0.0)
    index = first + step
    inside = weight
    if PADDING == 2:
        inside = tl.where((index >= 0) & (index < length), weight, 0.0)
    return _folded(index, length, PADDING), inside, weight


@triton.jit(do_not_specialize=UNSPECIALISED)  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    images, patches, scales, centres, whole_y, part_y, whole_x, part_x, fill, height, width, total,
    channels, count, blocks, SIZE: tl.constexpr, PADDING: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    # All scales of a group of images are adjacent in launch order, so the images are read once.
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


@triton.jit(do_not_specialize=UNSPECIALISED)  # type: ignore[untyped-decorator]
def _blur(  # type: ignore[no-untyped-def]
    images, patches, scales, centres, whole_y, part_y, whole_x, part_x, fill, height, width, total,
    channels, count, blocks, SIZE: tl.constexpr, PADDING: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
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
    top, down = _position(at // SIZE, scale, rest, whole_y, part_y, SIZE)
    left, far = _position(at % SIZE, scale, rest, whole_x, part_x, SIZE)
    half = tl.maximum(scale, 1.0)
    reach = tl.ceil(half).to(tl.int32)
    image = start + tl.arange(0, GROUP)
    written = (at < SIZE * SIZE)[None, :] & (image < total)[:, None]
    source = images + (image * height * width)[:, None]
    value = tl.zeros([GROUP, BLOCK], tl.float32)
    all_y = tl.zeros([BLOCK], tl.float32)
    all_x, in_y, in_x = all_y, all_y, all_y
    for step in range(1 - reach, reach + 1):
        _pixel, share, complete = _tap(step, left, far, half, width, PADDING)
        all_x += complete
        in_x += share
    for row in range(1 - reach, reach + 1):
        y, share_y, whole_weight = _tap(row, top, down, half, height, PADDING)
        all_y += whole_weight
        in_y += share_y
        for column in range(1 - reach, reach + 1):
            x, share_x, _whole = _tap(column, left, far, half, width, PADDING)
            weight = (share_y * share_x)[None, :]
            pixel = source + (y * width + x)[None, :]
            value += weight * tl.load(pixel, written & (weight > 0), other=0.0).to(tl.float32)
    value = value / (all_y * all_x)[None, :]
    if PADDING == 2:
        value += (fill * (1 - in_y / all_y * (in_x / all_x)))[None, :]
    place = ((image // channels) * count + which) * channels + image % channels
    target = patches + (place * SIZE * SIZE)[:, None] + at[None, :]
    tl.store(target, value.to(patches.dtype.element_ty), written)


@triton.jit  # type: ignore[untyped-decorator]
def _scatter(  # type: ignore[no-untyped-def]
    gradient, images, rows, columns, first_y, stop_y, first_x, stop_x, height, width, channels,
    count, tables, across, tiles, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Accumulate the gradient of one image tile from all patch pixels that read it."""
    program = tl.program_id(0)
    tile, plane = program % tiles, (program // tiles).to(tl.int64)
    y = tile // across * TILE + tl.arange(0, TILE)
    x = tile % across * TILE + tl.arange(0, TILE)
    in_y, in_x = y < height, x < width
    target = images + plane * height * width + y[:, None] * width + x[None, :]
    value = tl.load(target, in_y[:, None] & in_x[None, :], other=0.0)
    image = plane // channels
    for which in range(count):
        table = image * tables + which
        top = tl.min(tl.load(first_y + table * height + y, in_y, other=SIZE))
        bottom = tl.max(tl.load(stop_y + table * height + y, in_y, other=0))
        left = tl.min(tl.load(first_x + table * width + x, in_x, other=SIZE))
        right = tl.max(tl.load(stop_x + table * width + x, in_x, other=0))
        slopes = gradient + ((image * count + which) * channels + plane % channels) * SIZE * SIZE
        for p_first in range(top, bottom, CHUNK):
            p = p_first + tl.arange(0, CHUNK)
            down = rows + (table * SIZE + p)[None, :] * height + y[:, None]
            weight_y = tl.load(down, (p < SIZE)[None, :] & in_y[:, None], other=0.0)
            for q_first in range(left, right, CHUNK):
                q = q_first + tl.arange(0, CHUNK)
                there = (p < SIZE)[:, None] & (q < SIZE)[None, :]
                slope = tl.load(slopes + p[:, None] * SIZE + q[None, :], there, other=0.0)
                along = columns + (table * SIZE + q)[:, None] * width + x[None, :]
                weight_x = tl.load(along, (q < SIZE)[:, None] & in_x[None, :], other=0.0)
                part = tl.dot(slope.to(tl.float32), weight_x, input_precision="ieee")
                value += tl.dot(weight_y, part, input_precision="ieee")
    tl.store(target, value, in_y[:, None] & in_x[None, :])


def _table(scales: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the scales in float32 and their rounding errors, (2, S)."""
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        # Filled on the device and not cached: a CUDA graph cannot contain a copy from the CPU, and
        # tensors created during capture have no values before the graph is replayed.
        exact = [torch.full((1,), s, dtype=torch.float64, device=device) for s in scales]
        return _rounded(torch.cat(exact))
    return _cached_table(scales, device)


@lru_cache(maxsize=64)
def _cached_table(scales: tuple[float, ...], device: torch.device) -> Tensor:
    return _rounded(torch.tensor(scales, dtype=torch.float64)).to(device)


def _rounded(exact: Tensor) -> Tensor:
    near = exact.float()
    return torch.stack([near, (exact - near).float()])


def gather_patches(images: Tensor, spec: PatchSpec) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, S, C, P, P); see `foveate`."""
    scales, size, padding, _, centres = spec
    batch, channels, height, width = images.shape
    count, table = len(scales), _table(scales, images.device)
    patches = images.new_empty(batch, count, channels, size, size)
    if not patches.numel():
        return patches
    kind, fill = (padding, 0.0) if isinstance(padding, str) else ("constant", float(padding))
    points = table if centres is None else (centres - 0.5).to(table).contiguous()
    middle = [part for length in (height, width) for part in divmod(length / 2 - 0.5, 1.0)]
    group = GROUP if centres is None else 1  # images with individual centres share no positions
    blocks = triton.cdiv(size * size, BLOCK)
    total = batch * channels
    kernel = _blur if spec.blurs else _gather
    kernel[(triton.cdiv(total, group) * count * blocks,)](
        images.contiguous(), patches, table, points, *middle, fill, height, width, total, channels,
        count, blocks, SIZE=size, PADDING=PADDINGS[kind], CENTRED=centres is None, BLOCK=BLOCK,
        GROUP=group
    )  # fmt: skip
    return patches


def scatter_patches(gradient: Tensor, shape: torch.Size, spec: PatchSpec) -> Tensor:
    """Compute gradients of images of `shape` from patch gradients: the transpose.

    Each image pixel sums its own gradient in a fixed order, so the result is deterministic.
    """
    batch, channels, height, width = shape
    images = gradient.new_zeros(shape, dtype=torch.float32)
    across = triton.cdiv(width, TILE)
    tiles = across * triton.cdiv(height, TILE)
    begin = 0
    for part in split_by_scale(spec) if images.numel() and gradient.numel() else ():
        count = len(part.scales)
        slopes = gradient[:, begin : begin + count].contiguous()
        rows, columns = _sparse(height, part, 0, images), _sparse(width, part, 1, images)
        _scatter[(batch * channels * tiles,)](
            slopes, images, rows[0], columns[0], *rows[1:], *columns[1:], height, width, channels,
            count, 0 if spec.centres is None else count, across, tiles, SIZE=spec.size, TILE=TILE,
            CHUNK=CHUNK
        )  # fmt: skip
        begin += count
    return images.to(gradient.dtype)


def _sparse(length: int, spec: PatchSpec, axis: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrices of an axis, and the range of patch pixels that read each image pixel."""
    if spec.centres is not None:
        return _build_sparse(length, spec, spec.centres[:, axis], like.device)
    build = _build_sparse if torch.cuda.is_current_stream_capturing() else _cached_sparse
    return build(length, spec, None, like.device)  # see `_table`


def _build_sparse(
    length: int, spec: PatchSpec, centres: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    matrices = axis_matrices(length, spec, centres, device).float()
    at = torch.arange(spec.size, device=device, dtype=torch.int32)[:, None]
    first = torch.where(matrices != 0, at, spec.size).amin(-2)
    return matrices, first.int(), torch.where(matrices != 0, at + 1, 0).amax(-2).int()


_cached_sparse = lru_cache(maxsize=8)(_build_sparse)
