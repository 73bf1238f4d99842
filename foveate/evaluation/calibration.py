"""Choose the tolerance of lazy evaluation from unlabelled images."""
# Shape letters: B batch, N images, C image channel, H W pixels, S scale channel, K classes.

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.errors import ConfigError, DataError
from foveate.execution.plan import predict
from foveate.models.channels import ScaleChannels
from foveate.models.lazy import check_lazy, leads
from foveate.models.pooling import Pool, pool_scales

# For the option --lazy auto. Estimates of rare events are noisy: with tolerances calibrated for
# 0.05 % on 6,800 digits, up to 0.10 % of other digits differed.
DISAGREEMENT = 0.0002


class Calibration(NamedTuple):
    """A tolerance, and what lazy evaluation does with it on the images of the calibration.

    `channels` is the mean number of channels evaluated, `disagreement` the share of images whose
    class differs from that of all channels.
    """

    tolerance: float
    channels: float
    disagreement: float


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
        ConfigError: If the network is not `ScaleChannels` or is in training mode, its pool depends
            on all channels, or ``disagreement`` is not from 0 to 1.
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
    if not isinstance(net, ScaleChannels):
        raise ConfigError(f"lazy evaluation requires ScaleChannels, got {type(net).__name__}")
    if net.training:
        raise ConfigError("the network is in training mode; call net.eval() before calibrate")
    if not 0 <= disagreement <= 1:
        raise ConfigError(f"disagreement must be a share from 0 to 1, got {disagreement!r}")
    outputs = (_all_channels(net, images) for images in batches)
    return choose_tolerance(net, outputs, disagreement).tolerance


def choose_tolerance(
    net: ScaleChannels, outputs: Iterable[Tensor], disagreement: float
) -> Calibration:
    """Choose the tolerance from the logits (B, S, K) of all channels, see `calibrate`.

    The network has no tolerance of its own while it computes the `outputs`.
    """
    check_lazy(0.0, net.pool)
    previous, net.lazy = net.lazy, None
    try:
        rounds = [_rounds(channels, net.pool) for channels in outputs]
    finally:
        net.lazy = previous
    if not sum(part.shape[2] for part in rounds):
        raise DataError("there are no images to calibrate with; pass batches of images")
    differs, lead, count = torch.cat(rounds, 2)
    ordered = required_tolerance(differs > 0, lead).sort(descending=True).values
    allowed = math.floor(disagreement * len(ordered))
    tolerance = max(0.0, float(ordered[min(allowed, len(ordered) - 1)]))
    decided = lead > tolerance
    decided[-1] = True  # all channels
    stops = decided & (decided.cumsum(0) == 1)
    shares = ((stops * values).sum(0).mean() for values in (count, differs))
    return Calibration(tolerance, *map(float, shares))


def required_tolerance(differs: Tensor, lead: Tensor) -> Tensor:
    """Return the tolerance (B,) from which lazy evaluation finds the class of all channels.

    It is minus infinity if every round has this class. `differs` (R, B) states whether the class
    after each round differs from it, and `lead` (R, B) is the largest tolerance that decides for
    the class of the round.
    """
    needed = lead.new_full(lead.shape[1:], -math.inf)
    largest = needed.clone()  # an image is decided in a round only if its lead exceeds the earlier
    for other, own in zip(differs, lead, strict=True):
        needed = torch.where(other & (own > largest), own, needed)
        largest = torch.fmax(largest, own)
    return needed


def _rounds(channels: Tensor, pool: Pool) -> Tensor:
    """Return (3, R, B): per round, whether the class differs, its lead, the channels evaluated.

    The last round has all channels.
    """
    label = pool_scales(channels, pool).argmax(1)
    found = [
        torch.stack([(best != label).double(), lead.double(), count.double()])
        for best, lead, count in leads(channels, pool)
    ]
    last = torch.zeros_like(found[0])
    last[2] = channels.shape[1]
    return torch.stack([*found, last], 1).cpu()


def _all_channels(net: ScaleChannels, images: Tensor) -> Tensor:
    channels = predict(net, images).channels
    if channels is None:  # `forward` is overridden or has hooks
        with torch.no_grad():
            channels = net.channels(images)
    return channels
