"""The state of a run: tensors of a checkpoint, random states and determinism."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from foveate.models.pretrained import load_weights

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
MOST_KEPT = 2**31 - 1  # bytes, the largest int


def keep_freed_memory() -> None:
    """Let the C library of GNU keep freed memory for the rest of this process.

    The system fills new memory with zeros. A training step of EfficientNet-Lite0 in 7 channels of
    160 pixels, 4 images, takes 1.5 s of one core instead of 1.8 s.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, MOST_KEPT)
            libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)


def capture_state(net: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights, buffers, Adam's state, and the random states of the CPU and the GPU."""
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"adam.{key}.{name}"] = value
    tensors["random"] = torch.get_rng_state()
    if (device := next(net.parameters()).device).type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_state(
    net: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path
) -> None:
    """Restore the output of `capture_state`; `path` is the checkpoint, for error messages."""
    torch.set_rng_state(tensors["random"].to(torch.uint8))
    if (device := next(net.parameters()).device).type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].to(torch.uint8), device)
    load_weights(net, select_prefix(tensors, "net."), path)
    for name, parameter in net.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"adam.{key}.{name}" in tensors:
                value = tensors[f"adam.{key}.{name}"]
                if key != "step":
                    value = torch.empty_like(parameter).copy_(value)  # has the parameter's strides
                elif parameter.is_cuda:
                    value = value.to(parameter.device)
                optimiser.state[parameter][key] = value


def select_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


class RandomStates:
    """The random states of one run, which replace PyTorch's while the run is active.

    Each run has its own state object on a GPU, to which its captured CUDA graphs refer.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._generator: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
            self._gpu = self._generator.clone_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this run's random states within the block, and restore the caller's afterwards."""
        cpu, generator = torch.get_rng_state(), self._generator
        torch.set_rng_state(self._cpu)
        if generator is not None:
            gpu = generator.graphsafe_get_state()
            generator.graphsafe_set_state(self._gpu)
        try:
            yield
        finally:
            if generator is not None:
                generator.graphsafe_set_state(gpu)
            self._cpu = torch.get_rng_state()
            torch.set_rng_state(cpu)


@contextmanager
def deterministic(strict: bool) -> Iterator[None]:
    """Use deterministic GPU kernels within the block, chosen by rule and not by timing.

    With `strict`, PyTorch also replaces, or warns of, every operation that could sum in varying
    order. The paper's networks have no such operation: there, `strict` would only slow down the
    gradient of a maximum (FovMax on one H200: 18 % per step), while the rest costs 2 %.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")  # required by PyTorch; cuBLAS reads it at start
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(strict or algorithms, warn_only=warn_only or not algorithms)
    # Filling new tensors would cost a pass over each of them and change none of our results.
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
