"""Batch norm for the stages of `native_ops`: from sums over the batch to factors per filter."""
# Shape letters: N images, H W pixels, O filters.

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foveate.models import fast

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Norm:
    """How a map is normed; arrays are (O,), and NumPy's because they are small."""

    mean: Array
    spread: Array  # 1 / sqrt(variance + eps)
    gain: Array
    shift: Array
    moving: bool  # the mean and the variance are those of the batch
    count: int  # values per filter

    def factors(self) -> Tensor:
        """Mean, gain and shift (3, O), for the stages that read the map."""
        return stack(self.mean, self.gain, self.shift)

    def unnorm(self, total: Array, product: Array) -> Tensor:
        """Factors (4, O) that turn the slope of a map into its gradient.

        Given are the sums of the slope, and of the slope times the deviation from the mean.
        """
        share = self.gain / self.count if self.moving else np.zeros_like(self.gain)
        return stack(self.gain, -share * self.spread**2 * product, self.mean, -share * total)


def stack(*rows: Array) -> Tensor:
    """Arrays (O,) as one float32 tensor."""
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def column_sums(sums: Array) -> Array:
    """Add up the parts of sums (2, parts, O)."""
    total: Array = sums.sum(1)
    return total


def norm_of(
    norm: nn.BatchNorm2d | None, means: Array, squares: Array, shape: Sequence[int]
) -> Norm:
    """The norm of a map of `shape` (N, H, W, O); running statistics follow as always.

    Given are the mean and the sum of squared deviations (parts, O) of each part of the batch.
    """
    values = shape[0] * shape[1] * shape[2]
    if norm is None:
        one, nought = np.ones_like(means[0]), np.zeros_like(means[0])
        return Norm(nought, one, one, nought, False, values)
    assert norm.running_mean is not None and norm.running_var is not None
    if norm.training:
        mean, variance = _combine(means, squares, shape[0], values)
        fast.track(norm, torch.from_numpy(mean), torch.from_numpy(variance), values)
    else:
        mean, variance = _array(norm.running_mean), _array(norm.running_var)
    spread = 1 / np.sqrt(variance + norm.eps)
    return Norm(
        mean, spread, _array(norm.weight) * spread, _array(norm.bias), norm.training, values
    )


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy().astype(np.float64)


def _combine(means: Array, squares: Array, count: int, values: int) -> tuple[Array, Array]:
    """Mean and variance (O,) of all parts."""
    share = _shares(count, len(means))
    mean = (share * means).sum(0)
    return mean, squares.sum(0) / values + (share * (means - mean) ** 2).sum(0)


@lru_cache(maxsize=64)
def _shares(count: int, parts: int) -> Array:
    """Which share of the patches each part has (parts, 1); part k begins at ⌊count k / parts⌋."""
    begins = np.arange(parts + 1) * count // parts
    return np.diff(begins)[:, None] / count
