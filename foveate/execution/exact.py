"""The rule for when a faster implementation can replace the modules of a network.

Faster implementations support unmodified PyTorch modules only. A subclass, a parametrisation, a
hook or a replaced `forward` can change the result of a module, so each of them rules it out.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.sliding import SlidingChannels

Block: TypeAlias = tuple[nn.Conv2d, nn.BatchNorm2d | None]
METHODS = {
    *("forward", "patches", "channels", "forward_patches", "draw_mask", "combine"),
    *("maps", "grids", "pool_space", "classify", "dense", "covered"),
}
"""The methods that faster implementations leave out; none can be replaced on a module."""
PLAIN = (Tensor, nn.Parameter, type(None))


def all_unmodified(modules: Iterable[nn.Module]) -> bool:
    """Whether each module runs the `forward` of its class on plain tensors, without hooks."""
    if _has_any_global_hook():
        return False
    return all(map(_is_unmodified, modules))


def _is_unmodified(module: nn.Module) -> bool:
    before = module._forward_pre_hooks or module._backward_pre_hooks
    hooked = before or module._forward_hooks or module._backward_hooks
    # The form that torch.compile traces in every supported version of torch.
    if hooked or any(map(vars(module).__contains__, METHODS)):
        return False
    # `parameters()` takes five times as long, and a prediction checks all modules several times.
    return all(type(p) in PLAIN for p in module._parameters.values())


def exact_convnet(net: nn.Module) -> ConvNet | None:
    """Return the `ConvNet` of a network if all modules are unmodified, otherwise None."""
    if type(net) not in (ConvNet, ScaleChannels, SlidingChannels) or not all_unmodified([net]):
        return None
    backbone = convnet_of(net)
    if type(backbone) is not ConvNet or not all_unmodified([backbone]):
        return None
    head = (backbone.hidden, backbone.dropout, backbone.head)
    usual = [*map(type, head)] == [nn.Linear, nn.Dropout, nn.Linear] and all_unmodified(head)
    usual = usual and all(map(_has_stated_shape, (backbone.hidden, backbone.head)))
    return backbone if usual and len(plain_blocks(backbone.trunk)) > 0 else None


def matching_convnet(net: nn.Module, images: Tensor) -> ConvNet | None:
    """Return the unmodified `ConvNet` of a network if it accepts these images (B, C, H, W)."""
    backbone = exact_convnet(net)
    if backbone is None or images.shape[1] != backbone.trunk[0].in_channels:
        return None
    if isinstance(net, ScaleChannels):
        fixed = net.size == backbone.size and not net.recompute
    else:
        whole = images.shape[2:] == (backbone.size, backbone.size)
        fixed = whole or isinstance(net, SlidingChannels)
    return backbone if fixed else None


def require_convnet(net: nn.Module) -> ConvNet:
    """Return the `ConvNet` of a network with prepared inputs; raise if it was modified since."""
    if not torch.compiler.is_compiling() and exact_convnet(net) is None:
        raise ConfigError(
            f"modules of this {type(net).__name__} changed after its inputs were prepared; "
            "call prepare again"
        )
    return convnet_of(net)


def convnet_of(net: Any) -> ConvNet:
    """Return a `ConvNet` itself, or the backbone of scale channels."""
    return net if isinstance(net, ConvNet) else net.backbone


def plain_blocks(trunk: nn.Module) -> tuple[Block, ...]:
    """Return the convolutions of a trunk, each with the batch norm that follows it, or None.

    The result is empty unless the trunk is a sequence of blocks of exactly this form: an unpadded
    3 × 3 convolution of stride 1 or 2, an optional batch norm with running statistics, and a ReLU.
    """
    if type(trunk) is not nn.Sequential or not all_unmodified(trunk.modules()):
        return ()
    layers: list[Any] = list(trunk)
    found: list[Block] = []
    while layers:
        conv = layers.pop(0)
        norm = layers.pop(0) if layers and type(layers[0]) is nn.BatchNorm2d else None
        if not layers or type(layers.pop(0)) is not nn.ReLU:
            return ()
        if (
            type(conv) is not nn.Conv2d
            or not _is_supported_conv(conv)
            or not _has_running_stats(norm, conv.out_channels)
            or (found and found[-1][0].out_channels != conv.in_channels)
        ):
            return ()
        found.append((conv, norm))
    return tuple(found)


def _is_supported_conv(conv: nn.Conv2d) -> bool:
    shape = (conv.kernel_size, conv.padding, conv.dilation, conv.groups)
    usual = shape == ((3, 3), (0, 0), (1, 1), 1) and conv.stride in ((1, 1), (2, 2))
    filters = (conv.out_channels, conv.in_channels, 3, 3)  # pruning can replace the weights alone
    usual = usual and conv.bias is not None and conv.weight.shape == filters
    return usual and conv.bias.shape == filters[:1]  # type: ignore[union-attr]


def _has_stated_shape(layer: nn.Linear) -> bool:
    return layer.weight.shape == (layer.out_features, layer.in_features)


def _has_running_stats(norm: nn.BatchNorm2d | None, filters: int) -> bool:
    if norm is None:
        return True
    own = (norm.momentum, norm.weight, norm.bias)
    tracked = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    if not norm.track_running_stats or any(value is None for value in (*own, *tracked)):
        return False
    vectors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return all(value.shape == (filters,) for value in vectors)  # type: ignore[union-attr]
