"""Gaussian derivative networks: layers that mix Gaussian derivatives up to the second order.

Follows Lindeberg, "Scale-covariant and scale-invariant Gaussian derivative networks" (Journal of
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
# Shape letters: N images, S scale channel, M = S N, C features before a layer, F features after it,
# H W pixels or grid points before a layer, P grid points per axis after it, K classes.

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.baselines.convolutions import ALIGNED, check_frames
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

    Examples:
        >>> net = network(channels=1, classes=10)
        >>> sum(weight.numel() for weight in net.parameters())
        38874
    """
    return GaussianDerivativeNet(SIGMAS, channels=channels, classes=classes, size=size)


def wide(*, channels: int, classes: int, size: int = 112) -> nn.Module:
    """Create a network with 11 channels, for test scales from 1/2 to 8 and any training scale.

    The initial scales run from 1/2 to 16 pixels: over the factor of 16 between the test scales, and
    one octave more, because more than one channel responds at each scale.
    """
    return GaussianDerivativeNet(WIDE, channels=channels, classes=classes, size=size)


class GaussianDerivativeNet(nn.Module):
    """Classify a frame by Gaussian derivative layers in several scale channels.

    The logits are the maxima over the channels. Batch norm has the same statistics for all
    channels. The last layer has no batch norm and no ReLU. Cost for one image of 112 pixels: 81
    MFLOP per scale channel. Training holds 1.6 MB of activations per image and scale channel in
    float32.

    The initial scales `sigmas` of the channels are in pixels, at least 0.3, and increase.
    `features` are the numbers of features of each layer but the last, which has K.
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
    ) -> None:
        super().__init__()
        self.size = size
        grids = sampling_grids(len(features) + 1)
        self.register_buffer("first", pixel_jets(sigmas, grids[0], size), persistent=False)
        for layer, (before, after) in enumerate(pairwise(grids), start=1):
            jets = grid_jets(before, after, RATIO**layer)
            self.register_buffer(f"jets{layer}", jets, persistent=False)
        self.points = [len(grid) for grid in grids]
        self.layers = nn.ModuleList(
            DerivativeLayer(before, after)
            for before, after in zip((channels, *features), features, strict=False)
        )
        self.head = nn.Linear(DERIVATIVES * features[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits ``(N, K)`` of frames ``(N, channels, size, size)``."""
        return self.scale_channels(images).amax(1)

    def scale_channels(self, images: Tensor) -> Tensor:
        """Compute the logits (N, S, K) of every scale channel, before pooling."""
        check_frames(images, self.size)
        # Not in half precision: rounded kernels would see derivatives in the background's value.
        with torch.autocast(images.device.type, enabled=False):
            derivatives = pixel_derivatives(images.to(self.first.dtype), self.first)
        first, *later = cast("list[DerivativeLayer]", list(self.layers))
        features = first(mix_pixel_derivatives(derivatives, first.mixing.weight))
        for number, layer in enumerate(later, start=1):
            features = layer(self._mix(features, layer.mixing, number))
        mixed = self._mix(features, self.head, len(self.layers)).flatten(0, 2)
        logits = mixed + self.head.bias.to(mixed.dtype)
        return logits.unflatten(0, (len(self.first), -1)).transpose(0, 1)  # type: ignore[no-any-return]

    def _mix(self, features: Tensor, mixing: nn.Linear, layer: int) -> Tensor:
        jets = self.get_buffer(f"jets{layer}")
        return mix_derivatives(features, jets, mixing.weight, self.points[layer])


