"""Images in files of which only what is asked for is in memory: HDF5, tars, a folder of pictures.

`open_shards` takes one HDF5 file, shards:DIR, all .h5 or all .tar files of a folder, or
shards:PATTERN, those whose path matches, in the order of their names.

- HDF5 files are in the layout of `foveate.data.store`, with images at their scales already. A file
  may leave out splits.
- A tar is as WebDataset has it: for each sample a picture and a text with its label, as 0001.png
  and 0001.cls, one after the other. Its name begins with its split: train-000.tar, val-000.tar.
  Pictures are of one size. The first decides whether they are grey or RGB: then grey ones become
  RGB too.

Any image can be read alone, so every order can be had, and had again after an interruption. Kept
in memory are a label for each image and, of a tar, where its picture is: 32 bytes.
"""
# Shape letters: N images, C image channel, H W pixels.

import glob
import os
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foveate.data.pictures import EXTENSIONS, PictureFolder, folder_state, read_picture
from foveate.data.splits import SPLITS, Labels, SplitName, checked_labels, digest
from foveate.data.store import ScaledFile
from foveate.errors import DataError
from foveate.files import reading, regular

PREFIX = "shards:"
OPEN = 32  # files kept open at a time
LONGEST_LABEL = 32  # bytes
SETTLED = 2_000_000_000  # ns; of two changes in a moment, file systems may record one time


class Shard(Protocol):
    """One file or folder: the labels (N,) of its splits in memory, its images on the disk."""

    path: Path
    labels: Labels

    def open(self) -> Any:
        """Open the file for `images`; what it gives has a close()."""

    def images(self, file: Any, split: SplitName, chosen: Sequence[int]) -> Sequence[NDArray[Any]]:
        """Read the images, each (C, H, W), float32 or uint8, at the rising indices `chosen`."""

    def where(self, split: SplitName, index: int) -> str:
        """Name an image in an error."""

    def listing(self) -> Iterator[list[Any]]:
        """What identifies the images without reading their pixels."""


def is_shards(source: str) -> bool:
    """Whether a source names shards."""
    return source.startswith(PREFIX)


def open_shards(source: str) -> "Shards":
    """Open an HDF5 file, or the files that shards:DIR or shards:PATTERN names."""
    if not is_shards(source):
        return Shards([ScaledFile(Path(source))])
    place = os.path.expanduser(source.removeprefix(PREFIX))
    pattern = os.path.join(glob.escape(place), "*") if os.path.isdir(place) else place
    names = sorted(n for n in glob.glob(pattern, recursive=True) if n.endswith(tuple(KINDS)))
    if not names:
        raise DataError(f"no .h5 or .tar files in {place!r}; check the path")
    if len({KINDS[Path(name).suffix] for name in names}) > 1:
        raise DataError(f"{place!r} has .h5 and .tar files; name those of one kind, as DIR/*.tar")
    return _open_files(tuple((name, os.stat(name).st_mtime_ns) for name in names))


@lru_cache(maxsize=4)  # a tar is read through once to find its pictures
def _open_files(files: tuple[tuple[str, int], ...]) -> "Shards":
    """Open files by their names; when they were changed tells them from others so named."""
    return Shards([KINDS[Path(name).suffix](Path(name)) for name, _ in files])


def open_folder(folder: Path) -> "Shards":
    """Open a folder of pictures; it is listed once, and again only after it changed."""
    try:
        state = folder_state(folder)
    except OSError:
        state = ()  # opening it reports why
    last = max((changed for _, _, changed in state), default=0)
    if not 0 < last < time.time_ns() - SETTLED:
        return Shards([PictureFolder(folder)])
    return _open_folder(folder, state)


@lru_cache(maxsize=2)
def _open_folder(folder: Path, state: tuple[tuple[int, int, int], ...]) -> "Shards":
    return Shards([PictureFolder(folder)])


