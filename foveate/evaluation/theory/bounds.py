"""Findings: measured errors beside their derived bounds, and bounds on sums over grids."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
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


def product_norms(sups: Sequence[float], integrals: Sequence[float]) -> list[float]:
    """Bounds on the integral of |(f h)^(p)|, p = 0, 1, ..., by Leibniz's rule.

    `sups` bound |f|, |f'|, ... and `integrals` the integrals of |h|, |h'|, ...
    """
    return [
        sum(math.comb(p, j) * sups[j] * integrals[p - j] for j in range(p + 1))
        for p in range(min(len(sups), len(integrals)))
    ]


def grid_error(step: float, norms: Sequence[float]) -> float:
    """The distance of step · sum F(k step + any offset) from the integral of F over the line.

    By Poisson's summation formula it is at most the sum of |F^(2 pi k / step)| over k other than
    0, F^ the Fourier transform; |F^(w)| <= norms[p] / |w|^p for every p that the smoothness
    allows, `norms` as from `product_norms`; and sum of 1 / k^p <= pi² / 6 for p >= 2.
    """
    limits = [(step / (2 * math.pi)) ** p * norms[p] for p in range(2, len(norms))]
    return math.pi**2 / 3 * min(limits)


def product_error(sizes: Sequence[float], errors: Sequence[float]) -> float:
    """The error of a product of factors up to `sizes`, each known up to its error."""
    with_errors = math.prod(size + error for size, error in zip(sizes, errors, strict=True))
    return with_errors - math.prod(sizes)


def fitted_order(steps: Tensor, errors: Tensor) -> float:
    """The exponent p of errors ~ steps^p, by least squares on logarithms."""
    return float((_fit_weights(steps) * errors.log()).sum())


def order_uncertainty(steps: Tensor, errors: Tensor, unsure: Tensor) -> float:
    """How far the fitted order can move when each error is known up to ± unsure."""
    share = unsure / errors
    if bool((share >= 1).any()):
        return math.inf
    return float((_fit_weights(steps).abs() * -torch.log1p(-share)).sum())


def _fit_weights(steps: Tensor) -> Tensor:
    x = steps.log() - steps.log().mean()
    return x / (x**2).sum()
