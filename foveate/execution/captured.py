"""The training step, and on a GPU the same step compiled and captured as a graph.

The step itself is three lines in `plain_step`. On a GPU it is compiled, captured and replayed on a
stream of its own, so that several runs fill the GPU side by side: `CapturedStep`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.execution.plan import Prepared, logits
from foveate.execution.precision import Precision, cast

CHUNK = 1000  # images prepared or evaluated at a time
NETWORKS = 256  # kinds of networks that one process may compile; runs of one kind share the code


def loss_of(
    net: nn.Module, images: Prepared, labels: Tensor, precision: Precision, smoothing: float = 0.0
) -> Tensor:
    """Return the cross entropy of the pooled logits, with label smoothing."""
    with cast(precision, labels.device):
        found = logits(net, images)
    found = found.float() if precision == "bf16" else found
    return F.cross_entropy(found, labels, label_smoothing=smoothing)


class Batch(NamedTuple):
    """Prepared images with their labels; `chosen` (B,) are the indices of a batch, if not all."""

    images: Prepared
    labels: Tensor
    chosen: Tensor | None = None

    def pick(self) -> tuple[Prepared, Tensor]:
        """Return the images and labels of the batch alone."""
        if self.chosen is None:
            return self.images, self.labels
        return self.images[self.chosen], self.labels[self.chosen]


class Step(Protocol):
    """One step of training: takes a batch, changes the weights, gives the loss."""

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch."""


def plain_step(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    precision: Precision,
    smoothing: float = 0.0,
) -> Step:
    """The step as one reads it in a textbook."""

    def step(batch: Batch) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(net, *batch.pick(), precision, smoothing)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


class Recording(NamedTuple):
    """A captured step: where it reads what changes from batch to batch, and leaves its loss."""

    graph: torch.cuda.CUDAGraph
    held: tuple[Tensor, ...]
    loss: Tensor


class CapturedStep:
    """The same step, compiled and recorded once as a CUDA graph, then replayed.

    The graph is made from the first full `batch`; the last of an epoch may be shorter and takes
    the plain step. Where images are chosen from all that lie on the device, the graph picks them
    itself, so these may not move. Warming up must not train, so weights, running statistics, the
    optimiser's state and the random state are put back afterwards.
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
        self.loss_of = torch.compile(loss_of, dynamic=False) if compiled else loss_of
        self.plain = plain_step(net, optimiser, precision, smoothing)
        self.recorded: Recording | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Copy what is new to where the graph reads it, and replay."""
        images, labels, chosen = batch
        if len(labels if chosen is None else chosen) != self.batch:
            return self.plain(batch)
        if self.recorded is None:
            self.recorded = self._capture(batch)
        given = (*images.inputs, labels) if chosen is None else (chosen,)
        for held, new in zip(self.recorded.held, given, strict=True):
            held.copy_(new)
        self.recorded.graph.replay()
        return self.recorded.loss

    def _capture(self, batch: Batch) -> Recording:
        if batch.chosen is None:
            *inputs, labels = (t.clone() for t in (*batch.images.inputs, batch.labels))
            images = replace(batch.images, inputs=tuple(inputs))
            batch, held = Batch(images, labels), (*inputs, labels)
        else:
            held = (batch.chosen.clone(),)
            batch = batch._replace(chosen=held[0])
        before, drawn = [t.detach().clone() for t in self._state()], torch.cuda.get_rng_state()
        with _compiling():
            for _ in range(3):
                self._step(batch)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # On the run's own stream: graphs captured on one stream share the workspace of cuBLAS,
            # and side by side they spoil each other's products. FovAvg at scale 8: 68 % right, not
            # 88 %.
            with torch.cuda.graph(graph, stream=_own_stream()):
                loss = self._step(batch)
        if len(before) < len(list(self._state())):  # the optimiser had no state before: zeros
            before += [torch.zeros_like(t) for t in list(self._state())[len(before) :]]
        for tensor, value in zip(self._state(), before, strict=True):
            tensor.data.copy_(value)
        torch.cuda.set_rng_state(drawn)
        return Recording(graph, held, loss)

    def _step(self, batch: Batch) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        given = (*batch.pick(), self.precision, self.smoothing)
        loss: Tensor = self.loss_of(self.net, *given)
        with _short_products(self.precision):
            loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _state(self) -> Iterator[Tensor]:
        """All that a step changes: weights, running statistics, Adam's moments and counts."""
        yield from self.net.parameters()
        yield from self.net.buffers()
        for parameter in self.net.parameters():
            state = self.optimiser.state.get(parameter, {})
            yield from (value for value in state.values() if isinstance(value, Tensor))


def wake_compiler() -> None:
    """Start torch's compiling processes, which take seconds to begin, while images are prepared.

    They only save time, so a torch that has them elsewhere starts them later, by itself.
    """
    with suppress(ImportError):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile every kind of network, the ninth too, without torch's remarks to its developers.

    Unless results must be repeatable, cuDNN times its ways to convolve and takes the fastest.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic
    try:
        with torch._dynamo.config.patch(recompile_limit=NETWORKS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, "torch")
            yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _short_products(precision: Precision) -> Iterator[None]:
    """With bf16, take float32 products on tensor cores too: 10 bits of each factor, not 7."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or precision == "bf16"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _own_stream() -> torch.cuda.Stream:
    """The current stream, or a new one if that is the default, on which nothing can be captured."""
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
    """The fastest step for that device."""
    if device.type == "cuda":
        return CapturedStep(net, optimiser, precision, batch, compiled, smoothing)
    return plain_step(net, optimiser, precision, smoothing)
