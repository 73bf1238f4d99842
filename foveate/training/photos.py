"""Batches of photographs of any size, resampled to patches on the device of the network.

Workers read and resize the images. The main process resamples the patches, because an image has one
tenth of their bytes.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foveate.checks import check_memory
from foveate.data.large_scale import send
from foveate.data.recipes import Recipe
from foveate.data.shards import Shards
from foveate.data.splits import SplitName
from foveate.data.store import cpu_threads
from foveate.errors import ConfigError, DataError
from foveate.execution import patches
from foveate.execution.captured import Batch
from foveate.execution.plan import Prepared
from foveate.models.channels import ScaleChannels
from foveate.resampling.definition import PatchSpec, resample
from foveate.training.config import TrainConfig
from foveate.training.data import LISTED, Batches, open_pictures, sample_count
from foveate.training.photo_reader import (
    Background,
    DecodedImages,
    Packed,
    PhotoDataset,
    PhotoReader,
)
from foveate.training.rescaling import AugmentationSeed
from foveate.training.skipped import Bad

MOST_WORKERS = 8  # by default


@dataclass(frozen=True, eq=False)
class PhotoBatches(Batches):
    """A loader for the images of a split as patches (B, S, C, P, P), in any order.

    Augmentation depends only on the seed, the epoch and the index of an image. With `bad` "skip",
    an image that cannot be used is left out of its batch and listed in `skipped`. A batch without
    any usable image is empty in training, and left out otherwise.
    """

    recipe: Recipe = field(default_factory=lambda: Recipe(name="photo"))
    largest: int = 32
    workers: int = 0
    share: float = 1.0
    background: Background | None = None
    bad: Bad = "stop"
    decoded: DecodedImages | None = None
    idle: list[PhotoReader] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"workers must be 0 or more, got {self.workers}")
        self.recipe.resize()
        # Compiles the native kernels once, before workers start.
        windows_of(self.net).patches(torch.zeros(1, 3, 2, 2))

    def __call__(
        self, order: Tensor, batch: int, augmentation_seed: AugmentationSeed = (0, 0)
    ) -> Iterator[Batch]:
        """Yield the images at the indices `order` in batches of size `batch`.

        Outside training, a batch has at most `largest` images.
        """
        assert isinstance(self.images, Shards)
        size = batch if self.split == "train" else min(batch, self.largest)
        reader = self.idle.pop() if self.idle else self._reader(min(size, max(1, len(order))))
        used = 0
        try:
            for found in reader.read(
                [group.tolist() for group in order.split(size)], augmentation_seed
            ):
                made = self._batch(found[0])
                for index, reason in found[1]:
                    name = self.images.describe_image(self.split, index).removeprefix("image ")
                    self.skipped[self.split, name] = reason
                used += len(made.labels)
                if len(made.labels) or self.split == "train":
                    yield made
            if not used and len(order) == self.count:
                raise DataError(
                    f"none of the {self.count} {self.split} images can be used; check the source"
                )
        except BaseException:
            reader.close()
            raise
        self.idle.append(reader)

    def close(self) -> None:
        """Stop the workers, which wait for the next epoch."""
        while self.idle:
            self.idle.pop().close()

    def _batch(self, found: Packed) -> Batch:
        pinned = self.device.type == "cuda"  # other copies must end before the worker goes on
        packed = found._replace(values=found.values.to(self.device, non_blocking=pinned))
        cut = cut_patches(packed, self.recipe, windows_of(self.net))
        labels = send(torch.from_numpy(packed.labels), self.device)
        return Batch(Prepared(patches, (cut,)), labels)

    def _reader(self, batch: int) -> PhotoReader:
        assert isinstance(self.images, Shards) and isinstance(self.net, ScaleChannels)
        size = 4 * self.net.size**2 * 3 * len(self.net.scales) * batch
        remedy = "use a smaller batch or a smaller model.size"
        check_memory(2 * size, "two batches of patches", remedy)
        how = (self.recipe, self.bad, self.share, self.background, self.decoded)
        dataset = PhotoDataset(self.images, self.split, *how)
        workers = min(self.workers, math.ceil(self.count / batch))
        return PhotoReader(dataset, workers, pinned=self.device.type != "cpu")


def open_photos(
    config: TrainConfig,
    images: Shards,
    split: SplitName,
    net: nn.Module,
    device: torch.device,
    workers: int | None = None,
    **options: Any,
) -> PhotoBatches:
    """Return a loader with the settings of a run; `options` are fields of `PhotoBatches`."""
    count = sample_count(config, len(images.labels(split)), split)
    workers = default_workers() if workers is None else workers
    usual = {"recipe": config.recipe, "largest": config.batch, "workers": workers}
    given = {**usual, **options}
    return PhotoBatches(images, split, count, net, device, config.precision, **given)


@torch.no_grad()
def cut_patches(packed: Packed, recipe: Recipe, windows: ScaleChannels) -> Tensor:
    """Normalise images and resample their patches (B, S, C, P, P).

    On a CPU, they are processed one by one while each is in the cache, by one thread: the workers
    need the other cores.
    """
    if packed.values.device.type != "cpu" and len(packed.labels):
        return cut_together(packed, recipe, windows)
    found = torch.empty(len(packed.labels), len(windows.scales), 3, windows.size, windows.size)
    options = (windows.scales, windows.size, windows.padding, windows.antialias)
    centres = torch.from_numpy(packed.centres)
    with cpu_threads(1):
        for picture, centre, out in zip(packed.pictures(), centres, found, strict=True):
            spec = PatchSpec(*options, centre[None])
            resample(recipe.normalise(picture)[None], spec, out=out[None])
    return found


@torch.no_grad()
def cut_together(packed: Packed, recipe: Recipe, windows: ScaleChannels) -> Tensor:
    """Compute `cut_patches` for images of equal shape together, as on a GPU.

    Nothing here waits for the GPU, so that it trains on one batch while the next is launched: a
    step of EfficientNet-Lite0 takes 23.9 ms on an H200 instead of 31.3, and 22.8 ms without input.
    """
    shapes = list(map(tuple, packed.shapes.tolist()))
    order = sorted(range(len(shapes)), key=shapes.__getitem__)
    centres, places = (
        send(torch.from_numpy(values), packed.values.device)
        for values in (packed.centres[order], np.argsort(order))
    )
    pictures, parts, begin = packed.pictures(), list[Tensor](), 0
    for _, alike in groupby(order, key=shapes.__getitem__):
        images = recipe.normalise(torch.stack([pictures[i] for i in alike]))
        parts.append(windows.patches(images, centres[begin : begin + len(images)]))
        begin += len(images)
    return torch.cat(parts)[places]


def windows_of(net: nn.Module) -> ScaleChannels:
    """Return the scale channels of a network without its backbone, to resample patches."""
    if not isinstance(net, ScaleChannels) or not patches.fits(net, torch.empty(0)):
        raise ConfigError(
            "the recipe photo needs a network with scale channels; use fovmax, fovavg or fovconc, "
            "or --recipe mnist-large-scale"
        )
    options: dict[str, Any] = {"padding": net.padding, "antialias": net.antialias}
    return ScaleChannels(nn.Identity(), net.scales, net.size, **options)


def describe_photos(config: TrainConfig) -> str:
    """Describe the images, the recipe and the windows of a run in one line.

    The range of sizes is that of about `LISTED` training images, read from their headers.
    """
    assert config.recipe is not None
    images, model = open_pictures(config.source), config.model
    counts = [len(images.labels("train")), len(images.labels("val"))]
    windows = [round(model.size * scale) for scale in model.scales]
    shown = f"{len(windows)} windows of {windows[0]} to {windows[-1]} pixels"
    if len(windows) == 1:
        shown = f"1 window of {windows[0]} pixels"
    return (
        f"{config.source}: {counts[0]:,} training and {counts[1]:,} validation images of "
        f"{images.num_classes} classes"
        f"{_sizes(images)}; recipe photo: short side {config.recipe.base}; {shown}, "
        f"patches of {model.size}"
    )


def _sizes(images: Shards) -> str:
    """Return the range of image sizes as text."""
    sizes = [(height * width, width, height) for height, width in images.sizes("train", LISTED)]
    ends = [f"{width}x{height}" for _, width, height in (min(sizes), max(sizes))] if sizes else []
    return f", {' to '.join(ends)} pixels" if ends else ""


def default_workers(runs: int = 1) -> int:
    """Return the number of worker processes for each of `runs` concurrent runs."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * runs
    return max(1, min(MOST_WORKERS, cores // processes))
