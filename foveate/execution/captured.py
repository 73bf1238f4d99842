"""How a training step is made fast; the step itself is three lines in `plain_step`.

- What never changes for a fixed image (its patches, cut into windows, and their moments) is
  computed once and stays on the device: `prepare`.
- On a GPU the step is compiled, captured as a graph and replayed on a stream of its own, so that
  several runs fill the GPU side by side: `CapturedStep`.
"""
# Shape letters: N images, S scale channel, C image channel, m windows along an axis, K classes.

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.execution import windows as fast
from foveate.execution.exact import untouched
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.sliding import SlidingChannels
from foveate.training.config import Precision

Inputs = tuple[Tensor, ...]
CHUNK = 1000  # images prepared or evaluated at a time
NETWORKS = 256  # kinds of networks that one process may compile; runs of one kind share the code


def prepare(net: nn.Module, images: Tensor, precision: Precision) -> Inputs:
    """Compute, once, what the network needs of images (N, C, H, W); `answer` takes it from there.

    On a GPU, networks on a `ConvNet` get the windows (N, S, m, m, 16 C) of their patches, and for
    each image the mean (9 C,) and the mean square (9 C, 9 C) of all its 3 × 3 windows. A network
    that slides over a canvas gets the canvas, and in a tensor (N, 0, H, W) the size of the images.
    A network with hooks or of another type gets the images.
    """
    if not untouched([net]):
        return (images,)
    patches = net.patches(images) if type(net) is ScaleChannels else images
    if not images.is_cuda:
        return (patches,)
    if type(net) is SlidingChannels and net.seamless():
        size = images.new_empty(len(images), 0, *images.shape[2:])
        return net.canvas(images).to(dtype(precision)), size
    if not windowed(net):
        return (patches,)
    cut = fast.windows(patches.flatten(0, -4)).unflatten(0, (len(images), -1))
    mean, covariance = fast.window_moments(cut.flatten(1, 3).double())
    square = covariance + mean[:, :, None] * mean[:, None, :]
    return cut, mean.float(), square.float()


def windowed(net: nn.Module) -> bool:
    """Whether the network begins with a `ConvNet` that sees each image as fixed patches."""
    if type(net) is ScaleChannels and net.recompute:
        return False  # groups of channels are shown to the backbone as they are
    backbone = net.backbone if type(net) is ScaleChannels else net
    if not isinstance(backbone, ConvNet) or not backbone.is_plain():
        return False
    return backbone.size % 2 == 0 and fast.fits(backbone.trunk)


def answer(net: nn.Module, inputs: Inputs) -> Tensor:
    """Give the logits of prepared images."""
    if len(inputs) == 1:
        (patches,) = inputs
        if isinstance(net, ScaleChannels) and patches.ndim == 5:
            return net.combine(net.answer(patches))
        return net(patches)  # type: ignore[no-any-return]
    if isinstance(net, SlidingChannels):
        canvas, size = inputs
        layout = net.layout(*size.shape[2:])
        if net.one_window_wins() and net.training:
            return net.winners(canvas, layout)
        return net.combine(net.answer(canvas, layout))
    cut, means, squares = inputs
    backbone = net.backbone if isinstance(net, ScaleChannels) else net
    assert isinstance(backbone, ConvNet)
    mean = means.mean(0)
    moments = fast.Moments(mean, squares.mean(0) - mean[:, None] * mean)
    features = fast.run(backbone.trunk, cut.flatten(0, 1), moments)
    if not isinstance(net, ScaleChannels):
        return backbone.classify(features)
    outputs = backbone.classify(features, net.draw_kept(means))
    return net.combine(outputs.unflatten(0, cut.shape[:2]))


def dtype(precision: Precision) -> torch.dtype:
    """The type in which convolutions are computed."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def cast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Compute convolutions and products in that precision."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def loss_of(net: nn.Module, inputs: Inputs, labels: Tensor, precision: Precision) -> Tensor:
    """Cross entropy of the pooled logits."""
    with cast(precision, labels.device):
        logits = answer(net, inputs)
    return F.cross_entropy(logits.float() if precision == "bf16" else logits, labels)


class Batch(NamedTuple):
    """Prepared images with their labels; `chosen` (B,) says which of them are meant, if not all."""

    inputs: Inputs
    labels: Tensor
    chosen: Tensor | None = None


def pick(inputs: Inputs, labels: Tensor, chosen: Tensor | None = None) -> tuple[Inputs, Tensor]:
    """Read the images and labels that a `Batch` means."""
    if chosen is None:
        return inputs, labels
    return tuple(t[chosen] for t in inputs), labels[chosen]


class Step(Protocol):
    """One step of training: takes a batch, changes the weights, gives the loss."""

    def __call__(self, inputs: Inputs, labels: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Train on one `Batch`."""


def plain_step(net: nn.Module, optimiser: torch.optim.Optimizer, precision: Precision) -> Step:
    """The step as one reads it in a textbook."""

    def step(inputs: Inputs, labels: Tensor, chosen: Tensor | None = None) -> Tensor:
        inputs, labels = pick(inputs, labels, chosen)
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(net, inputs, labels, precision)
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
    ) -> None:
        self.net, self.optimiser, self.precision, self.batch = net, optimiser, precision, batch
        self.loss_of = torch.compile(loss_of, dynamic=False) if compiled else loss_of
        self.plain = plain_step(net, optimiser, precision)
        self.recorded: Recording | None = None

    def __call__(self, inputs: Inputs, labels: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Copy what is new to where the graph reads it, and replay."""
        if len(labels if chosen is None else chosen) != self.batch:
            return self.plain(inputs, labels, chosen)
        if self.recorded is None:
            self.recorded = self._capture(Batch(inputs, labels, chosen))
        given = (*inputs, labels) if chosen is None else (chosen,)
        for held, new in zip(self.recorded.held, given, strict=True):
            held.copy_(new)
        self.recorded.graph.replay()
        return self.recorded.loss

    def _capture(self, batch: Batch) -> Recording:
        if batch.chosen is None:
            *inputs, labels = (t.clone() for t in (*batch.inputs, batch.labels))
            batch, held = Batch(tuple(inputs), labels), (*inputs, labels)
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
        inputs, labels = pick(*batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss: Tensor = self.loss_of(self.net, inputs, labels, self.precision)
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
) -> Step:
    """The fastest step for that device."""
    if device.type == "cuda":
        return CapturedStep(net, optimiser, precision, batch, compiled)
    return plain_step(net, optimiser, precision)


@torch.no_grad()
def predict(net: nn.Module, images: Tensor, precision: Precision) -> Tensor:
    """Give the logits (N, K) of images that are on the network's device, in evaluation mode."""
    was_training = net.training
    net.eval()
    parts = []
    for chunk in torch.split(images, CHUNK):
        with cast(precision, images.device):
            parts.append(answer(net, prepare(net, chunk, precision)).float())
    net.train(was_training)
    return torch.cat(parts)
