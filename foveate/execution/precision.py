"""The precision of convolutions and matrix products."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["float32", "bf16"]


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the dtype of convolutions and matrix products."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def cast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context for a precision."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
