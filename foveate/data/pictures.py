"""A folder of pictures with a sub-folder per class."""
# Shape letters: N images, C image channel, H W pixels.

import hashlib
import itertools
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from foveate.data.decoding import Pixels as Pixels
from foveate.data.decoding import is_colour
from foveate.data.decoding import read_picture as read_picture
from foveate.data.splits import SPLITS, Labels, Source, Split, SplitName
from foveate.errors import DataError

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
)
VALIDATION = frozenset(("val", "validation"))

Classes: TypeAlias = dict[str, list[Path]]
"""The files of each class, both in the order of their names."""
Item: TypeAlias = tuple[Path, int]
"""A file and its label."""


def read_folder(name: str, folder: Path) -> Source:
    """Read all pictures of `folder` into memory, as a source called `name`.

    Classes are numbered, and files ordered, by name. Sub-folders `train`, `val` (or `validation`)
    and `test` are the splits. Where there is no `val`, a sixth of `train` is; without sub-folders a
    fifth of all files is test and a tenth val. A hash of class and file name decides which, see
    `fraction`: adding or removing a file moves no other one. Near-duplicates, as the frames of a
    film, can fall into different splits then; make the sub-folders yourself for those. In each
    split the classes take turns, so its first images are balanced. Hidden files and other
    extensions are ignored.

    Each picture is read as by `read_picture`. C is 1 if all are grey; a single colour picture makes
    all of them RGB.
    """
    found = PictureFolder(folder)
    images = _decode_all([path for split in SPLITS for path, _ in found.items[split]])
    parts = torch.split(images, [len(found.items[split]) for split in SPLITS])
    labels = [torch.from_numpy(found.labels[split]) for split in SPLITS]
    return Source.of(name, list(map(Split, parts, labels)), found.classes)


def list_pictures(folder: Path, split: str = "all") -> tuple[list[Item], tuple[str, ...]]:
    """List the files of a split with their labels, or of `all`, and the names of the classes.

    The splits are those of `read_folder`; `all` needs none. Nothing is opened.
    """
    if split != "all":
        plan = [_plan(folder)[list[str](SPLITS).index(split)]]
    else:
        plan = _plan(folder) if has_splits(folder) else [_classes(folder)]
    return [item for part in plan for item in _interleave(part)], tuple(plan[0])


class PictureFolder:
    """The pictures of a folder in the splits of `read_folder`, read when they are needed."""

    def __init__(self, folder: Path) -> None:
        plan = _plan(folder)
        self.path, self.classes = folder, tuple(plan[0])
        self.items = dict(zip(SPLITS, map(_interleave, plan), strict=True))
        self.labels: Labels = {
            split: np.array([label for _, label in items], np.int64)
            for split, items in self.items.items()
        }

    def open(self) -> ExitStack:
        """Nothing stays open between two pictures."""
        return ExitStack()

    def images(self, file: object, split: SplitName, chosen: Sequence[int]) -> list[Pixels]:
        """Read the pictures, each (C, H, W), at the indices `chosen`."""
        paths = [self.items[split][index][0] for index in chosen]
        return [read_picture(path).transpose(2, 0, 1) for path in paths]

    @cached_property
    def in_colour(self) -> bool:
        """Whether any picture is in colour; headers are read up to the first that is.

        Pictures that cannot be read do not count: they are reported when they are needed.
        """
        for path, _ in itertools.chain.from_iterable(self.items.values()):
            with suppress(DataError):
                if is_colour(path):
                    return True
        return False

    def where(self, split: SplitName, index: int) -> str:
        """Name a picture in an error."""
        return f"image {self.items[split][index][0]}"

    def listing(self) -> Iterator[list[Any]]:
        """What identifies the pictures without decoding them: relative path and size.

        A file that is missing, as where a link leads nowhere, has no size: it is reported when the
        picture is needed.
        """
        for path, _ in itertools.chain.from_iterable(self.items.values()):
            name = unicodedata.normalize("NFC", path.relative_to(self.path).as_posix())
            try:
                size = path.stat().st_size
            except OSError:
                size = None
            yield [name, size]


