"""The precision of convolutions and matrix products."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["float32", "bf16"]


def cast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context for a precision."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which convolutions of a tensor are computed."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
