"""Scale space: the Gaussian that is exact on the pixel grid, and derivatives of the smooth one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.errors import ConfigError


def discrete_gaussian(variance: float | Tensor, radius: int | None = None) -> Tensor:
    """Sample T(n, t) = e^-t I_n(t), the Gaussian of discrete scale space (Lindeberg 1990).

    `variance` t is a number or a tensor of any shape (...); the result, float64 and of shape
    (..., 2 radius + 1), is centred. Without `radius`, what is left out sums to less than 1e-12.

    The kernel is computed from its Fourier transform e^(t (cos w - 1)), which is smooth and
    positive, so a finite transform gives it to rounding error for all t at once, on any device.
    """
    t = torch.as_tensor(variance, dtype=torch.float64)
    if not bool(torch.isfinite(t).all()) or bool((t < 0).any()):
        raise ConfigError(f"variance must be finite and not negative, got {variance}")
    enough = gaussian_radius(float(t.max()))
    radius = enough if radius is None else radius
    points = 2 * max(enough, radius) + 2
    frequency = torch.arange(points // 2 + 1, dtype=torch.float64, device=t.device)
    transform = torch.exp(t[..., None] * (torch.cos(frequency * (2 * math.pi / points)) - 1))
    half = torch.fft.irfft(transform, n=points)[..., : radius + 1].clamp_min(0)
    return torch.cat([half[..., 1:].flip(-1), half], dim=-1)


def gaussian_radius(variance: float) -> int:
    """Pixels beyond which less than 1e-12 of a discrete Gaussian of that variance lies."""
    return math.ceil(8 * math.sqrt(variance)) + 12


def hermite(order: int, x: Tensor) -> Tensor:
    """The probabilists' Hermite polynomial He_n: 1, x, then He_n = x He_(n-1) - (n-1) He_(n-2)."""
    if order < 0:
        raise ConfigError(f"a derivative has an order of 0 or more, got {order}")
    before, value = torch.zeros_like(x), torch.ones_like(x)
    for n in range(order):
        before, value = value, x * value - n * before
    return value


def gaussian_derivative(
    points: Tensor, sigma: float, orders: Sequence[int], *, normalised: bool = False
) -> Tensor:
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


def _check_sigma(sigma: float) -> None:
    if not (math.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"sigma must be finite and above 0, got {sigma:g}")
