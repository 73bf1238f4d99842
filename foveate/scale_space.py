"""Discrete scale space: the Gaussian kernel that is exact on the pixel grid."""

import math

import torch
from torch import Tensor

from foveate.errors import ConfigError


def discrete_gaussian(variance: float | Tensor, radius: int | None = None) -> Tensor:
    """Compute the Gaussian kernel of discrete scale space, T(n, t) = e^-t I_n(t).

    Unlike a sampled continuous Gaussian, this kernel keeps the semigroup property on the pixel
    grid: two blurs in a row equal one blur with the summed variance (Lindeberg 1990). It is
    computed from its Fourier transform e^(t (cos w - 1)). This function is smooth and positive, so
    a finite transform is accurate to rounding error for all t at once, on any device.

    Args:
        variance: Variance t in squared pixels: a number or a tensor of any shape ``(...)``.
        radius: Number of pixels on each side of the centre. By default the truncated tails sum to
            less than 1e-12.

    Shape:
        - Output: ``(..., 2 * radius + 1)``, centred.

    Returns:
        The kernel of each variance, in float64.

    Raises:
        ConfigError: If a variance is negative or not finite.

    Examples:
        >>> kernel = discrete_gaussian(2.0)
        >>> kernel.shape, round(float(kernel.sum()), 6)
        (torch.Size([49]), 1.0)
        >>> discrete_gaussian(torch.tensor([1.0, 4.0]), radius=3).shape
        torch.Size([2, 7])
    """
    t = torch.as_tensor(variance, dtype=torch.float64)
    if not bool(torch.isfinite(t).all()) or bool((t < 0).any()):
        raise ConfigError(f"variance must be finite and at least 0, got {variance}")
    enough = gaussian_radius(float(t.max()))
    radius = enough if radius is None else radius
    points = 2 * max(enough, radius) + 2
    frequency = torch.arange(points // 2 + 1, dtype=torch.float64, device=t.device)
    transform = torch.exp(t[..., None] * (torch.cos(frequency * (2 * math.pi / points)) - 1))
    half = torch.fft.irfft(transform, n=points)[..., : radius + 1].clamp_min(0)
    return torch.cat([half[..., 1:].flip(-1), half], dim=-1)


def gaussian_radius(variance: float) -> int:
    """Return a radius outside which a discrete Gaussian has less than 1e-12 of its mass."""
    return math.ceil(8 * math.sqrt(variance)) + 12
