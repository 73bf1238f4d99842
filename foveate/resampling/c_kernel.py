"""Call the C kernels of the resampling op and its transpose on a CPU."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import ctypes

import torch
from torch import Tensor

from foveate.native.build import library
from foveate.native.calls import PARTS, call, fields
from foveate.resampling.definition import PADDINGS, PatchSpec

CLOSE = 4  # largest column stride read in place: channels-last images with up to 4 channels


class Arguments(ctypes.Structure):
    """Mirror of `struct view` in native/patches.h, field by field."""

    _fields_ = (
        *fields(ctypes.c_int64, "parts count colours height width scales size padding antialias"),
        *fields(ctypes.c_int64, "image_step colour_step row_step column_step"),
        *fields(ctypes.c_void_p, "images patches scale centres"),
        *fields(ctypes.c_double, "fill"),
        *fields(ctypes.c_int64, "next failed"),
    )


def gather_patches(images: Tensor, spec: PatchSpec, out: Tensor | None = None) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, S, C, P, P); see `foveate`.

    Images must be float32 on the CPU, with any strides. `library` must not return None.
    """
    images = images.resolve_neg()  # the imaginary part of a conjugate is stored with other signs
    count, colours = images.shape[:2]
    shape = (count, len(spec.scales), colours, spec.size, spec.size)
    patches = images.new_empty(shape) if out is None else out
    assert patches.shape == shape and patches.dtype == images.dtype and patches.is_contiguous()
    if not spec.blurs:
        _call("cut", images, patches, spec)
    else:
        near = images.stride(3) in range(1, CLOSE + 1)
        _call("blur", images if near else images.contiguous(), patches, spec)
    return patches


def scatter_patches(gradient: Tensor, shape: torch.Size, spec: PatchSpec) -> Tensor:
    """Compute image gradients from patch gradients: the transpose of `gather_patches`.

    The result is bitwise the same for any number of threads.
    """
    images = gradient.new_zeros(shape)
    _call("scatter", images, gradient.contiguous(), spec)
    return images


def _call(function: str, images: Tensor, patches: Tensor, spec: PatchSpec) -> None:
    scales, size, padding, antialias, centres = spec
    lib = library()
    assert lib is not None
    table = torch.tensor(scales, dtype=torch.float64, device="cpu")
    points = None if centres is None else centres.detach().to(table).contiguous()
    kind, fill = (padding, 0.0) if isinstance(padding, str) else ("constant", float(padding))
    arguments = Arguments(
        PARTS, *images.shape, len(scales), size, PADDINGS[kind], antialias, *images.stride(),
        images.data_ptr(), patches.data_ptr(), table.data_ptr(),
        None if points is None else points.data_ptr(), fill,
    )  # fmt: skip
    call(getattr(lib, function), arguments)
