"""Resample images at many scales at once, as two small matrix products per scale.

Tests pin each of these conventions:

- Pixel (i, j) covers [i, i + 1) × [j, j + 1) of the plane. Its centre is (i + ½, j + ½), and the
  centre of the image is (H / 2, W / 2).
- Patch pixel p of scale s samples the image at y = centre + (p + ½ - P / 2) · s, and likewise for
  x. The patch shows a window of P · s image pixels. Scale 1 at the size of the image is the
  identity.
- Interpolation between pixel centres is linear along each axis. With `antialias` the kernel is a
  triangle of half-width max(s, 1) pixels whose weights sum to one.
- Outside the image, "border" repeats the edge pixel, and "reflect" mirrors about the centre of the
  edge pixel (which is not repeated) as often as needed. A number is a constant value.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels,
# L pixels of one axis (H or W), T taps of one kernel.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foveate.errors import ConfigError
from foveate.native.build import library
from foveate.scales import ScaleGrid, as_scales
from foveate.tracing import exporting, is_traced

Padding: TypeAlias = Literal["border", "reflect"] | float
PADDINGS = {"border": 0, "reflect": 1, "constant": 2}  # as compiled code numbers them
# The largest scale that compiled code antialiases: its loops grow with the kernel width, and on a
# GPU with the square of that width.
WIDEST = {"cpu": 4096, "cuda": 16}


def foveate(
    images: Tensor,
    scales: ScaleGrid | Sequence[float],
    size: int,
    *,
    padding: Padding = "border",
    antialias: bool = False,
    centres: Tensor | None = None,
) -> Tensor:
    """Cut images into square patches, one per scale, all resampled to the same size.

    The patch of scale s shows a window of ``size * s`` image pixels about the image centre, or
    about ``centres``. Pixel (i, j) has its centre at (i + ½, j + ½), interpolation is linear along
    each axis, and scale 1 at the size of the image is the identity.

    Compiled kernels gather the pixels (Triton on a GPU, C on a CPU). Matrix products replace them
    for function transforms, float64, antialiasing at scales above 4096 (16 on a GPU), and on a CPU
    for half precision or without a C compiler. Kernels and products compute in float32 or float64,
    also under autocast; half precision is rounded once, at the end.

    The kernels allocate only their output, except that antialiasing on a CPU copies images whose
    neighbouring pixels are more than 4 floats apart in memory. Matrix products also
    allocate a buffer of about the size of the output, and a float32 copy of half-precision images.

    Pixels must be finite. This is not checked, because the check would synchronise a GPU. A NaN
    affects the patch pixels computed from it, and with matrix products every patch whose window
    contains it.

    Args:
        images: Batch of floating-point images of any height and width.
        scales: Scales of the patches, increasing.
        size: Width and height P of a patch in pixels.
        padding: Values outside the image: ``"border"`` repeats the edge pixel, ``"reflect"``
            mirrors about the centre of the edge pixel, and a number is a constant.
        antialias: Whether to widen the interpolation kernel at scales above 1, which suits
            photographs. It is slower.
        centres: Centre (y, x) of each image's windows in pixels; by default the image centre.

    Shape:
        - images: ``(B, C, H, W)``.
        - centres: ``(B, 2)``.
        - Output: ``(B, S, C, P, P)``.

    Returns:
        The patches, with the dtype and device of ``images``. Gradients flow to ``images``, not to
        ``centres``.

    Raises:
        ConfigError: If ``images`` or ``centres`` has the wrong shape, the images are not
            floating-point, or another argument is invalid.

    Examples:
        >>> import torch
        >>> from foveate import foveate
        >>> images = torch.arange(16.0).view(1, 1, 4, 4)
        >>> patches = foveate(images, scales=[1, 2], size=2)
        >>> patches.shape
        torch.Size([1, 2, 1, 2, 2])
        >>> patches[0, 0, 0]
        tensor([[ 5.,  6.],
                [ 9., 10.]])
    """
    spec = PatchSpec(as_scales(scales), size, padding, antialias, centres)
    check_images(images)
    count = images.shape[0]  # len() would fix the batch size of an exported program
    if centres is not None and tuple(centres.shape) != (count, 2):
        raise ConfigError(
            f"centres must contain one (y, x) per image, shape ({count}, 2), "
            f"got {tuple(centres.shape)}"
        )
    check_window(size, padding)
    return resample(images, spec)


def resample(images: Tensor, spec: PatchSpec, out: Tensor | None = None) -> Tensor:
    """Compute `foveate` for validated arguments, and write the patches to `out` if it is given.

    Gradients do not flow through `out`.
    """
    if _can_gather(images, spec):
        from foveate.resampling.compiled import gather

        return gather(images, spec, out)
    # The products read `images.shape` as numbers, which would fix the size of an exported program.
    variable = exporting() and not isinstance(images.shape[-1], int)
    with full_precision(images):
        patches = _by_definition(images, spec) if variable else _resample(images, spec)
    return patches if out is None else out.copy_(patches)


def _by_definition(images: Tensor, spec: PatchSpec) -> Tensor:
    """Compute `_resample` as one einsum, for images whose size is a variable of an export."""
    axes = "sph,bchw,sqw->bscpq" if spec.centres is None else "bsph,bchw,bsqw->bscpq"
    pixels = images.to(_working_dtype(images))
    rows, columns, frame = _matrices(pixels, pixels.shape, spec)
    patches = torch.einsum(axes, rows, pixels, columns)
    return (patches if frame is None else patches + frame.unsqueeze(-3)).to(images.dtype)


def scatter_plain(gradient: Tensor, shape: torch.Size, spec: PatchSpec) -> Tensor:
    """Apply the transpose of `_resample`: from (B, S, C, P, P) to the `shape` of the images."""
    with full_precision(gradient):
        slopes = gradient.to(_working_dtype(gradient))
        rows, columns, _ = _matrices(slopes, shape, spec)
        # Matrix products, because batched gradients do not support einsum.
        parts = [
            rows[..., i, None, :, :].mT @ slopes[:, i] @ columns[..., i, None, :, :]
            for i in range(len(spec.scales))
        ]
        return torch.stack(parts).sum(0).to(gradient.dtype)


class PatchSpec(NamedTuple):
    """The arguments of `foveate` except the images."""

    scales: tuple[float, ...]
    size: int
    padding: Padding = "border"
    antialias: bool = False
    centres: Tensor | None = None

    @property
    def blurs(self) -> bool:
        """Whether antialiasing has an effect: some kernel is wider than two pixels."""
        return self.antialias and max(self.scales) > 1


def _resample(images: Tensor, spec: PatchSpec) -> Tensor:
    """Compute `foveate` as two matrix products per scale, on the pixels inside its window."""
    # Measured for (32, 1, 112, 112), 17 scales, size 28 on 2 idle cores: products 1.9 ms, one
    # grid_sample per scale 3.4 ms, one einsum 2.5 ms, whole images instead of windows 2.9 ms,
    # gathered rows 4.7 ms, writing into one preallocated output instead of stacking 2.1 ms.
    # Building the matrices adds 0.2 to 0.4 ms.
    pixels = images.to(_working_dtype(images))
    # Limits the intermediate (P, W) rows of one scale to the size of one output, (S, P, P).
    parts = min(spec.size, math.ceil(index(images.shape[-1]) / (len(spec.scales) * spec.size)))
    patches: list[Tensor] = []
    for part in split_by_scale(spec):
        patches += [patch.to(images.dtype) for patch in _patches(pixels, part, parts)]
    return torch.stack(patches, 1)


def _can_gather(images: Tensor, spec: PatchSpec) -> bool:
    """Whether compiled code can compute these patches."""
    if spec.blurs and max(spec.scales) > WIDEST.get(images.device.type, 0):
        return False
    graph = images.requires_grad and torch.is_grad_enabled()
    # torch.compile can trace the Triton kernels, but not a gradient through them.
    traceable = images.is_cuda and not graph
    traceable = traceable and (torch.compiler.is_compiling() or not spec.blurs)
    return (traceable or not is_traced(images)) and kernels_support(images)


def kernels_support(tensor: Tensor) -> bool:
    """Whether compiled code supports this tensor, if no tracer or transform must see it."""
    if tensor.is_cuda:
        return tensor.dtype != torch.float64 and not exporting()
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and library() is not None


def split_by_scale(spec: PatchSpec) -> list[PatchSpec]:
    """Split a spec with centres by scale: matrices of all scales would outgrow the patches."""
    if spec.centres is None:
        return [spec]
    return [spec._replace(scales=(scale,)) for scale in spec.scales]


def _patches(pixels: Tensor, spec: PatchSpec, parts: int) -> Iterator[Tensor]:
    """Yield the (B, C, P, P) patches scale by scale."""
    # Plain integers instead of symbols: torch.compile takes 6 s for a new size instead of 35 s.
    height, width = index(pixels.shape[-2]), index(pixels.shape[-1])
    rows, columns, frame = _matrices(pixels, pixels.shape, spec)
    for i, scale in enumerate(spec.scales):
        y, x = _window(height, scale, spec), _window(width, scale, spec)
        patch = _patch(pixels[..., y, x], rows[..., i, :, y], columns[..., i, :, x], parts)
        yield patch if frame is None else patch + frame[..., i, None, :, :]


def _patch(pixels: Tensor, rows: Tensor, columns: Tensor, parts: int) -> Tensor:
    """Return the (B, C, P, P) patch of one scale, computed in `parts` pieces to save memory."""
    if rows.ndim == 3:  # one matrix per image
        columns = columns.unsqueeze(1)
    # Rows always get an axis for C: with a 2-D matrix, matmul can copy the pixels.
    pieces = [
        (piece.unsqueeze(-3) @ pixels) @ columns.mT for piece in rows.tensor_split(parts, dim=-2)
    ]
    return pieces[0] if parts == 1 else torch.cat(pieces, -2)


def _window(length: int, scale: float, spec: PatchSpec) -> slice:
    """Return the pixels of one axis that a scale reads, symmetric about the image centre."""
    if spec.centres is not None:
        return slice(0, length)
    reach = (spec.size - 1) / 2 * scale + _half_width(scale, spec.antialias)
    margin = max(0, math.floor((length - 1) / 2 - reach))
    return slice(margin, length - margin)


def _matrices(
    like: Tensor, shape: torch.Size, spec: PatchSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return row matrices (…, S, P, H), column matrices (…, S, P, W) and the constant's share.

    The matrices apply to images of `shape` and have the dtype and device of `like`. The share is
    (…, S, P, P), or None for a padding that takes its values from the image. A tap is outside the
    image if its row or its column is, so a constant v adds v · (1 - rowsum · columnsum).
    """
    height, width = shape[-2:]
    y, x = (None, None) if spec.centres is None else spec.centres.unbind(1)
    rows, row_sums = _axis(like, height, spec, y)
    square = isinstance(width, int) and height == width  # sizes of a trace are not compared
    if spec.centres is None and square:
        columns, column_sums = rows, row_sums
    else:
        columns, column_sums = _axis(like, width, spec, x)
    if isinstance(spec.padding, str) or spec.padding == 0:
        return rows, columns, None
    inside = row_sums[..., :, None] * column_sums[..., None, :]
    return rows, columns, (float(spec.padding) * (1 - inside)).to(like)


