"""Gaussian derivative networks: layers that mix Gaussian derivatives up to the second order.

After Lindeberg, "Scale-covariant and scale-invariant Gaussian derivative networks" (Journal of
Mathematical Imaging and Vision, 2022). A scale channel with initial scale sigma_0 computes
scale-normalised derivatives at sigma_0 r^(k-1) in layer k, and reads its logits at the centre of
the frame. The channels share all weights, and their initial scales are a factor of sqrt(2) apart,
so rescaling the image shifts the logits from channel to channel. Pooling over channels makes the
network scale-invariant.

The kind of layer is that of the paper. The numbers of features, the ratio of sigma between layers
and the range of channels are ours, as is the sampling: feature maps of all pixels in all channels
would cost 40 times as much. A channel evaluates layer k on a grid of step sigma_0 r^(k-1)
about the centre, as far out as the centre depends on it. The kernels are Gaussian derivatives
integrated over pixels or grid cells. Their variance is reduced by that of a cell, so that the
smoothing has exactly its nominal variance in every channel. Outside the frame, images repeat their
edge pixels.

With random weights, digits of scales 1 and 4 in matched channels have logits that differ from those
of scale 2 by 5 and 1 % of the spread over digits; with the paper's discretisation (the discrete
Gaussian and central differences, at all pixels), scale 1 differs by 13 %.
"""
# Shape letters: N images, S scale channel, C features before a layer, F features after it,
# H W pixels or grid points before a layer, P grid points per axis after it, K classes.

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.errors import ConfigError
from foveate.scales import ScaleGrid

FEATURES = (16, 24, 32, 48, 64)
RATIO = 1.25  # of sigma between layers
REACH = 4.0  # the grid of a layer reaches so many standard deviations of all later layers
DERIVATIVES = 6  # L, Ly, Lyy, Lx, Lxy, Lxx
SIGMAS = ScaleGrid(0.5**0.5, 8, per_octave=2)
WIDE = ScaleGrid(0.5, 16, per_octave=2)


def network(*, channels: int, classes: int, size: int = 112) -> nn.Module:
    """Create a network with 8 scale channels and max pooling: 38,874 weights for 10 classes.

    Args:
        channels: Number of image channels.
        classes: Number of classes K.
        size: Width and height of the frame in pixels.

    Returns:
        A network from frames ``(N, channels, size, size)`` to logits ``(N, K)``.

    Examples:
        >>> net = network(channels=1, classes=10)
        >>> sum(weight.numel() for weight in net.parameters())
        38874
    """
    return GaussianDerivativeNet(SIGMAS, channels=channels, classes=classes, size=size)


def average(*, channels: int, classes: int, size: int = 112) -> nn.Module:
    """Create the same network with average pooling; the arguments are those of `network`."""
    return GaussianDerivativeNet(SIGMAS, channels=channels, classes=classes, size=size, pool="avg")


def wide(*, channels: int, classes: int, size: int = 112) -> nn.Module:
    """Create a network with 11 channels, for test scales from 1/2 to 8 and any training scale.

    The initial scales run from 1/2 to 16 pixels: over the factor of 16 between the test scales, and
    one octave more, because more than one channel responds at each scale. The arguments are those
    of `network`.
    """
    return GaussianDerivativeNet(WIDE, channels=channels, classes=classes, size=size)


def wide_average(*, channels: int, classes: int, size: int = 112) -> nn.Module:
    """Create the network of `wide` with average pooling; the arguments are those of `network`."""
    return GaussianDerivativeNet(WIDE, channels=channels, classes=classes, size=size, pool="avg")


