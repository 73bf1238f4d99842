"""Adam without an import of the compiler, and on a GPU with large parameters in pieces."""

from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

SMALLEST_PIECE = 2048  # elements that a block of the fused kernel updates at a time
MOST_PIECES = 128  # of all parameters; a launch of the kernel takes at most 36 tensors


class PlainAdam(torch.optim.Adam):
    """`torch.optim.Adam` without decorators that import `torch._dynamo`, which takes a second.

    They prevent or interrupt compilation, and our steps call no compiled optimiser.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters."""
        unwrap(torch.optim.Adam.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters; a closure is not supported."""
        unwrap(torch.optim.Adam.step)(self)


class PiecewiseAdam(PlainAdam):
    """`torch.optim.Adam` with ``fused=True``; results and state are identical.

    PyTorch's fused kernel updates up to 65,536 elements of a tensor in one block, one after the
    other. The parameters of the paper's networks fit into few blocks, so that most of the GPU
    waits: on an H200, for 32 of the 436 µs of a FovAvg step with batch 32. Here the kernel receives
    pieces of the tensors. Its arithmetic is elementwise, so the pieces do not change the results.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters; a closure is not supported."""
        total = sum(p.numel() for group in self.param_groups for p in group["params"])
        size = SMALLEST_PIECE * -(-total // (SMALLEST_PIECE * MOST_PIECES))
        for group in self.param_groups:
            lists = [list[Tensor]() for _ in range(6)]
            self._init_group(group, *lists)  # type: ignore[no-untyped-call]
            *tensors, _, steps = lists
            if not steps:
                continue
            torch._foreach_add_(steps, 1)
            pieces: list[list[Tensor]] = [[] for _ in range(5)]
            for step, *alike in zip(steps, *tensors, strict=True):
                parts = [_split(tensor, size, alike) for tensor in alike]
                for found, new in zip(pieces, (*parts, [step] * len(parts[0])), strict=True):
                    found.extend(new)
            update: Any = (
                torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            )
            update(
                *pieces[:4], [], pieces[4], lr=group["lr"], beta1=group["betas"][0],
                beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
                amsgrad=False, maximize=False,
            )  # fmt: skip


def _split(tensor: Tensor, size: int, alike: list[Tensor]) -> list[Tensor]:
    """Split a tensor into pieces of `size` elements, if all of `alike` are contiguous."""
    if not all(other.is_contiguous() for other in alike):
        return [tensor]
    return list(tensor.view(-1).split(size))
