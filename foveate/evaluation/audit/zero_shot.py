"""Wrap a classifier in scale channels without training."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

import math
from collections.abc import Sequence

from torch import nn

from foveate.checks import check_memory
from foveate.errors import ConfigError
from foveate.evaluation.audit.images import Transform
from foveate.models.channels import ScaleChannels
from foveate.models.pooling import Pool

CANVAS = 1 << 26  # values in a batch of images that is rescaled at once; 256 MB as float32


def pair_with_channels(
    net: nn.Module, transform: Transform, windows: Sequence[float], pool: Pool, patch: int | None
) -> tuple[nn.Module, ScaleChannels, int]:
    """Pair a classifier with the same classifier in scale channels; both take images of one side.

    The `windows` are in units of the input of the `transform`, which must be square. `patch` is the
    side of the patches in pixels, by default that of the input. The side of the images is returned
    as well. If a window is larger than the input, the images are enlarged by an even number of
    pixels to contain it, and the classifier alone receives their centre crop.

    Images of MNIST Large Scale are never enlarged. They are not smoothed before downsampling
    either: an image magnified s times has no detail that would alias. A DenseNet on digits with 9
    channels reached 63 % at its native scale without antialiasing, 51 % with it.
    """
    size, width = transform.size
    if size != width:
        shape = f"{size} x {width}"
        raise ConfigError(f"scale channels require a square input, got {shape}; pass --size")
    cut, framed = patch or size, transform.recipe == "frame"
    scales = [window * size / cut for window in windows]
    inside = ScaleChannels(net, scales, cut, pool, antialias=framed)
    if not framed or windows[-1] <= 1:
        return net, inside, size
    side = size + 2 * math.ceil((windows[-1] - 1) * size / 2 - 1e-6)
    return ScaleChannels(net, [1.0], size, "max"), inside, side  # one window is the centre crop


def largest_batch(batch: int, pixels: int) -> int:
    """Return the number of images of `pixels` values to rescale at once, at most `batch`."""
    found = max(1, min(batch, CANVAS // pixels))
    remedy = "use a smaller --size, scales nearer to 1 or --pool none"
    check_memory(4 * 3 * pixels * found, "windows larger than the input", remedy)
    return found
