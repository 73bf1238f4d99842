"""The optimiser of a run, and all that must survive an interruption as named tensors."""

from pathlib import Path

import torch
from torch import Tensor, nn

from foveate.models.pretrained import load_weights
from foveate.training.config import TrainConfig
from foveate.training.randomness import random_tensors, restore_random


def adam(net: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Make the optimiser; on a GPU its rate is a tensor, so that a captured step can read it."""
    on_gpu = device.type == "cuda"
    rate = torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate
    return torch.optim.Adam(net.parameters(), lr=rate, fused=on_gpu, capturable=on_gpu)


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
    return tensors | random_tensors(_device(net))


def put_back(
    net: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path
) -> None:
    """Bring net, optimiser and random state to what `state_of` gave; `path` is where it was."""
    restore_random(tensors, _device(net))
    weights = {k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")}
    load_weights(net, weights, path)
    for name, parameter in net.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"adam.{key}.{name}" in tensors:
                value = tensors[f"adam.{key}.{name}"]
                on_device = key != "step" or parameter.is_cuda
                optimiser.state[parameter][key] = value.to(parameter.device) if on_device else value


def _device(net: nn.Module) -> torch.device:
    return next(net.parameters()).device
