"""Rows of the table about photographs: wrapped backbones, and reading files."""

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import torch
from backbones import SIZE, WINDOWS, build, loop, wrap_backbone
from cases import Case, Setup, compiled, evaluating, in_float
from channels import training_step
from limits import Counts, of_network, work_of
from timing import SkippedError, Step
from torch import nn

from foveate import ScaleChannels
from foveate.data.pictures import PictureFolder
from foveate.data.shards import Shards
from foveate.execution.captured import Batch, make_step
from foveate.execution.plan import prepare
from foveate.models.zoo import model_config
from foveate.training.config import TrainConfig
from foveate.training.optimiser import make_optimiser
from foveate.training.state import keep_freed_memory

COMPILED_BATCH = 4
PLANE = 416  # pixels a side of one image with as many pixels (97 %) as seven patches of 160
Change = Callable[[nn.Module], nn.Module]


def unchanged(backbone: nn.Module) -> nn.Module:
    return backbone


def compile_module(backbone: nn.Module) -> nn.Module:
    return torch.compile(backbone, dynamic=False)  # type: ignore[return-value]


def wrapped_evaluation(setup: Setup, name: str, batch: int) -> Case:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 448, 448, device=setup.device)
    net = wrap_backbone(build(name)).to(setup.device).eval()
    whole = torch.randn(batch, 3, PLANE, PLANE, device=setup.device)

    def compile_loop() -> Step:
        if batch != COMPILED_BATCH:
            raise SkippedError(f"compiled for batch {COMPILED_BATCH} only")
        other = wrap_backbone(compile_module(net.backbone))
        return evaluating(setup, lambda: loop(other, images))

    def alternative() -> Step:
        one = build(name, PLANE).to(setup.device).eval()
        return evaluating(setup, lambda: one(whole))

    return Case(
        title=f"{name}, 7 channels of 160 pixels, evaluation, batch {batch}",
        ours="`net(images)`",
        alternative=f"the backbone on one image of {PLANE} pixels a side",
        candidates={
            "ours": lambda: evaluating(setup, lambda: net(images)),
            "loop": lambda: evaluating(setup, lambda: loop(net, images)),
            "compiled": compiled(setup, compile_loop),
            "alternative": alternative,
        },
        counts=wrapped_counts(setup, name, batch, training=False),
        precision=setup.precision,
    )


def wrapped_step(setup: Setup, name: str) -> Case:
    keep_freed_memory()
    torch.manual_seed(0)
    batch = setup.choose(cpu=4, gpu=32, quick=1)
    images = torch.randn(batch, 3, 448, 448, device=setup.device)
    labels = torch.randint(0, 10, (batch,), device=setup.device)
    whole = torch.randn(batch, 3, PLANE, PLANE, device=setup.device)

    def network(change: Change = unchanged) -> ScaleChannels:
        backbone = build(name).to(setup.device)
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return wrap_backbone(change(backbone)).train()

    def ours() -> Step:
        net = network()
        config = TrainConfig(model=model_config("fovavg"))  # for the rate and the kind of Adam
        optimiser = make_optimiser(net, config, setup.device)
        options = {"batch": batch, "compiled": False}
        step = make_step(net, optimiser, setup.precision, setup.device, **options)  # type: ignore[arg-type]

        def run() -> None:
            with torch.no_grad():
                prepared = prepare(net, images, setup.precision)
            step(Batch(prepared, labels))

        return run

    def looped(change: Change = unchanged) -> Step:
        net = network(change)
        return training_step(in_float(setup, lambda: loop(net, images)), net, labels)

    def alternative() -> Step:
        one = build(name, PLANE).to(setup.device).train()
        one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return training_step(in_float(setup, lambda: one(whole)), one, labels)

    return Case(
        title=f"{name}, 7 channels of 160 pixels, training step, batch {batch}",
        ours="cutting the patches, and the step of `foveate train`",
        alternative=f"the backbone on one image of {PLANE} pixels a side",
        candidates={
            "ours": ours,
            "loop": looped,
            "compiled": compiled(setup, lambda: looped(compile_module)),
            "alternative": alternative,
        },
        counts=wrapped_counts(setup, name, batch, training=True),
        precision=setup.precision,
    )


def wrapped_counts(setup: Setup, name: str, batch: int, training: bool) -> Counts:
    work = work_of(build(name), torch.randn(len(tuple(WINDOWS)), 3, SIZE, SIZE), training)
    return of_network(work, (batch, 3, 448, 448), training, setup.width)


# Reading files


def reading(setup: Setup) -> Case:
    from photo_input import patch_pass, resized_pass, torchvision_pass

    keep_freed_memory()
    count = 16 if setup.quick else 192
    folder = setup.photos or make_photos(Path(mkdtemp()), 2 * count)
    images = Shards([PictureFolder(folder)])
    count = min(count, len(images.labels("train")))
    order = torch.randperm(len(images.labels("train")), generator=torch.Generator().manual_seed(0))
    ours = resized_pass if setup.gpu else patch_pass
    return Case(
        title=f"Reading {count} JPEG files with two workers",
        ours="the input of `foveate train`"
        + ("; the GPU cuts the patches" if setup.gpu else ", cut into seven patches of 160"),
        alternative="torchvision: ImageFolder, RandomResizedCrop(224), a flip, normalisation",
        candidates={
            "ours": lambda: ours(images, order[:count]),
            "alternative": lambda: torchvision_pass(folder, count),
        },
    )


def make_photos(folder: Path, count: int) -> Path:
    """Write smooth random images of 640 x 480 pixels as JPEG files of two classes."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number % 2}" / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        small.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    return folder
