"""Whether PyTorch runs a function or records it."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def exporting() -> bool:
    """Whether the call becomes part of an exported program, which must hold common operations.

    `is_exporting` alone does not do: under `torch.compile` it is True in torch 2.11.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def watched(tensor: Tensor) -> bool:
    """Whether each operation on a tensor must be one of PyTorch's own.

    A compiler, a transform such as `vmap`, a tangent or a mode that counts operations would not
    see what compiled code does. The mode of `torch.set_default_device` changes nothing here.
    """
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return True
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # `is_grads_batched` of autograd
        return True
    traced = torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0
    modes = torch._C._len_torch_dispatch_stack() > 0 or any(
        type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()
    )
    return traced or modes or torch._C._are_functorch_transforms_active()
