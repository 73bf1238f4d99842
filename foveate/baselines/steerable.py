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
# K classes; I and O channels before and after a convolution; L frequencies along an axis, M of them
# not negative.

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.baselines.filter_bases import Filters, discrete_basis, hermite_basis
from foveate.errors import ConfigError

WIDTHS = (32, 63, 95)
HIDDEN = 256
DROPOUT = 0.7  # probability for each hidden unit
SMALLEST = 16  # side of the smallest image that leaves four pixels along each axis
WIDE = 7  # filter pixels from which Fourier transforms are faster than a sum over taps
ALIGNED = 8  # channels of matrix products on tensor cores


class ScaleConv(nn.Module):
    """Convolve with filters that share their weights over scale.

    Images are lifted: every scale sees the same image. Features that already have a scale axis are
    convolved scale by scale, each with the filters of its scale. Values outside the image are zero,
    and the size stays the same.

    Args:
        before: Number of channels of the input.
        after: Number of channels of the output.
        basis: Filters of each of the S scales, with the same number F of functions.
        size: Width and height of the features, for which the layer then stores the matrices of its
            Fourier transforms. Those of other sizes are computed when they are needed.

    Shape:
        - Input: ``(N, before, H, W)`` or ``(S, N, before, H, W)``.
        - Output: ``(S, N, after, H, W)``.

    Examples:
        >>> layer = ScaleConv(1, 8, hermite_basis([2.0, 4.0], 15))
        >>> layer(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([2, 3, 8, 28, 28])
    """

    def __init__(
        self, before: int, after: int, basis: Sequence[Filters], *, size: int | None = None
    ) -> None:
        super().__init__()
        self.steps = [filters.step for filters in basis]
        self.size = size
        self.weight = nn.Parameter(torch.empty(after, before, len(basis[0].values)))
        self.bias = nn.Parameter(torch.zeros(after))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        for index, filters in enumerate(basis):
            self.register_buffer(f"basis{index}", filters.values.float(), persistent=False)
            taps = filters.values.shape[-1]
            if size is not None and taps >= WIDE:
                matrices = fourier_matrices(size, size, taps, filters.step)
                for name, matrix in matrices._asdict().items():
                    self.register_buffer(f"{name}{index}", matrix.float(), persistent=False)

    def kernels(self) -> list[Tensor]:
        """Compute the filters of every scale, in the precision of the weights.

        Returns:
            One tensor ``(after, before, P, P)`` per scale; its taps are outermost in memory.
        """
        bases = [self.get_buffer(f"basis{index}") for index in range(len(self.steps))]
        with torch.autocast(self.weight.device.type, enabled=False):
            weight = self.weight.permute(2, 1, 0)
            found = [torch.tensordot(basis.permute(1, 2, 0), weight, 1) for basis in bases]
        return [kernel.permute(3, 2, 0, 1) for kernel in found]

    def forward(self, features: Tensor) -> Tensor:
        """Convolve images, or features at each scale.

        Args:
            features: Images ``(N, before, H, W)`` or features ``(S, N, before, H, W)``.

        Returns:
            Features, shape ``(S, N, after, H, W)``.
        """
        lifting = features.ndim == 4  # images have too few channels to repay the transforms
        if lifting:
            features = features.expand(len(self.steps), *features.shape)
        found = []
        for index, (x, kernel) in enumerate(zip(features, self.kernels(), strict=True)):
            if lifting or kernel.shape[-1] < WIDE:
                x = x.contiguous(memory_format=torch.channels_last)
                step = self.steps[index]
                padding = kernel.shape[-1] // 2 * step
                found.append(F.conv2d(x, kernel, self.bias, padding=padding, dilation=step))
            else:
                found.append(fourier_conv(x, kernel, self.bias, self._matrices(index, x)))
        # In contrast to torch.stack, torch.cat keeps the memory format.
        return torch.cat(found).unflatten(0, (len(found), -1))  # type: ignore[no-any-return]

    def _matrices(self, index: int, features: Tensor) -> "FourierMatrices":
        """Return the matrices of a scale for features (N, C, H, W)."""
        height, width = features.shape[-2:]
        if height == width == self.size:
            stored = [self.get_buffer(f"{name}{index}") for name in FourierMatrices._fields]
            return FourierMatrices(*stored)
        taps = self.get_buffer(f"basis{index}").shape[-1]
        found = fourier_matrices(height, width, taps, self.steps[index])
        return FourierMatrices(*(matrix.to(self.weight) for matrix in found))


