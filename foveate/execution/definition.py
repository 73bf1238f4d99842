"""The fallback plan for every network: call the network itself."""

import torch
from torch import Tensor, nn

from foveate.execution.exact import all_unmodified
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import Outputs, plain_outputs
from foveate.models.sliding import SlidingChannels


def fits(net: nn.Module, images: Tensor) -> bool:
    """Return True for every network."""
    return True


def prepare(net: nn.Module, images: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
    """Return the images (B, C, H, W) unchanged."""
    return (images,)


def outputs(net: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Call the network; channels are None if `forward` is overridden or has hooks."""
    own = type(net) in (ScaleChannels, SlidingChannels) and all_unmodified([net])
    return plain_outputs(net, *inputs) if own else Outputs(net(*inputs))
