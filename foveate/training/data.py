"""The images of a run: made at its training scales, prepared once, and handed out in batches."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from foveate.data.large_scale import rescale
from foveate.data.sources import Source, Split, load_source
from foveate.data.store import ScaledFile, SplitName
from foveate.errors import ConfigError
from foveate.training.config import Precision, TrainConfig
from foveate.training.engine import CHUNK, Inputs, prepare


class Batches(Protocol):
    """Prepared images with their labels, in any order that is asked for."""

    def __len__(self) -> int: ...

    def __call__(self, order: Tensor, batch: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Hand out the images that `order` lists, `batch` at a time."""


@dataclass(frozen=True, eq=False)
class Resident:
    """All prepared images on the device."""

    inputs: Inputs
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(self, order: Tensor, batch: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Hand out the images that `order` lists, `batch` at a time."""
        for chosen in torch.split(order.to(self.labels.device), batch):
            yield tuple(t[chosen] for t in self.inputs), self.labels[chosen]


@dataclass(frozen=True, eq=False)
class Streamed:
    """Images that stay in an HDF5 file; the next batch is read while this one is used."""

    file: ScaledFile
    split: SplitName
    net: nn.Module
    device: torch.device
    precision: Precision
    count: int

    def __len__(self) -> int:
        return self.count

    def __call__(self, order: Tensor, batch: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Hand out the images that `order` lists, `batch` at a time."""
        with ThreadPoolExecutor(1) as reader:
            waiting = None
            for chosen in torch.split(order, batch):
                coming = reader.submit(self.file.pick, self.split, chosen)
                if waiting is not None:
                    yield self._ready(*waiting.result())
                waiting = coming
            if waiting is not None:
                yield self._ready(*waiting.result())

    def _ready(self, images: Tensor, labels: Tensor) -> tuple[Inputs, Tensor]:
        with torch.no_grad():
            inputs = prepare(self.net, images.to(self.device), self.precision)
        return inputs, labels.to(self.device)


def open_batches(
    config: TrainConfig, split: SplitName, net: nn.Module, device: torch.device, stream: bool
) -> Batches:
    """Get the images of a split ready; `source` may be a data set file (.h5), which may stream."""
    if config.source.endswith((".h5", ".hdf5")):
        file = ScaledFile(Path(config.source))
        count = file.counts.get(split, 0)
        count = min(count, config.samples or count) if split == "train" else count
        if stream:
            return Streamed(file, split, net, device, config.precision, count)
        images, labels = file.read(split, slice(count))
        return _resident(net, config, device, torch.split(images, CHUNK), labels)
    if stream:
        raise ConfigError(f"only a data set file (.h5) can be streamed, got {config.source!r}")
    data, scales = training_images(load_source(config.source), config, split)
    return _resident(net, config, device, _made(data.images, scales, config, device), data.labels)


def training_images(source: Source, config: TrainConfig, split: SplitName) -> tuple[Split, Tensor]:
    """Pick the images of a split, and the scale (N,) at which each is shown."""
    data: Split = getattr(source, split)
    scales = draw_scales(config, len(data), split)
    if split == "train" and config.samples:
        if config.samples > len(data):
            raise ConfigError(f"samples={config.samples}, but there are {len(data)} images")
        data = Split(data.images[: config.samples], data.labels[: config.samples])
    return data, scales[: len(data)]


def draw_scales(config: TrainConfig, count: int, split: SplitName) -> Tensor:
    """Draw the scale of each image; the same for every training seed."""
    ranges = config.ranges()
    drawn = torch.stack([r.draw(count, config.data_seed, split) for r in ranges])
    if len(ranges) == 1:
        return drawn[0]
    choice = np.random.default_rng([config.data_seed, 9]).integers(len(ranges), size=count)
    return drawn[torch.from_numpy(choice), torch.arange(count)]


def _made(
    images: Tensor, scales: Tensor, config: TrainConfig, device: torch.device
) -> Iterator[Tensor]:
    same = len(scales.unique()) == 1
    for some, factors in zip(torch.split(images, CHUNK), torch.split(scales, CHUNK), strict=True):
        factor = float(factors[0]) if same else factors.to(device)
        yield rescale(some.to(device), factor, size=config.size, border=config.border)


def _resident(
    net: nn.Module,
    config: TrainConfig,
    device: torch.device,
    chunks: Iterator[Tensor] | tuple[Tensor, ...],
    labels: Tensor,
) -> Resident:
    held: Inputs = ()
    at = 0
    with torch.no_grad():
        for chunk in chunks:
            ready = prepare(net, chunk.to(device), config.precision)
            if not held:  # one allocation of the whole, filled piece by piece
                held = tuple(t.new_empty(len(labels), *t.shape[1:]) for t in ready)
            for target, part in zip(held, ready, strict=True):
                target[at : at + len(part)] = part
            at += len(chunk)
    return Resident(held, labels.to(device))