class DerivativeLayer(nn.Module):
    """The weights that mix the derivatives of all features, and batch norm and ReLU after it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.mixing = nn.Linear(DERIVATIVES * before, after, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, mixed: Tensor) -> Tensor:
        """Apply batch norm and ReLU to mixed derivatives ``(P, M, P, F)``."""
        # Features stay last on a GPU. On a CPU, PyTorch would sum such values one by one: the
        # variance of 40,000 then has a relative error of 8 e-6 instead of 7 e-8.
        layout = torch.channels_last if mixed.is_cuda else torch.contiguous_format
        values = mixed.flatten(0, 1).mT[..., None].contiguous(memory_format=layout)
        return F.relu(self.norm(values))[..., 0].mT.unflatten(0, mixed.shape[:2])  # type: ignore[no-any-return]


def sampling_grids(layers: int) -> list[Tensor]:
    """Compute the positions at which each layer is evaluated, in units of sigma_0.

    The grids are symmetric about the centre 0. The last one is the centre alone.
    """
    grids = []
    for layer in range(layers):
        later = math.sqrt(sum(RATIO ** (2 * other) for other in range(layer + 1, layers)))
        count = math.ceil(REACH * later / RATIO**layer)
        grids.append(torch.arange(-count, count + 1, dtype=torch.float64) * RATIO**layer)
    return grids


def pixel_jets(sigmas: ScaleGrid | Sequence[float], grid: Tensor, size: int) -> Tensor:
    """Compute the matrices of the first layer, from pixels to the grid of every scale channel.

    Pixel i covers [i, i + 1]. The grid (P,) is in units of sigma. The matrices (S, 3 P, size) of
    the orders 0, 1 and 2, one below the other, are in float32.
    """
    edges = torch.arange(1, size, dtype=torch.float64)
    matrices = [jet_matrices(size / 2 + sigma * grid, edges, sigma, 1.0) for sigma in sigmas]
    return torch.stack(matrices).float()


def grid_jets(before: Tensor, after: Tensor, sigma: float) -> Tensor:
    """Compute the matrices (H, 3, P) of the orders 0, 1 and 2 between the grids of two layers.

    `sigma` is the standard deviation of the smoothing. The matrices are in float32, with zeros up
    to a multiple of 8 points P.
    """
    edges = (before[1:] + before[:-1]) / 2
    matrices = jet_matrices(after, edges, sigma, float(before[1] - before[0])).float()
    orders = matrices.unflatten(0, (3, -1)).permute(2, 0, 1)
    return F.pad(orders, (0, -len(after) % ALIGNED)).contiguous()


def jet_matrices(positions: Tensor, edges: Tensor, sigma: float, step: float) -> Tensor:
    """Compute matrices that smooth and differentiate a signal of constant cells.

    The cells lie between the edges; the first and the last one continue to infinity. Integrated
    over a cell, the derivative of order d of a Gaussian is a difference of derivatives of order
    d - 1 at its edges, or of the normal distribution function for d = 0.

    Results are at positions (P,). The edges (H - 1,) lie between the H cells, of width `step`. The
    standard deviation `sigma` of the smoothing includes the variance step² / 12 of a cell. The
    matrices (3 P, H) of the orders 0, 1 and 2 are multiplied by sigma^order, one below the other.
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


def pixel_derivatives(images: Tensor, matrices: Tensor) -> Tensor:
    """Compute the derivatives of frames (N, C, H, H) on the grids of all scale channels.

    `matrices` (S, 3 P, H) are those of `pixel_jets`. The derivatives (3, 3, C, P, S, N, P) are of
    the orders 0, 1 and 2 along x and along y.
    """
    points = matrices.shape[1] // 3
    rows = images.permute(2, 0, 1, 3)
    along_y = (matrices.flatten(0, 1) @ rows.flatten(1)).view(len(matrices), -1, images.shape[-1])
    orders = (along_y @ matrices.mT).view(len(matrices), 3, -1, *images.shape[:2], 3, points)
    return orders.permute(5, 1, 4, 2, 0, 3, 6)


def mix_pixel_derivatives(derivatives: Tensor, weight: Tensor) -> Tensor:
    """Mix derivatives ``(3, 3, C, P, S, N, P)`` with weights ``(F, 6 C)``: ``(P, S N, P, F)``."""
    weights = weights_by_order(weight).permute(2, 3, 1, 0).flatten(0, 2)
    mixed = derivatives.flatten(3).flatten(0, 2).mT @ weights
    points = derivatives.shape[3]
    return mixed.view(points, -1, points, len(weight))


def mix_derivatives(features: Tensor, jets: Tensor, weight: Tensor, points: int) -> Tensor:
    """Compute the derivatives of features (H, M, H, C) and mix them at each point: (P, M, P, F).

    Operations along different axes commute: the features are differentiated along y, then mixed,
    and their mixtures differentiated along x and summed. There are 3 derivatives of each feature
    between these steps, instead of 6.

    `jets` (H, 3, P) are the matrices of `grid_jets` for P = `points` grid points, and `weight`
    (F, 6 C) mixes the derivatives.
    """
    jets = jets.to(features.dtype)
    along_y = jets.flatten(1).mT @ features.flatten(1)
    along_y = along_y.view(3, -1, *features.shape[1:])[:, :points]
    weights = weights_by_order(weight).permute(2, 0, 3, 1).flatten(0, 1).flatten(1)
    mixed = F.linear(along_y.permute(1, 2, 3, 0, 4).flatten(3), weights)  # (P, M, H, 3 F)
    rows = mixed.view(-1, 3 * features.shape[2], len(weight))
    # `bmm`, because `@` copies the rows to multiply all of them with one matrix.
    along_x = torch.bmm(jets.flatten(0, 1).mT.expand(len(rows), -1, -1), rows)
    return along_x[:, :points].unflatten(0, (points, -1))  # type: ignore[no-any-return]


def weights_by_order(weight: Tensor) -> Tensor:
    """Arrange weights ``(F, 6 C)`` by the orders along x and y, shape ``(F, C, 3, 3)``.

    The weights of derivatives beyond the second order are zero.
    """
    weights = weight.unflatten(1, (-1, DERIVATIVES))
    orders = torch.cat([weights[..., :5], F.pad(weights[..., 5:], (1, 2))], dim=-1)
    return orders.unflatten(-1, (3, 3))  # type: ignore[no-any-return]
