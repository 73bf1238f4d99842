"""What a network says about images, channel by channel where it has scale channels."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes.

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from foveate.models.channels import ScaleChannels, refine_scale
from foveate.models.sliding import SlidingChannels


class Answers(NamedTuple):
    """Logits (B, K), and for networks with scale channels what each of them said, (B, S, K)."""

    logits: Tensor
    channels: Tensor | None = None


def answers(net: nn.Module, images: Tensor) -> Answers:
    """Ask any network about images (B, C, H, W)."""
    if not isinstance(net, ScaleChannels | SlidingChannels):
        return Answers(net(images))
    outputs = net.channels(images)
    return Answers(net.combine(outputs), outputs)


def strongest_channel(said: Answers) -> Tensor:
    """Say in which channel (B,) the predicted class answered most strongly."""
    return _strength(said).argmax(1)


def seen_at(said: Answers, scales: Sequence[float]) -> Tensor:
    """Say at which scale (B,) that was, refined between the channels' `scales`."""
    return refine_scale(_strength(said), scales)


def _strength(said: Answers) -> Tensor:
    """What each channel said about the predicted class, (B, S)."""
    assert said.channels is not None
    label = said.logits.argmax(1)[:, None, None].expand(-1, said.channels.shape[1], 1)
    return said.channels.gather(2, label).squeeze(2)
