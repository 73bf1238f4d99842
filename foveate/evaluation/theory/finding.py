"""One statement of the theory, measured: its error, the bound on it, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was measured for one statement.

    `statement` says what should be true, `error` is how far the measurement is from it, `bound`
    how far it may be by the derivation named in `note`. Where `breaks` is set, the theory says
    that the equality fails, and the error must exceed the bound. `test` is the function in
    tests/test_theory.py that asserts it.
    """

    statement: str
    error: float
    bound: float
    test: str
    note: str
    breaks: bool = False

    @property
    def holds(self) -> bool:
        """Whether the measurement is as the theory says; never so for NaN."""
        return self.error > self.bound if self.breaks else self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Error over bound: how much of the allowance was used."""
        return self.error / self.bound if self.bound else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """The fields and the verdict, ready for JSON, which has no infinity and no NaN."""
        numbers = {"error": self.error, "bound": self.bound}
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        return {**asdict(self), **finite, "holds": self.holds}


def compare(
    statement: str,
    pair: Iterable[Tensor],
    bound: Tensor | float,
    *,
    test: str,
    note: str,
    breaks: bool = False,
) -> Finding:
    """A finding about two tensors that should be equal, with a bound for each entry or for all.

    Every entry is held against its own bound; the finding reports the entry that comes closest.
    """
    one, other = pair
    error = (one - other).abs()
    limit = torch.as_tensor(bound, dtype=error.dtype).expand_as(error)
    used = torch.where(error == 0, 0.0, error / limit)  # an entry of a dead unit has bound 0
    worst = int(used.argmax())
    return Finding(
        statement=statement,
        error=float(error.flatten()[worst]),
        bound=float(limit.flatten()[worst]),
        test=test,
        note=note,
        breaks=breaks,
    )
