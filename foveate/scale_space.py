"""Scale space: the Gaussian that is exact on the pixel grid."""

import math

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
