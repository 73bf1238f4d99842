"""Networks of scale-steerable convolutions, with Hermite (SESN) or discrete (DISCO) filters.

Follows Sosnovik, Szmaja and Smeulders, "Scale-Equivariant Steerable Networks" (SESN, ICLR 2020),
and Sosnovik, Moskalev and Smeulders, "DISCO: accurate Discrete Scale Convolutions" (BMVC 2021). A
convolution learns weights of fixed functions, which are given at several scales. The first layer
maps an image to features at each scale, the following layers map each scale to itself, and the
maximum over scale removes the scale axis. The network is the authors' for MNIST: 494,549 weights
for grey images and 10 classes.

Wide filters are applied by Fourier transforms. For features of 56 × 56 pixels and filters of
15 × 15, they take 1/13 of the products of a sum over taps, and hardly more for wider filters.
"""
# Shape letters: N images, C channels, S scale, H W pixels, F functions of a basis, P filter pixels,
# K classes.

from collections.abc import Sequence
from math import inf
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.baselines.convolutions import (
    FourierTransforms,
    check_frames,
    convolve_blocks,
    convolve_dilated,
)
from foveate.baselines.filter_bases import Filters, discrete_basis, hermite_basis
from foveate.checks import check_range

WIDTHS = (32, 63, 95)
HIDDEN = 256
DROPOUT = 0.7  # probability for each hidden unit
SMALLEST = 16  # side of the smallest image that leaves four pixels along each axis
WIDE = 9  # filter pixels from which Fourier transforms are faster than a sum over taps


class ScaleConv(nn.Module):
    """Convolve with filters that share their weights over scale.

    Images (N, before, H, W) are lifted: every scale sees the same image. Features
    (S, N, before, H, W) are convolved scale by scale, each with the filters of its scale. Values
    outside the image are zero, and the size stays the same.

    Wide filters on features of the width and height `size` are applied by Fourier transforms.
    `size` is None for features of any size, and for images, which have too few channels for that.
    """

    def __init__(
        self, before: int, after: int, basis: Sequence[Filters], *, size: int | None = None
    ) -> None:
        super().__init__()
        self.steps = [filters.step for filters in basis]
        self.fourier = nn.ModuleDict()
        self.weight = nn.Parameter(torch.empty(after, before, len(basis[0].values)))
        self.bias = nn.Parameter(torch.zeros(after))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        for index, filters in enumerate(basis):
            self.register_buffer(f"basis{index}", filters.values.float(), persistent=False)
            taps = filters.values.shape[-1]
            if size is not None and taps >= WIDE and filters.step == 1:
                self.fourier[str(index)] = FourierTransforms(size, taps).float()

    def kernels(self) -> list[Tensor]:
        """Compute the filters (after, before, P, P) of every scale, in the dtype of the weights.

        Their taps are outermost in memory.
        """
        bases = [self.get_buffer(f"basis{index}") for index in range(len(self.steps))]
        with torch.autocast(self.weight.device.type, enabled=False):
            weight = self.weight.permute(2, 1, 0)
            found = [torch.tensordot(basis.permute(1, 2, 0), weight, 1) for basis in bases]
        return [kernel.permute(3, 2, 0, 1) for kernel in found]

    def forward(self, features: Tensor) -> Tensor:
        """Convolve images, or features at each scale, to features (S, N, after, H, W)."""
        return _joined(self.maps(features))

    def maps(self, features: Tensor) -> list[Tensor]:
        """Compute the result of `forward` as one tensor ``(N, after, H, W)`` per scale."""
        if features.ndim == 4:
            features = features.expand(len(self.steps), *features.shape)
        found = zip(range(len(self.steps)), features, self.kernels(), strict=True)
        return [self._convolve(index, x, kernel) for index, x, kernel in found]

    def _convolve(self, index: int, features: Tensor, kernel: Tensor) -> Tensor:
        """Convolve the features (N, before, H, W) of one scale."""
        if str(index) in self.fourier:
            return self.fourier[str(index)](features, kernel, self.bias)  # type: ignore[no-any-return]
        features = features.contiguous(memory_format=torch.channels_last)
        step = self.steps[index]
        padding = kernel.shape[-1] // 2 * step
        return F.conv2d(features, kernel, self.bias, padding=padding, dilation=step)


