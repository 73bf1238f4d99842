"""The images of a run: made at its training scales, prepared once, and handed out in batches."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from foveate.checks import check_memory
from foveate.data.folder import Pictures, SplitName
from foveate.data.large_scale import rescale
from foveate.data.shards import H5Shard, Shards, is_shards, open_shards
from foveate.data.sources import Source, Split
from foveate.data.store import ScaledFile
from foveate.errors import ConfigError
from foveate.execution.captured import CHUNK, Batch
from foveate.execution.plan import Prepared, prepare
from foveate.training.config import Precision, TrainConfig

FOLDER = "folder:"
Load = Callable[[str], Source]


class Batches(Protocol):
    """Prepared images with their labels, in any order that is asked for."""

    def __len__(self) -> int: ...

    def __call__(self, order: Tensor, batch: int) -> Iterator[Batch]:
        """Hand out the images that `order` lists, `batch` at a time."""


@dataclass(frozen=True, eq=False)
class Resident:
    """All prepared images on the device."""

    images: Prepared
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(self, order: Tensor, batch: int) -> Iterator[Batch]:
        """Hand out the images that `order` lists, `batch` at a time."""
        for chosen in _groups(order.to(self.labels.device), batch):
            yield Batch(self.images, self.labels, chosen)


class Pickable(Protocol):
    """Images that can be read by their indices."""

    def pick(self, split: SplitName, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Read the images and labels at the indices `chosen`, in their order."""


Show = Callable[[Tensor, Tensor], Tensor]
"""Brings images (N, C, h, w) with their indices (N,) to their scales."""


