"""Batch norm whose mean and variance are over all processes of a run, forward and backward."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from foveate.errors import ConfigError
from foveate.models.recompute import batch_norm, by_batch

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Sum = Callable[[Tensor], Tensor]
"""Adds up a tensor over all processes, in place."""


def share_norms(net: nn.Module, add_up: Sum) -> None:
    """Let every batch norm of the network take its statistics over all processes.

    A norm changes its class, not its place: parameters, buffers and their names stay, and so does
    what a subclass of batch norm adds. PyTorch's SyncBatchNorm is for GPUs alone and left as it
    is; this one runs wherever `add_up` does.
    """
    for name, module in net.named_modules():
        if isinstance(module, LazyModuleMixin):
            raise ConfigError(f"{name} has no parameters yet: run the network once before training")
        if isinstance(module, Norm) and not isinstance(module, _SharedNorm):
            kind: Any = type(module)
            module.__class__ = _shared(kind)
            module.__dict__["sum_in_place"] = add_up


def set_apart(net: nn.Module, apart: bool) -> None:
    """Let the norms be of this process alone for now, or of all processes again."""
    for module in net.modules():
        if isinstance(module, _SharedNorm):
            module.apart = apart


def running_statistics(net: nn.Module) -> list[Tensor]:
    """The running means and variances of all batch norms."""
    norms = [module for module in net.modules() if isinstance(module, Norm)]
    both = [t for norm in norms for t in (norm.running_mean, norm.running_var)]
    return [tensor for tensor in both if tensor is not None]


class _SharedNorm(nn.Module):
    """What a shared norm does otherwise than the batch norm that it also is."""

    sum_in_place: Sum
    apart = False

    def forward(self, values: Tensor) -> Tensor:
        """Norm values (N, C, ...), of which the other processes have other N."""
        if self.apart:
            return super().forward(values)  # type: ignore[no-any-return]
        with _Sharing(self.sum_in_place) as sharing:
            outputs = super().forward(values)
        if by_batch(self) and not sharing.calls:
            kind = type(self).__name__.removeprefix("Shared")
            raise ConfigError(f"{kind} does not call F.batch_norm: train with norms='local'")
        return outputs  # type: ignore[no-any-return]


class _Sharing(TorchFunctionMode):
    """Takes the statistics of `F.batch_norm` over all processes."""

    def __init__(self, sum_in_place: Sum) -> None:
        super().__init__()
        self.sum_in_place, self.calls = sum_in_place, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace the call in training mode."""
        kwargs = kwargs or {}
        if func is not F.batch_norm or not kwargs["training"]:
            return func(*args, **kwargs)
        self.calls += 1
        return batch_norm(*args, **kwargs, add_up=self._add_up)

    def _add_up(self, sums: Tensor) -> Tensor:
        return _TotalSum.apply(sums, self.sum_in_place)  # type: ignore[no-any-return,no-untyped-call]


class _TotalSum(torch.autograd.Function):
    """The sum over all processes; so is its gradient, as every process computes with it."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, add_up: Sum) -> Tensor:
        """Add up."""
        ctx.add_up = add_up
        return add_up(sums.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        """Add up what the sum means to each process."""
        return ctx.add_up(slope.clone()), None


@cache
def _shared(kind: type) -> Any:
    return type(f"Shared{kind.__name__}", (_SharedNorm, kind), {})
