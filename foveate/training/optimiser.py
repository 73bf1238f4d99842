"""The optimiser of a run, and the moving average of its weights."""

import copy
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from foveate.training.config import TrainConfig

SMALLEST_PIECE = 2048  # elements that a block of the fused kernel updates at a time
MOST_PIECES = 128  # of all parameters; a launch of the kernel takes at most 36 tensors


def make_optimiser(
    net: nn.Module, config: TrainConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Create the optimiser: Adam, or AdamW with weight decay; `clip` limits the gradient's norm.

    On a GPU, the learning rate is a tensor, so that a captured CUDA graph can read it.
    """
    on_gpu = device.type == "cuda"
    rate = torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate
    options: dict[str, Any] = {"lr": rate, "fused": on_gpu, "capturable": on_gpu}
    options["foreach"] = not on_gpu  # on a CPU, 3/4 of the time of a loop, with the same bits
    options["decoupled_weight_decay"] = config.weight_decay > 0
    kind = PiecewiseAdam if on_gpu else PlainAdam
    if not config.weight_decay:
        optimiser = kind(net.parameters(), **options)
    else:
        both: list[list[nn.Parameter]] = [[], []]
        for parameter in net.parameters():  # biases and the parameters of norms do not decay
            both[parameter.ndim < 2].append(parameter)
        rates = (config.weight_decay, 0.0)
        groups = [{"params": p, "weight_decay": w} for p, w in zip(both, rates, strict=True) if p]
        optimiser = kind(groups, **options)
    if config.clip:
        parameters = list(net.parameters())

        def limit(*_: Any) -> None:
            clip_grad_norm_(parameters, config.clip)

        optimiser.register_step_pre_hook(limit)
    return optimiser


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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

    PyTorch's fused kernel updates up to 65,536 elements of a tensor in one block, so most of the
    GPU waits: on an H200, for 32 of the 436 µs of a FovAvg step with batch 32. Here it receives
    pieces of the tensors; its arithmetic is elementwise.
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


class WeightAverage:
    """An exponential moving average of the weights and buffers of a network in training.

    The average is a network of its own, `net`, because captured CUDA graphs refer to the memory of
    the trained weights. It starts at these, and each step multiplies it by `decay`.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net, self.decay = copy.deepcopy(net), decay
        own, trained = (
            dict(n.named_parameters()) | dict(n.named_buffers()) for n in (self.net, net)
        )
        state = net.state_dict()  # other buffers are constants, and masks can be infinite
        real = [k for k, v in trained.items() if k in state and v.is_floating_point()]
        rest = [k for k, v in trained.items() if k in state and not v.is_floating_point()]
        self._averages, self._copies = ([own[k].detach() for k in names] for names in (real, rest))
        self._values, self._others = (
            [trained[k].detach() for k in names] for names in (real, rest)
        )

    def update(self, step: int) -> None:
        """Move the average towards the current weights, after each step of the optimiser.

        In the first steps, counted from 0, the decay is lower, so that the initial weights do not
        dominate the average of a short run. Integer buffers are copied.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        # On a GPU, a few launches on the current stream, without synchronisation.
        torch._foreach_lerp_(self._averages, self._values, 1 - decay)
        if self._copies:
            torch._foreach_copy_(self._copies, self._others)
