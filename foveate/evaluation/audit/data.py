"""The pictures of an audit: listed first, read batch by batch, unreadable ones left out."""
# Shape letters: N images, B batch, C image channel, H W pixels.

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from foveate.data.pictures import has_splits, list_pictures, read_picture
from foveate.data.sources import Source, load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.images import Look
from foveate.evaluation.invariance import Rescale

SPLITS = ("train", "val", "test", "all")
Read: TypeAlias = Callable[[int], Tensor]


class Pictures:
    """Pictures (C, H, W) uint8 with labels; those that cannot be read are named in `unreadable`.

    `read(i)` gives picture i or raises a DataError. After a pass over all of them `checksum` is
    the sha256 of the shapes, pixels and labels that were read.
    """

    def __init__(
        self, source: str, split: str, read: Read, labels: Tensor, classes: Sequence[str]
    ) -> None:
        self.source, self.split, self.classes = source, split, tuple(classes)
        self.labels, self._read = labels, read
        self.reordered = False  # whether `classes` are a model's own, not the source's
        self.unreadable: dict[int, str] = {}
        self.checksum = ""

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, count: int) -> list[Tensor]:
        """Give the first pictures that can be read: `count` of them, or all if there are fewer."""
        tried = (self._try(index) for index in range(len(self)))
        found = list(itertools.islice((p for p in tried if p is not None), count))
        if not found:
            raise DataError(f"none of the {len(self)} images of {self.source} can be read")
        return found

    def batches(
        self,
        look: Look,
        batch: int,
        device: torch.device | str = "cpu",
        *,
        seed: int | None = None,
    ) -> Iterator[tuple[Rescale, Tensor]]:
        """Hand out `batch` pictures at a time: a function that shows them at a scale, and labels.

        With a `seed` they come in a random order.
        """
        order = torch.arange(len(self))
        if seed is not None:
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        digest = hashlib.sha256()
        for chosen in order.split(batch):
            found = [(i, self._try(i)) for i in chosen.tolist()]
            pictures = [picture for _, picture in found if picture is not None]
            labels = self.labels[[i for i, picture in found if picture is not None]]
            for picture, label in zip(pictures, labels.tolist(), strict=True):
                digest.update(f"{tuple(picture.shape)} {label}".encode())
                digest.update(picture.numpy().tobytes())
            if pictures:
                yield partial(look.show, [picture.to(device) for picture in pictures]), labels
        self.checksum = digest.hexdigest()

    def _try(self, index: int) -> Tensor | None:
        try:
            return self._read(index)
        except DataError as error:
            self.unreadable[index] = str(error)
            return None


def open_pictures(
    source: str,
    split: str = "test",
    limit: int | None = None,
    classes: Sequence[str] = (),
    load: Callable[[str], Source] = load_source,
) -> Pictures:
    """Open a split of a source, or `all` of it; of `limit` pictures the first.

    Pictures of a folder are read when they are needed, and may differ in size. `classes` are the
    names of a model's answers in their order, if it has others than the source, or in another.
    """
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 image, got {limit}")
    pictures = _open(source, split, limit, load)
    if classes:
        pictures.labels = _in_order(pictures, classes)
        pictures.classes, pictures.reordered = tuple(classes), True
    return pictures


def _open(source: str, split: str, limit: int | None, load: Callable[[str], Source]) -> Pictures:
    kind, _, folder = source.partition(":")
    if kind == "folder" and folder:
        items, names = list_pictures(Path(folder).expanduser(), split)
        labels = torch.tensor([label for _, label in items[:limit]], dtype=torch.int64)
        read = partial(_read_file, [path for path, _ in items])
        return Pictures(source, split, read, labels, names)
    found = load(source)
    parts = [found.train, found.val, found.test] if split == "all" else [getattr(found, split)]
    images, labels = (
        torch.cat([getattr(part, name) for part in parts])[:limit] for name in ("images", "labels")
    )
    return Pictures(source, split, images.__getitem__, labels, found.classes)


def usual_split(source: str) -> str:
    """The split that is meant if none is named: test, or all of a folder that has no splits."""
    kind, _, folder = source.partition(":")
    if kind == "folder" and folder and not has_splits(Path(folder).expanduser()):
        return "all"
    return "test"


def _in_order(pictures: Pictures, classes: Sequence[str]) -> Tensor:
    """The labels as places in `classes`."""
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise ConfigError(f"the model's classes have the name {twice!r} twice; name each once")
    missing = [name for name in pictures.classes if name not in classes]
    if missing:
        raise ConfigError(
            f"the images have the class {missing[0]!r}, which is not among the {len(classes)} "
            "classes given for the model; use the same names"
        )
    places = torch.tensor([list(classes).index(name) for name in pictures.classes])
    return places[pictures.labels]


def _read_file(paths: Sequence[Path], index: int) -> Tensor:
    return torch.from_numpy(read_picture(paths[index]).copy()).movedim(-1, 0)
