"""How far a sum over a regular grid can be from the integral it stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def product_norms(sups: Sequence[float], integrals: Sequence[float]) -> list[float]:
    """Bounds on the integral of |(f h)^(p)|, p = 0, 1, ..., by Leibniz's rule.

    `sups` bound |f|, |f'|, ... and `integrals` the integrals of |h|, |h'|, ...
    """
    count = min(len(sups), len(integrals))
    return [
        sum(math.comb(p, j) * sups[j] * integrals[p - j] for j in range(p + 1))
        for p in range(count)
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