class SteerableNet(nn.Module):
    """Three scale-steerable convolutions, the maximum over scale, and two linear layers.

    With `smooth`, blocks of 2 × 2 features are averaged, as in DISCO, instead of their maximum
    being taken. The last maximum is then taken over overlapping windows.
    """

    def __init__(
        self,
        basis: Sequence[Filters],
        *,
        channels: int,
        classes: int,
        size: int,
        smooth: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        words = f"at least {SMALLEST} pixels for a steerable network"
        check_range("size", size, SMALLEST, inf, words)
        self.smooth = smooth
        before = (channels, *WIDTHS)
        sizes = (None, size // 2, size // 4)
        self.convs = nn.ModuleList(
            ScaleConv(i, o, basis, size=side)
            for i, o, side in zip(before, WIDTHS, sizes, strict=False)
        )
        maps, vectors = WIDTHS[:2], (WIDTHS[2], HIDDEN)
        self.norms = nn.ModuleList([*map(nn.BatchNorm2d, maps), *map(nn.BatchNorm1d, vectors)])
        self.hidden = nn.Linear(4 * WIDTHS[-1], HIDDEN, bias=False)
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(HIDDEN, classes)

    def features(self, images: Tensor) -> Tensor:
        """Compute the features (S, N, 95, size // 4, size // 4) behind the last convolution."""
        check_frames(images, self.size)
        first, second, third = cast("list[ScaleConv]", list(self.convs))
        features = _norm(self.norms[0], _joined(self._lift(first, images)))
        halved = [self._halve(part) for part in second.maps(features)]
        features = _norm(self.norms[1], _joined(halved))
        return third(features)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (N, K) of images (N, C, size, size)."""
        strongest = self.features(images).amax(0)
        pooled = _four_windows_smooth(strongest) if self.smooth else _four_windows(strongest)
        hidden = self.norms[3](self.hidden(self.norms[2](pooled).flatten(1)))
        return self.head(self.dropout(F.relu(hidden)))  # type: ignore[no-any-return]

    def _lift(self, conv: ScaleConv, images: Tensor) -> list[Tensor]:
        """Compute features of images at each scale, at half the resolution: (N, C, H/2, W/2)."""
        found = []
        for kernel, step in zip(conv.kernels(), conv.steps, strict=True):
            if step == 1:
                blocks = convolve_blocks(images, kernel, conv.bias)
                pooled = F.relu(blocks).mean(3) if self.smooth else F.relu(blocks.amax(3))
                found.append(pooled.permute(0, 3, 1, 2))
            else:
                maps = convolve_dilated(images, kernel, conv.bias, step).permute(0, 3, 1, 2)
                found.append(self._halve(maps))
        return found

    def _halve(self, features: Tensor) -> Tensor:
        """Apply ReLU and halve the resolution of maps (N, C, H, W), without an odd last pixel."""
        if self.smooth:  # PyTorch's pooling of maps with channels last takes longer
            tall, wide = (side // 2 for side in features.shape[2:])
            blocks = F.relu(features)[..., : 2 * tall, : 2 * wide].permute(0, 2, 3, 1)
            blocks = blocks.unflatten(1, (tall, 2)).unflatten(3, (wide, 2))
            return blocks.mean((2, 4)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
        return F.relu(F.max_pool2d(features, 2))  # on a quarter of the values, with equal results


def _joined(maps: list[Tensor]) -> Tensor:
    """Join maps (N, C, H, W) of each scale to (S, N, C, H, W)."""
    # In contrast to torch.stack, torch.cat keeps the memory format.
    return torch.cat(maps).unflatten(0, (len(maps), -1))  # type: ignore[no-any-return]


def _norm(norm: nn.Module, features: Tensor) -> Tensor:
    """Apply batch norm to features (S, N, C, H, W), with the same statistics for all scales."""
    return norm(features.flatten(0, 1)).unflatten(0, features.shape[:2])  # type: ignore[no-any-return]


def _four_windows(features: Tensor) -> Tensor:
    """Return the positive part of the maximum (N, C, 4) of features (N, C, H, W) in four windows.

    The authors use windows of H // 2 + 1 pixels behind a border of two pixels, so that the first
    window ends at H // 2 - 1.
    """
    middle = features.shape[-1] // 2 - 1
    parts = [slice(0, middle), slice(middle, None)]
    return torch.stack([F.relu(features[..., r, c].amax((2, 3))) for r in parts for c in parts], 2)


def _four_windows_smooth(features: Tensor) -> Tensor:
    """Return four means (N, C, 4) of the positive parts of the maxima in four windows each.

    The authors take the maxima of all windows of H // 2 pixels, average blocks of 2 × 2 of them,
    and keep two blocks along each axis.
    """
    side = features.shape[-1]
    length, stride = side // 2, (side - side // 2 + 1) // 2
    starts = [0, 1, stride, stride + 1]
    rows = torch.stack([features[..., i : i + length, :].amax(2) for i in starts], 2)
    maxima = torch.stack([rows[..., i : i + length].amax(3) for i in starts], 3)
    return F.avg_pool2d(F.relu(maxima), 2).flatten(2)


def network(*, channels: int, classes: int, size: int = 112) -> SteerableNet:
    """Build SESN with the authors' four scales, over an octave.

    Examples:
        >>> net = network(channels=1, classes=10)
        >>> sum(weight.numel() for weight in net.parameters())
        494549
    """
    basis = hermite_basis([2 * 2 ** (i / 3) for i in range(4)], 15)
    return SteerableNet(basis, channels=channels, classes=classes, size=size)


def wide(*, channels: int, classes: int, size: int = 112) -> SteerableNet:
    """Build SESN with seven scales, over three octaves.

    The standard deviations of the filters are 1 to 8 pixels, a factor of sqrt(2) apart. Below 1,
    the narrowest functions fall between pixels: at 1/2, sampling would amplify them by up to 7.
    """
    basis = hermite_basis([2 ** (i / 2) for i in range(7)], 31)
    return SteerableNet(basis, channels=channels, classes=classes, size=size)


def discrete(*, channels: int, classes: int, size: int = 112) -> SteerableNet:
    """Build DISCO with the authors' four scales, over an octave."""
    basis = discrete_basis([2 ** (i / 3) for i in range(4)])
    return SteerableNet(basis, channels=channels, classes=classes, size=size, smooth=True)


def discrete_wide(*, channels: int, classes: int, size: int = 112) -> SteerableNet:
    """Build DISCO with the four scales 1, 2, 4 and 8, over three octaves.

    Rescaling between them is exact. With scales between the octaves, the least-squares fit of
    `transfer` halved the filters of those scales, so there are none.
    """
    basis = discrete_basis([1, 2, 4, 8])
    return SteerableNet(basis, channels=channels, classes=classes, size=size, smooth=True)
