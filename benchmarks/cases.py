"""The rows of the table: what each of them compares, and its limits."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from channels import fovavg, loop_over_channels, patch, training_step
from limits import Counts, of_network, of_resampling, work_of
from timing import Compiler, Factory, SkippedError, Step
from torch import Tensor

from foveate import create_model
from foveate.execution.captured import Batch, make_step
from foveate.execution.plan import predict, prepare
from foveate.execution.precision import Precision, cast
from foveate.models.zoo import model_config
from foveate.resampling import foveate
from foveate.training.config import TrainConfig
from foveate.training.optimiser import make_optimiser
from foveate.training.state import keep_freed_memory

Forward = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where and how thoroughly to measure."""

    device: torch.device
    quick: bool
    compiler: Compiler
    photos: Path | None = None

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def precision(self) -> Precision:
        return "bf16" if self.gpu else "float32"

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return 2 if self.gpu else 4

    def choose(self, cpu: int, gpu: int, quick: int) -> int:
        """Return the batch for this device."""
        return quick if self.quick else gpu if self.gpu else cpu


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: its candidates by column, what they are, and their limits."""

    title: str
    ours: str
    candidates: dict[str, Factory]
    alternative: str = ""
    counts: Counts | None = None
    precision: Precision = "float32"


def evaluating(setup: Setup, forward: Forward) -> Step:
    """Return a step that evaluates without gradients, in the precision of the device."""

    def step() -> None:
        with torch.no_grad(), cast(setup.precision, setup.device):
            forward()

    return step


def compiled(setup: Setup, make: Callable[[], Step]) -> Factory:
    """Compile a candidate within the time that is left for compiling."""

    def factory() -> Step:
        if setup.quick:
            raise SkippedError("--quick does not compile")
        with setup.compiler.limit():
            torch._dynamo.reset()
            step = make()
            step()
        return step

    return factory


def compile_forward(setup: Setup, forward: Forward) -> Forward:
    """Compile with static shapes, and on a GPU with CUDA graphs."""
    mode = "reduce-overhead" if setup.gpu else "default"
    return torch.compile(forward, dynamic=False, mode=mode)


# FovAvg


def digits(setup: Setup) -> tuple[Tensor, Tensor]:
    """Return images of digits and labels, with random values."""
    torch.manual_seed(0)
    count = setup.choose(cpu=32, gpu=128, quick=4)
    images = torch.randn(count, 1, 112, 112, device=setup.device)
    return images, torch.randint(0, 10, (count,), device=setup.device)


def in_float(setup: Setup, forward: Forward) -> Forward:
    """Compute in the precision of the device and return float32 logits."""

    def run() -> Tensor:
        with cast(setup.precision, setup.device):
            found = forward()
        return found.float()

    return run


def fovavg_counts(setup: Setup, count: int, training: bool) -> Counts:
    net = fovavg("cpu")
    seen = torch.randn(len(net.scales), 1, net.size, net.size)
    work = work_of(net.backbone, seen, training)
    return of_network(work, (count, 1, 112, 112), training, setup.width)


def fovavg_step(setup: Setup) -> Case:
    keep_freed_memory()
    images, labels = digits(setup)

    def ours() -> Step:
        net = fovavg(setup.device)
        config = TrainConfig(model=model_config("fovavg"))
        optimiser = make_optimiser(net, config, setup.device)
        with torch.no_grad():  # more images than a batch, because a step also selects its batch
            prepared = prepare(net, torch.cat([images] * 4), setup.precision)
        chosen = torch.randperm(4 * len(images), device=setup.device)[: len(images)]
        batch = Batch(prepared, torch.cat([labels] * 4), chosen)
        step = make_step(net, optimiser, setup.precision, setup.device, batch=len(labels))
        return lambda: step(batch)

    def loop(use: Callable[[Forward], Forward] = lambda forward: forward) -> Step:
        net = fovavg(setup.device)
        forward = use(in_float(setup, lambda: loop_over_channels(net, images)))
        return training_step(forward, net, labels)

    def cnn() -> Step:
        net = create_model("cnn").to(setup.device)
        return training_step(in_float(setup, lambda: net(images)), net, labels)

    return Case(
        title=f"FovAvg, 17 channels, training step, batch {len(labels)}",
        ours="the step of `foveate train`, on images whose patches were cut before the run",
        alternative="the paper's plain CNN on the whole image (94 % of the pixels)",
        candidates={
            "ours": ours,
            "loop": loop,
            "compiled": compiled(setup, lambda: loop(partial(compile_forward, setup))),
            "alternative": cnn,
        },
        counts=fovavg_counts(setup, len(labels), training=True),
        precision=setup.precision,
    )


def fovavg_evaluation(setup: Setup) -> Case:
    images, _ = digits(setup)
    net, cnn = fovavg(setup.device).eval(), create_model("cnn").to(setup.device).eval()

    def loop() -> Tensor:
        return loop_over_channels(net, images)

    return Case(
        title=f"FovAvg, 17 channels, evaluation, batch {len(images)}",
        ours="`foveate.execution.plan.predict`, which all commands use",
        alternative="the paper's plain CNN on the whole image (94 % of the pixels)",
        candidates={
            "ours": lambda: lambda: predict(net, images, setup.precision),
            "loop": lambda: evaluating(setup, loop),
            "compiled": compiled(setup, lambda: evaluating(setup, compile_forward(setup, loop))),
            "alternative": lambda: evaluating(setup, lambda: cnn(images)),
        },
        counts=fovavg_counts(setup, len(images), training=False),
        precision=setup.precision,
    )


# The resampling operation


def resampling(setup: Setup, antialias: bool, backward: bool) -> Case:
    torch.manual_seed(0)
    scales, size = fovavg("cpu").scales, 28
    count = setup.choose(cpu=128, gpu=4096, quick=4)
    images = torch.randn(count, 1, 112, 112, device=setup.device, requires_grad=backward)
    gradient = torch.randn(count, len(scales), 1, size, size, device=setup.device)

    def loop() -> Tensor:
        return torch.stack([patch(images, scale, size, antialias) for scale in scales], 1)

    def sampled() -> Tensor:
        if antialias:
            raise SkippedError("grid_sample has no antialiasing")
        found = F.grid_sample(images, grid, "bilinear", padding_mode="border", align_corners=False)
        return found.unflatten(2, (len(scales), size)).transpose(1, 2)  # type: ignore[no-any-return]

    def step(forward: Forward) -> Step:
        def run() -> None:
            found = forward()
            if backward:
                images.grad = None
                found.backward(gradient)

        return run

    grid = sample_grid(scales, size, 112).to(setup.device).expand(count, -1, -1, -1)
    kind = "antialiased" if antialias else "bilinear"
    which = "forward and backward" if backward else "forward"
    return Case(
        title=f"Resampling, {kind}, {which}, 17 channels of {count} images",
        ours="`foveate.foveate(images, scales, 28)`",
        alternative="one `F.grid_sample` for all channels",
        candidates={
            "ours": lambda: step(lambda: foveate(images, scales, size, antialias=antialias)),
            "loop": lambda: step(loop),
            "compiled": compiled(setup, lambda: step(compile_forward(setup, loop))),
            "alternative": lambda: step(sampled),
        },
        counts=of_resampling((count, 1, 112, 112), scales, size, antialias, backward),
    )


def sample_grid(scales: tuple[float, ...], size: int, side: int) -> Tensor:
    """Return the sample points of all channels for F.grid_sample, (1, S * P, P, 2)."""
    offsets = torch.arange(size) + (0.5 - size / 2)
    at = 2 * offsets * torch.tensor(scales)[:, None] / side  # -1 and 1 are the borders
    y = at[:, :, None].expand(-1, -1, size)
    x = at[:, None, :].expand(-1, size, -1)
    return torch.stack((x, y), -1).flatten(0, 1)[None]