@dataclass(frozen=True, eq=False)
class Streamed:
    """Images that stay on the disk; the next batch is read while this one is used."""

    file: Pickable
    split: SplitName
    net: nn.Module
    device: torch.device
    precision: Precision
    count: int
    show: Show = lambda images, chosen: images

    def __len__(self) -> int:
        return self.count

    def __call__(self, order: Tensor, batch: int) -> Iterator[Batch]:
        """Hand out the images that `order` lists, `batch` at a time."""
        with ThreadPoolExecutor(1) as reader:
            waiting = None
            for chosen in _groups(order, batch):
                coming = reader.submit(self._read, chosen)
                if waiting is not None:
                    yield self._ready(*waiting.result())
                waiting = coming
            if waiting is not None:
                yield self._ready(*waiting.result())

    def _read(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.file.pick(self.split, chosen), chosen

    def _ready(self, images: Tensor, labels: Tensor, chosen: Tensor) -> Batch:
        with torch.no_grad():
            shown = self.show(images.to(self.device), chosen)
            ready = prepare(self.net, shown, self.precision)
        return Batch(ready, labels.to(self.device))


def open_batches(
    config: TrainConfig,
    split: SplitName,
    net: nn.Module,
    device: torch.device,
    stream: bool,
    load: Load,
) -> Batches:
    """Get the images of a split ready.

    `source` may be a data set file (.h5) or a folder, which may stream, or shards, which always do.
    """
    if (kept := _on_disk(config.source, stream)) is not None:
        return _streamed(kept, config, split, net, device)
    if is_file(config.source):
        file = ScaledFile(Path(config.source))
        first, _ = file.read(split, slice(1))  # says so if there are none
        count = _count(config, file.counts[split], split)
        _check_fit(config, first, torch.from_numpy(file.labels[split]))
        if stream:
            return Streamed(file, split, net, device, config.precision, count)
        images, labels = file.read(split, slice(count))
        return _resident(net, config, device, torch.split(images, CHUNK), labels)
    if stream:
        raise ConfigError(
            f"only a data set file (.h5), a folder or shards can be streamed, got {config.source!r}"
        )
    data, scales = training_images(load(config.source), config, split)
    _check_fit(config, data.images, data.labels)
    return _resident(net, config, device, _made(data.images, scales, config, device), data.labels)


def _on_disk(source: str, stream: bool) -> Shards | Pictures | None:
    """The images of a source of which any can be read alone, if it is to be read so."""
    if is_shards(source):
        return open_shards(source)
    if stream and source.startswith(FOLDER):
        return Pictures(Path(source.removeprefix(FOLDER)).expanduser())
    return None


def _streamed(
    kept: Shards | Pictures,
    config: TrainConfig,
    split: SplitName,
    net: nn.Module,
    device: torch.device,
) -> Streamed:
    labels = kept.labels(split)
    _check_fit(config, torch.from_numpy(kept.first)[None], labels)
    count, stream = _count(config, len(labels), split), (net, device, config.precision)
    if kept.made:
        return Streamed(kept, split, *stream, count)
    scales = draw_scales(config, len(labels), split)
    return Streamed(kept, split, *stream, count, _rescaling(scales, config))


def _rescaling(scales: Tensor, config: TrainConfig) -> Show:
    """Show each image at its scale, as `_made` does."""
    same = len(scales.unique()) == 1

    def show(images: Tensor, chosen: Tensor) -> Tensor:
        factors = float(scales[0]) if same else scales[chosen].to(images.device)
        return rescale(images, factors, size=config.size, border=config.border)

    return show


def training_images(source: Source, config: TrainConfig, split: SplitName) -> tuple[Split, Tensor]:
    """Pick the images of a split, and the scale (N,) at which each is shown."""
    data: Split = getattr(source, split)
    scales = draw_scales(config, len(data), split)
    count = _count(config, len(data), split)
    return Split(data.images[:count], data.labels[:count]), scales[:count]


def draw_scales(config: TrainConfig, count: int, split: SplitName) -> Tensor:
    """Draw the scale of each image; the same for every training seed."""
    ranges = config.ranges()
    drawn = torch.stack([r.draw(count, config.data_seed, split) for r in ranges])
    if len(ranges) == 1:
        return drawn[0]
    choice = np.random.default_rng([config.data_seed, 9]).integers(len(ranges), size=count)
    return drawn[torch.from_numpy(choice), torch.arange(count)]


def fitted(
    config: TrainConfig, load: Load, given: Collection[str] = (), stream: bool = False
) -> TrainConfig:
    """Let the model's channels and classes follow the source, unless they are among `given`.

    Data set files also decide the size, the scales and the border of the images.
    """
    made = made_files(config.source)
    if (kept := _on_disk(config.source, stream)) is not None:
        images = torch.from_numpy(kept.first)[None]
        classes = 1 + max(int(kept.labels(split).max()) for split in kept.counts)
    elif is_file(config.source):
        (file,) = made
        images, _ = file.read("train", slice(1))
        classes = 1 + max(int(labels.max()) for labels in file.labels.values())
    else:
        source = load(config.source)
        images, classes = source.train.images, len(source.classes)
    if made:
        config = replace(config, size=images.shape[-1], **_made_with(made))
    follows = {"channels": images.shape[1], "classes": classes}
    changes: dict[str, Any] = {
        key: value for key, value in follows.items() if f"model.{key}" not in given
    }
    return replace(config, model=replace(config.model, **changes))


def _made_with(files: Sequence[ScaledFile]) -> dict[str, Any]:
    """The training scales and the border of files, as far as they say."""
    with_train = [file for file in files if "train" in file.counts]
    scales = list(dict.fromkeys(filter(None, map(_training_scales, with_train))))
    found: dict[str, Any] = {"scales": ",".join(scales)} if scales else {}
    manifests = [file.manifest for file in with_train if file.manifest]
    return {**found, "border": manifests[0]["border"]} if manifests else found


def _training_scales(file: ScaledFile) -> str | None:
    if file.manifest and file.manifest.get("train"):
        low, high = file.manifest["train"]["low"], file.manifest["train"]["high"]
        return f"{low:g}" if low == high else f"{low:g}-{high:g}"
    found = re.search(r"_sctr(\d+p\d+(?:-\d+p\d+)?)", file.path.name)
    if not found:
        return None
    return "-".join(f"{float(end):g}" for end in found[1].replace("p", ".").split("-"))


def is_file(source: str) -> bool:
    """Whether the source is one data set file."""
    return source.endswith((".h5", ".hdf5")) and not is_shards(source)


def is_made(source: str) -> bool:
    """Whether the source is data set files, whose images are at their scales already."""
    return open_shards(source).made if is_shards(source) else is_file(source)


def made_files(source: str) -> list[ScaledFile]:
    """The data set files that a source consists of; none if it is something else."""
    if is_shards(source):
        return [shard for shard in open_shards(source).shards if isinstance(shard, H5Shard)]
    return [ScaledFile(Path(source))] if is_file(source) else []


def made_from(source: str) -> str | None:
    """The source that data set files were made from, as far as they say; else the source itself."""
    files = made_files(source)
    if not files:
        return source
    return str(files[0].manifest["source"]["name"]) if files[0].manifest else None


def _groups(order: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Cut `order` into batches; of nothing `torch.split` would make one that is empty."""
    return torch.split(order, batch) if len(order) else ()


def _count(config: TrainConfig, there: int, split: SplitName) -> int:
    if split != "train" or not config.samples:
        return there
    if config.samples > there:
        raise ConfigError(f"samples={config.samples}, but there are {there} training images")
    return config.samples


def _check_fit(config: TrainConfig, images: Tensor, labels: Tensor) -> None:
    """Refuse images that the network cannot take, and labels that it cannot give."""
    model, channels, classes = config.model, images.shape[1], int(labels.max()) + 1
    if channels != model.channels:
        raise ConfigError(
            f"{config.source} has images of {channels} channels, and the model takes "
            f"{model.channels}: set model.channels={channels}"
        )
    if classes > model.classes:
        raise ConfigError(
            f"{config.source} has {classes} classes, and the model knows {model.classes}: "
            f"set model.classes={classes}"
        )
    if is_made(config.source) and images.shape[-1] != config.size:
        raise ConfigError(
            f"{config.source} has images of {images.shape[-1]} pixels, not {config.size}: "
            f"set size={images.shape[-1]}"
        )


def _made(
    images: Tensor, scales: Tensor, config: TrainConfig, device: torch.device
) -> Iterator[Tensor]:
    same = len(scales.unique()) == 1
    for some, factors in zip(torch.split(images, CHUNK), torch.split(scales, CHUNK), strict=True):
        factor = float(factors[0]) if same else factors.to(device)
        yield rescale(some.to(device), factor, size=config.size, border=config.border)


def _check_memory(config: TrainConfig, ready: Prepared, count: int, device: torch.device) -> None:
    """Refuse images and a step of training that the memory of this machine cannot hold.

    Of each activation the step keeps the output of the convolution, that of the norm, and a
    gradient. On a GPU an allocation that does not fit is an error of its own.
    """
    if device.type != "cpu":
        return
    images = count * sum(t[0].numel() * t.element_size() for t in ready.inputs)
    step = 12 * min(config.batch, count) * config.model.activations()
    remedy = "use fewer samples or a smaller size; --stream reads a folder or file in parts"
    check_memory(images, f"{count} images of {config.size} pixels", remedy)
    check_memory(step, f"steps of {config.batch} images", "use a smaller batch")


def _resident(
    net: nn.Module,
    config: TrainConfig,
    device: torch.device,
    chunks: Iterator[Tensor] | tuple[Tensor, ...],
    labels: Tensor,
) -> Resident:
    held: Prepared | None = None
    at = 0
    with torch.no_grad():
        for chunk in chunks:
            ready = prepare(net, chunk.to(device), config.precision)
            if held is None:  # one allocation of the whole, filled piece by piece
                _check_memory(config, ready, len(labels), device)
                whole = tuple(t.new_empty(len(labels), *t.shape[1:]) for t in ready.inputs)
                held = replace(ready, inputs=whole)
            for target, part in zip(held.inputs, ready.inputs, strict=True):
                target[at : at + len(part)] = part
            at += len(chunk)
    assert held is not None
    resident = Resident(held, labels.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # runs side by side read it on streams of their own
    return resident
