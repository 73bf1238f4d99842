"""Statements of the theory about formulas alone, which no network and no op takes part in."""
# Shape letters: M blobs, U nodes of the sum, T terms of a kernel, X points.

import math
from functools import cache

import numpy as np
import torch
from gaussian_derivatives import directional_derivative, gaussian_derivative, hermite
from numpy.polynomial import Polynomial
from scale_space_statements import ORDERS
from theory_tools import EPS, SIGMA, grid_error, product_error, product_norms, steepness

from foveate.evaluation.theory.blobs import scene
from foveate.evaluation.theory.bounds import compare

RADIUS = 9.0  # of the kernel's support, in pixels
SMOOTH = 8  # the kernel's derivative of this order still is bounded
SCALES = (0.5, 2**0.25, 2.0)
NODES = {"filter": 301, "image": 270}  # not multiples, so that the two sums share no nodes
NOTE = "Poisson's formula bounds each sum by an integral of |derivative 8|, plus rounding"
SKEWS = ((0.8, -0.3), (-0.5, 0.9))  # of the T = 2 products y-profile · x-profile
DIRECTIONS = ((1.0, 0.0), (0.6, -0.8), (-1.0, 2.5))
KERNEL_SCALES = (*SCALES, 5.0)
ROUNDED = "float64 rounding: eps times the operations times the largest partial sum"


def filter_duality(seed=0):
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


def _finding(statement, image, at):
    """The worst of SCALES, each evaluated at (X, N) points."""
    cases = []
    for scale in SCALES:
        ours, error = _convolved(image, at, scale, NODES["filter"])
        theirs, more = _convolved(image.scaled(1 / scale), at / scale, 1.0, NODES["image"])
        cases.append((ours, theirs, error + more))
    return compare(statement, *cases, note=NOTE)


def _convolved(image, points, scale, nodes):
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


def _sum(image, point, at, profiles):
    sides = [image.profiles(axis, x - at) for axis, x in enumerate(point)]
    if len(sides) == 1:
        return torch.einsum("m,um,tu->", image.amplitudes, sides[0], profiles[0])
    values = torch.einsum("m,um,vm->uv", image.amplitudes, *sides)
    return (values * torch.einsum("tu,tv->uv", *profiles)).sum()


def _norms(image, axis, term, reach):
    """Bounds on the integrals of the integrand's derivatives along one axis."""
    orders = range(SMOOTH + 1)
    sups = [steepness(image, axis, p) for p in orders]
    return product_norms(sups, [_mass(axis, term, p) * reach**-p * RADIUS for p in orders])


def _kernel(at):
    """The profiles of the kernel along y and x at (U,) points: (2, T, U)."""
    v = (at / RADIUS).clamp(-1, 1)
    bump = (1 - v**2) ** SMOOTH
    skews = torch.tensor(SKEWS, dtype=torch.float64).T[..., None]
    return bump * (1 + skews * v)


@cache
def _mass(axis, term, order):
    """A bound on the integral of |derivative| of a profile on [-1, 1], by Cauchy and Schwarz."""
    profile = Polynomial([1, 0, -1]) ** SMOOTH * Polynomial([1, SKEWS[term][axis]])
    square = (profile.deriv(order) ** 2).integ()
    return float(np.sqrt(2 * (square(1.0) - square(-1.0))))


def kernel_scaling(seed=0):
    """Scaling a normalised Gaussian derivative gives the normalised derivative of that scale.

    h(x) = sigma^n d^n g(x; sigma) has h(x / s) / s^N = (s sigma)^n d^n g(x; s sigma).
    """
    random = torch.Generator().manual_seed(seed)
    points = 4 * SIGMA * (2 * torch.rand(200, 2, generator=random, dtype=torch.float64) - 1)
    line = [(((n,),), {(n,): 1}) for n in range(5)]
    plane = [((orders,), {orders: 1}) for orders in ORDERS]
    along = [  # a direction, by the multinomial expansion
        ((e, n), {(a, n - a): 2 * math.comb(n, a) for a in range(n + 1)})
        for e in DIRECTIONS
        for n in range(5)
    ]
    name = "scaled Gaussian derivatives"
    return [
        _scaling(f"{name}, orders to 4 in 1-D", points[:, :1], gaussian_derivative, line),
        _scaling(f"{name}, orders to 4 in 2-D", points, gaussian_derivative, plane),
        _scaling(f"{name} along any direction", points, directional_derivative, along),
    ]


def _scaling(statement, points, derivative, choices):
    """Compare scaled kernels with the kernels of that scale, within the rounding between them.

    A choice is the arguments of a derivative, and the weights with which partial derivatives enter
    its rounding.
    """
    cases = []
    for arguments, weights in choices:
        for scale in KERNEL_SCALES:
            scaled = derivative(points / scale, SIGMA, *arguments, normalised=True)
            direct = derivative(points, scale * SIGMA, *arguments, normalised=True)
            parts = [w * _rounding(points, scale * SIGMA, o) for o, w in weights.items()]
            cases.append((scaled / scale ** points.shape[1], direct, torch.stack(parts).sum(0)))
    return compare(statement, *cases, note=ROUNDED)


def _rounding(points, sigma, orders):
    """How far rounding can part two ways to compute a derivative of the Gaussian.

    |He_n(z)| is summed without its signs, i^-n He_n(i z); a relative error of eps in z moves it
    by n eps and the exponential by z² eps; 3 n operations and 10 factors are rounded.
    """
    z = (points / sigma).abs()
    size = torch.exp(-(z**2).sum(-1) / 2) / (math.sqrt(2 * math.pi) * sigma) ** len(orders)
    for axis, order in enumerate(orders):
        size = size * (hermite(order, 1j * z[:, axis]) * (-1j) ** order).real
    return 2 * EPS * (10 + 4 * sum(orders) + 2 * (z**2).sum(-1)) * size
