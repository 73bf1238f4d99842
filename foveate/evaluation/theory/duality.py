"""Scaling the filter against scaling the image: the same representation, seen from two sides."""
# Shape letters: M blobs, U nodes of the sum, T terms of a kernel, X points.

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from foveate.evaluation.theory.finding import Finding, compare
from foveate.evaluation.theory.images import Blobs, scene
from foveate.evaluation.theory.sums import EPS, grid_error, product_error, product_norms

RADIUS = 9.0  # of the kernel's support, in pixels
SMOOTH = 8  # the kernel's derivative of this order still is bounded
SCALES = (0.5, 2**0.25, 2.0)
NODES = {"filter": 301, "image": 270}  # not multiples, so that the two sums share no nodes
NOTE = "Poisson's formula bounds each sum by an integral of |derivative 8|, plus rounding"
TEST = "test_scaling_the_filter_is_scaling_the_image"
SKEWS = ((0.8, -0.3), (-0.5, 0.9))  # of the T = 2 products y-profile · x-profile


def duality(seed: int = 0) -> list[Finding]:
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
    axes, pairs, limits = at.shape[1], [], []
    for scale in SCALES:
        by_filter = _Sum(image, 1.0, scale, NODES["filter"])
        by_image = _Sum(image.scaled(1 / scale), scale, 1.0, NODES["image"])
        pairs.append(
            [torch.stack([s.value(x / s.unit) for x in at]) for s in (by_filter, by_image)]
        )
        limits.append(by_filter.error(axes) + by_image.error(axes))
    sides = [torch.stack(side) for side in zip(*pairs, strict=True)]
    bound = torch.tensor(limits, dtype=torch.float64)[:, None]
    return compare(statement, sides, bound, note=NOTE, test=TEST)


class _Sum(NamedTuple):
    """The convolution of `image` with the kernel of scale `scale`, as a sum over a grid.

    `unit` is the length of the image's coordinates in those of the original.
    """

    image: Blobs
    unit: float
    scale: float
    nodes: int

    def value(self, point: Tensor) -> Tensor:
        """The convolution at an (N,) point; in one dimension, of the blobs' profiles along y."""
        at, step = self._grid()
        profiles = _kernel(at / self.scale) / self.scale  # (2, T, U)
        sides = [self.image.profiles(axis, x - at) for axis, x in enumerate(point)]
        if len(sides) == 1:
            return step * torch.einsum("m,um,tu->", self.image.amplitudes, sides[0], profiles[0])
        values = torch.einsum("m,um,vm->uv", self.image.amplitudes, *sides)
        return step**2 * (values * torch.einsum("tu,tv->uv", *profiles)).sum()

    def _grid(self) -> tuple[Tensor, float]:
        """Nodes over the kernel's support, and their distance."""
        reach = RADIUS * self.scale
        step = 2 * reach / self.nodes
        return torch.arange(self.nodes + 1, dtype=torch.float64) * step - reach, step

    def error(self, axes: int) -> float:
        """How far `value` can be from the integral, for that many axes."""
        _, step = self._grid()
        rounding = (self.nodes + 8) * EPS  # additions, and 8 roundings in each term
        total = 0.0
        for term in range(len(SKEWS)):
            norms = [self._norms(axis, term) for axis in range(axes)]
            errors = [grid_error(step, n) + rounding * n[0] for n in norms]
            total += product_error([n[0] for n in norms], errors)
        return float(self.image.amplitudes.abs().sum()) * total

    def _norms(self, axis: int, term: int) -> list[float]:
        """Bounds on the integrals of the integrand's derivatives along one axis."""
        reach, orders = RADIUS * self.scale, range(SMOOTH + 1)
        sups = [self.image.steepness(axis, p) for p in orders]
        integrals = [_mass(axis, term, p) * reach**-p * RADIUS for p in orders]
        return product_norms(sups, integrals)


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
