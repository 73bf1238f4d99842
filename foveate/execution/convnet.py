"""Plan for networks with an unmodified `ConvNet`: fast convolutions where available."""
# Shape letters: B batch, N patches, S scale channel, C image channel, H W pixels, K classes.

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.execution import windows
from foveate.execution.exact import convnet_of, matching_convnet, require_convnet
from foveate.execution.native import trunk as native
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.lazy import all_patches, lazy_inputs, lazy_logits
from foveate.models.outputs import Outputs
from foveate.models.sliding import SlidingChannels

FORMS = (native, windows)
"""Implementations of a trunk in order of preference."""

Channels: TypeAlias = ScaleChannels | SlidingChannels


def fits(net: nn.Module, images: Tensor) -> bool:
    """Whether the network has an unmodified `ConvNet` and accepts these images."""
    return matching_convnet(net, images) is not None


def prepare(net: nn.Module, images: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
    """Cut the patches of scale channels, unless lazy evaluation cuts them as needed.

    Other networks use the images.
    """
    return (lazy_inputs(net, images) if isinstance(net, ScaleChannels) else images,)


def outputs(net: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Run the network on prepared inputs."""
    backbone, (images,) = require_convnet(net), inputs
    if isinstance(net, ScaleChannels):
        lazy = lazy_logits(net, images, lambda p: backbone.classify(features(backbone, p)))
        if lazy is not None:
            return Outputs(lazy)
        channels = all_channels(net, all_patches(net, images))
    elif isinstance(net, SlidingChannels):
        mask = backbone.draw_mask(images)
        channels = net.pool_space([dense(backbone, grid, mask) for grid in net.grids(images)])
    else:
        return Outputs(backbone.classify(features(backbone, images)))
    return Outputs(net.combine(channels), channels)


def all_channels(net: ScaleChannels, patches: Tensor) -> Tensor:
    """Compute the logits (B, S, K) of all channels from patches (B, S, C, P, P)."""
    backbone = convnet_of(net)
    found = features(backbone, patches.flatten(0, 1))
    logits = backbone.classify(found, net.draw_mask(patches))
    return logits.unflatten(0, patches.shape[:2])  # type: ignore[no-any-return]


def features(backbone: ConvNet, images: Tensor) -> Tensor:
    """Run the convolutions on images (N, C, H, W) by the fastest implementation."""
    for form in FORMS:
        if form.applies(backbone.trunk, images):
            found: Tensor = form.run(backbone.trunk, images)
            return found
    return backbone.trunk(images)  # type: ignore[no-any-return]


def dense(backbone: ConvNet, images: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute `backbone.dense` with the fully connected layers as convolutions."""
    found = features(backbone, backbone.covered(images))
    kernel = backbone.hidden.weight.unflatten(1, (-1, backbone.side, backbone.side))
    hidden = F.relu(F.conv2d(found, kernel, backbone.hidden.bias))
    mask = backbone.draw_mask(images) if mask is None else mask
    if mask is not None:
        hidden = hidden * mask[..., None, None]
    return F.conv2d(hidden, backbone.head.weight[..., None, None], backbone.head.bias)
