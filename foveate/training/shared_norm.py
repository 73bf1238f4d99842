"""Batch norm whose mean and variance are over all processes of a run, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foveate.models.recompute import Norm, batch_sums, by_batch, normalise, remember, statistics

Sum = Callable[[Tensor], Tensor]
"""Adds up a tensor over all processes, in place."""


def share_norms(net: nn.Module, add_up: Sum) -> None:
    """Let every batch norm of the network take its statistics over all processes.

    A norm changes its class, not its place: parameters, buffers and their names stay. PyTorch's
    SyncBatchNorm is for GPUs alone; this one runs wherever `add_up` does.
    """
    for module in net.modules():
        if type(module) in _SHARED:
            module.__class__ = _SHARED[type(module)]
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
        if self.apart or not by_batch(self):
            return super().forward(values)  # type: ignore[no-any-return]
        assert isinstance(self, Norm)
        self._check_input_dim(values)
        found = statistics(_TotalSum.apply(batch_sums(values), self.sum_in_place))
        remember(self, found)
        return normalise(self, values, found.mean, found.variance)

    def add_up(self, sums: Tensor) -> Tensor:
        """Add up over the processes; `foveate.models.recompute` asks for it."""
        return sums if self.apart else self.sum_in_place(sums.clone())


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


_SHARED: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Shared{kind.__name__}", (_SharedNorm, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}
