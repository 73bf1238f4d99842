"""The plan that fits every network: the network itself."""

import torch
from torch import Tensor, nn

from foveate.execution.exact import untouched
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import Outputs, plain_outputs
from foveate.models.sliding import SlidingChannels

DEVICES: tuple[str, ...] = ()  # it needs none: it is what remains


def fits(net: nn.Module, images: Tensor) -> bool:
    """Always."""
    return True


def prepare(net: nn.Module, images: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
    """Keep the images (B, C, H, W)."""
    return (images,)


def outputs(net: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Call the network; a `forward` of its own or with hooks does not tell about channels."""
    own = type(net) in (ScaleChannels, SlidingChannels) and untouched([net])
    return plain_outputs(net, *inputs) if own else Outputs(net(*inputs))
