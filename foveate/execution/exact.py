"""One rule for when another form may be computed in place of a network's own modules.

A faster form knows the exact modules of torch and nothing else. A subclass, a parametrisation, a
hook or a replaced `forward` may change what a module computes, so any of them rules it out.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

Block: TypeAlias = tuple[nn.Conv2d, nn.BatchNorm2d | None]


def untouched(modules: Iterable[nn.Module]) -> bool:
    """Whether calling each module runs the `forward` of its class on plain tensors, and no hook."""
    if _has_any_global_hook():
        return False
    return all(map(_untouched, modules))


def _untouched(module: nn.Module) -> bool:
    before = module._forward_pre_hooks or module._backward_pre_hooks
    hooked = before or module._forward_hooks or module._backward_hooks or "forward" in vars(module)
    parameters = module.parameters(recurse=False)
    return not hooked and all(type(p) in (Tensor, nn.Parameter) for p in parameters)


def plain_blocks(trunk: nn.Module) -> tuple[Block, ...]:
    """Give the convolutions of a trunk, each with the norm behind it if there is one.

    Nothing is given unless the trunk is a sequence of exactly these: an unpadded 3 × 3 convolution
    of stride 1 or 2, a batch norm with running statistics or none, a ReLU.
    """
    if type(trunk) is not nn.Sequential or not untouched(trunk.modules()):
        return ()
    layers: list[Any] = list(trunk)
    found: list[Block] = []
    while layers:
        conv = layers.pop(0)
        norm = layers.pop(0) if layers and type(layers[0]) is nn.BatchNorm2d else None
        if not layers or type(layers.pop(0)) is not nn.ReLU:
            return ()
        if type(conv) is not nn.Conv2d or not _usual(conv) or not _tracks(norm):
            return ()
        found.append((conv, norm))
    return tuple(found)


def _usual(conv: nn.Conv2d) -> bool:
    shape = (conv.kernel_size, conv.padding, conv.dilation, conv.groups)
    usual = shape == ((3, 3), (0, 0), (1, 1), 1) and conv.stride in ((1, 1), (2, 2))
    return usual and conv.bias is not None


def _tracks(norm: nn.BatchNorm2d | None) -> bool:
    if norm is None:
        return True
    own = (norm.momentum, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return norm.track_running_stats and all(value is not None for value in own)
