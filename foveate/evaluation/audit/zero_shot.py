"""Wrap a classifier in scale channels without training, and measure the cost."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foveate.checks import check_memory
from foveate.errors import ConfigError
from foveate.evaluation.audit.images import Transform
from foveate.models.channels import ScaleChannels
from foveate.models.pooling import Pool

CANVAS = 1 << 26  # values in a batch of images that is rescaled at once; 256 MB as float32


class CentreCrop(nn.Module):
    """Apply a classifier to the centre crop (height, width) of larger images."""

    def __init__(self, net: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.net, self.size = net, size

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (B, K) of images (B, C, H, W)."""
        height, width = self.size
        top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
        logits: Tensor = self.net(images[..., top : top + height, left : left + width])
        return logits


class Comparison(NamedTuple):
    """A classifier alone and in scale channels, for images of `side` by `side` pixels."""

    plain: nn.Module
    inside: ScaleChannels
    side: int

    def cost(self, images: Tensor, size: int) -> dict[str, float]:
        """Measure pixels and time of the scale channels relative to the classifier alone."""
        pixels = len(self.inside.scales) * (self.inside.size / size) ** 2
        return {
            "pixels": pixels,
            "time": _seconds(self.inside, images) / _seconds(self.plain, images),
        }


def pair_with_channels(
    net: nn.Module, transform: Transform, windows: Sequence[float], pool: Pool, patch: int | None
) -> Comparison:
    """Pair a classifier with the same classifier in scale channels.

    If a window is larger than the input, the images are enlarged by an even number of pixels to
    contain it, and the classifier alone receives their centre crop. Images of MNIST Large Scale are
    never enlarged. They are not smoothed before downsampling either: an image magnified s times has
    no detail that would alias. A DenseNet on digits with 9 channels reached 63 % at its native
    scale without antialiasing, 51 % with it.

    Args:
        net: The classifier.
        transform: Transform from images to its input, which must be square.
        windows: Sides of the windows in units of the input.
        pool: Pooling of the logits over the channels.
        patch: Side of the patches in pixels; that of the input by default.

    Raises:
        ConfigError: If the input is not square.
    """
    size, width = transform.size
    if size != width:
        shape = f"{size} x {width}"
        raise ConfigError(f"scale channels require a square input, got {shape}; pass --size")
    cut, framed = patch or size, transform.recipe == "frame"
    scales = [window * size / cut for window in windows]
    inside = ScaleChannels(net, scales, cut, pool, antialias=framed)
    if not framed or windows[-1] <= 1:
        return Comparison(net, inside, size)
    side = size + 2 * math.ceil((windows[-1] - 1) * size / 2 - 1e-6)
    return Comparison(CentreCrop(net, transform.size), inside, side)


def largest_batch(batch: int, pixels: int) -> int:
    """Return the number of images of `pixels` values to rescale at once, at most `batch`."""
    found = max(1, min(batch, CANVAS // pixels))
    remedy = "use a smaller --size, scales nearer to 1 or --pool none"
    check_memory(4 * 3 * pixels * found, "windows larger than the input", remedy)
    return found


@torch.no_grad()
def _seconds(net: nn.Module, images: Tensor) -> float:
    """Return the shorter time of two calls, after one warm-up call."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        net(images).cpu()  # the copy waits for the GPU
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)
