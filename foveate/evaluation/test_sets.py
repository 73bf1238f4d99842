"""Test sets of a run, rescaled to any scale by its recipe, and the speed of its network."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from foveate.data.shards import Shards, is_shards
from foveate.data.sources import Load
from foveate.data.splits import Source, Split, SplitName
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.images import BorderMode, View, check_border_mode, check_view
from foveate.evaluation.calibration import DISAGREEMENT, Calibration, choose_tolerance
from foveate.evaluation.curve import AtScale, eval_mode, measure_accuracy, rescaled_batches
from foveate.evaluation.models import frame_of
from foveate.execution.plan import Prepared, outputs, predict
from foveate.execution.precision import cast as cast_to
from foveate.models.channels import ScaleChannels
from foveate.models.pooling import Pool
from foveate.scales import ScaleGrid, parse_windows
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import generated_from, is_photo, open_pictures
from foveate.training.photos import open_photos, windows_of
from foveate.training.skipped import Bad, Skipped, check_bad
from foveate.training.unchanged import (
    check_classes,
    check_unchanged,
    names_of,
    source_checksum,
)

BATCH = {"cuda": 256, "cpu": 32}  # images in memory whose classification is timed
LEAST = 0.1  # seconds to time it


@dataclass(frozen=True, kw_only=True, eq=False)
class TestSet:
    """One split of a source, on which the network of a run is evaluated.

    With the recipes `mnist-large-scale` and `mirrored`, each image is rescaled into a frame of the
    size of the run. With `photo`, scale s resizes the short side of an image to s times the base
    size of the recipe; windows that extend past the image see the padding of the network, or the
    given `border`. The view "resolution" of photographs reduces their resolution instead.
    """

    __test__ = False  # keep pytest from collecting the class

    config: TrainConfig
    name: str
    checksum: str
    images: Source | Shards
    split: SplitName
    view: View = "zoom"
    border: BorderMode | None = None
    bad: Bad = "stop"
    skipped: Skipped = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.images.labels(self.split))

    def measure(
        self,
        net: nn.Module,
        scales: Sequence[float],
        advance: Callable[[int], None] = lambda count: None,
    ) -> tuple[AtScale, ...]:
        """Measure the accuracy of the network at each scale, on its device."""
        self.check_scales(scales)
        at = partial(self.batches, net)
        return tuple(measure_accuracy(net, at, scales, self.config.precision, advance))

    def check_scales(self, scales: Sequence[float]) -> None:
        """Raise a ConfigError for scales at which the images cannot be made."""
        for scale in scales:
            check_view(self.view, scale)
            if is_photo(self.config) and self.view == "zoom":
                assert self.config.recipe is not None
                self.config.recipe.at_scale(scale)

    def calibrate(
        self,
        net: ScaleChannels,
        scales: Sequence[float],
        disagreement: float = DISAGREEMENT,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Calibration:
        """Choose the tolerance of lazy evaluation from the images at all scales together.

        The tolerance of the network itself is not changed.
        """
        with eval_mode(net):
            return choose_tolerance(net, self._channels(net, scales, advance), disagreement)

    def _channels(
        self, net: ScaleChannels, scales: Sequence[float], advance: Callable[[int], None]
    ) -> Iterator[Tensor]:
        """Yield the logits (B, S, K) of all channels, batch by batch."""
        device = next(net.parameters()).device
        for images, labels in chain.from_iterable(self.batches(net, scale) for scale in scales):
            with cast_to(self.config.precision, device):
                channels = outputs(net, images).channels
            assert channels is not None  # the networks of runs are plain scale channels
            yield channels
            advance(len(labels))

    def batches(self, net: nn.Module, scale: float) -> Iterator[tuple[Prepared, Tensor]]:
        """Yield batches at a scale, prepared for a network on its device, with their labels."""
        recipe, config = self.config.recipe, self.config
        if not isinstance(self.images, Shards):
            data: Split = getattr(self.images, self.split)
            how: dict[str, Any] = {"size": config.size, "border": config.border, "recipe": recipe}
            yield from rescaled_batches(net, data, scale, precision=config.precision, **how)
            return
        assert recipe is not None
        background = None
        if self.border is not None:
            background = frame_of(windows_of(net)), self.border
        batches = open_photos(
            config,
            self.images,
            self.split,
            net,
            next(net.parameters()).device,
            recipe=recipe.at_scale(scale) if self.view == "zoom" else recipe,
            share=1.0 if self.view == "zoom" else scale,
            background=background,
            bad=self.bad,
            skipped=self.skipped,
        )
        try:
            for batch in batches(torch.arange(len(self)), config.batch):
                yield batch.select()
        finally:
            batches.close()


def with_channels(
    net: nn.Module, config: TrainConfig, windows: str | None, pool: str | None
) -> tuple[nn.Module, TrainConfig]:
    """Replace the windows or the pooling of a trained network, and keep its backbone.

    Return the network and its configuration. A network on whole images becomes the backbone of
    channels: it receives the image at several sizes. Windows are in pixels, in the notation of
    `foveate.scales.parse_windows`. None keeps the windows or the pooling of the run. Raises a
    ConfigError for sliding windows and for pooling by concatenation.
    """
    if windows is None and pool is None:
        return net, config
    model = config.model
    if model.form == "plain" and not isinstance(net, ScaleChannels):
        model = replace(model, form="foveated", scales=ScaleGrid(1, 1))
        net = ScaleChannels(net, model.scales, model.size, model.pool).train(net.training)
    if type(net) is not ScaleChannels or "concat" in (net.pool, pool):
        raise ConfigError(
            "windows and pool can be changed only for channels pooled by max, avg, logsumexp or "
            "probabilities; leave out --windows and --pool"
        )
    if windows is not None:
        model = replace(model, scales=parse_windows(windows, model.size))
    model = replace(model, pool=cast(Pool, pool or model.pool))
    options: dict[str, Any] = {"padding": net.padding, "antialias": net.antialias}
    changed = ScaleChannels(net.backbone, model.scales, net.size, model.pool, **options)
    return changed.train(net.training), replace(config, model=model)


def lazy_channels(net: object) -> ScaleChannels:
    """Return the network if it is `ScaleChannels`, otherwise raise a ConfigError."""
    if not isinstance(net, ScaleChannels):
        raise ConfigError(
            f"lazy evaluation requires ScaleChannels, got {type(net).__name__}; leave out --lazy"
        )
    return net


def open_test_set(
    folder: RunFolder,
    load: Load,
    *,
    split: SplitName = "test",
    source: str | None = None,
    changed_data: bool = False,
    bad: Bad = "stop",
    view: View = "zoom",
    border: BorderMode | None = None,
) -> TestSet:
    """Open the test set of a run.

    The source is that of the run, or of its dataset file, unless another one is given. With
    `changed_data`, its content can have changed since the run started. With `bad` "skip", images
    that cannot be used are left out and listed in `skipped`. `view` and `border` are for
    photographs: the meaning of a scale, and what windows see outside an image.
    """
    config = folder.config()
    check_bad(bad, config)
    check_view(view, 1.0)
    check_border_mode(border)
    if (view != "zoom" or border is not None) and not is_photo(config):
        option = "border" if view == "zoom" else "view"
        raise ConfigError(
            f"--{option} requires a run on photographs, and {folder.path} has the source "
            f"{config.source}; leave it out"
        )
    name = _find_own_source(folder, config) if source is None else source
    if not changed_data:
        check_unchanged(folder, name, load)
    if name == "mnist-5k" and generated_from(config.source) == "mnist":
        raise ConfigError("mnist-5k is a subset of the training images of mnist; evaluate on mnist")
    if is_photo(config):
        images: Source | Shards = open_pictures(name)
        checksum = source_checksum(name, load, listing=True)
    else:
        images = load(name)
        checksum = images.checksum
        if images.shape[0] != config.model.channels:
            raise ConfigError(
                f"{name} has images of {images.shape[0]} channels, but the network takes "
                f"{config.model.channels}; pass another --source"
            )
    check_classes(folder, name, names_of(images))
    known: dict[str, Any] = {"config": config, "name": name, "checksum": checksum}
    known |= {"view": view, "border": border}
    return TestSet(images=images, split=split, bad=bad, **known)


def _find_own_source(folder: RunFolder, config: TrainConfig) -> str:
    """Return the name of the source of a run; its images may not be on this machine."""
    name = find_test_source(config)
    kind, _, place = name.partition(":")
    if kind == "folder" and not Path(place).expanduser().exists():
        raise DataError(
            f"{folder.path} was trained on {name}, which does not exist here; pass the location of "
            "these images as --source folder:DIR"
        )
    return name


def find_test_source(config: TrainConfig) -> str:
    """Return the name of the source of a run or of its dataset file."""
    name = generated_from(config.source)
    if name is None or (is_shards(name) and not is_photo(config)):
        raise ConfigError(
            f"{config.source} does not name the source of its images, so the network cannot be "
            "tested at other scales; pass --source, or set the source of the study"
        )
    return name


def images_per_second(net: nn.Module, config: TrainConfig) -> float:
    """Measure how many images a network classifies per second, on its device.

    The images are already in memory at their final size, so the time to read and rescale them does
    not count. A first batch, which compiles kernels, does not count either.
    """
    device = next(net.parameters()).device
    side = config.recipe.base if config.recipe and is_photo(config) else config.size
    images = torch.zeros(BATCH[device.type], config.model.channels, side, side, device=device)
    with eval_mode(net):
        predict(net, images, config.precision).logits.cpu()  # the copy waits for the GPU
        done, begun = 0, time.perf_counter()
        while (taken := time.perf_counter() - begun) < LEAST or not done:
            predict(net, images, config.precision).logits.cpu()
            done += len(images)
    return done / taken
