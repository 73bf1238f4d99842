"""Scaling the filter against scaling the image: the same representation, seen from two sides."""
# Shape letters: M blobs, U nodes of the sum, T terms of a kernel, X points.

from functools import cache

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from foveate.evaluation.theory.blobs import Blobs, scene
from foveate.evaluation.theory.bounds import (
    EPS,
    Finding,
    compare,
    grid_error,
    product_error,
    product_norms,
)

RADIUS = 9.0  # of the kernel's support, in pixels
SMOOTH = 8  # the kernel's derivative of this order still is bounded
SCALES = (0.5, 2**0.25, 2.0)
NODES = {"filter": 301, "image": 270}  # not multiples, so that the two sums share no nodes
NOTE = "Poisson's formula bounds each sum by an integral of |derivative 8|, plus rounding"
SKEWS = ((0.8, -0.3), (-0.5, 0.9))  # of the T = 2 products y-profile · x-profile


def filter_duality(seed: int = 0) -> list[Finding]:
    """L(x; s) = M(x / s; 1 / s), in one and in two dimensions.

    L convolves the image with h(x / s) / s^N, M the image scaled by 1 / s with h itself. The
    kernel h is a polynomial bump, skewed, so that neither is symmetric nor Gaussian.
    """
    image = scene(seed)
    at = torch.tensor([[3.7, -8.1], [-14.2, 5.5], [21.3, 16.4]], dtype=torch.float64)
    return [
        _finding("duality in 1-D: scaled filter = scaled image", image, at[:, :1]),
        _finding("duality in 2-D: scaled filter = scaled image", image, at),
    ]


def _finding(statement: str, image: Blobs, at: Tensor) -> Finding:
    """The worst of SCALES, each evaluated at (X, N) points."""
    cases = []
    for scale in SCALES:
        ours, error = _convolved(image, at, scale, NODES["filter"])
        theirs, more = _convolved(image.scaled(1 / scale), at / scale, 1.0, NODES["image"])
        cases.append((ours, theirs, error + more))
    return compare(statement, *cases, note=NOTE)


def _convolved(image: Blobs, points: Tensor, scale: float, nodes: int) -> tuple[Tensor, float]:
    """The image convolved with the kernel of that scale at (X, N) points, as a sum over a grid.

    In one dimension, of the blobs' profiles along y. The second value is how far the sum can be
    from the integral: for each term, by its derivatives along every axis, and by rounding.
    """
    reach = RADIUS * scale
    step = 2 * reach / nodes
    at = torch.arange(nodes + 1, dtype=torch.float64) * step - reach
    profiles = _kernel(at / scale) / scale  # (2, T, U)
    values = torch.stack([_sum(image, point, at, profiles) for point in points])
    total, rounding = 0.0, (nodes + 8) * EPS  # additions, and 8 roundings in each term
    for term in range(len(SKEWS)):
        norms = [_norms(image, axis, term, reach) for axis in range(points.shape[1])]
        errors = [grid_error(step, n) + rounding * n[0] for n in norms]
        total += product_error([n[0] for n in norms], errors)
    return step ** points.shape[1] * values, float(image.amplitudes.abs().sum()) * total


def _sum(image: Blobs, point: Tensor, at: Tensor, profiles: Tensor) -> Tensor:
    sides = [image.profiles(axis, x - at) for axis, x in enumerate(point)]
    if len(sides) == 1:
        return torch.einsum("m,um,tu->", image.amplitudes, sides[0], profiles[0])
    values = torch.einsum("m,um,vm->uv", image.amplitudes, *sides)
    return (values * torch.einsum("tu,tv->uv", *profiles)).sum()


def _norms(image: Blobs, axis: int, term: int, reach: float) -> list[float]:
    """Bounds on the integrals of the integrand's derivatives along one axis."""
    orders = range(SMOOTH + 1)
    sups = [image.steepness(axis, p) for p in orders]
    return product_norms(sups, [_mass(axis, term, p) * reach**-p * RADIUS for p in orders])


def _kernel(at: Tensor) -> Tensor:
    """The profiles of the kernel along y and x at (U,) points: (2, T, U)."""
    v = (at / RADIUS).clamp(-1, 1)
    bump = (1 - v**2) ** SMOOTH
    skews = torch.tensor(SKEWS, dtype=torch.float64).T[..., None]
    return bump * (1 + skews * v)


@cache
def _mass(axis: int, term: int, order: int) -> float:
    """A bound on the integral of |derivative| of a profile on [-1, 1], by Cauchy and Schwarz."""
    profile = Polynomial([1, 0, -1]) ** SMOOTH * Polynomial([1, SKEWS[term][axis]])
    square = (profile.deriv(order) ** 2).integ()
    return float(np.sqrt(2 * (square(1.0) - square(-1.0))))
