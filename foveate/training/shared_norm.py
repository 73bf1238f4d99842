"""Batch norm with mean and variance over all processes of a run, forward and backward."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from foveate.errors import ConfigError
from foveate.models.recompute import batch_norm, uses_batch_statistics

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes, in place."""


def share_norms(net: nn.Module, all_reduce_sum: Sum) -> None:
    """Make every batch norm of the network compute its statistics over all processes.

    The class of each module is replaced in place; its parameters, buffers and methods stay.
    PyTorch's SyncBatchNorm, which needs a GPU, is left unchanged.
    """
    for module in net.modules():
        if isinstance(module, Norm) and not isinstance(module, _SharedNorm):
            kind: Any = type(module)
            module.__class__ = _shared(kind)
            module.__dict__["sum_in_place"] = all_reduce_sum


def set_local_statistics(net: nn.Module, local: bool) -> None:
    """Compute batch statistics in this process alone (`local`), or over all processes."""
    for module in net.modules():
        if isinstance(module, _SharedNorm):
            module.local_statistics = local


def running_statistics(net: nn.Module) -> list[Tensor]:
    """Return the running means and variances of all batch norms."""
    norms = [module for module in net.modules() if isinstance(module, Norm)]
    both = [t for norm in norms for t in (norm.running_mean, norm.running_var)]
    return [tensor for tensor in both if tensor is not None]


class _SharedNorm(nn.Module):
    """Mixin that makes a batch norm compute its statistics over all processes."""

    sum_in_place: Sum
    local_statistics = False

    def forward(self, values: Tensor) -> Tensor:
        """Normalise values (N, C, ...); N can differ between processes."""
        if self.local_statistics:
            return super().forward(values)  # type: ignore[no-any-return]
        with _Sharing(self.sum_in_place) as sharing:
            outputs = super().forward(values)
        if uses_batch_statistics(self) and not sharing.calls:
            kind = type(self).__name__.removeprefix("Shared")
            raise ConfigError(f"{kind} does not call F.batch_norm; train with norms='local'")
        return outputs  # type: ignore[no-any-return]


class _Sharing(TorchFunctionMode):
    """Mode in which `F.batch_norm` computes its statistics over all processes."""

    def __init__(self, sum_in_place: Sum) -> None:
        super().__init__()
        self.sum_in_place, self.calls = sum_in_place, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace calls of `F.batch_norm` in training mode."""
        kwargs = kwargs or {}
        if func is not F.batch_norm or not kwargs["training"]:
            return func(*args, **kwargs)
        self.calls += 1
        return batch_norm(*args, **kwargs, all_reduce_sum=self._all_reduce_sum)

    def _all_reduce_sum(self, sums: Tensor) -> Tensor:
        return _TotalSum.apply(sums, self.sum_in_place)  # type: ignore[no-any-return,no-untyped-call]


class _TotalSum(torch.autograd.Function):
    """Sum over all processes. Its gradient is also summed, as every process uses the sum."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, all_reduce_sum: Sum) -> Tensor:
        """Sum a tensor over all processes."""
        ctx.all_reduce_sum = all_reduce_sum
        return all_reduce_sum(sums.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient over all processes."""
        return ctx.all_reduce_sum(slope.clone()), None


@cache
def _shared(kind: type) -> Any:
    return type(f"Shared{kind.__name__}", (_SharedNorm, kind), {})
