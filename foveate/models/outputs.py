"""The outputs of a network, including the logits of its scale channels."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes.

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from foveate.models.channels import ScaleChannels, refine_scale
from foveate.models.lazy import all_patches, is_lazy, lazy_inputs, lazy_logits
from foveate.models.pooling import class_logits
from foveate.models.sliding import SlidingChannels


class Outputs(NamedTuple):
    """Logits of a network, and of each of its scale channels.

    Attributes:
        logits: Logits of the network, shape ``(B, K)``.
        channels: Logits of the scale channels, shape ``(B, S, K)``, or None if the network has no
            scale channels or evaluates them lazily.

    Examples:
        >>> import torch
        >>> from foveate import create_model
        >>> from foveate.execution.plan import predict
        >>> outputs = predict(create_model("fovmax").eval(), torch.zeros(2, 1, 112, 112))
        >>> outputs.logits.shape, outputs.channels.shape
        (torch.Size([2, 10]), torch.Size([2, 17, 10]))
    """

    logits: Tensor
    channels: Tensor | None = None


def plain_outputs(net: nn.Module, images: Tensor) -> Outputs:
    """Run any network on images (B, C, H, W) without a faster plan.

    Channels are None if a subclass defines its own `forward`, which can compute other logits.
    """
    known = (ScaleChannels.forward, SlidingChannels.forward)
    if not isinstance(net, ScaleChannels | SlidingChannels) or type(net).forward not in known:
        return Outputs(net(images))
    if isinstance(net, ScaleChannels) and is_lazy(net):
        return patch_outputs(net, lazy_inputs(net, images))
    channels = net.channels(images)
    return Outputs(net.combine(channels), channels)


def patch_outputs(net: ScaleChannels, inputs: Tensor) -> Outputs:
    """Run scale channels on patches or on `lazy_inputs`; with `net.lazy`, on as few as needed."""
    if (logits := lazy_logits(net, inputs)) is not None:
        return Outputs(logits)
    channels = net.forward_patches(all_patches(net, inputs))
    return Outputs(net.combine(channels), channels)


def strongest_channel(outputs: Outputs) -> Tensor:
    """Return the index (B,) of the channel with the largest logit of the predicted class."""
    return _of_prediction(outputs).argmax(1)


def selected_scale(outputs: Outputs, scales: Sequence[float]) -> Tensor:
    """Return the scale (B,) of the strongest channel, interpolated between the `scales`."""
    return refine_scale(_of_prediction(outputs), scales)


def _of_prediction(outputs: Outputs) -> Tensor:
    """Return the logits (B, S) of the predicted class in every channel."""
    assert outputs.channels is not None
    return class_logits(outputs.channels, outputs.logits.argmax(1))
