"""Choose the tolerance of lazy evaluation from unlabelled images."""
# Shape letters: B batch, N images, C image channel, H W pixels, S scale channel, K classes.

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from foveate.errors import ConfigError, DataError
from foveate.execution.plan import predict
from foveate.models.channels import ScaleChannels
from foveate.models.lazy import check_lazy, leads
from foveate.models.pooling import Pool, pool_scales


def calibrate(net: ScaleChannels, batches: Iterable[Tensor], disagreement: float = 0.001) -> float:
    """Find the smallest tolerance for which lazy evaluation rarely changes the predicted class.

    The network evaluates all channels of the images. For each image, this determines the largest
    lead with which lazy evaluation would stop at another class than that of all channels.

    Use images like those that the network will receive, at all their scales; labels are not needed.
    A share of 0.001 can be estimated from some thousands of images. From fewer than
    ``1 / disagreement`` images, the tolerance is the largest lead of any of them.

    Args:
        net: Network with ``pool="max"`` or ``pool="logsumexp"``, in evaluation mode.
        batches: Batches of images, each of shape ``(B, C, H, W)``.
        disagreement: Largest share of these images whose predicted class may differ.

    Returns:
        Tolerance in logits, for ``net.lazy``.

    Raises:
        ConfigError: If the pool depends on all channels, the network is in training mode, or
            ``disagreement`` is not from 0 to 1.
        DataError: If there are no images.

    Examples:
        >>> from foveate import create_model, load_source
        >>> from foveate.data.large_scale import rescale
        >>> net = create_model("fovmax-mnist-tr2", pretrained=True)
        >>> digits = load_source("mnist-5k").test.images[:50]
        >>> net.lazy = calibrate(net, [rescale(digits, scale) for scale in (0.5, 2, 8)])
        >>> 0 <= net.lazy < 20
        True
    """
    check_lazy(0.0, net.pool)
    if net.training:
        raise ConfigError("the network is in training mode; call net.eval() before calibrate")
    if not 0 <= disagreement <= 1:
        raise ConfigError(f"disagreement must be a share from 0 to 1, got {disagreement!r}")
    previous, net.lazy = net.lazy, None
    try:
        needed = [required_tolerance(_all_channels(net, images), net.pool) for images in batches]
    finally:
        net.lazy = previous
    if not sum(map(len, needed)):
        raise DataError("there are no images to calibrate with; pass batches of images")
    ordered = torch.cat(needed).sort(descending=True).values
    allowed = math.floor(disagreement * len(ordered))
    return max(0.0, float(ordered[min(allowed, len(ordered) - 1)]))


def required_tolerance(channels: Tensor, pool: Pool) -> Tensor:
    """Return the tolerance (B,) from which lazy evaluation finds the class of all channels.

    `channels` are the logits (B, S, K) of all channels. The tolerance is minus infinity if every
    round has this class.
    """
    label = pool_scales(channels, pool).argmax(1)
    needed = channels.new_full(label.shape, -math.inf)
    largest = needed.clone()  # an image is decided in a round only if its lead exceeds the earlier
    for found, lead in leads(channels, pool):
        stops = (found != label) & (lead > largest)
        needed = torch.where(stops, lead, needed)
        largest = torch.fmax(largest, lead)
    return needed


def _all_channels(net: ScaleChannels, images: Tensor) -> Tensor:
    channels = predict(net, images).channels
    if channels is None:  # `forward` is overridden or has hooks
        with torch.no_grad():
            channels = net.channels(images)
    return channels
