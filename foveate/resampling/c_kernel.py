"""The resampling op on a CPU: every patch pixel gathers its four image pixels, in C."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import ctypes

import torch
from torch import Tensor

from foveate.native.build import library
from foveate.native.calls import PARTS, call
from foveate.resampling.definition import View

PADDINGS = {"border": 0, "reflect": 1, "constant": 2}


class Arguments(ctypes.Structure):
    """`struct view` of the C file, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("parts", "count", "colours", "height", "width")),
        *((name, ctypes.c_int64) for name in ("scales", "size", "padding", "image_step")),
        *((name, ctypes.c_int64) for name in ("colour_step", "row_step", "column_step")),
        *((name, ctypes.c_void_p) for name in ("images", "patches", "scale", "centres")),
        ("fill", ctypes.c_double),
        ("next", ctypes.c_int64),
        ("failed", ctypes.c_int64),
    )


def gather_patches(images: Tensor, view: View) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, S, C, P, P), as `foveate` without antialiasing.

    Images are float32 on the CPU with any strides. There must be a `library`.
    """
    scales, size, padding, _, centres = view
    lib, count = library(), len(scales)
    assert lib is not None
    patches = images.new_empty(images.shape[0], count, images.shape[1], size, size)
    table = torch.tensor(scales, dtype=torch.float64, device="cpu")
    points = None if centres is None else centres.detach().to(table).contiguous()
    kind, fill = (padding, 0.0) if isinstance(padding, str) else ("constant", float(padding))
    arguments = Arguments(
        PARTS, *images.shape, count, size, PADDINGS[kind], *images.stride(), images.data_ptr(),
        patches.data_ptr(), table.data_ptr(), None if points is None else points.data_ptr(), fill,
    )  # fmt: skip
    call(lib.cut, arguments)
    return patches
