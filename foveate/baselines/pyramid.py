"""Image pyramid with shared weights and mean logits: the baseline "ensemble" of STIR.

Follows Altstidl, Nguyen, Schwinn, Köferl, Mutschler, Eskofier and Zanca, "Just a Matter of Scale?
Reevaluating Scale Equivariance in Convolutional Neural Networks" (arXiv:2211.10288): one CNN
classifies the image at several resolutions, each half of the previous one, and the logits are
averaged. The CNN has two padded 7 × 7 convolutions of 16 and 32 filters, a global maximum and a
linear layer: 26,250 weights for grey images and 10 classes.
"""
# Shape letters: N images, C image channel, H W pixels, L level, K classes.

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.baselines.convolutions import block_filters, convolve_blocks
from foveate.checks import check_range

KERNEL = 7  # side of the filters; the paper also tries 3, 11 and 15
WIDTHS = (16, 32)
LEVELS = 4  # from the resolution of the image to 1/8; the authors' code has 3, for 64 pixels
SMALLEST = 32  # side of the smallest image that has 4 pixels along each axis at 1/8


class Pyramid(nn.Module):
    """Classify an image at several resolutions with one CNN, and average the logits (N, K).

    There are four levels from the image on. With `doubled` there are five, the first of twice the
    resolution of the image by bilinear interpolation.
    """

    filter: Tensor

    def __init__(self, *, channels: int, classes: int, size: int, doubled: bool = False) -> None:
        super().__init__()
        check_range("size", size, SMALLEST, inf, f"at least {SMALLEST} pixels for a pyramid")
        self.doubled = doubled
        first, last = WIDTHS
        self.first = nn.Conv2d(channels, first, KERNEL, padding=KERNEL // 2)
        self.second = nn.Conv2d(first, last, KERNEL, padding=KERNEL // 2)
        self.head = nn.Linear(last, classes)
        taps = torch.tensor([1.0, 5, 10, 10, 5, 1]) / 32
        self.register_buffer("filter", torch.outer(taps, taps)[None, None], persistent=False)

    def levels(self, images: Tensor) -> list[Tensor]:
        """Compute the image at every resolution, the highest first."""
        if self.doubled:
            images = F.interpolate(images, scale_factor=2.0, mode="bilinear", align_corners=False)
        found = [images]
        for _ in range(LEVELS - 1 + self.doubled):
            found.append(self.halve(found[-1]))
        return found

    def halve(self, images: Tensor) -> Tensor:
        """Halve the resolution: smooth with a binomial filter and average blocks of 2 × 2 pixels.

        The binomial filter (1, 4, 6, 4, 1) / 16 of Burt and Adelson and the mean of two pixels are
        one filter (1, 5, 10, 10, 5, 1) / 32 along each axis, with stride 2. The image is mirrored
        at its border.
        """
        flat = F.pad(images, (2, 2, 2, 2), mode="reflect").flatten(0, 1)[:, None]
        halved = F.conv2d(flat, self.filter, stride=2)[:, 0]
        return halved.unflatten(0, images.shape[:2])  # type: ignore[no-any-return]

    def classify(self, images: Tensor) -> Tensor:
        """Compute the logits (N, K) of one level, images of any size."""
        if images.shape[2] % 2 or images.shape[3] % 2:
            features = self.second(F.relu(self.first(images))).amax((2, 3))
        else:
            features = self._strongest(images)
        return self.head(F.relu(features))  # type: ignore[no-any-return]

    def _strongest(self, images: Tensor) -> Tensor:
        """Compute the maximum (N, 32) of the second convolution over images of even size.

        Both convolutions compute blocks of 2 × 2 results, which are channels of the second one.
        """
        biases = [conv.get_parameter("bias") for conv in (self.first, self.second)]
        blocks = F.relu(convolve_blocks(images, self.first.weight, biases[0], shift=1))
        # The outermost results lie outside the image, where features are zero.
        inside = F.pad(blocks.new_ones(images.shape[2:]), (1, 1, 1, 1))
        inside = inside.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
        features = (blocks * inside[..., None]).flatten(3).permute(0, 3, 1, 2)
        filters = block_filters(self.second.weight, KERNEL + 1).flatten(0, 1)
        filters = filters.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # (F, C, P, 2, P, 2)
        filters = filters.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
        strongest = F.conv2d(features, filters, padding=1).amax((2, 3))
        return strongest.view(len(images), 4, -1).amax(1) + biases[1]

    def channels(self, images: Tensor) -> Tensor:
        """Compute the logits (N, L, K) of every level."""
        return torch.stack([self.classify(level) for level in self.levels(images)], 1)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the mean (N, K) of the logits over the levels."""
        return self.channels(images).mean(1)


def network(*, channels: int, classes: int, size: int = 112) -> Pyramid:
    """Build the network with four levels, for objects of one to eight times the smallest scale.

    Examples:
        >>> net = network(channels=1, classes=10)
        >>> sum(weight.numel() for weight in net.parameters())
        26250
    """
    return Pyramid(channels=channels, classes=classes, size=size)


def wide(*, channels: int, classes: int, size: int = 112) -> Pyramid:
    """Build the network with five levels, the first of twice the resolution.

    The levels show the windows of scales 1/2, 1, 2, 4 and 8 of `network`'s first level: the range
    of the test scales of MNIST Large Scale, in octaves.
    """
    return Pyramid(channels=channels, classes=classes, size=size, doubled=True)
