"""The images of a run: rescaled to the training scales, prepared once, and loaded in batches."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from foveate.checks import check_memory
from foveate.data.large_scale import send
from foveate.data.pictures import PictureFolder
from foveate.data.recipes import Recipe, find_recipe
from foveate.data.shards import Shards, is_shards, open_shards
from foveate.data.sources import Load as Load
from foveate.data.sources import Source, find_kind, open_source
from foveate.data.splits import SplitName
from foveate.data.store import ScaledFile
from foveate.errors import ConfigError
from foveate.execution.captured import CHUNK, Batch
from foveate.execution.plan import Prepared, prepare
from foveate.scales import ScaleGrid
from foveate.training.backbones import normalisation
from foveate.training.config import Precision, TrainConfig, is_mirrored
from foveate.training.config import is_photo as is_photo
from foveate.training.rescaling import (
    AugmentationSeed,
    RescaleFunction,
    draw_training_scales,
    find_zooms,
    is_augmented,
    is_random,
    rescaling,
)
from foveate.training.skipped import Bad, Skipped
from foveate.training.zooms import Zooms, draw_zooms, prepare_zoomed

CHUNK_ON_GPU = 4 * CHUNK  # images to prepare at a time on a GPU, again for each epoch
LISTED = 1000  # images whose headers are read to estimate the sizes of all
MAX_WINDOW = 8  # times the base size: limits the largest window for very elongated images
PHOTO_SHAPE = (3,)  # channels of an image with the recipe photo; its size varies


@dataclass(frozen=True, eq=False)
class Batches:
    """A loader for the images of a split, prepared for a network, in any order.

    Either all images are prepared once and `resident` on the device, or each batch is read and
    prepared on demand. If the images are `random`, resident ones are prepared again for each epoch;
    `filled` is the seed and epoch for which they were prepared. Images that could not be used are
    in `skipped`.
    """

    images: Source | Shards
    split: SplitName
    count: int
    net: nn.Module
    device: torch.device
    precision: Precision
    rescale_images: RescaleFunction = lambda images, indices, seed: images
    resident: Batch | None = None
    zooms: Zooms | None = None
    random: bool = False
    filled: list[tuple[int, int]] = field(default_factory=list)
    skipped: Skipped = field(default_factory=dict)

    def __len__(self) -> int:
        return self.count

    def __call__(
        self, order: Tensor, batch: int, augmentation_seed: AugmentationSeed = (0, 0)
    ) -> Iterator[Batch]:
        """Yield the images at the indices `order` in batches of size `batch`.

        Random augmentation depends on `augmentation_seed`: the seed and the epoch.
        """
        if not len(order):
            return
        if self.resident is not None:
            if self.random and self.filled != [augmentation_seed]:
                self._fill(self.resident.images, augmentation_seed)
                self.filled[:] = [augmentation_seed]
            # Copies the order to the device once, not once per batch.
            for indices in order.to(self.device).split(batch):
                yield self.resident._replace(indices=indices)
            return
        with ThreadPoolExecutor(1) as reader:
            groups, read = order.split(batch), partial(self.images.read_batch, self.split)
            coming = reader.submit(read, groups[0])
            for number, indices in enumerate(groups, 1):
                images, labels = coming.result()
                if number < len(groups):
                    coming = reader.submit(read, groups[number])
                yield self._prepared(images, labels, indices, augmentation_seed)

    def close(self) -> None:
        """Release resources that persist between epochs; this class has none."""

    def _prepared(
        self, images: Tensor, labels: Tensor, indices: Tensor, seed: AugmentationSeed = (0, 0)
    ) -> Batch:
        with torch.no_grad():
            shown = self.rescale_images(send(images, self.device), indices, seed)
            if self.zooms is None:
                ready = prepare(self.net, shown, self.precision)
            else:
                factors = draw_zooms(self.zooms.limits, self.count, seed)[indices]
                ready = prepare_zoomed(self.net, shown, factors, self.precision, self.zooms)
        return Batch(ready, send(labels, self.device))

    def make_resident(self, config: TrainConfig) -> "Batches":
        """Prepare all images and hold them on the device."""
        one = torch.arange(1)
        ready = self._prepared(*self.images.read_batch(self.split, one), one).images
        if self.device.type == "cpu":  # PyTorch reports what does not fit on a GPU
            self._check_memory(config, ready)
        whole = tuple(t.new_empty(self.count, *t.shape[1:]) for t in ready.inputs)
        whole_split = replace(ready, inputs=whole)
        if not self.random:
            self._fill(whole_split)
        labels = self.images.labels(self.split)[: self.count].to(self.device)
        return replace(self, resident=Batch(whole_split, labels))

    def _check_memory(self, config: TrainConfig, ready: Prepared) -> None:
        """Raise a ConfigError if the images or a training step do not fit in the main memory.

        For each activation of the paper's networks, a step stores the output of the convolution,
        the output of the norm and a gradient. Other steps are not checked.
        """
        images = self.count * sum(t[0].numel() * t.element_size() for t in ready.inputs)
        remedy = "use fewer samples, a smaller size, or --stream to read images on demand"
        check_memory(images, f"{self.count} images of {config.size} pixels", remedy)
        if not config.backbone and not getattr(self.net, "recompute", 0):
            step = 12 * min(config.batch, self.count) * config.model.activations()
            check_memory(step, f"steps of {config.batch} images", "use a smaller batch")

    def _fill(self, whole: Prepared, seed: AugmentationSeed = (0, 0)) -> None:
        """Prepare all images in the memory of `whole`, several chunks in order of their zooms."""
        order, on_gpu = torch.arange(self.count), self.device.type == "cuda"
        chunk = CHUNK_ON_GPU if self.random and on_gpu else CHUNK
        if self.zooms is not None and self.count > chunk:
            order = draw_zooms(self.zooms.limits, self.count, seed).argsort()
        for indices in order.split(chunk):
            images, labels = self.images.read_batch(self.split, indices)
            ready = self._prepared(images, labels, indices, seed).images
            for target, part in zip(whole.inputs, ready.inputs, strict=True):
                target[send(indices, self.device)] = part
        if on_gpu and not self.random:
            torch.cuda.synchronize(self.device)  # other runs read the images on their own streams


def open_batches(
    config: TrainConfig,
    split: SplitName,
    net: nn.Module,
    device: torch.device,
    stream: bool,
    load: Load,
    workers: int | None = None,
    bad: Bad = "stop",
) -> Batches:
    """Return a loader for the images of a split.

    Shards are always streamed, other sources only if `stream` is set. Images that the recipe
    `mirrored` augments are prepared for each epoch on a GPU, and to save memory for each batch on a
    CPU.
    """
    if is_photo(config):
        from foveate.training.photo_reader import memory_for
        from foveate.training.photos import open_photos  # which imports this module

        pictures = open_pictures(config.source)
        check_fit(config, PHOTO_SHAPE, pictures.labels(split))
        decoded = memory_for(pictures, split) if config.epochs > 1 else None
        options = {"bad": bad, "decoded": decoded}
        return open_photos(config, pictures, split, net, device, workers, **options)
    images = open_source(config.source, load, stream)
    labels = images.labels(split)
    check_fit(config, images.shape, labels)
    count, training = sample_count(config, len(labels), split), split == "train"
    zooms = find_zooms(config) if training else None
    random = training and is_random(config)
    batches = Batches(
        images, split, count, net, device, config.precision, zooms=zooms, random=random
    )
    if not is_generated(config.source):
        scales = draw_training_scales(config, len(labels), split)[:count]
        batches = replace(batches, rescale_images=rescaling(config, scales, training))
    elif config.distortions:
        raise ConfigError(
            f"the images in {config.source} are already rescaled; distortions need the source "
            "from which they were made"
        )
    slow = training and is_augmented(config) and device.type == "cpu"
    streamed = stream or is_shards(config.source) or slow
    return batches if streamed else batches.make_resident(config)


def adapt_to_source(
    config: TrainConfig, load: Load, explicit_fields: Collection[str] = (), stream: bool = False
) -> TrainConfig:
    """Adapt the recipe and the model's channels and classes to the source.

    Fields of the configuration in `explicit_fields` are left unchanged.

    Colour images in a folder or in tar files get the recipe `photo`: the model resamples windows
    with antialiasing, and inputs are normalised as a timm backbone expects. With a backbone, the
    windows follow from the sizes of the images (see `propose_windows`). Other colour images, such
    as CIFAR-10, get the recipe `mirrored`: scale 1, in frames of twice their size. HDF5 files also
    determine the size, the scales and the border of the images.
    """
    chosen = config.recipe
    if not is_photo(config) and not is_mirrored(config):
        coloured = has_colour_pictures(config.source)
        config = replace(config, recipe=(chosen or Recipe(name="photo")) if coloured else None)
    if is_photo(config):
        classes = open_pictures(config.source).num_classes
        config = replace(config, scales="1")  # `recipe.base` defines the size instead
        if config.recipe and not {"recipe.mean", "recipe.std"} & set(explicit_fields):
            known = normalisation(config.backbone)
            config = replace(config, recipe=replace(config.recipe, **known))  # type: ignore[arg-type]
        follows: dict[str, Any] = {"channels": PHOTO_SHAPE[0], "classes": classes}
        follows["antialias"] = True
        if config.backbone:
            follows["scales"] = propose_windows(config)
        return _following(config, follows, explicit_fields)
    images = open_source(config.source, load, stream)
    if files := [file for file in generated_files(config.source) if "train" in file.counts]:
        scales = dict.fromkeys(filter(None, (file.training_scales() for file in files)))
        borders = [file.manifest["border"] for file in files if file.manifest]
        changes: dict[str, Any] = {"size": images.shape[-1]}
        changes |= {"scales": ",".join(scales)} if scales else {}
        changes |= {"border": borders[0]} if borders else {}
        config = replace(config, **changes)
    elif images.shape[0] == PHOTO_SHAPE[0] and config.recipe is None:
        config = replace(config, recipe=chosen or find_recipe("mirrored"))
    follows = {"channels": images.shape[0], "classes": images.num_classes}
    if is_mirrored(config):
        usual: dict[str, Any] = {"size": 2 * images.shape[-1], "scales": "1"}
        config = replace(config, **{k: v for k, v in usual.items() if k not in explicit_fields})
        follows |= {"size": config.size} if config.model.form == "plain" else {}
    return _following(config, follows, explicit_fields)


def propose_windows(config: TrainConfig) -> ScaleGrid:
    """Propose windows for objects at 1/4 to 2 times their size in the training images.

    The smallest window is one quarter of the recipe's base size. The largest is twice the long side
    of an image with the median aspect ratio.
    """
    assert config.recipe is not None
    model, base = config.model, config.recipe.base
    sizes = open_pictures(config.source).sizes("train", LISTED)
    aspects = [max(size) / min(size) for size in sizes]
    longest = 2 * base * (median(aspects) if aspects else 1)
    return ScaleGrid.windows(base / 4, min(longest, MAX_WINDOW * base), model.size)


def _following(
    config: TrainConfig, follows: dict[str, Any], explicit_fields: Collection[str]
) -> TrainConfig:
    changes = {
        key: value for key, value in follows.items() if f"model.{key}" not in explicit_fields
    }
    return replace(config, model=replace(config.model, **changes))


def unused_setting(config: TrainConfig, given: Collection[str]) -> tuple[str, str] | None:
    """Return a setting in `given` that a run does not use, and an error message."""
    for key in [name for name in ("scales", "size", "border") if name in given]:
        if is_generated(config.source):
            return key, f"the images in {config.source} are already rescaled; leave out {key}"
        if is_photo(config):
            return key, f"the recipe photo does not use {key}; set recipe.base, the short side"
        if key == "border" and is_mirrored(config):
            return key, "the recipe mirrored has no border; leave it out"
    return None


def has_colour_pictures(source: str) -> bool:
    """Whether a source has image files in colour; of tar files, the first readable image counts."""
    if not source.startswith(("folder:", "shards:")):
        return False
    found = open_source(source, stream=True)
    assert isinstance(found, Shards)
    if isinstance(folder := found.shards[0], PictureFolder):
        return folder.in_colour
    return not found.scaled and found.in_colour


def open_pictures(source: str) -> Shards:
    """Open the image files of a folder or of tar files, without decoding any."""
    if source.startswith(("folder:", "shards:")):
        found = open_source(source, stream=True)
        if isinstance(found, Shards) and not found.scaled:
            return found
    raise ConfigError(
        f"the recipe photo reads image files, and {source} has none; use folder:DIR, shards:DIR "
        "with .tar files, or the recipe mirrored"
    )


def is_generated(source: str) -> bool:
    """Whether the source consists of HDF5 files, whose images are already rescaled."""
    return bool(generated_files(source))


def generated_files(source: str) -> list[ScaledFile]:
    """Return the HDF5 files of a source; an empty list for other kinds of source."""
    kind = find_kind(source)
    return open_shards(source).scaled if kind and kind.open == open_shards else []


def generated_from(source: str) -> str | None:
    """Return the source from which HDF5 files were generated, or None if unknown.

    Other sources are returned unchanged.
    """
    files = generated_files(source)
    if not files:
        return source
    return str(files[0].manifest["source"]["name"]) if files[0].manifest else None


def sample_count(config: TrainConfig, there: int, split: SplitName) -> int:
    """Return the number of images that a run uses, of those that are `there` in a split."""
    if split != "train" or not config.samples:
        return there
    if config.samples > there:
        raise ConfigError(
            f"samples must be at most {there}, the size of the training set, got {config.samples}"
        )
    return config.samples


def check_fit(config: TrainConfig, shape: tuple[int, ...], labels: Tensor) -> None:
    """Raise a ConfigError if the images or labels do not fit the network."""
    model, channels, classes = config.model, shape[0], int(labels.max()) + 1
    if channels != model.channels:
        raise ConfigError(
            f"{config.source} has images of {channels} channels, but the model takes "
            f"{model.channels}; set model.channels={channels}"
        )
    if classes > model.classes:
        raise ConfigError(
            f"{config.source} has {classes} classes, but the model has {model.classes}; "
            f"set model.classes={classes}"
        )
    generated = is_generated(config.source)
    if channels == PHOTO_SHAPE[0] and not generated and config.recipe is None:
        raise ConfigError(
            f"{config.source} has colour images; set recipe to photo or mirrored, or to "
            "mnist-large-scale to stretch their contrast"
        )
    if generated and is_mirrored(config):
        raise ConfigError(f"the images in {config.source} are already rescaled; leave out recipe")
    if generated and shape[-1] != config.size:
        raise ConfigError(
            f"{config.source} has images of {shape[-1]} pixels, not {config.size}; "
            f"set size={shape[-1]}"
        )
