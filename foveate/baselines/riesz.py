"""Riesz networks: layers that mix first- and second-order Riesz transforms of the whole frame.

Follows Barisin, Schladitz and Redenbach, "Riesz networks: scale invariant neural networks in a
single forward pass" (Journal of Mathematical Imaging and Vision, 2024). The Riesz transform
multiplies the spectrum by a function of the direction of a frequency, not of its length. It
therefore commutes with rescaling, and so does a network of Riesz transforms, pointwise mixing,
batch norm and ReLU. No scale channels are needed. On a pixel grid this holds for band-limited
images, away from the frame border: the Fourier transform continues the frame periodically, as in
the authors' code.
"""
# Shape letters: N images, C features before a layer, F features after it, H W pixels,
# M = H // 2 + 1 frequencies along y, Q pixels at the centre (1 or 4), K classes.

from collections.abc import Sequence
from math import inf
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.baselines.convolutions import (
    ALIGNED,
    ALIGNED_SIDE,
    FourierTransforms,
    check_frames,
)
from foveate.checks import check_range

FEATURES = (12, 16, 24, 32, 80)
TRANSFORMS = 5  # along x, along y, and twice: xx, xy, yy


def network(*, channels: int, classes: int, size: int = 112) -> nn.Module:
    """Create the authors' network for MNIST Large Scale: 20,718 weights for 1 channel, 10 classes.

    The authors count 20,882 weights: their layers also have biases, which batch norm removes. They
    train for 20 epochs with Adam, batches of 50 images and a learning rate of 0.001 that halves
    every third epoch.

    Examples:
        >>> net = network(channels=1, classes=10)
        >>> sum(weight.numel() for weight in net.parameters())
        20718
    """
    return RieszNet(channels=channels, classes=classes, size=size)