class FourierMatrices(NamedTuple):
    """Matrices that transform features and filters along one axis each, and features back.

    They are real: an axis of 2 holds real and imaginary parts. Shapes are (after, before).
    """

    rows: Tensor  # (M 2, H)
    columns: Tensor  # (L 2, 2 W)
    tap_rows: Tensor  # (M 2, P)
    tap_columns_real: Tensor  # (L, 2 P), to the real part
    tap_columns_imag: Tensor  # (L, 2 P), to the imaginary part
    back_columns: Tensor  # (2 W, L 2)
    back_columns_i: Tensor  # (2 W, L 2), of spectra times the imaginary unit
    back_rows: Tensor  # (H, M 2)


def fourier_matrices(height: int, width: int, taps: int, step: int) -> FourierMatrices:
    """Compute the matrices of `fourier_conv`, in float64.

    The transforms are periodic. They are longer than the features by the reach of the filters, so
    that a filter at one border meets zeros instead of the opposite border.

    Args:
        height: Number H of rows of the features.
        width: Number W of columns of the features.
        taps: Number P of taps of the filters along an axis.
        step: Distance between taps in pixels.
    """
    (down, tap_down), (across, tap_across) = (_waves(n, taps, step) for n in (height, width))
    length, half = len(down), len(down) // 2 + 1
    # The spectrum of real numbers at -k is the complex conjugate of that at k.
    times = torch.full((half, 1), 2 / length, dtype=torch.float64)
    times[[0, -1]] = 1 / length
    taps_real, taps_imag = _on_parts(tap_across).flatten(2).unbind(1)
    back = across.conj().T / len(across)
    back, back_i = (_on_parts(m).permute(1, 0, 3, 2).flatten(2) for m in (back, 1j * back))
    return FourierMatrices(
        torch.view_as_real(down[:half]).transpose(1, 2).flatten(0, 1),
        _on_parts(across).flatten(2).flatten(0, 1),
        torch.view_as_real(tap_down[:half]).transpose(1, 2).flatten(0, 1),
        taps_real,
        taps_imag,
        back.flatten(0, 1),
        back_i.flatten(0, 1),
        torch.view_as_real((down[:half] * times).T).flatten(1),
    )


