"""The training step, on a GPU captured as a CUDA graph.

`plain_step` is the ordinary training step. `CapturedStep` captures and replays it on its own CUDA
stream, so that several runs can share a GPU.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.execution.fused import FusedGradients, find_fused
from foveate.execution.fused_winners import find_winners
from foveate.execution.plan import Prepared, logits
from foveate.execution.precision import Precision, cast

CHUNK = 1000  # images to prepare or evaluate at a time
NETWORKS = 256  # networks that one process can compile; runs of one kind share the code


def loss_of(
    net: nn.Module, images: Prepared, labels: Tensor, precision: Precision, smoothing: float = 0.0
) -> Tensor:
    """Return the cross entropy of the pooled logits, with label smoothing."""
    with cast(precision, labels.device):
        found = logits(net, images)
    found = found.float() if precision == "bf16" else found
    return F.cross_entropy(found, labels, label_smoothing=smoothing)


class Batch(NamedTuple):
    """Prepared images and labels; `indices` (B,) selects a batch, None means all images."""

    images: Prepared
    labels: Tensor
    indices: Tensor | None = None

    def select(self) -> tuple[Prepared, Tensor]:
        """Return the selected images and labels."""
        if self.indices is None:
            return self.images, self.labels
        return self.images[self.indices], self.labels[self.indices]


Step: TypeAlias = Callable[[Batch], Tensor]
"""One training step: updates the weights with a batch and returns the loss."""


def plain_step(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    precision: Precision,
    smoothing: float = 0.0,
) -> Step:
    """Return the plain PyTorch training step: forward, backward, optimiser."""

    def step(batch: Batch) -> Tensor:
        net.zero_grad(set_to_none=True)
        loss = loss_of(net, *batch.select(), precision, smoothing)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


class Recording(NamedTuple):
    """A captured step: the graph, its input tensors (copied to for each batch) and its loss."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    loss: Tensor


class CapturedStep:
    """The training step, captured once as a CUDA graph, then replayed.

    The step has its own kernels if there are any for this network, and is otherwise compiled. The
    graph is captured for the first batch of size `batch`. Smaller batches, such as the last of an
    epoch, are not captured. If all images are on the device, the graph selects the batch
    itself, so the tensors of images and labels must not be replaced. The warm-up must not train:
    weights, running statistics, optimiser state and random state are restored afterwards.
    """

    def __init__(
        self,
        net: nn.Module,
        optimiser: torch.optim.Optimizer,
        precision: Precision,
        batch: int,
        compiled: bool,
        smoothing: float = 0.0,
    ) -> None:
        self.smoothing = smoothing
        self.net, self.optimiser, self.precision, self.batch = net, optimiser, precision, batch
        self.compiled, self.loss_of = compiled, loss_of
        self.plain = plain_step(net, optimiser, precision, smoothing)
        self.fused: FusedGradients | None = None
        self.recorded: Recording | None = None
        self.begun = False

    def __call__(self, batch: Batch) -> Tensor:
        """Copy the batch to the graph's inputs and replay the graph."""
        images, labels, indices = batch
        if not self.begun:
            self._begin(images)
        if len(labels if indices is None else indices) != self.batch:
            return self.plain(batch) if self.fused is None else self._step(batch)
        if self.recorded is None:
            self.recorded = self._capture(batch)
        given = (*images.inputs, labels) if indices is None else (indices,)
        for target, new in zip(self.recorded.inputs, given, strict=True):
            target.copy_(new)
        self.recorded.graph.replay()
        return self.recorded.loss

    def _begin(self, images: Prepared) -> None:
        """Choose kernels of its own for the step, or compile it; the compiler takes seconds."""
        self.begun = True
        if self.precision == "bf16":
            given = (self.net, images, self.batch)
            self.fused = find_fused(*given) or find_winners(*given)
        if self.fused is None and self.compiled:
            self.loss_of = torch.compile(loss_of, dynamic=False)

    def _capture(self, batch: Batch) -> Recording:
        if batch.indices is None:
            *inputs, labels = (t.clone() for t in (*batch.images.inputs, batch.labels))
            images = replace(batch.images, inputs=tuple(inputs))
            batch, static_inputs = Batch(images, labels), (*inputs, labels)
        else:
            static_inputs = (batch.indices.clone(),)
            batch = batch._replace(indices=static_inputs[0])
        before, drawn = [t.detach().clone() for t in self._state()], torch.cuda.get_rng_state()
        with _compiling() if self.fused is None else nullcontext():
            for _ in range(3):
                self._step(batch)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # On a separate stream per run: graphs captured on one stream share a cuBLAS workspace
            # and corrupt each other's products when they run concurrently. Accuracy of FovAvg at
            # scale 8 with a shared stream: 68 % instead of 88 %.
            with torch.cuda.graph(graph, stream=_own_stream()):
                loss = self._step(batch)
        if len(before) < len(list(self._state())):  # the new optimiser state starts at zero
            before += [torch.zeros_like(t) for t in list(self._state())[len(before) :]]
        for tensor, value in zip(self._state(), before, strict=True):
            tensor.data.copy_(value)
        torch.cuda.set_rng_state(drawn)
        return Recording(graph, static_inputs, loss)

    def _step(self, batch: Batch) -> Tensor:
        if self.fused is not None:
            loss = self.fused(*batch, self.smoothing)
            self.optimiser.step()
            return loss
        self.net.zero_grad(set_to_none=True)
        given = (*batch.select(), self.precision, self.smoothing)
        loss = self.loss_of(self.net, *given)
        with _allow_tf32(self.precision):
            loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _state(self) -> Iterator[Tensor]:
        """Yield everything that a step changes: weights, running statistics, optimiser state."""
        yield from self.net.parameters()
        yield from self.net.buffers()
        for parameter in self.net.parameters():
            state = self.optimiser.state.get(parameter, {})
            yield from (value for value in state.values() if isinstance(value, Tensor))


def warm_up_compiler() -> None:
    """Start the worker processes of torch.compile in advance, because they take seconds to start.

    This is optional: versions of torch without this function start the workers on first use.
    """
    with suppress(ImportError):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


@contextmanager
def _compiling() -> Iterator[None]:
    """Raise torch's recompile limit (8 by default) and suppress its developer warnings.

    Unless deterministic results are required, cuDNN and the compiler choose kernels by timing.
    """
    from torch._inductor import config as inductor  # takes seconds to import

    before = torch.backends.cudnn.benchmark
    exact = torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark = not exact
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=NETWORKS),
            inductor.patch(deterministic=exact),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, "torch")
            warnings.filterwarnings("ignore", ".*code generation for complex", UserWarning)
            yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _allow_tf32(precision: Precision) -> Iterator[None]:
    """With bf16, allow TF32 for float32 products, which keeps 10 mantissa bits against 7."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or precision == "bf16"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _own_stream() -> torch.cuda.Stream:
    """Return the current stream, or a new one if it is the default, which cannot be captured."""
    current = torch.cuda.current_stream()
    return torch.cuda.Stream() if current == torch.cuda.default_stream() else current


def make_step(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    precision: Precision,
    device: torch.device,
    *,
    batch: int,
    compiled: bool = True,
    smoothing: float = 0.0,
) -> Step:
    """Return the fastest training step for a device."""
    if device.type == "cuda":
        return CapturedStep(net, optimiser, precision, batch, compiled, smoothing)
    return plain_step(net, optimiser, precision, smoothing)