class RieszNet(nn.Module):
    """Classify a frame by the features at its centre after layers of Riesz transforms.

    Each layer computes five Riesz transforms of each feature, mixes them pixel by pixel, and
    applies batch norm and ReLU. A linear layer then maps the features at the centre of the frame to
    logits. In a frame of even size, the centre lies between pixels, and its features are the mean
    of the four pixels around it; the authors read the lower right one. In evaluation mode, the last
    layer computes these pixels alone.

    Cost for one image of 112 pixels: in training, about 3 GFLOP of matrix products forward, with 26
    MB of activations in float32; in evaluation, about 2 GFLOP. The matrices by which a layer
    multiplies spectra take another 0.2 GB for a batch of any size.
    """

    multipliers: Tensor
    centre: Tensor

    def __init__(
        self, *, channels: int, classes: int, size: int, features: Sequence[int] = FEATURES
    ) -> None:
        super().__init__()
        check_range("size", size, 2, inf, "at least 2 pixels")
        self.size = size
        self.register_buffer("multipliers", riesz_multipliers(size).float(), persistent=False)
        self.register_buffer("centre", centre_kernels(size).float(), persistent=False)
        self.fourier = FourierTransforms(size, periodic=True).float()
        self.layers = nn.ModuleList(
            RieszLayer(before, after)
            for before, after in zip((channels, *features), features, strict=False)
        )
        self.head = nn.Linear(features[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits ``(N, K)`` of frames ``(N, channels, size, size)``."""
        check_frames(images, self.size)
        *inner, last = cast("list[RieszLayer]", list(self.layers))
        features = images
        for layer in inner:
            features = layer(features, self.multipliers, self.fourier)
        if last.norm.training:  # the statistics of a batch are those of whole frames
            centre = slice((self.size - 1) // 2, self.size // 2 + 1)
            features = last(features, self.multipliers, self.fourier)[..., centre, centre]
        else:
            mixed = last.mixing(centre_transforms(features, self.centre))
            features = last.activate(mixed.mT[..., None])
        return self.head(features.mean((-2, -1)))  # type: ignore[no-any-return]


class RieszLayer(nn.Module):
    """Mix the Riesz transforms of all features, then apply batch norm and ReLU."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.mixing = nn.Linear(TRANSFORMS * before, after, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, features: Tensor, multipliers: Tensor, fourier: FourierTransforms) -> Tensor:
        """Compute features ``(N, F, H, W)`` from features ``(N, C, H, W)``.

        The remaining arguments are those of `mix_transforms`.
        """
        mixed = mix_transforms(features, self.mixing.weight, multipliers, fourier).contiguous()
        # Batch norm does not distinguish the axes H, W and N. In this order, features are in the
        # memory format channels_last, and neither batch norm nor the next layer copies them.
        return self.activate(mixed.permute(0, 3, 1, 2)).permute(3, 1, 0, 2)

    def activate(self, mixed: Tensor) -> Tensor:
        """Apply batch norm and ReLU."""
        return F.relu(self.norm(mixed))


def riesz_multipliers(size: int) -> Tensor:
    """Compute the factors by which Riesz transforms multiply the spectrum of a square frame.

    For a frequency of direction (x, y), they are -x and -y, which are to be multiplied by the
    imaginary unit, then x², xy and y². The mean of a frame has no direction and becomes 0. The
    highest frequency of an even size stands for both directions along its axis, so that odd factors
    of it vanish.

    The factors (M W, 8) of the frequencies of `FourierTransforms` are in float64. The last three
    columns are zero, as tensor cores need multiples of 8.
    """
    frequency = torch.fft.fftfreq(size, dtype=torch.float64)
    y, x = torch.meshgrid(frequency[: size // 2 + 1].abs(), frequency, indexing="ij")
    length = torch.hypot(x, y)
    x, y = (part / length.masked_fill(length == 0, 1) for part in (x, y))
    factors = torch.stack([-x, -y, x * x, x * y, y * y])
    if size % 2 == 0:
        factors[[0, 3], :, size // 2] = 0
        factors[[1, 3], -1] = 0
    unused = -factors.shape[1] % ALIGNED_SIDE  # frequencies, as in `FourierTransforms`
    factors = F.pad(factors, (0, 0, 0, unused, 0, ALIGNED - TRANSFORMS))
    return factors.flatten(1).T.contiguous()


def mix_transforms(
    features: Tensor, weights: Tensor, multipliers: Tensor, fourier: FourierTransforms
) -> Tensor:
    """Compute weighted sums of the Riesz transforms x, y, xx, xy and yy of all features.

    A Riesz transform multiplies the spectrum by one number per frequency. All transforms and their
    mixing together multiply the spectra of all features by one complex matrix per frequency. The
    transforms of second order have the sign of the factors x², xy and y², so that xx + yy is the
    image without its mean.

    Features (N, C, H, W), weights (F, C 5) and `multipliers` (M W, 8) from `riesz_multipliers` give
    features (H, W, N, F), in the precision of the matrices, or of autocast. The transforms
    `fourier` are periodic.
    """
    before, after = features.shape[1], len(weights)
    weights = weights.view(after, before, TRANSFORMS).permute(2, 1, 0)
    weights = F.pad(weights, (0, -after % ALIGNED, 0, -before % ALIGNED, 0, ALIGNED - TRANSFORMS))
    first = torch.arange(ALIGNED, device=weights.device)[:, None, None] < 2
    parts = (weights.masked_fill(first, 0), weights.masked_fill(~first, 0))
    real, imag = ((multipliers @ p.flatten(1)).view(-1, *p.shape[1:]) for p in parts)
    return fourier.multiply(features, real, imag)[..., :after]


def centre_kernels(size: int) -> Tensor:
    """Compute the kernels whose inner products with a frame are the transforms at its centre.

    The kernels (5, Q, H W) of the five transforms at the Q pixels of the centre are in float64.
    """
    pixels = torch.eye(size, dtype=torch.float64)[(size - 1) // 2 : size // 2 + 1]
    impulses = (pixels[:, None, :, None] * pixels[:, None]).flatten(0, 1)[:, None]
    each = torch.eye(TRANSFORMS, dtype=torch.float64)
    fourier = FourierTransforms(size, periodic=True)
    responses = mix_transforms(impulses, each, riesz_multipliers(size), fourier)
    responses[..., :2] *= -1  # the transforms of first order are odd, and this is their adjoint
    return responses.permute(3, 2, 0, 1).flatten(2)


def centre_transforms(features: Tensor, kernels: Tensor) -> Tensor:
    """Compute the transforms ``(N, Q, C 5)`` of features ``(N, C, H, W)`` at the centre."""
    with torch.autocast(features.device.type, enabled=False):
        wide = features.to(torch.promote_types(features.dtype, kernels.dtype))
        found: Tensor = torch.tensordot(kernels, wide.permute(2, 3, 0, 1).flatten(0, 1), 1)
    return found.permute(2, 1, 3, 0).flatten(2)
