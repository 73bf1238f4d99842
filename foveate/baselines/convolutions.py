"""Convolutions in forms for tensor cores: wide filters, and images of few channels.

`fourier_conv` convolves by Fourier transforms, which are products with fixed matrices.
`convolve_blocks` computes blocks of 2 × 2 results by one product with all pixels that they see.
"""
# Shape letters: N images, I and O channels before and after a convolution, H W pixels, P filter
# pixels, T pixels of a window along an axis, L frequencies along an axis, M of them not negative.

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8  # tensor cores are fast if the numbers of channels are multiples of 8
ALIGNED_SIDE = 4  # squares of such sides have multiples of 8 pixels


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


def convolve_blocks(images: Tensor, weight: Tensor, bias: Tensor | None, shift: int = 0) -> Tensor:
    """Convolve images of few channels: `F.conv2d` with padding, in blocks of 2 × 2 results.

    A product with the pixels of a window gives all results of a block. Tensor cores need many
    results per window, and a number of pixels that is a multiple of 8.

    Args:
        images: Batch of images, shape ``(N, I, H, W)``.
        weight: Filters of odd width and height, shape ``(O, I, P, P)``.
        bias: Biases of the filters, shape ``(O,)``.
        shift: Number of rows and columns above and to the left of the image at which the blocks
            begin, 0 or 1. Blocks with results inside the image are computed as a whole, except that
            without a shift the last row or column of an odd number is left out.

    Returns:
        Blocks of results, shape ``(N, H', W', 4, O)``: upper left, upper right, lower left and
        lower right. H' is ``H // 2``, and ``H // 2 + 1`` with a shift.
    """
    side = weight.shape[-1]
    window = -(-(side + 1) // ALIGNED_SIDE) * ALIGNED_SIDE
    before = side // 2 + shift
    right, below = (window - 2 - before + 2 * shift - n % 2 for n in images.shape[:1:-1])
    if torch.is_autocast_enabled(images.device.type):
        images = images.to(torch.get_autocast_dtype(images.device.type))
    seen = F.pad(images, (before, right, before, below))
    windows = seen.unfold(2, window, 2).unfold(3, window, 2)  # (N, I, H', W', T, T)
    filters = block_filters(weight, window).flatten(2).flatten(0, 1)
    biases = None if bias is None else bias.repeat(4)
    results = F.linear(windows.permute(0, 2, 3, 1, 4, 5).flatten(3), filters, biases)
    return results.unflatten(-1, (4, -1))  # type: ignore[no-any-return]


def block_filters(weight: Tensor, window: int) -> Tensor:
    """Place filters ``(O, I, P, P)`` in windows for each result of a block: ``(4, O, I, T, T)``."""
    extra = window - weight.shape[-1]
    places = [(y, x) for y in (0, 1) for x in (0, 1)]
    return torch.stack([F.pad(weight, (x, extra - x, y, extra - y)) for y, x in places])


def _aligned(values: Tensor, axes: int) -> Tensor:
    """Fill the last axes with zeros up to a multiple of 8, as tensor cores need them."""
    extra = [side for n in values.shape[: -1 - axes : -1] for side in (0, -n % ALIGNED)]
    return F.pad(values, extra) if any(extra) else values


def _each(matrix: Tensor, columns: Tensor) -> Tensor:
    """Multiply one matrix by each matrix of a batch."""
    return torch.bmm(matrix.expand(len(columns), -1, -1), columns)
