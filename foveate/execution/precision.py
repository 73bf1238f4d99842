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
