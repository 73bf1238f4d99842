"""Backbones that are one fixed kernel, and how far their answers can be from the closed form."""
# Shape letters: N patches, P patch pixels.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from foveate.evaluation.theory.images import CRAMER, Blobs
from foveate.evaluation.theory.sums import grid_error, product_error, product_norms
from foveate.scale_space import gaussian_derivative

SIGMA = 2.0  # of the Gaussian, in patch pixels
RADIUS = 18  # 9 deviations: what is left out is below 1e-15
SIZE = 2 * RADIUS + 1
TERMS = 30  # derivatives tried in the bound on sampling
LAPLACIAN = ((2, 0), (0, 2))
Orders = tuple[int, int]


class KernelNet(nn.Module):
    """Convolve patches (N, 1, P, P) with a kernel (P, P) and give its value in the middle, (N, 1).

    The kernel is `sign` times the sum of scale-normalised derivatives of a Gaussian.
    """

    kernel: Tensor

    def __init__(self, orders: Sequence[Orders], sign: float = 1.0) -> None:
        super().__init__()
        at = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
        points = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)
        parts = [gaussian_derivative(points, SIGMA, pair, normalised=True) for pair in orders]
        self.register_buffer("kernel", sign * torch.stack(parts).sum(0))

    def forward(self, patches: Tensor) -> Tensor:
        """Weigh each patch with the mirrored kernel, as a convolution does."""
        return (patches * self.kernel.flip(0, 1)).sum((2, 3))


def closed_form(image: Blobs, scale: float, orders: Sequence[Orders]) -> float:
    """The sum of scale-normalised derivatives of the image at the origin, at scale · SIGMA."""
    wide, origin = image.smoothed(scale * SIGMA), torch.zeros(1, dtype=torch.float64)
    values = [(scale * SIGMA) ** sum(o) * wide.values(origin, origin, o) for o in orders]
    return float(torch.stack(values).sum())


def response_error(image: Blobs, scale: float, orders: Sequence[Orders], frame: int) -> float:
    """How far the answer of channel `scale` can be from `closed_form`.

    Interpolation under the kernel, what is left of the blobs at the border of the frame, and the
    sum over patch pixels in place of the integral.
    """
    kernel = KernelNet(orders).kernel.abs()
    at = scale * torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
    pixels = image.interpolation_error(at, at)
    if scale * RADIUS > frame / 2 - 1:
        pixels = pixels + 2 * image.beyond(-math.inf, frame / 2 - 1)
    sampling = sum(_sampling_error(image, scale, pair) for pair in orders)
    return float((kernel * pixels).sum()) + sampling


def _sampling_error(image: Blobs, scale: float, orders: Orders) -> float:
    """The distance of the sum over the whole patch grid, cut at RADIUS, from the integral."""
    norms = [_norms(image, axis, scale, order) for axis, order in enumerate(orders)]
    errors = [grid_error(1.0, n) + _cut(order) for n, order in zip(norms, orders, strict=True)]
    return float(image.amplitudes.abs().sum()) * product_error([n[0] for n in norms], errors)


def _norms(image: Blobs, axis: int, scale: float, order: int) -> list[float]:
    """Bounds on the integrals of the derivatives of f(scale v) h(v) along one axis.

    By Cramér's bound, the integral of |g^(n)| is at most 1.0865 sqrt(2 n!) / sigma^n.
    """
    sups = [scale**p * image.steepness(axis, p) for p in range(TERMS)]
    integrals = [CRAMER * math.sqrt(2 * math.factorial(order + p)) / SIGMA**p for p in range(TERMS)]
    return product_norms(sups, integrals)


@cache
def _cut(order: int) -> float:
    """What the kernel of one axis holds beyond RADIUS; beyond four times that, below e^-600."""
    tail = torch.arange(RADIUS + 1, 4 * RADIUS, dtype=torch.float64)[:, None]
    return 2 * float(gaussian_derivative(tail, SIGMA, [order], normalised=True).abs().sum())
