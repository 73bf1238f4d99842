"""A classifier in scale channels without any training: its windows, and what they cost."""
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

CANVAS = 1 << 26  # numbers of a batch of images that are rescaled together; 256 MB as float32


class Centre(nn.Module):
    """A classifier that receives the central (height, width) pixels of larger images."""

    def __init__(self, net: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.net, self.size = net, size

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (B, K) of images (B, C, H, W)."""
        height, width = self.size
        top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
        logits: Tensor = self.net(images[..., top : top + height, left : left + width])
        return logits


def in_channels(
    net: nn.Module,
    scales: Sequence[float],
    size: tuple[int, int],
    pool: Pool,
    *,
    patch: int | None = None,
    antialias: bool = True,
) -> ScaleChannels:
    """Put a classifier into scale channels: channel s sees a window of s times its input.

    Args:
        net: The classifier.
        scales: Sides of the windows in units of the classifier's input.
        size: Height and width of the classifier's input; a square.
        pool: How the logits of the channels are combined.
        patch: Side of the patches that the classifier receives; that of its input by default.
        antialias: Whether to smooth before reducing. Not for digits on small frames: an object made
            s times larger has no detail that plain samples could alias. (A DenseNet on digits, 9
            channels, kept 63 % at its native scale; antialiased 51 %.)

    Raises:
        ConfigError: If the input is not square.
    """
    if size[0] != size[1]:
        shape = f"{size[0]} x {size[1]}"
        raise ConfigError(f"scale channels need a square frame, got {shape}: pass --size")
    side = patch or size[0]
    return ScaleChannels(
        net, [scale * size[0] / side for scale in scales], side, pool, antialias=antialias
    )


class Beside(NamedTuple):
    """A classifier and the same one in scale channels, for images of `side` by `side` pixels."""

    plain: nn.Module
    inside: ScaleChannels
    side: int

    def cost(self, images: Tensor, size: int) -> dict[str, float]:
        """Measure how many times the pixels and the time of the plain classifier are needed."""
        pixels = len(self.inside.scales) * (self.inside.size / size) ** 2
        return {
            "pixels": pixels,
            "time": _seconds(self.inside, images) / _seconds(self.plain, images),
        }


def beside(
    net: nn.Module, transform: Transform, windows: Sequence[float], pool: Pool, patch: int | None
) -> Beside:
    """Put a classifier into channels whose windows reach beyond its input, see `in_channels`.

    The images are then larger than the input, by an even number of pixels, and hold the largest
    window; the plain classifier receives their centre. Images of MNIST Large Scale are never
    larger.
    """
    framed = transform.recipe == "frame"
    inside = in_channels(net, windows, transform.size, pool, patch=patch, antialias=framed)
    size = transform.size[0]
    if not framed or windows[-1] <= 1:
        return Beside(net, inside, size)
    side = size + 2 * math.ceil((windows[-1] - 1) * size / 2 - 1e-6)
    return Beside(Centre(net, transform.size), inside, side)


def fitting_batch(batch: int, pixels: int) -> int:
    """Return how many images of so many numbers to rescale at a time, at most `batch`."""
    found = max(1, min(batch, CANVAS // pixels))
    remedy = "use a smaller --size, scales nearer to 1 or --pool none"
    check_memory(4 * 3 * pixels * found, "windows beyond the input", remedy)
    return found


@torch.no_grad()
def _seconds(net: nn.Module, images: Tensor) -> float:
    """The shorter of two calls, after one that is not counted."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        net(images).cpu()  # which waits for a GPU
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)
