"""The state of a run: optimiser, named tensors for a checkpoint, and random states of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from foveate.models.pretrained import load_weights
from foveate.training.config import TrainConfig

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def adam(net: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Make the optimiser; on a GPU its rate is a tensor, so that a captured step can read it.

    With weight decay it is AdamW, and biases and norms do not decay. With `clip` the norm of the
    gradient is limited before each step.
    """
    on_gpu = device.type == "cuda"
    rate = torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate
    options: dict[str, Any] = {"lr": rate, "fused": on_gpu, "capturable": on_gpu}
    if not config.weight_decay:
        optimiser = torch.optim.Adam(net.parameters(), **options)
    else:
        both: list[list[nn.Parameter]] = [[], []]
        for parameter in net.parameters():
            both[parameter.ndim < 2].append(parameter)
        rates = (config.weight_decay, 0.0)
        groups = [{"params": p, "weight_decay": w} for p, w in zip(both, rates, strict=True) if p]
        optimiser = torch.optim.AdamW(groups, **options)
    if config.clip:
        parameters = list(net.parameters())

        def limit(*_: Any) -> None:
            clip_grad_norm_(parameters, config.clip)

        optimiser.register_step_pre_hook(limit)
    return optimiser


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Change the learning rate."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def state_of(net: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, running statistics, Adam's state, and the random states of the CPU and the GPU."""
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"adam.{key}.{name}"] = value
    tensors["random"] = torch.get_rng_state()
    if (device := next(net.parameters()).device).type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def put_back(
    net: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path
) -> None:
    """Restore what `state_of` gave; `path` is the file it was in.

    A run that moved to a GPU keeps the GPU's random state.
    """
    torch.set_rng_state(tensors["random"].to(torch.uint8))
    if (device := next(net.parameters()).device).type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].to(torch.uint8), device)
    weights = {k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")}
    load_weights(net, weights, path)
    for name, parameter in net.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"adam.{key}.{name}" in tensors:
                value = tensors[f"adam.{key}.{name}"]
                if key != "step":
                    value = torch.empty_like(parameter).copy_(value)  # with the parameter's strides
                elif parameter.is_cuda:
                    value = value.to(parameter.device)
                optimiser.state[parameter][key] = value


class RandomStates:
    """The random states of one run: PyTorch's while the run works, set aside while others do.

    On a GPU the default generator is given a state object that belongs to this run. A captured step
    keeps referring to that object, so runs that replay side by side never share draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._generator = _default_generator(device)
        if self._generator is not None:
            self._gpu = self._generator.clone_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this run's random states in the block; the caller's are back afterwards."""
        cpu = torch.get_rng_state()
        torch.set_rng_state(self._cpu)
        try:
            with self._gpu_active():
                yield
        finally:
            self._cpu = torch.get_rng_state()
            torch.set_rng_state(cpu)

    @contextmanager
    def _gpu_active(self) -> Iterator[None]:
        if self._generator is None:
            yield
            return
        before = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._gpu)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(before)


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type != "cuda":
        return None
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def deterministic(strict: bool) -> Iterator[None]:
    """Choose GPU kernels by rule instead of by timing, and only those that add in a fixed order.

    With `strict`, PyTorch replaces or warns of every operation that might add in another order. The
    paper's networks have none: there it would only slow down the gradient of a maximum (FovMax on
    one H200: 18 % a step), while the rest costs 2 %.
    The caller's settings are restored afterwards.
    """
    from torch._inductor import config as inductor  # takes seconds, and only GPUs need it

    os.environ.setdefault(WORKSPACE, ":4096:8")  # PyTorch insists; cuBLAS reads it when it starts
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(strict or algorithms, warn_only=warn_only or not algorithms)
    # Filling would cost a pass over every new tensor and change no result of ours.
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    try:
        with inductor.patch(deterministic=True):
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
