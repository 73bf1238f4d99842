"""Findings: measured errors beside their derived bounds."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

Case = tuple[Tensor, Tensor, Tensor | float]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The measured error of one statement of the theory, and the bound on it.

    Args:
        statement: What should be true.
        error: Distance of the measurement from the statement.
        bound: Largest error that the derivation in `note` allows.
        note: Where the bound comes from.
        breaks: The theory says that the equality fails, so the error must exceed the bound.
    """

    statement: str
    error: float
    bound: float
    note: str
    breaks: bool = False

    @property
    def holds(self) -> bool:
        """Whether the measurement agrees with the theory; false for NaN."""
        return self.error > self.bound if self.breaks else self.error <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """The fields and the verdict, ready for JSON, which has no infinity and no NaN."""
        numbers = {"error": self.error, "bound": self.bound}
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        return {**asdict(self), **finite, "holds": self.holds}


def compare(statement: str, *cases: Case, note: str, breaks: bool = False) -> Finding:
    """Compare pairs of tensors that should be equal, each with a bound per entry or for all.

    The finding reports the entry of all `cases` (one, other, bound) that is closest to its bound.
    """
    pairs = [((one - other).abs(), bound) for one, other, bound in cases]
    error = torch.cat([error.flatten() for error, _ in pairs])
    limits = [torch.as_tensor(b, dtype=e.dtype).expand_as(e).flatten() for e, b in pairs]
    limit = torch.cat(limits)
    used = torch.where(error == 0, 0.0, error / limit)  # the entries of a dead unit have bound 0
    worst = used.argmax()
    most, bound = float(error[worst]), float(limit[worst])
    return Finding(statement=statement, error=most, bound=bound, note=note, breaks=breaks)
