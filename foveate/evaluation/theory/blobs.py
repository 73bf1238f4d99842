"""Sums of Gaussian blobs: images whose scaling, derivatives and bounds are exact."""
# Shape letters: M blobs, H W pixels. Points are (y, x) in pixels from the centre of the frame.

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ORIGIN = (0.0, 0.0)
FAR = 26.0  # standard deviations; farther values are denormal numbers, which multiply slowly


@dataclass(frozen=True)
class Blobs:
    """An image f(y, x), the sum of a exp(-(y - c_y)² / 2 d_y² - (x - c_x)² / 2 d_x²) over M blobs.

    `amplitudes` a have the shape (M,), `centres` c and standard `deviations` d the shape (M, 2).
    All are float64.
    """

    amplitudes: Tensor
    centres: Tensor
    deviations: Tensor

    def values(self, ys: Tensor, xs: Tensor) -> Tensor:
        """Evaluate the image on the grid of ys (H,) and xs (W,)."""
        rows, columns = self.profiles(0, ys), self.profiles(1, xs)
        return torch.einsum("m,hm,wm->hw", self.amplitudes, rows, columns)

    def profiles(self, axis: int, at: Tensor) -> Tensor:
        """Return the profile of each blob along one axis at (L,) points, as (L, M)."""
        z = (at[:, None] - self.centres[:, axis]) / self.deviations[:, axis]
        return torch.where(z.abs() < FAR, torch.exp(-(z**2) / 2), 0.0)

    def sampled(self, size: int) -> Tensor:
        """Sample the image at the pixel centres of a square frame, as (1, 1, size, size)."""
        return self.values(centred(size), centred(size))[None, None]

    def transform(self, t: float, x1: Sequence[float], x2: Sequence[float]) -> "Blobs":
        """Return the image h with h(x') = f(x) for x' = t (x - x1) + x2."""
        one, two = self.centres.new_tensor(x1), self.centres.new_tensor(x2)
        return Blobs(self.amplitudes, t * (self.centres - one) + two, t * self.deviations)

    def scaled(self, t: float, about: Sequence[float] = ORIGIN) -> "Blobs":
        """Return the image scaled by t about a point."""
        return self.transform(t, about, about)

    def patch_error(self, scale: float, size: int, about: Sequence[float] = ORIGIN) -> Tensor:
        """Bound the error of bilinear interpolation for each pixel of a patch (size, size).

        Linear interpolation along one axis deviates by at most max|f''| / 8 over its cell, and
        interpolation along the other axis does not increase that. A cell extends at most 1 pixel
        from the sample.
        """
        flat, bent = [], []
        for axis in range(2):
            at, width = about[axis] + scale * centred(size), self.deviations[:, axis]
            z = ((at[:, None] - self.centres[:, axis]).abs() - 1).clamp_min(0) / width
            flat.append(torch.exp(-(z**2) / 2))
            bent.append(_bend(z) / width**2)
        product, heights = "m,hm,wm->hw", self.amplitudes.abs() / 8
        rows = torch.einsum(product, heights, bent[0], flat[1])
        return rows + torch.einsum(product, heights, flat[0], bent[1])

    def tail_bound(self, near: float, far: float) -> float:
        """Bound |f| at distances below `near` and above `far` from the origin."""
        radius = self.centres.norm(dim=1)
        gap = torch.minimum(radius - near, far - radius).clamp_min(0)
        widest = self.deviations.amax(1)
        return float((self.amplitudes.abs() * torch.exp(-((gap / widest) ** 2) / 2)).sum())


def centred(size: int) -> Tensor:
    """Return the centres of `size` pixels relative to the centre of their row, as (size,)."""
    return torch.arange(size, dtype=torch.float64) + (0.5 - size / 2)


def _bend(z: Tensor) -> Tensor:
    """Return the maximum of |u² - 1| exp(-u²/2) over u >= z, for z >= 0.

    The function is the absolute second derivative of a Gaussian.
    """
    hump = 2 * math.exp(-1.5)  # local maximum at z = sqrt(3); the function decreases from there
    here = (z**2 - 1).abs() * torch.exp(-(z**2) / 2)
    return torch.where(z < math.sqrt(3), here.clamp_min(hump), here)


def scene(seed: int, count: int = 5) -> Blobs:
    """Return random blobs with deviations of 10 to 20 pixels and centres of -20 to 20 pixels."""
    random = torch.Generator().manual_seed(seed)
    return _random_blobs(random, 40 * _uniform(random, count, 2) - 20, 10)


def ring(seed: int) -> Blobs:
    """Return four random blobs with deviations of 15 to 20 pixels on a circle of radius 120.

    The image is empty at the centre and far outside, so that the finest and the coarsest channels
    of a wide enough set see only background.
    """
    random = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * _uniform(random, 4)
    return _random_blobs(random, 120 * torch.stack([angle.sin(), angle.cos()], 1), 15)


def _random_blobs(random: torch.Generator, centres: Tensor, low: float) -> Blobs:
    """Return blobs with deviations of `low` to 20 and amplitudes of ±0.5 to ±1, alternating."""
    signs = 1 - 2 * (torch.arange(len(centres)) % 2).double()
    heights = signs * (0.5 + 0.5 * _uniform(random, len(centres)))
    return Blobs(heights, centres, low + (20 - low) * _uniform(random, len(centres), 2))


def _uniform(random: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=random, dtype=torch.float64)