def _waves(side: int, taps: int, step: int) -> tuple[Tensor, Tensor]:
    """Return exp(-2 pi i k x / L) at pixels, (L, side), and its conjugate at taps, (L, taps).

    Taps at which a filter on the image never meets the image are zero. L is a multiple of 4, so
    that rows of matrices are aligned.
    """
    offsets = (torch.arange(taps) - taps // 2) * step
    within = offsets.abs() < side
    length = -(-(side + int(offsets[within].max())) // 4) * 4
    frequencies = torch.arange(length)[:, None]

    def waves(x: Tensor) -> Tensor:
        angles = (frequencies * x % length).double() * (2 * math.pi / length)
        return torch.polar(torch.ones_like(angles), angles)

    return waves(-torch.arange(side)), waves(offsets) * within


def _on_parts(matrix: Tensor) -> Tensor:
    """Return how a complex matrix (A, B) acts on real and imaginary parts, shape (A, 2, 2, B)."""
    real, imag = matrix.real, matrix.imag
    return torch.stack([torch.stack([real, -imag], 1), torch.stack([imag, real], 1)], 1)


def fourier_conv(
    features: Tensor, kernel: Tensor, bias: Tensor, matrices: FourierMatrices
) -> Tensor:
    """Convolve features with wide filters: multiply their spectra, one frequency at a time.

    The transforms are matrix products. At these sizes they take less time than fast Fourier
    transforms, and leave frequencies outermost, where the products over channels need them. They
    keep the precision of the filters, also under autocast, and round once at the end.

    Args:
        features: Features, shape ``(N, I, H, W)``.
        kernel: Filters, shape ``(O, I, P, P)``.
        bias: Bias, shape ``(O,)``.
        matrices: From `fourier_matrices`, for these sizes.

    Returns:
        Features, shape ``(N, O, H, W)``, as `torch.nn.functional.conv2d` computes them.
    """
    device, dtype = features.device.type, features.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        x = _aligned(features.permute(2, 3, 0, 1), 1)
        kernel = _aligned(kernel.permute(2, 3, 1, 0), 2)
        (height, width, n, i), (taps, _, _, o) = x.shape, kernel.shape
        half, full = len(matrices.rows) // 2, len(matrices.columns) // 2
        x = matrices.rows @ x.to(kernel.dtype).reshape(height, -1)
        x = _each(matrices.columns, x.view(half, 2 * width, -1)).view(-1, 2 * n, i)
        kernel = (matrices.tap_rows @ kernel.reshape(taps, -1)).view(half, 2 * taps, -1)
        real = x @ _each(matrices.tap_columns_real, kernel).view(-1, i, o)
        imag = x @ _each(matrices.tap_columns_imag, kernel).view(-1, i, o)
        y = _each(matrices.back_columns, real.view(half, 2 * full, -1))
        back = matrices.back_columns_i.expand(half, -1, -1)
        y = torch.baddbmm(y, back, imag.view(half, 2 * full, -1))
        y = (matrices.back_rows @ y.view(2 * half, -1)).view(height, width, n, o)
        y = (y[..., : len(bias)] + bias).permute(2, 3, 0, 1)
        return y.to(dtype, memory_format=torch.channels_last)


def _aligned(values: Tensor, axes: int) -> Tensor:
    """Fill the last axes with zeros up to a multiple of 8, as tensor cores need them."""
    extra = [side for n in values.shape[: -1 - axes : -1] for side in (0, -n % ALIGNED)]
    return F.pad(values, extra) if any(extra) else values


def _each(matrix: Tensor, columns: Tensor) -> Tensor:
    """Multiply one matrix by each matrix of a batch."""
    return torch.bmm(matrix.expand(len(columns), -1, -1), columns)


class SteerableNet(nn.Module):
    """Three scale-steerable convolutions, the maximum over scale, and two linear layers.

    Args:
        basis: Filters of each scale.
        channels: Number of image channels C.
        classes: Number of classes K.
        size: Width and height of the images in pixels.
        smooth: Whether blocks of 2 × 2 features are averaged, as in DISCO, instead of their maximum
            being taken. The last maximum is then taken over overlapping windows.

    Shape:
        - Input: ``(N, C, size, size)``.
        - Output: ``(N, K)``.

    Raises:
        ConfigError: If the images have less than 16 pixels along an axis.

    Examples:
        >>> net = SteerableNet(hermite_basis([1.0, 2.0], 7), channels=3, classes=5, size=16)
        >>> net(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 5])
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
        if size < SMALLEST:
            raise ConfigError(
                f"a steerable network needs images of at least {SMALLEST} pixels, got {size}; "
                "use larger frames"
            )
        self.smooth = smooth
        before = (channels, *WIDTHS)
        sizes = (None, size // 2, size // 4)  # the first layer needs no Fourier transforms
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
        """Compute the features of every scale behind the last convolution.

        Args:
            images: Batch of images, shape ``(N, C, size, size)``.

        Returns:
            Features, shape ``(S, N, 95, size // 4, size // 4)``.
        """
        first, second, third = self.convs
        features = _norm(self.norms[0], self._halve(F.relu(first(images))))
        features = _norm(self.norms[1], self._halve(F.relu(second(features))))
        return third(features)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of images.

        Args:
            images: Batch of images, shape ``(N, C, size, size)``.

        Returns:
            Logits, shape ``(N, K)``.
        """
        strongest = self.features(images).amax(0)
        pooled = _four_windows_smooth(strongest) if self.smooth else _four_windows(strongest)
        hidden = self.norms[3](self.hidden(self.norms[2](pooled).flatten(1)))
        return self.head(self.dropout(F.relu(hidden)))  # type: ignore[no-any-return]

    def _halve(self, features: Tensor) -> Tensor:
        """Halve the resolution of features (S, N, C, H, W); drop an odd last row or column."""
        pool = F.avg_pool2d if self.smooth else F.max_pool2d
        return pool(features.flatten(0, 1), 2).unflatten(0, features.shape[:2])  # type: ignore[no-any-return]


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

    Args:
        channels: Number of image channels.
        classes: Number of classes.
        size: Width and height of the images in pixels.

    Returns:
        The network, with random weights.

    Raises:
        ConfigError: If the images are too small.

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

    The arguments are those of `network`.
    """
    basis = hermite_basis([2 ** (i / 2) for i in range(7)], 31)
    return SteerableNet(basis, channels=channels, classes=classes, size=size)


def discrete(*, channels: int, classes: int, size: int = 112) -> SteerableNet:
    """Build DISCO with the authors' four scales, over an octave.

    The arguments are those of `network`.
    """
    basis = discrete_basis([2 ** (i / 3) for i in range(4)])
    return SteerableNet(basis, channels=channels, classes=classes, size=size, smooth=True)


def discrete_wide(*, channels: int, classes: int, size: int = 112) -> SteerableNet:
    """Build DISCO with the four scales 1, 2, 4 and 8, over three octaves.

    Rescaling between them is exact. With scales between the octaves, the least-squares fit of
    `transfer` halved the filters of those scales, so there are none.

    The arguments are those of `network`.
    """
    basis = discrete_basis([1, 2, 4, 8])
    return SteerableNet(basis, channels=channels, classes=classes, size=size, smooth=True)
