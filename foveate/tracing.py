"""Detect whether PyTorch runs, traces, transforms or differentiates the current call."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def exporting() -> bool:
    """Whether the call is traced by `torch.export`, so that only standard operators can be used.

    `is_exporting` alone is not sufficient: in torch 2.11 it is True under `torch.compile` as well.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_transformed(tensor: Tensor) -> bool:
    """Whether PyTorch traces or batches a call, or differentiates it forward or by `torch.func`."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # set by `is_grads_batched` of autograd
        return True
    traced = torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0
    return traced or torch._C._are_functorch_transforms_active()


def is_traced(tensor: Tensor) -> bool:
    """Whether PyTorch must see every operation on a tensor, which rules out compiled kernels.

    The mode of `torch.set_default_device` has no effect on kernels.
    """
    if is_transformed(tensor) or type(tensor) is not Tensor:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or any(
        type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()
    )


def differentiable_once(backward: Any) -> Any:
    """Decorate a backward function so that differentiating its result raises an error.

    `once_differentiable` alone treats the result for a constant incoming gradient as a constant, so
    that a gradient penalty has no effect.
    """
    once = once_differentiable(backward)

    def wrapper(ctx: Any, slope: Tensor) -> Any:
        return once(ctx, slope.detach().requires_grad_() if torch.is_grad_enabled() else slope)

    return wrapper
