"""The outputs of a network, channel by channel where it has scale channels."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes.

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from foveate.models.channels import ScaleChannels, refine_scale
from foveate.models.sliding import SlidingChannels


class Outputs(NamedTuple):
    """Logits (B, K), and the logits (B, S, K) of each scale channel if the network has channels."""

    logits: Tensor
    channels: Tensor | None = None


def plain_outputs(net: nn.Module, images: Tensor) -> Outputs:
    """Run any network on images (B, C, H, W)."""
    if not isinstance(net, ScaleChannels | SlidingChannels):
        return Outputs(net(images))
    channels = net.channels(images)
    return Outputs(net.combine(channels), channels)


def strongest_channel(outputs: Outputs) -> Tensor:
    """Return the index (B,) of the channel with the highest logit of the predicted class."""
    return _of_prediction(outputs).argmax(1)


def selected_scale(outputs: Outputs, scales: Sequence[float]) -> Tensor:
    """Return the scale (B,) of that maximum, refined between the channels' `scales`."""
    return refine_scale(_of_prediction(outputs), scales)


def _of_prediction(outputs: Outputs) -> Tensor:
    """The logits (B, S) of the predicted class."""
    assert outputs.channels is not None
    label = outputs.logits.argmax(1)[:, None, None].expand(-1, outputs.channels.shape[1], 1)
    return outputs.channels.gather(2, label).squeeze(2)
