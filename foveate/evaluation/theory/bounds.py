"""Compare measured errors with derived bounds."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

Case = tuple[Tensor, Tensor, Tensor | float]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Measured error of one statement of the theory, with its bound.

    Attributes:
        statement: The statement, such as an equality of two responses.
        error: Measured deviation from the equality.
        bound: Largest error that the derivation in `note` allows.
        note: Origin of the bound.
        breaks: Whether the theory predicts that the equality fails, so that the error must exceed
            the bound.

    Examples:
        >>> Finding(statement="covariance", error=1e-6, bound=1e-5, note="rounding").holds
        True
        >>> Finding(statement="breaks", error=1e-6, bound=1e-5, note="", breaks=True).holds
        False
    """

    statement: str
    error: float
    bound: float
    note: str
    breaks: bool = False

    @property
    def holds(self) -> bool:
        """Whether the measurement agrees with the theory; False for NaN."""
        return self.error > self.bound if self.breaks else self.error <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Convert the finding to a dictionary that can be serialised as JSON.

        Returns:
            The fields, plus ``holds``. Non-finite numbers become None.
        """
        numbers = {"error": self.error, "bound": self.bound}
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        return {**asdict(self), **finite, "holds": self.holds}


def compare(statement: str, *cases: Case, note: str, breaks: bool = False) -> Finding:
    """Compare pairs of tensors that should be equal.

    Each case is a pair with a bound, either per entry or for all entries. The finding reports the
    entry with the largest ratio of error to bound.
    """
    pairs = [((one - other).abs(), bound) for one, other, bound in cases]
    error = torch.cat([error.flatten() for error, _ in pairs])
    limits = [torch.as_tensor(b, dtype=e.dtype).expand_as(e).flatten() for e, b in pairs]
    limit = torch.cat(limits)
    used = torch.where(error == 0, 0.0, error / limit)  # an inactive unit has bound 0
    worst = used.argmax()
    most, bound = float(error[worst]), float(limit[worst])
    return Finding(statement=statement, error=most, bound=bound, note=note, breaks=breaks)
