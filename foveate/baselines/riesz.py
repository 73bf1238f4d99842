"""Riesz networks: layers that mix first- and second-order Riesz transforms of the whole frame.

After Barisin, Schladitz and Redenbach, "Riesz networks: scale invariant neural networks in a single
forward pass" (Journal of Mathematical Imaging and Vision, 2024). The Riesz transform multiplies the
spectrum by a function of the direction of a frequency, not of its length. It therefore commutes
with rescaling, and so does a network of Riesz transforms, pointwise mixing, batch norm and ReLU. No
scale channels are needed. On a pixel grid this holds for band-limited images, away from the frame
border: the Fourier transform continues the frame periodically, as in the authors' code.
"""
# Shape letters: N images, C features before a layer, F features after it, H W pixels,
# V = W // 2 + 1 frequencies, Q pixels at the centre (1 or 4), K classes.

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.errors import ConfigError

FEATURES = (12, 16, 24, 32, 80)
TRANSFORMS = 5  # along x, along y, and twice: xx, xy, yy


def network(*, channels: int, classes: int, size: int = 112) -> nn.Module:
    """Create the authors' network for MNIST Large Scale: 20,718 weights for 1 channel, 10 classes.

    The authors count 20,882 weights: their layers also have biases, which batch norm removes. They
    train for 20 epochs with Adam, batches of 50 images and a learning rate of 0.001 that halves
    every third epoch.

    Args:
        channels: Number of image channels.
        classes: Number of classes K.
        size: Width and height of the frame in pixels.

    Returns:
        A network from frames ``(N, channels, size, size)`` to logits ``(N, K)``.

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

    Cost for one image of 112 pixels: in training, 0.5 GFLOP of mixing and 249 Fourier transforms,
    with 38 MB of activations in float32; in evaluation, 0.2 GFLOP and 137 transforms.

    Args:
        channels: Number of image channels.
        classes: Number of classes K.
        size: Width and height of the frame in pixels.
        features: Number of features of each layer.

    Shape:
        - Input: ``(N, channels, size, size)``.
        - Output: ``(N, K)``.

    Raises:
        ConfigError: If ``size`` is below 2 pixels.

    Examples:
        >>> net = RieszNet(channels=3, classes=4, size=32, features=(6, 8)).eval()
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 4])
    """

    multipliers: Tensor
    centre: Tensor

    def __init__(
        self, *, channels: int, classes: int, size: int, features: Sequence[int] = FEATURES
    ) -> None:
        super().__init__()
        if size < 2:
            raise ConfigError(f"size must be at least 2 pixels, got {size}")
        multipliers = riesz_multipliers(size)
        self.register_buffer("multipliers", multipliers, persistent=False)
        self.register_buffer("centre", centre_kernels(multipliers), persistent=False)
        self.layers = nn.ModuleList(
            RieszLayer(before, after)
            for before, after in zip((channels, *features), features, strict=False)
        )
        self.head = nn.Linear(features[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits ``(N, K)`` of frames ``(N, channels, size, size)``."""
        size = self.multipliers.shape[-2]
        if images.shape[-2:] != (size, size):
            raise ConfigError(
                f"images must be {size} × {size} pixels, got {tuple(images.shape[-2:])}; "
                "create the network with another size"
            )
        *inner, last = cast("list[RieszLayer]", list(self.layers))
        features = images
        for layer in inner:
            features = layer(features, self.multipliers)
        if last.norm.training:  # the statistics of a batch are those of whole frames
            centre = slice((size - 1) // 2, size // 2 + 1)
            features = last(features, self.multipliers)[..., centre, centre]
        else:
            features = last.activate(last.mix(centre_transforms(features, self.centre)))
        return self.head(features.mean((-2, -1)))  # type: ignore[no-any-return]


class RieszLayer(nn.Module):
    """Mix the Riesz transforms of all features, then apply batch norm and ReLU.

    Mixing commutes with the inverse Fourier transform. It comes first, because a layer has fewer
    features after the mixing than transforms before it.

    Args:
        before: Number of features C before the layer.
        after: Number of features F after the layer.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.mixing = nn.Linear(TRANSFORMS * before, after, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, features: Tensor, multipliers: Tensor) -> Tensor:
        """Compute features ``(N, F, H, W)`` from features ``(N, C, H, W)``."""
        mixed = self.mix(riesz_spectra(features, multipliers).flatten(1, 2))
        return self.activate(from_spectra(mixed.to(multipliers.dtype), features.shape[-1]))

    def mix(self, transforms: Tensor) -> Tensor:
        """Mix transforms ``(N, 5 C, ...)`` to features ``(N, F, ...)``."""
        # `bmm`, because `@` copies the transforms to multiply those of all images at once.
        weights = self.mixing.weight.expand(len(transforms), -1, -1)
        return torch.bmm(weights, transforms.flatten(2)).unflatten(-1, transforms.shape[2:])  # type: ignore[no-any-return]

    def activate(self, mixed: Tensor) -> Tensor:
        """Apply batch norm and ReLU."""
        return F.relu(self.norm(mixed))


def riesz_multipliers(size: int) -> Tensor:
    """Compute the factors by which Riesz transforms multiply the spectrum of a square frame.

    For a frequency of direction (x, y), they are x and y, which are to be multiplied by -i, then
    x², xy and y². The mean of a frame has no direction and becomes 0. The highest frequency of an
    even size stands for both directions along its axis, so that odd factors of it vanish.

    Args:
        size: Width and height of the frame in pixels.

    Returns:
        Factors for the spectrum of ``torch.fft.rfft2``, shape ``(5, H, V)``, in float32.
    """
    frequency = torch.fft.fftfreq(size, dtype=torch.float64)
    y, x = torch.meshgrid(frequency, frequency[: size // 2 + 1].abs(), indexing="ij")
    length = torch.hypot(x, y)
    x, y = (part / length.masked_fill(length == 0, 1) for part in (x, y))
    factors = torch.stack([x, y, x * x, x * y, y * y])
    if size % 2 == 0:
        factors[[0, 3], :, -1] = 0
        factors[[1, 3], size // 2] = 0
    return factors.float()


def riesz_spectra(images: Tensor, multipliers: Tensor) -> Tensor:
    """Compute the spectra of the Riesz transforms of first and second order.

    Args:
        images: Images or features, shape ``(N, C, H, W)``.
        multipliers: Factors from `riesz_multipliers`, shape ``(5, H, V)``.

    Returns:
        Spectra of the transforms x, y, xx, xy and yy, shape ``(N, C, 5, H, V, 2)``; the last axis
        has the real and imaginary parts. They are divided by the number of pixels. Those of second
        order have the sign of the factors x², xy and y², so that xx + yy is the image without its
        mean.
    """
    with torch.autocast(images.device.type, enabled=False):
        wide = images.to(torch.promote_types(images.dtype, multipliers.dtype))
        spectrum = torch.view_as_real(torch.fft.rfft2(wide))[:, :, None]
        # Products of real numbers: torch.compile generates no code for complex ones.
        turned = torch.stack([spectrum[..., 1], -spectrum[..., 0]], dim=-1)  # times -i
        # Dividing the factors instead of the spectra saves a pass over the spectra.
        factors = multipliers[..., None] / images[0, 0].numel()
        return torch.cat([turned * factors[:2], spectrum * factors[2:]], dim=2)


def from_spectra(spectra: Tensor, size: int) -> Tensor:
    """Transform spectra ``(..., H, V, 2)`` back to images ``(..., H, W)`` of the given size."""
    with torch.autocast(spectra.device.type, enabled=False):
        values = torch.view_as_complex(spectra)
        images: Tensor = torch.fft.irfft2(values, s=(size, size), norm="forward")
    return images


def centre_kernels(multipliers: Tensor) -> Tensor:
    """Compute the kernels whose inner products with a frame are the transforms at its centre.

    Args:
        multipliers: Factors from `riesz_multipliers`, shape ``(5, H, V)``.

    Returns:
        Kernels of the five transforms at the Q pixels of the centre, shape ``(5, Q, H W)``, in
        float32.
    """
    size = multipliers.shape[-2]
    pixels = torch.eye(size, dtype=torch.float64)[(size - 1) // 2 : size // 2 + 1]
    impulses = pixels[:, None, :, None] * pixels[:, None]
    responses = from_spectra(riesz_spectra(impulses, multipliers.double()), size)
    responses[:, :, :2] *= -1  # the transforms of first order are odd, and this is their adjoint
    return responses.flatten(0, 1).transpose(0, 1).flatten(2).float()


def centre_transforms(images: Tensor, kernels: Tensor) -> Tensor:
    """Compute the transforms ``(N, 5 C, Q, 1)`` of images ``(N, C, H, W)`` at the centre."""
    with torch.autocast(images.device.type, enabled=False):
        wide = images.to(torch.promote_types(images.dtype, kernels.dtype))
        found = wide.flatten(2) @ kernels.flatten(0, 1).mT
    return found.unflatten(-1, kernels.shape[:2]).flatten(1, 2)[..., None]  # type: ignore[no-any-return]
