"""Derivatives of the Gaussian, for the statements of the theory."""

import math

import torch

from foveate.errors import ConfigError


def hermite(order, x):
    """The probabilists' Hermite polynomial He_n: 1, x, then He_n = x He_(n-1) - (n-1) He_(n-2)."""
    if order < 0:
        raise ConfigError(f"a derivative has an order of 0 or more, got {order}")
    before, value = torch.zeros_like(x), torch.ones_like(x)
    for n in range(order):
        before, value = value, x * value - n * before
    return value


def gaussian_derivative(points, sigma, orders, *, normalised=False):
    """A partial derivative of the N-dimensional Gaussian at points (..., N); gives (...).

    `orders` says how often to differentiate along each of the N axes. Each axis gives the factor
    (-1/sigma)^n He_n(x / sigma) g(x; sigma). With `normalised`, the result is multiplied by
    sigma^(n_1 + ... + n_N): derivatives in units of sigma, which can be compared over scale.
    """
    _check_sigma(sigma)
    if points.shape[-1:] != (len(orders),):
        raise ConfigError(
            f"orders {tuple(orders)} are for {len(orders)} axes, so points must have the shape "
            f"(..., {len(orders)}), got {tuple(points.shape)}"
        )
    z = points / sigma
    value = torch.exp(-(z**2).sum(-1) / 2) / (math.sqrt(2 * math.pi) * sigma) ** len(orders)
    for axis, order in enumerate(orders):
        value = value * hermite(order, z[..., axis])
    total = sum(orders)
    return value * (-1) ** total if normalised else value * (-1 / sigma) ** total


def _check_sigma(sigma):
    if not (math.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"sigma must be finite and above 0, got {sigma:g}")


def directional_derivative(
    points,
    sigma,
    direction,
    order,
    *,
    normalised=False,
):
    """The derivative of that order of the Gaussian along a direction, at points (..., N).

    (e_1 d_1 + ... + e_N d_N)^n expanded: each partial derivative with orders a_1 + ... + a_N = n
    enters n! / (a_1! ... a_N!) e_1^a_1 ... e_N^a_N times. `direction` e is scaled to length one.
    """
    length = math.hypot(*direction)
    if not (math.isfinite(length) and length > 0):
        raise ConfigError(f"direction must be finite and not zero, got {tuple(direction)}")
    unit = [component / length for component in direction]
    total = torch.zeros(points.shape[:-1], dtype=points.dtype, device=points.device)
    for orders in _orders(len(unit), order):
        weight = float(math.factorial(order))
        for component, n in zip(unit, orders, strict=True):
            weight *= component**n / math.factorial(n)
        total = total + weight * gaussian_derivative(points, sigma, orders, normalised=normalised)
    return total


def _orders(axes, total):
    """All ways to share `total` derivatives among the axes."""
    if total < 0:
        raise ConfigError(f"a derivative has an order of 0 or more, got {total}")
    if axes == 1:
        return [(total,)]
    return [(n, *rest) for n in range(total + 1) for rest in _orders(axes - 1, total - n)]
