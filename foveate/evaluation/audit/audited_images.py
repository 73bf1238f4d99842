"""The images of an audit, read lazily from a source."""
# Shape letters: B batch, C image channel, H W pixels.

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from foveate.checks import check_choice
from foveate.data.pictures import has_splits, list_pictures, read_picture
from foveate.data.shards import Shards, is_shards, open_shards
from foveate.data.sources import Source, load_source
from foveate.data.splits import SplitName
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.images import Rescale

SPLITS = ("train", "val", "test", "all")
Prepare = Callable[..., Tensor]
"""Function that maps images, each ``(C, H, W)`` uint8, and a scale to the input of a model."""
Check = Callable[[Tensor], object]


@dataclass(eq=False)
class AuditImages:
    """Images (C, H, W) uint8 with labels, read lazily.

    `read(i)` returns image i or raises a DataError; `describe(i)` describes the image in messages.
    `unreadable` maps the index of each skipped image to the reason. After a pass over all images,
    `readable` lists the indices of the images used, `shapes` their heights and widths, and
    `checksum` is the sha256 of their shapes, pixels and labels.
    """

    source: str
    split: str
    read: Callable[[int], Tensor]
    labels: Tensor
    classes: tuple[str, ...]
    describe: Callable[[int], str]
    unreadable: dict[int, str] = field(default_factory=dict)
    readable: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    checksum: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> list[Tensor]:
        """Return the first `count` readable images, or fewer if the source has fewer."""
        tried = (self._try(index) for index in range(len(self)) if index not in self.unreadable)
        found = list(itertools.islice((image for image in tried if image is not None), count))
        if not found:
            raise DataError(
                f"none of the {len(self)} images of {self.source} can be read; check the files"
            )
        return found

    def batches(
        self,
        transform: Prepare,
        batch: int,
        device: torch.device | str = "cpu",
        check: Check = lambda image: None,
    ) -> Iterator[tuple[Rescale, Tensor]]:
        """Yield each batch as a function from a scale to the input, with its labels.

        Images that cannot be read, or for which `check` raises a DataError, are skipped.
        """
        digest = hashlib.sha256()
        self.readable, self.shapes = [], []
        for start in range(0, len(self), batch):
            tried = [(i, self._try(i, check)) for i in range(start, min(start + batch, len(self)))]
            found = {i: image for i, image in tried if image is not None}
            labels = self.labels[list(found)]
            for image, label in zip(found.values(), labels.tolist(), strict=True):
                digest.update(f"{tuple(image.shape)} {label}".encode())
                digest.update(image.numpy().tobytes())
                self.shapes.append((image.shape[-2], image.shape[-1]))
            self.readable += found
            if found:
                yield partial(transform, [image.to(device) for image in found.values()]), labels
        self.checksum = digest.hexdigest()

    def _try(self, index: int, check: Check = lambda image: None) -> Tensor | None:
        try:
            image = self.read(index)
        except DataError as error:
            self.unreadable[index] = str(error)
            return None
        try:
            check(image)
        except DataError as error:
            self.unreadable[index] = f"{self.describe(index)} {error}"
            return None
        return image


def open_images(
    source: str,
    split: str | None = None,
    limit: int | None = None,
    classes: Sequence[str] = (),
    load: Callable[[str], Source] = load_source,
) -> AuditImages:
    """Open the images of a source; images of a folder or of tar files can differ in size.

    The split is test by default, and all for a folder without splits. Only the first `limit` images
    are used. `classes` are the class names in the order of the model's logits, by default that of
    the source. `load` loads sources other than folders and tar files.
    """
    kind, _, name = source.partition(":")
    folder = Path(name).expanduser() if kind == "folder" and name else None
    if split is None:
        split = "all" if folder and not has_splits(folder) else "test"
    check_choice("split", split, SPLITS)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 image, got {limit}")
    if folder:
        items, names = list_pictures(folder, split)
        labels = torch.tensor([label for _, label in items[:limit]], dtype=torch.int64)

        def read(index: int) -> Tensor:
            return torch.from_numpy(read_picture(items[index][0]).copy()).movedim(-1, 0)

        found = AuditImages(source, split, read, labels, names, lambda i: f"image {items[i][0]}")
    elif is_shards(source) and not (shards := open_shards(source)).scaled:
        found = _streamed(source, split, limit, shards)
    else:
        found = _loaded(source, split, limit, load(source))
    if classes:
        found.labels = _reordered(found, classes)
        found.classes = tuple(classes)
    return found


def _streamed(source: str, split: str, limit: int | None, shards: Shards) -> AuditImages:
    """Return the images of tar files, whose classes have no names."""
    parts = [name for name in shards.counts if split == "all"] or [cast(SplitName, split)]
    labels = torch.cat([shards.labels(part) for part in parts])[:limit]
    places = [(part, index) for part in parts for index in range(len(shards.labels(part)))]

    def read(index: int) -> Tensor:
        return torch.from_numpy(shards.read(*places[index]).copy())

    names = tuple(map(str, range(shards.num_classes)))
    return AuditImages(
        source, split, read, labels, names, lambda i: shards.describe_image(*places[i])
    )


def _loaded(source: str, split: str, limit: int | None, data: Source) -> AuditImages:
    parts = [getattr(data, name) for name in (SPLITS[:3] if split == "all" else [split])]
    images = torch.cat([part.images for part in parts])[:limit]
    labels = torch.cat([part.labels for part in parts])[:limit]
    describe = f"image {{}} of {source} ({split})".format
    return AuditImages(source, split, images.__getitem__, labels, data.classes, describe)


def _reordered(images: AuditImages, classes: Sequence[str]) -> Tensor:
    """Return the labels as indices into `classes`."""
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise ConfigError(f"classes must be unique, got {twice!r} twice")
    if missing := [name for name in images.classes if name not in classes]:
        raise ConfigError(
            f"the images have the class {missing[0]!r}, which is not among the {len(classes)} "
            "given classes; list every class of the images"
        )
    return torch.tensor([list(classes).index(name) for name in images.classes])[images.labels]