class TarShard:
    """A tar of pictures and labels as a shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            found = list(_samples(regular(path)))
        labels = np.array([sample[2] for sample in found], np.float64)  # holds 2^63 too
        self.labels: Labels = {_split_of(path): checked_labels(labels, str(path))}
        self.places = np.array([sample[:2] for sample in found], np.int64)

    def open(self) -> Any:
        """Open the file for `images`."""
        return regular(self.path).open("rb")

    def images(self, file: Any, split: SplitName, chosen: Sequence[int]) -> list[NDArray[Any]]:
        """Read the pictures, each (C, H, W), at the indices `chosen`."""
        found = []
        for index in chosen:
            offset, size = map(int, self.places[index])
            content = _Picture(os.pread(file.fileno(), size, offset))
            content.name = f"{index} of {self.path}"
            found.append(read_picture(content).transpose(2, 0, 1))
        return found

    def where(self, split: SplitName, index: int) -> str:
        """Name a picture in an error."""
        return f"image {index} of {self.path}"

    def listing(self) -> Iterator[list[Any]]:
        """What identifies the file without its pixels: name, size, labels, places of pictures."""
        labels = {split: digest(values) for split, values in self.labels.items()}
        yield [self.path.name, self.path.stat().st_size, labels, digest(self.places)]


KINDS: dict[str, type[ScaledFile] | type[TarShard]] = {
    ".h5": ScaledFile,
    ".hdf5": ScaledFile,
    ".tar": TarShard,
}


class _Picture(BytesIO):
    """The content of a picture; its name is for messages."""

    name = ""

    def __str__(self) -> str:
        return self.name


class Shards:
    """The images of many files, as if they were one."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.files: dict[int, Any] = {}
        self.lock = threading.Lock()  # runs side by side may read at the same time
        self.scaled: list[ScaledFile] = [shard for shard in shards if isinstance(shard, ScaledFile)]
        self.starts, self._labels = {}, dict[SplitName, Tensor]()
        for split in SPLITS:
            found = [shard.labels.get(split, np.empty(0, np.int64)) for shard in shards]
            self.starts[split] = np.cumsum([0, *map(len, found)])
            if self.starts[split][-1]:
                self._labels[split] = torch.from_numpy(np.concatenate(found))
        self.counts = {split: len(labels) for split, labels in self._labels.items()}
        if not self.counts:
            raise DataError(f"there are no images in {shards[0].path} and the files beside it")

    @cached_property
    def first(self) -> NDArray[Any]:
        """The first image (C, H, W)."""
        split = next(iter(self.counts))
        return self._read(int(np.flatnonzero(self.starts[split])[0]) - 1, split, [0])[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (C, H, W) of an image."""
        return self.first.shape

    @cached_property
    def in_colour(self) -> bool:
        """Whether the first image that can be read has three channels."""
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
        """The labels (N,) of a split."""
        if split not in self.counts:
            where, holds = self.shards[0].path, ", ".join(self.counts)
            where = where if len(self.shards) == 1 else where.parent
            raise DataError(f"{where} holds no {split} images, only {holds}")
        return self._labels[split]

    def pick(self, split: SplitName, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Read the images (N, C, H, W) and labels (N,) at the indices `chosen`, in their order."""
        labels, starts = self.labels(split)[chosen], self.starts[split]
        owners = np.searchsorted(starts, chosen.numpy(), side="right") - 1
        images = np.empty((len(chosen), *self.shape), self.first.dtype)
        for at in np.unique(owners).tolist():
            places = np.flatnonzero(owners == at)
            inside, back = np.unique(chosen.numpy()[places] - starts[at], return_inverse=True)
            found = self._read(at, split, inside.tolist())
            for place, number in zip(places, back, strict=True):
                image = found[number]
                if image.shape not in (self.shape, (1, *self.shape[1:])):
                    raise DataError(
                        f"{self.shards[at].where(split, int(inside[number]))} is {image.shape}, "
                        f"the first of all is {self.shape}; make them alike"
                    )
                images[place] = image
        return torch.from_numpy(images), labels

    def read(self, split: SplitName, index: int) -> NDArray[Any]:
        """Read the image (C, H, W) at an index, of whatever size it is."""
        at, inside = self._place(split, index)
        return self._read(at, split, [inside])[0]

    def where(self, split: SplitName, index: int) -> str:
        """Name an image in an error."""
        at, inside = self._place(split, index)
        return self.shards[at].where(split, inside)

    def listing(self) -> Iterator[list[Any]]:
        """What identifies the images without reading their pixels."""
        for shard in self.shards:
            yield from shard.listing()

    def close(self) -> None:
        """Close all files; they open again when needed."""
        while self.files:
            self.files.popitem()[1].close()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "files": {}, "lock": None}  # a process opens files of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())

    def _place(self, split: SplitName, index: int) -> tuple[int, int]:
        """The shard that holds an image, and its index there."""
        at = int(np.searchsorted(self.starts[split], index, side="right")) - 1
        return at, index - int(self.starts[split][at])

    def _read(self, at: int, split: SplitName, chosen: list[int]) -> Sequence[NDArray[Any]]:
        shard = self.shards[at]
        with reading(shard.path), self.lock:
            file = self.files.pop(at, None) or shard.open()
            self.files[at] = file  # the last in the order, which is that of use
            if len(self.files) > OPEN:
                self.files.pop(next(iter(self.files))).close()
            return shard.images(file, split, chosen)


def _split_of(path: Path) -> SplitName:
    for split in SPLITS:
        if path.name.startswith(split):
            return split
    raise DataError(f"{path} must begin with the name of its split, as train-000.tar")


def _samples(path: Path) -> Iterator[tuple[int, int, int]]:
    """Where the picture of each sample begins, its size, and the sample's label."""
    end = path.stat().st_size
    with tarfile.open(path, "r:") as tar:
        name, parts = "", dict[str, int]()
        while member := tar.next():
            tar.members = []  # type: ignore[attr-defined]  # it would keep them all
            folder, slash, base = member.name.rpartition("/")
            stem, _, kind = base.partition(".")
            if not member.isfile() or not stem:
                continue  # a link, a device, a folder: nothing is followed or unpacked
            if member.issparse() or member.size < 0 or member.offset_data + member.size > end:
                raise DataError(
                    f"{member.name} of {path} claims {member.size} bytes that are not in the file; "
                    "make it again"
                )
            if folder + slash + stem != name:
                yield from _sample(path, name, parts)
                name, parts = folder + slash + stem, {}
            if f".{kind.lower()}" in EXTENSIONS:
                parts |= {"offset": member.offset_data, "size": member.size}
            elif kind == "cls":
                parts["label"] = _label(tar, member)
        yield from _sample(path, name, parts)


def _sample(path: Path, name: str, parts: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    if len(parts) == 3:
        yield parts["offset"], parts["size"], parts["label"]
    elif parts:
        lacks = "label (.cls)" if "offset" in parts else "picture"
        raise DataError(f"sample {name!r} of {path} has no {lacks} beside it; add it")


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    content = tar.extractfile(member)
    assert content is not None
    text = content.read(LONGEST_LABEL + 1)
    if not text.strip().isdigit() or len(text) > LONGEST_LABEL:
        raise DataError(f"{member.name} of {tar.name!r} must be a label as 7, got {text!r}")
    return int(text)
