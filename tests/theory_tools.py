"""What the statements about scale space are measured with: derivatives, kernels, bounds on sums."""
# Shape letters: N patches, P patch pixels.

import math
from functools import cache

import torch
from gaussian_derivatives import gaussian_derivative, hermite
from torch import nn

from foveate.evaluation.theory.blobs import Blobs, centred

EPS = torch.finfo(torch.float64).eps
CRAMER = 1.0865  # Cramér: |He_n(x)| exp(-x²/4) <= 1.0865 sqrt(n!) for all n and x
SIGMA = 2.0  # of the Gaussian kernels, in patch pixels
RADIUS = 18  # 9 deviations: what is left out is below 1e-15
KERNEL_SIZE = 2 * RADIUS + 1
TERMS = 30  # derivatives tried in the bound on sampling
LAPLACIAN = ((2, 0), (0, 2))


def blob(sigma):
    """One round blob of height 1 at the origin."""
    one = torch.ones(1, dtype=torch.float64)
    return Blobs(one, torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 2), sigma).double())


def derivative(image, ys, xs, orders):
    """The partial derivative of these orders of an image, on the grid of ys (H,) and xs (W,)."""
    sides = []
    for axis, (at, order) in enumerate(zip((ys, xs), orders, strict=True)):
        deviations = image.deviations[:, axis]
        z = (at[:, None] - image.centres[:, axis]) / deviations
        slopes = (-1 / deviations) ** order * hermite(order, z)
        sides.append(slopes * image.profiles(axis, at))
    return torch.einsum("m,hm,wm->hw", image.amplitudes, *sides)


def smoothed(image, sigma):
    """The image convolved with a Gaussian: variances add, and the mass of each blob stays."""
    wider = (image.deviations**2 + sigma**2).sqrt()
    shrink = (image.deviations / wider).prod(1)
    return Blobs(image.amplitudes * shrink, image.centres, wider)


def steepness(image, axis, order):
    """A bound on the derivative of that order of every blob's profile along an axis."""
    narrowest = float(image.deviations[:, axis].min())
    return CRAMER * math.sqrt(math.factorial(order)) / narrowest**order


def product_norms(sups, integrals):
    """Bounds on the integral of |(f h)^(p)|, p = 0, 1, ..., by Leibniz's rule.

    `sups` bound |f|, |f'|, ... and `integrals` the integrals of |h|, |h'|, ...
    """
    return [
        sum(math.comb(p, j) * sups[j] * integrals[p - j] for j in range(p + 1))
        for p in range(min(len(sups), len(integrals)))
    ]


def grid_error(step, norms):
    """The distance of step · sum F(k step + any offset) from the integral of F over the line.

    By Poisson's summation formula it is at most the sum of |F^(2 pi k / step)| over k other than
    0, F^ the Fourier transform; |F^(w)| <= norms[p] / |w|^p for every p that the smoothness
    allows, `norms` as from `product_norms`; and sum of 1 / k^p <= pi² / 6 for p >= 2.
    """
    limits = [(step / (2 * math.pi)) ** p * norms[p] for p in range(2, len(norms))]
    return math.pi**2 / 3 * min(limits)


def product_error(sizes, errors):
    """The error of a product of factors up to `sizes`, each known up to its error."""
    with_errors = math.prod(size + error for size, error in zip(sizes, errors, strict=True))
    return with_errors - math.prod(sizes)


def fitted_order(steps, errors):
    """The exponent p of errors ~ steps^p, by least squares on logarithms."""
    return float((_fit_weights(steps) * errors.log()).sum())


def order_uncertainty(steps, errors, unsure):
    """How far the fitted order can move when each error is known up to ± unsure."""
    share = unsure / errors
    if bool((share >= 1).any()):
        return math.inf
    return float((_fit_weights(steps).abs() * -torch.log1p(-share)).sum())


def _fit_weights(steps):
    x = steps.log() - steps.log().mean()
    return x / (x**2).sum()


class KernelNet(nn.Module):
    """Convolve patches (N, 1, P, P) with a kernel (P, P) and give its value in the middle, (N, 1).

    The kernel is `sign` times the sum of scale-normalised derivatives of a Gaussian.
    """

    def __init__(self, orders, sign=1.0):
        super().__init__()
        at = centred(KERNEL_SIZE)
        points = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)
        parts = [gaussian_derivative(points, SIGMA, pair, normalised=True) for pair in orders]
        self.register_buffer("kernel", sign * torch.stack(parts).sum(0))

    def forward(self, patches):
        """Weigh each patch with the mirrored kernel, as a convolution does."""
        return (patches * self.kernel.flip(0, 1)).sum((2, 3))


def closed_form(image, scale, orders):
    """The scale-normalised derivative of the image at the origin, at scale · SIGMA."""
    origin = torch.zeros(1, dtype=torch.float64)
    value = derivative(smoothed(image, scale * SIGMA), origin, origin, orders)
    return float((scale * SIGMA) ** sum(orders) * value)


def response_error(image, scale, orders, frame):
    """How far the response of channel `scale` can be from `closed_form`.

    Interpolation under the kernel, what is left of the blobs at the border of the frame, and the
    sum over patch pixels in place of the integral.
    """
    kernel = KernelNet(orders).kernel.abs()
    pixels = image.patch_error(scale, KERNEL_SIZE)
    if scale * RADIUS > frame / 2 - 1:
        pixels = pixels + 2 * image.tail_bound(-math.inf, frame / 2 - 1)
    sampling = sum(_sampling_error(image, scale, pair) for pair in orders)
    return float((kernel * pixels).sum()) + sampling


def _sampling_error(image, scale, orders):
    """The distance of the sum over the whole patch grid, cut at RADIUS, from the integral."""
    norms = [_norms(image, axis, scale, order) for axis, order in enumerate(orders)]
    errors = [grid_error(1.0, n) + _cut(order) for n, order in zip(norms, orders, strict=True)]
    return float(image.amplitudes.abs().sum()) * product_error([n[0] for n in norms], errors)


def _norms(image, axis, scale, order):
    """Bounds on the integrals of the derivatives of f(scale v) h(v) along one axis.

    By Cramér's bound, the integral of |g^(n)| is at most 1.0865 sqrt(2 n!) / sigma^n.
    """
    sups = [scale**p * steepness(image, axis, p) for p in range(TERMS)]
    integrals = [CRAMER * math.sqrt(2 * math.factorial(order + p)) / SIGMA**p for p in range(TERMS)]
    return product_norms(sups, integrals)


@cache
def _cut(order):
    """What the kernel of one axis holds beyond RADIUS; beyond four times that, below e^-600."""
    tail = torch.arange(RADIUS + 1, 4 * RADIUS, dtype=torch.float64)[:, None]
    return 2 * float(gaussian_derivative(tail, SIGMA, [order], normalised=True).abs().sum())