def _axis(
    pixels: Tensor, length: int, spec: PatchSpec, centres: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the matrices of one axis in the dtype of the pixels, and their float64 row sums.

    The matrices of both axes in float64 would need more memory than the patches.
    """
    exact = axis_matrices(length, spec, centres, pixels.device)
    return exact.to(pixels), exact.sum(-1)


def axis_matrices(
    length: int, spec: PatchSpec, centres: Tensor | None, device: torch.device | str
) -> Tensor:
    """Return the (S, P, L) weights that map the L = `length` pixels of one axis to patch pixels.

    With `centres`, a (B,) tensor of coordinates on this axis, the result is (B, S, P, L). With
    constant padding the weight outside the image is left out, so rows can sum to less than one.
    The weights are float64, on the CPU if the device does not support them.
    """
    device = "cpu" if torch.device(device).type == "mps" else device
    offsets = torch.arange(spec.size, dtype=torch.float64, device=device) + (0.5 - spec.size / 2)
    at = offsets * _column(spec.scales, device)  # (S, P)
    if centres is None:
        at = at + (length / 2 - 0.5)  # the centre of pixel i is at i + 0.5
    else:
        at = at + (centres.detach().to(at)[:, None, None] - 0.5)
    taps, weights = _taps(at, [_half_width(scale, spec.antialias) for scale in spec.scales])
    if not isinstance(spec.padding, str):
        weights = weights * ((taps >= 0) & (taps < length))
    matrices = weights.new_zeros(*at.shape, length)
    return matrices.scatter_add_(-1, _fold(taps.long(), length, spec.padding), weights)


def _taps(at: Tensor, half_widths: list[float]) -> tuple[Tensor, Tensor]:
    """Return pixel indices around the points `at` (…, S, P) and weights, both (…, S, P, T)."""
    reach = math.ceil(max(half_widths))
    nearby = torch.arange(1 - reach, reach + 1, dtype=at.dtype, device=at.device)
    at = at.unsqueeze(-1)
    taps = at.floor() + nearby
    distance = (taps - at).abs()
    if reach == 1:
        return taps, 1 - distance
    weights = (1 - distance / _column(half_widths, at.device).unsqueeze(-1)).clamp(min=0)
    return taps, weights / weights.sum(-1, keepdim=True)


def _fold(taps: Tensor, length: int, padding: Padding) -> Tensor:
    """Map any pixel index to a pixel of an image with `length` pixels."""
    if padding == "reflect":
        last = length - 1
        period = taps.new_full((), max(2 * last, 1))  # ONNX cannot divide by a variable size
        return last - (last - taps.remainder(period)).abs()
    return taps.clamp(0, length - 1)


def _half_width(scale: float, antialias: bool) -> float:
    """Return the half-width of the interpolation kernel in pixels."""
    return max(scale, 1.0) if antialias else 1.0


def _column(values: Sequence[float], device: torch.device | str) -> Tensor:
    """Return an (S, 1) tensor, filled on the device: a copy from the CPU breaks CUDA graphs."""
    fill = [torch.full((1,), value, dtype=torch.float64, device=device) for value in values]
    return torch.stack(fill)


def _working_dtype(images: Tensor) -> torch.dtype:
    """Return float64 for float64 images and float32 for all others."""
    return torch.float64 if images.dtype == torch.float64 else torch.float32


def full_precision(images: Tensor) -> AbstractContextManager[object]:
    """Disable autocast if it is enabled; an unneeded context would nest exported graphs."""
    kind = images.device.type
    enabled = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else nullcontext()


def check_images(images: Tensor) -> None:
    """Raise a ConfigError unless `images` are non-empty float images (B, C, H, W)."""
    shape = tuple(images.shape)
    if images.ndim != 4:
        hint = "; add a batch axis with images[None]" if images.ndim == 3 else ""
        raise ConfigError(f"images must have shape (B, C, H, W), got {shape}{hint}")
    if not images.is_floating_point():
        raise ConfigError(
            f"images must have a floating-point dtype, got {images.dtype}; pass images.float()"
        )
    if 0 in shape[2:]:
        raise ConfigError(f"images must have at least one pixel, got shape {shape}")


def check_window(size: int, padding: Padding) -> None:
    """Raise a ConfigError for an invalid size or padding."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"size must be a whole number of at least 1 pixel, got {size!r}")
    finite = isinstance(padding, int | float) and math.isfinite(padding)
    if isinstance(padding, bool) or not (finite or padding in ("border", "reflect")):
        raise ConfigError(
            f'padding must be "border", "reflect" or a finite number, got {padding!r}'
        )