def folder_state(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Device, inode and time of change of a folder and of the folders in it, two levels deep.

    It differs where a picture or class was added, removed or renamed.
    """
    found = [os.stat(folder)]
    for inside in _folders(folder):
        found += [os.stat(inside), *map(os.stat, _folders(inside))]
    return tuple((state.st_dev, state.st_ino, state.st_mtime_ns) for state in found)


def _folders(folder: Path | str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir())


def has_splits(folder: Path) -> bool:
    """Whether the folder has the sub-folders train and test."""
    return {"train", "test"} <= {path.name for path in _entries(folder) if path.is_dir()}


def fraction(label: str, name: str) -> float:
    """Map the name of a file and its class to a number from 0 to 1 by their sha256.

    Names are compared in Unicode's composed form (NFC), which not all file systems keep.
    """
    text = unicodedata.normalize("NFC", f"{label}/{name}")
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _plan(folder: Path) -> list[Classes]:
    """The files of train, val and test."""
    names = {path.name for path in _entries(folder) if path.is_dir()}
    if not {"train", "test"} <= names:
        if names and names <= {"train", "test", *VALIDATION}:
            raise DataError(
                f"{folder} has only {' and '.join(sorted(names))}; give it both train and test, "
                "or one sub-folder per class"
            )
        _refuse_unknown_splits(folder, names)
        classes = _classes(folder)
        shares = ((0.3, 1), (0.2, 0.3), (0, 0.2))
        return _checked(folder, [_part(classes, *share) for share in shares])
    if unknown := sorted(names - {"train", "test", *VALIDATION}):
        raise DataError(
            f"{folder} has {unknown[0]!r} beside train and test; move it away, or call it val"
        )
    if names >= VALIDATION:
        raise DataError(f"{folder} has both val and validation; keep one of them")
    train = _classes(folder / "train")
    others = {name: _classes(folder / name) for name in sorted(names - {"train"})}
    for name, classes in others.items():
        if different := sorted(train.keys() ^ classes.keys()):
            raise DataError(
                f"train and {name} in {folder} must hold the same classes; only one of them has "
                f"{', '.join(different)}"
            )
    test = others.pop("test")
    if others:
        return [train, *others.values(), test]
    return _checked(folder, [_part(train, 1 / 6, 1), _part(train, 0, 1 / 6), test])


def _refuse_unknown_splits(folder: Path, names: set[str]) -> None:
    """Refuse a folder whose train, val or test holds folders: it is a split, and no class."""
    for name in sorted(names & {"train", "test", *VALIDATION}):
        inside = folder / name
        if not _images(inside) and any(path.is_dir() for path in _entries(inside)):
            other = sorted(names - {"train", "test", *VALIDATION})[0]
            raise DataError(
                f"{folder} has {name!r} with sub-folders, and {other!r}; the splits of a folder "
                "are train, test and, if there is one, val or validation: rename or move "
                f"{other!r}"
            )


def _part(classes: Classes, low: float, high: float) -> Classes:
    """The files of each class whose `fraction` lies from `low` to below `high`."""
    return {
        label: [path for path in files if low <= fraction(label, path.name) < high]
        for label, files in classes.items()
    }


def _checked(folder: Path, plan: list[Classes]) -> list[Classes]:
    """Refuse splits by `fraction` that leave a split or the training images of a class empty."""
    counts = {
        split: sum(map(len, classes.values())) for split, classes in zip(SPLITS, plan, strict=True)
    }
    bare = [label for label, files in plan[0].items() if not files]
    if bare or 0 in counts.values():
        what = ", ".join(f"{count} {split}" for split, count in counts.items())
        also = f", and class {bare[0]!r} no training image" if bare else ""
        raise DataError(
            f"the images of {folder} give {what}{also}; add images, or make the sub-folders "
            "train, val and test yourself"
        )
    return plan


def _classes(folder: Path) -> Classes:
    classes = {path.name: _images(path) for path in _entries(folder) if path.is_dir()}
    if not classes:
        raise DataError(f"{folder} has no class sub-folders; put the images of each class into one")
    for name, files in classes.items():
        if not files:
            known = " ".join(sorted(extension[1:] for extension in EXTENSIONS))
            raise DataError(
                f"class {name!r} in {folder} has no images; add some ({known}) "
                "or remove the sub-folder"
            )
    return classes


def _images(folder: Path) -> list[Path]:
    paths = _entries(folder)
    return [path for path in paths if path.suffix.lower() in EXTENSIONS and not path.is_dir()]


def _entries(folder: Path) -> list[Path]:
    """What is in `folder` and not hidden or left by a program (__pycache__, __MACOSX), by name."""
    if not folder.exists():
        raise DataError(f"folder {folder} does not exist; check the path")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give one with a sub-folder of images per class")
    try:
        paths = sorted(folder.iterdir(), key=lambda path: unicodedata.normalize("NFC", path.name))
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror}; check its permissions") from error
    return [path for path in paths if not path.name.startswith((".", "__"))]


def _interleave(classes: Classes) -> list[Item]:
    """First the first file of every class, then the second of every class that has one, ..."""
    columns: list[list[Item]] = [
        [(path, label) for path in files] for label, files in enumerate(classes.values())
    ]
    rounds: Iterable[tuple[Item | None, ...]] = itertools.zip_longest(*columns)
    return [item for turn in rounds for item in turn if item is not None]


def _decode_all(paths: Sequence[Path]) -> Tensor:
    """Read pictures of one size into (N, C, H, W)."""
    pictures: list[Pixels] = []
    for path in paths:
        pictures.append(read_picture(path))
        if pictures[-1].shape[:2] != pictures[0].shape[:2]:
            first, other = (f"{p.shape[1]}x{p.shape[0]}" for p in (pictures[0], pictures[-1]))
            raise DataError(
                f"images differ in size: {paths[0]} is {first} and {path} is {other}; "
                "resize them to one size first"
            )
    channels = max(picture.shape[2] for picture in pictures)
    images = np.empty((len(paths), channels, *pictures[0].shape[:2]), dtype=np.uint8)
    for image, picture in zip(images, pictures, strict=True):
        image[:] = picture.transpose(2, 0, 1)  # a grey picture fills all three channels
    return torch.from_numpy(images)
