"""Sources that are read from disk on demand: HDF5 files, tar files and folders of images.

`open_shards` accepts one HDF5 file; shards:DIR, all .h5 or all .tar files of a folder; or
shards:PATTERN, all files whose path matches. Files are sorted by name.

- HDF5 files have the layout of `foveate.data.store`, with images that are already rescaled. A file
  can lack splits.
- Tar files follow WebDataset: each sample is an image and a text file with its label, such as
  0001.png and 0001.cls, one after the other. File names begin with the split: train-000.tar,
  val-000.tar. All images have one size, except with the recipe `photo`. If the first one is RGB,
  grey ones are converted to RGB.

Images are read individually, so batches can have any order, and a resumed run reads the same
batches. Only the label of each image and, for a tar file, the position of the image are held in
memory: 32 bytes per image.
"""
# Shape letters: N images, C image channel, H W pixels.

import glob
import os
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foveate.data.decoding import read_picture, read_size
from foveate.data.pictures import EXTENSIONS, PictureFolder, folder_fingerprint
from foveate.data.splits import (
    SPLITS,
    Labels,
    Source,
    Split,
    SplitName,
    check_split,
    checked_labels,
    digest,
)
from foveate.data.store import ScaledFile
from foveate.errors import DataError
from foveate.files import NamedBytes, check_regular, wrap_read_errors

PREFIX = "shards:"
LONGEST_LABEL = 32  # bytes
HEADER = 1 << 20  # bytes of an image file that contain its size
SETTLED = 2_000_000_000  # ns; file systems can record one time for two changes in quick succession


def is_shards(source: str) -> bool:
    """Whether a source has the form shards:DIR or shards:PATTERN."""
    return source.startswith(PREFIX)


def open_shards(source: str) -> "Shards":
    """Open an HDF5 file, or the files of shards:DIR or shards:PATTERN."""
    if not is_shards(source):
        return Shards([ScaledFile(Path(source))])
    place = os.path.expanduser(source.removeprefix(PREFIX))
    pattern = os.path.join(glob.escape(place), "*") if os.path.isdir(place) else place
    names = sorted(n for n in glob.glob(pattern, recursive=True) if n.endswith(tuple(KINDS)))
    if not names:
        raise DataError(f"no .h5 or .tar files in {place!r}; check the path")
    kinds = {KINDS[Path(name).suffix] for name in names}
    if len(kinds) > 1:
        raise DataError(
            f"{place!r} has .h5 and .tar files; select files of one kind, such as DIR/*.tar"
        )
    changed = tuple(os.stat(name).st_mtime_ns for name in names)
    return _open(kinds.pop(), tuple(names), changed)


def open_folder(folder: Path) -> "Shards":
    """Open a folder of images; it is listed once, and again only after it changed."""
    try:
        state = folder_fingerprint(folder)
    except OSError:
        state = ()  # opening the folder reports the reason
    last = max((changed for _, _, changed in state), default=0)
    if not 0 < last < time.time_ns() - SETTLED:
        return Shards([PictureFolder(folder)])
    return _open(PictureFolder, (str(folder),), state)


def read_folder(name: str, folder: Path) -> Source:
    """Read all images of `folder` into memory: grey if all are grey, otherwise RGB."""
    found = PictureFolder(folder)
    images, splits = Shards([found]), []
    for split in SPLITS:
        groups = torch.arange(images.counts[split]).split(16)  # other sizes are found early
        parts = [images.read_batch(split, indices) for indices in groups]
        splits.append(Split(*map(torch.cat, zip(*parts, strict=True))))
    return Source.of(name, splits, found.classes)


@lru_cache(maxsize=4)  # a folder is listed, and a tar file is scanned to find its images, only once
def _open(kind: "Callable[[Path], Shard]", paths: tuple[str, ...], state: Hashable) -> "Shards":
    """Open files or a folder; a `state` that changed with them makes the cache miss."""
    return Shards([kind(Path(path)) for path in paths])


