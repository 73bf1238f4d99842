"""Detect whether PyTorch runs, traces or transforms the current call."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def exporting() -> bool:
    """Whether the call is traced by `torch.export`, so that only standard operators can be used.

    `is_exporting` alone is not sufficient: in torch 2.11 it is True under `torch.compile` as well.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_traced(tensor: Tensor) -> bool:
    """Whether PyTorch must see every operation on a tensor, which rules out compiled kernels.

    True under a compiler, a transform such as `vmap`, forward-mode differentiation, or a mode that
    counts operations. The mode of `torch.set_default_device` has no effect on kernels.
    """
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return True
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # set by `is_grads_batched` of autograd
        return True
    traced = torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0
    modes = torch._C._len_torch_dispatch_stack() > 0 or any(
        type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()
    )
    return traced or modes or torch._C._are_functorch_transforms_active()
