"""A data set in many files, HDF5 or tar, of which only what is asked for is in memory.

`open_shards` takes shards:DIR, all .h5 or all .tar files of a folder, or shards:PATTERN, those
whose path matches, in the order of their names.

- HDF5 files are in the layout of `foveate.data.store`, with images at their scales already. A file
  may leave out splits.
- A tar is as WebDataset has it: for each sample a picture and a text with its label, as 0001.png
  and 0001.cls, one after the other. Its name begins with its split: train-000.tar, val-000.tar.
  Pictures are of one size. The first decides whether they are grey or RGB: then grey ones become
  RGB too.

Any image can be read alone, so every order can be had, and had again after an interruption. Kept
in memory are a label for each image and, of a tar, where its picture is: 24 bytes.
"""
# Shape letters: N images, C image channel, H W pixels.

import glob
import os
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foveate.data.checks import checked_labels, checked_pixels
from foveate.data.folder import EXTENSIONS, SPLITS, SplitName
from foveate.data.hdf5 import Labels
from foveate.data.picture import read_picture
from foveate.data.store import ScaledFile
from foveate.errors import DataError
from foveate.files import regular

PREFIX = "shards:"
OPEN = 32  # files kept open at a time
LONGEST_LABEL = 32  # bytes


def is_shards(source: str) -> bool:
    """Whether a source names shards."""
    return source.startswith(PREFIX)


def open_shards(source: str) -> "Shards":
    """Find the files that shards:DIR or shards:PATTERN names."""
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


class Shard(Protocol):
    """One file: the labels (N,) of its splits in memory, its images on the disk."""

    path: Path
    labels: Labels

    def open(self) -> Any:
        """Give the file as `image` wants it; it has a close()."""

    def image(self, file: Any, split: SplitName, index: int) -> NDArray[Any]:
        """Read one image (C, H, W), float32 or uint8."""


class H5Shard(ScaledFile):
    """A data set file as a shard."""

    def open(self) -> Any:
        """Give the file."""
        return h5py.File(regular(self.path))

    def image(self, file: Any, split: SplitName, index: int) -> NDArray[Any]:
        """Read one image (C, H, W)."""
        pixels = file[f"x_{split}"][index : index + 1]
        return np.moveaxis(checked_pixels(pixels, f"x_{split} of {self.path}", [index])[0], -1, 0)


class TarShard:
    """A tar of pictures and labels as a shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _one_line(path):
            found = list(_samples(regular(path)))
        labels = np.array([sample[2] for sample in found], np.float64)  # holds 2^63 too
        self.labels: Labels = {_split_of(path): checked_labels(labels, str(path))}
        self.places = np.array([sample[:2] for sample in found], np.int64)

    def open(self) -> Any:
        """Give the file."""
        return regular(self.path).open("rb")

    def image(self, file: Any, split: SplitName, index: int) -> NDArray[Any]:
        """Read one picture (C, H, W)."""
        offset, size = map(int, self.places[index])
        content = _Picture(os.pread(file.fileno(), size, offset))
        content.name = f"{index} of {self.path}"
        return read_picture(content).transpose(2, 0, 1)


KINDS: dict[str, type[H5Shard] | type[TarShard]] = {
    ".h5": H5Shard,
    ".hdf5": H5Shard,
    ".tar": TarShard,
}


class _Picture(BytesIO):
    """The content of a picture; its name is for messages."""

    name = ""

    def __str__(self) -> str:
        return self.name


class Shards:
    """The images of many files, as if they were one; `made` says that they have their scales."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.files: dict[int, Any] = {}
        self.lock = threading.Lock()  # runs side by side may read at the same time
        self.made = isinstance(shards[0], H5Shard)
        self.starts = {
            split: np.cumsum([0, *(len(shard.labels.get(split, ())) for shard in shards)])
            for split in SPLITS
        }
        self.counts = {split: int(ends[-1]) for split, ends in self.starts.items() if ends[-1]}
        if not self.counts:
            raise DataError(f"there are no images in {shards[0].path} and the files beside it")
        self.first = self._image(next(iter(self.counts)), 0).copy()

    def labels(self, split: SplitName) -> Tensor:
        """The labels (N,) of a split."""
        self._require(split)
        found = [s.labels[split] for s in self.shards if split in s.labels]
        return torch.from_numpy(np.concatenate(found))

    def pick(self, split: SplitName, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Read the images (N, C, H, W) and labels (N,) at the indices `chosen`, in their order."""
        self._require(split)
        images = np.empty((len(chosen), *self.first.shape), self.first.dtype)
        labels = np.empty(len(chosen), np.int64)
        with self.lock:
            for place in chosen.argsort().tolist():  # a file's images one after the other
                shard, inside = self._find(split, int(chosen[place]))
                labels[place] = self.shards[shard].labels[split][inside]
                image = self._image(split, int(chosen[place]))
                if image.shape not in (self.first.shape, (1, *self.first.shape[1:])):
                    raise DataError(
                        f"image {inside} of {self.shards[shard].path} is {image.shape}, the first "
                        f"of all is {self.first.shape}; make them alike"
                    )
                images[place] = image
        return torch.from_numpy(images), torch.from_numpy(labels)

    def close(self) -> None:
        """Close all files; they open again when needed."""
        while self.files:
            self.files.popitem()[1].close()

    def __del__(self) -> None:
        self.close()

    def _require(self, split: SplitName) -> None:
        if split not in self.counts:
            raise DataError(f"the shards hold no {split} images, only {', '.join(self.counts)}")

    def _find(self, split: SplitName, index: int) -> tuple[int, int]:
        """The shard of an image, and its number there."""
        shard = int(np.searchsorted(self.starts[split], index, side="right")) - 1
        return shard, index - int(self.starts[split][shard])

    def _image(self, split: SplitName, index: int) -> NDArray[Any]:
        at, inside = self._find(split, index)
        shard = self.shards[at]
        with _one_line(shard.path):
            file = self.files.pop(at, None) or shard.open()
            self.files[at] = file  # the last in the order, which is that of use
            if len(self.files) > OPEN:
                self.files.pop(next(iter(self.files))).close()
            return shard.image(file, split, inside)


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


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # tarfile and h5py raise anything from IndexError to MemoryError
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read {path} ({reason}); make or get it again") from None