class TarShard:
    """A tar file of images and labels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with wrap_read_errors(path):
            found = list(_samples(check_regular(path)))
        labels = np.array([sample[2] for sample in found], np.float64)  # int64 overflows at 2^63
        self.labels: Labels = {_split_of(path): checked_labels(labels, str(path))}
        self.places = np.array([sample[:2] for sample in found], np.int64)

    def images(self, split: SplitName, indices: Sequence[int]) -> list[NDArray[Any]]:
        """Read the images, each (C, H, W), at the given `indices`."""
        return [read_picture(self._content(i)).transpose(2, 0, 1) for i in indices]

    def size(self, split: SplitName, index: int) -> tuple[int, int]:
        """Read height and width of an image from its first bytes."""
        return read_size(self._content(index, HEADER))

    def _content(self, index: int, most: int = sys.maxsize) -> NamedBytes:
        """Read the first bytes of an image file, at `most` so many."""
        offset, size = map(int, self.places[index])
        with check_regular(self.path).open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), min(size, most), offset)
        return NamedBytes(content, f"{index} of {self.path}")


KINDS: dict[str, Callable[[Path], ScaledFile | TarShard]] = {
    ".h5": ScaledFile,
    ".hdf5": ScaledFile,
    ".tar": TarShard,
}
Shard: TypeAlias = ScaledFile | TarShard | PictureFolder
"""One file or folder, with the labels (N,) of its splits in memory and its images on disk."""


class Shards:
    """The images of several files as one source."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.lock = threading.Lock()  # runs can share a source, and `warnings` is not thread-safe
        self.scaled: list[ScaledFile] = [shard for shard in shards if isinstance(shard, ScaledFile)]
        self.starts, self._labels = {}, dict[SplitName, Tensor]()
        for split in SPLITS:
            found = [shard.labels.get(split, np.empty(0, np.int64)) for shard in shards]
            self.starts[split] = np.cumsum([0, *map(len, found)])
            if self.starts[split][-1]:
                self._labels[split] = torch.from_numpy(np.concatenate(found))
        self.counts = {split: len(labels) for split, labels in self._labels.items()}
        if not self.counts:
            raise DataError(
                f"{shards[0].path} and the files next to it have no images; check the path"
            )

    @cached_property
    def first(self) -> NDArray[Any]:
        """First image (C, H, W)."""
        return self.read(next(iter(self.counts)), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (C, H, W) of the first image, as RGB if another image of a folder is in colour."""
        colour = isinstance(folder := self.shards[0], PictureFolder) and folder.in_colour
        return (3, *self.first.shape[1:]) if colour else self.first.shape

    @cached_property
    def in_colour(self) -> bool:
        """Whether the first readable image has three channels."""
        for split, count in self.counts.items():
            for index in range(count):
                with suppress(DataError):
                    return len(self.read(split, index)) == 3
        return False

    @property
    def num_classes(self) -> int:
        """Number of classes: one more than the largest label."""
        return 1 + max(int(labels.max()) for labels in self._labels.values())

    def labels(self, split: SplitName) -> Tensor:
        """Return the labels (N,) of a split."""
        where = self.shards[0].path
        check_split(where if len(self.shards) == 1 else where.parent, split, self.counts)
        return self._labels[split]

    def read_batch(self, split: SplitName, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Read the images (N, C, H, W) and labels (N,) at the given `indices`, in their order."""
        labels, starts, shape = self.labels(split)[indices], self.starts[split], self.shape
        owners = np.searchsorted(starts, indices.numpy(), side="right") - 1
        images = np.empty((len(indices), *shape), self.first.dtype)
        for at in np.unique(owners).tolist():
            places = np.flatnonzero(owners == at)
            inside, back = np.unique(indices.numpy()[places] - starts[at], return_inverse=True)
            found = self._read(at, split, inside.tolist())
            for place, number in zip(places, back, strict=True):
                image = found[number]
                if image.shape not in (shape, (1, *shape[1:])):
                    first = self.describe_image(next(iter(self.counts)), 0)
                    raise DataError(
                        f"{self.describe_image(split, int(indices[place]))} has shape "
                        f"{image.shape}, but {first} has {shape}; resize or convert them to one "
                        "shape"
                    )
                images[place] = image
        return torch.from_numpy(images), labels

    def read(self, split: SplitName, index: int) -> NDArray[Any]:
        """Read the image (C, H, W) at an index; images can differ in size."""
        at, inside = self._place(split, index)
        return self._read(at, split, [inside])[0]

    def sizes(self, split: SplitName, most: int) -> list[tuple[int, int]]:
        """Return height and width of about `most` readable images, evenly spaced in a split."""
        found = []
        for index in range(0, len(labels := self.labels(split)), max(1, len(labels) // most)):
            at, inside = self._place(split, index)
            if isinstance(shard := self.shards[at], PictureFolder | TarShard):
                with suppress(DataError):
                    found.append(shard.size(split, inside))
        return found

    def describe_image(self, split: SplitName, index: int) -> str:
        """Return the name of an image for error messages."""
        at, inside = self._place(split, index)
        shard = self.shards[at]
        if isinstance(shard, PictureFolder):
            return f"image {shard.items[split][inside][0]}"
        return f"image {inside} of {shard.path}"

    def listing(self) -> Iterator[list[Any]]:
        """Yield the properties of each file that a checksum covers, without reading pixels."""
        for shard in self.shards:
            if isinstance(shard, PictureFolder):
                yield from shard.listing()
                continue
            labels = {split: digest(values) for split, values in shard.labels.items()}
            more = digest(shard.places) if isinstance(shard, TarShard) else shard.manifest
            yield [shard.path.name, shard.path.stat().st_size, labels, more]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())

    def _place(self, split: SplitName, index: int) -> tuple[int, int]:
        """Return the number of the shard with an image, and the index of the image in it."""
        at = int(np.searchsorted(self.starts[split], index, side="right")) - 1
        return at, index - int(self.starts[split][at])

    def _read(self, at: int, split: SplitName, indices: list[int]) -> Sequence[NDArray[Any]]:
        shard = self.shards[at]
        with wrap_read_errors(shard.path), self.lock:
            return shard.images(split, indices)


def _split_of(path: Path) -> SplitName:
    for split in SPLITS:
        if path.name.startswith(split):
            return split
    raise DataError(f"the name of {path} must begin with its split, such as train-000.tar")


def _samples(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield offset and size in bytes of each sample's image, and the label of the sample."""
    end = path.stat().st_size
    with tarfile.open(path, "r:") as tar:
        name, parts = "", dict[str, int]()
        while member := tar.next():
            tar.members = []  # type: ignore[attr-defined]  # tarfile would hold all in memory
            folder, slash, base = member.name.rpartition("/")
            stem, _, kind = base.partition(".")
            if not member.isfile() or not stem:
                continue  # links, devices and folders are never followed or unpacked
            if member.issparse() or member.size < 0 or member.offset_data + member.size > end:
                raise DataError(
                    f"{member.name} of {path} declares {member.size} bytes that are not in the "
                    "file; create the tar file again"
                )
            if folder + slash + stem != name:
                yield from _sample(path, name, parts)
                name, parts = folder + slash + stem, {}
            if f".{kind.lower()}" in EXTENSIONS:
                parts |= {"offset": member.offset_data, "size": member.size}
            elif kind == "cls":
                parts["label"] = _label(tar, member)
        yield from _sample(path, name, parts)
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)  # tarfile stops at a damaged header as at the end
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(
                f"{path} is damaged or incomplete after the sample {name!r}; create or download it "
                "again"
            )


def _sample(path: Path, name: str, parts: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    if len(parts) == 3:
        yield parts["offset"], parts["size"], parts["label"]
    elif parts:
        lacks = "label (.cls)" if "offset" in parts else "image"
        raise DataError(f"sample {name!r} of {path} has no {lacks} next to it; add one")


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    content = tar.extractfile(member)
    assert content is not None
    text = content.read(LONGEST_LABEL + 1)
    if not text.strip().isdigit() or len(text) > LONGEST_LABEL:
        raise DataError(
            f"{member.name} of {tar.name!r} must be a class index such as 7, got {text!r}"
        )
    return int(text)