class GaussianDerivativeNet(nn.Module):
    """Classify a frame by Gaussian derivative layers in several scale channels.

    Batch norm has the same statistics for all channels. The last layer has no batch norm and no
    ReLU. Cost for one image of 112 pixels: 57 MFLOP per scale channel. Training holds 2 MB of
    activations per image and scale channel in float32.

    Args:
        sigmas: Initial scales sigma_0 of the channels in pixels, increasing.
        channels: Number of image channels.
        classes: Number of classes K.
        size: Width and height of the frame in pixels.
        features: Number of features of each layer but the last, which has K.
        pool: Pooling of the logits over channels, ``"max"`` or ``"avg"``.

    Shape:
        - Input: ``(N, channels, size, size)``.
        - Output: ``(N, K)``.

    Raises:
        ConfigError: If a sigma is below 0.3 pixels, which the pixel grid cannot represent.

    Examples:
        >>> net = GaussianDerivativeNet((1, 2), channels=3, classes=4, size=32, features=(6, 8))
        >>> net.eval()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 4])
    """

    first: Tensor

    def __init__(
        self,
        sigmas: ScaleGrid | Sequence[float],
        *,
        channels: int,
        classes: int,
        size: int,
        features: Sequence[int] = FEATURES,
        pool: Literal["max", "avg"] = "max",
    ) -> None:
        super().__init__()
        self.size, self.pool = size, pool
        grids = sampling_grids(len(features) + 1, RATIO)
        self.register_buffer("first", pixel_jets(sigmas, grids[0], size), persistent=False)
        for layer, (before, after) in enumerate(pairwise(grids), start=1):
            jets = grid_jets(before, after, RATIO**layer)
            self.register_buffer(f"jets{layer}", jets, persistent=False)
        self.layers = nn.ModuleList(
            DerivativeLayer(before, after)
            for before, after in zip((channels, *features), features, strict=False)
        )
        self.head = nn.Linear(DERIVATIVES * features[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits ``(N, K)`` of frames ``(N, channels, size, size)``."""
        logits = self.scale_channels(images)
        return logits.amax(1) if self.pool == "max" else logits.mean(1)

    def scale_channels(self, images: Tensor) -> Tensor:
        """Compute the logits of every scale channel, before pooling.

        Args:
            images: Frames, shape ``(N, channels, size, size)``.

        Returns:
            Logits of the scale channels, shape ``(N, S, K)``.

        Raises:
            ConfigError: If the frames have another size.
        """
        if images.shape[-2:] != (self.size, self.size):
            raise ConfigError(
                f"images must be {self.size} × {self.size} pixels, got "
                f"{tuple(images.shape[-2:])}; create the network with another size"
            )
        # Not in half precision: rounded kernels would see derivatives in the background's value.
        with torch.autocast(images.device.type, enabled=False):
            derivatives = apply_jets(images.to(self.first.dtype)[:, None], self.first[:, None])
        derivatives = derivatives.flatten(0, 1)
        for number, layer in enumerate(self.layers, start=1):
            derivatives = apply_jets(layer(derivatives), self.get_buffer(f"jets{number}"))
        logits = self.head(derivatives.flatten(1))
        return logits.unflatten(0, (-1, len(self.first)))  # type: ignore[no-any-return]


class DerivativeLayer(nn.Module):
    """Mix the derivatives of all features point by point, then apply batch norm and ReLU.

    Args:
        before: Number of features C before the layer.
        after: Number of features F after the layer.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.mixing = nn.Linear(DERIVATIVES * before, after, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, derivatives: Tensor) -> Tensor:
        """Compute features ``(N, F, P, P)`` from derivatives ``(N, C, 6, P, P)``."""
        mixed = self.mixing.weight @ derivatives.flatten(1, 2).flatten(2)
        return F.relu(self.norm(mixed.unflatten(-1, derivatives.shape[-2:])))


def sampling_grids(layers: int, ratio: float) -> list[Tensor]:
    """Compute the positions at which each layer is evaluated, in units of sigma_0.

    Args:
        layers: Number of layers.
        ratio: Ratio of sigma between layers.

    Returns:
        One grid per layer, symmetric about the centre 0. The last one is the centre alone.
    """
    grids = []
    for layer in range(layers):
        later = math.sqrt(sum(ratio ** (2 * other) for other in range(layer + 1, layers)))
        count = math.ceil(REACH * later / ratio**layer)
        grids.append(torch.arange(-count, count + 1, dtype=torch.float64) * ratio**layer)
    return grids


def pixel_jets(sigmas: ScaleGrid | Sequence[float], grid: Tensor, size: int) -> Tensor:
    """Compute the matrices of the first layer, from pixels to the grid of every scale channel.

    Args:
        sigmas: Initial scales of the channels in pixels.
        grid: Positions in units of sigma, shape ``(P,)``.
        size: Number of pixels per axis; pixel i covers [i, i + 1].

    Returns:
        Matrices of the orders 0, 1 and 2, one below the other, in float32, shape
        ``(S, 3 P, size)``.

    Raises:
        ConfigError: If a sigma is below 0.3 pixels.
    """
    edges = torch.arange(1, size, dtype=torch.float64)
    matrices = [jet_matrices(size / 2 + sigma * grid, edges, sigma, 1.0) for sigma in sigmas]
    return torch.stack(matrices).float()


def grid_jets(before: Tensor, after: Tensor, sigma: float) -> Tensor:
    """Compute the matrices between the grids of two layers, shape ``(3 P, H)``, in float32."""
    edges = (before[1:] + before[:-1]) / 2
    return jet_matrices(after, edges, sigma, float(before[1] - before[0])).float()


def jet_matrices(positions: Tensor, edges: Tensor, sigma: float, step: float) -> Tensor:
    """Compute matrices that smooth and differentiate a signal of constant cells.

    The cells lie between the edges; the first and the last one continue to infinity. Integrated
    over a cell, the derivative of order d of a Gaussian is a difference of derivatives of order
    d - 1 at its edges, or of the normal distribution function for d = 0.

    Args:
        positions: Positions of the results, shape ``(P,)``.
        edges: Edges between the H cells, shape ``(H - 1,)``.
        sigma: Standard deviation of the smoothing, including the variance step² / 12 of a cell.
        step: Width of a cell.

    Returns:
        Matrices of the orders 0, 1 and 2, multiplied by sigma^order, one below the other, shape
        ``(3 P, H)``.

    Raises:
        ConfigError: If sigma is below 0.3 steps.
    """
    if sigma < 0.3 * step:
        raise ConfigError(f"sigma must be at least 0.3 pixels, got {sigma:g}; use a larger one")
    spread = math.sqrt(sigma**2 - step**2 / 12)
    z = (positions[:, None] - edges) / spread
    density = torch.exp(-(z**2) / 2) / (math.sqrt(2 * math.pi) * spread)
    values = torch.stack(
        [torch.special.ndtr(z), sigma * density, -(sigma**2) * z / spread * density]
    )
    left = values.new_tensor([1.0, 0.0, 0.0])[:, None, None].expand(-1, len(positions), 1)
    return -torch.cat([left, values, torch.zeros_like(left)], dim=-1).diff(dim=-1).flatten(0, 1)


def apply_jets(images: Tensor, matrices: Tensor) -> Tensor:
    """Compute the derivatives up to order 2 of square images, one axis after the other.

    Args:
        images: Images or features, shape ``(..., C, H, H)``.
        matrices: Matrices of the orders 0, 1 and 2, shape ``(..., 3 P, H)``.

    Returns:
        The derivatives L, Ly, Lyy, Lx, Lxy and Lxx, shape ``(..., C, 6, P, P)``.
    """
    points = matrices.shape[-2] // 3
    along_x = (images @ matrices.mT).split(points, dim=-1)
    along_y = [matrices[..., : (3 - x) * points, :] @ part for x, part in enumerate(along_x)]
    derivatives = torch.cat(along_y, dim=-2)
    return derivatives.unflatten(-2, (DERIVATIVES, points))  # type: ignore[no-any-return]
