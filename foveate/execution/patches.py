"""Plan for scale channels around any backbone: patches are cut once, the backbone runs as is."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import torch
from torch import Tensor, nn

from foveate.execution.exact import all_unmodified
from foveate.models.channels import ScaleChannels
from foveate.models.lazy import lazy_inputs
from foveate.models.outputs import Outputs, patch_outputs


def fits(net: nn.Module, images: Tensor) -> bool:
    """Whether `forward` is that of `ScaleChannels`; every backbone is supported."""
    return type(net) is ScaleChannels and all_unmodified([net])


def prepare(net: nn.Module, images: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
    """Cut the patches (B, S, C, P, P), unless lazy evaluation cuts them as needed."""
    assert isinstance(net, ScaleChannels)
    return (lazy_inputs(net, images),)


def outputs(net: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Run the backbone on a copy of the patches, which it can change in place, and pool."""
    assert isinstance(net, ScaleChannels)
    return patch_outputs(net, inputs[0].clone())
