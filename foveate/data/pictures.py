"""A folder of images with one subfolder per class."""
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
from foveate.data.decoding import is_colour, read_size
from foveate.data.decoding import read_picture as read_picture
from foveate.data.splits import SPLITS, Labels, Source, Split, SplitName
from foveate.errors import DataError

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
)
VALIDATION = {"val", "validation"}
SPLIT_FOLDERS = {"train", "test", *VALIDATION}

Classes: TypeAlias = dict[str, list[Path]]
"""The files of each class; classes and files are sorted by name."""
Item: TypeAlias = tuple[Path, int]
"""A file and its class index."""


def read_folder(name: str, folder: Path) -> Source:
    """Read all images of `folder` into memory, as a source called `name`.

    Classes and files are sorted by name. The subfolders `train`, `val` (or `validation`) and `test`
    are the splits. Without `val`, one sixth of `train` is the validation set. Without such
    subfolders, one fifth of all files is the test set and one tenth the validation set. The classes
    are those of `train`; other splits can lack some of them. A hash of class and file name assigns
    the files (see `split_fraction`), so adding or removing a file does not move any other. The
    images of each split alternate between the classes, so its first images are balanced. Hidden
    files and files with other extensions are ignored.

    Images are decoded by `read_picture`. They have one channel if all are grey; otherwise all of
    them become RGB.
    """
    found = PictureFolder(folder)
    images = _decode_all([path for split in SPLITS for path, _ in found.items[split]])
    parts = torch.split(images, [len(found.items[split]) for split in SPLITS])
    labels = [torch.from_numpy(found.labels[split]) for split in SPLITS]
    return Source.of(name, list(map(Split, parts, labels)), found.classes)


def list_pictures(folder: Path, split: str = "all") -> tuple[list[Item], tuple[str, ...]]:
    """List the files of a split, or of all splits, with their labels, and the class names.

    The splits are those of `read_folder`; `all` also accepts folders that cannot be split. No file
    is opened.
    """
    if split != "all":
        plan = [_plan(folder)[list[str](SPLITS).index(split)]]
    else:
        plan = _plan(folder) if has_splits(folder) else [_classes(folder)]
    return [item for part in plan for item in _interleave(part)], tuple(plan[0])


class PictureFolder:
    """The images of a folder in the splits of `read_folder`, read on demand."""

    def __init__(self, folder: Path) -> None:
        plan = _plan(folder)
        self.path, self.classes = folder, tuple(plan[0])
        self.items = dict(zip(SPLITS, map(_interleave, plan), strict=True))
        self.labels: Labels = {
            split: np.array([label for _, label in items], np.int64)
            for split, items in self.items.items()
        }

    def open(self) -> ExitStack:
        """Return an empty context: no file stays open between two images."""
        return ExitStack()

    def images(self, file: object, split: SplitName, indices: Sequence[int]) -> list[Pixels]:
        """Read the images, each (C, H, W), at the given `indices`."""
        paths = [self.items[split][index][0] for index in indices]
        return [read_picture(path).transpose(2, 0, 1) for path in paths]

    def size(self, split: SplitName, index: int) -> tuple[int, int]:
        """Read height and width of an image."""
        return read_size(self.items[split][index][0])

    @cached_property
    def in_colour(self) -> bool:
        """Whether any image is in colour; reads headers until it finds such an image.

        Files that cannot be read are ignored here and reported when they are used.
        """
        for path, _ in itertools.chain.from_iterable(self.items.values()):
            with suppress(DataError):
                if is_colour(path):
                    return True
        return False

    def describe_image(self, split: SplitName, index: int) -> str:
        """Return the name of an image for error messages."""
        return f"image {self.items[split][index][0]}"

    def listing(self) -> Iterator[list[Any]]:
        """Yield relative path and size of each file, which identify the images for a checksum.

        A missing file, such as a broken link, has no size. It is reported when the image is used.
        """
        for path, _ in itertools.chain.from_iterable(self.items.values()):
            name = unicodedata.normalize("NFC", path.relative_to(self.path).as_posix())
            try:
                size = path.stat().st_size
            except OSError:
                size = None
            yield [name, size]


def folder_fingerprint(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Return device, inode and modification time of a folder and its subfolders, two levels deep.

    The result changes when an image or class is added, removed or renamed.
    """
    found = [os.stat(folder)]
    for inside in _folders(folder):
        found += [os.stat(inside), *map(os.stat, _folders(inside))]
    return tuple((state.st_dev, state.st_ino, state.st_mtime_ns) for state in found)


def _folders(folder: Path | str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir())


def has_splits(folder: Path) -> bool:
    """Whether the folder has the subfolders train and test."""
    return {"train", "test"} <= _subfolders(folder).keys()


def split_fraction(label: str, name: str) -> float:
    """Map the class and the name of a file to a number from 0 to 1 by their sha256.

    Names are normalised to Unicode's composed form (NFC), because some file systems decompose them.
    """
    text = unicodedata.normalize("NFC", f"{label}/{name}")
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _plan(folder: Path) -> list[Classes]:
    """Return the files of train, val and test."""
    names = set(_subfolders(folder))
    if not {"train", "test"} <= names:
        if names and names <= SPLIT_FOLDERS:
            raise DataError(
                f"{folder} has only {' and '.join(sorted(names))}; add both train and test, "
                "or use one subfolder per class"
            )
        _refuse_unknown_splits(folder, names)
        classes = _classes(folder)
        shares = ((0.3, 1), (0.2, 0.3), (0, 0.2))
        return _checked(folder, [_part(classes, *share) for share in shares])
    if unknown := sorted(names - SPLIT_FOLDERS):
        raise DataError(
            f"{folder} has {unknown[0]!r} next to train and test; remove it, or rename it to val"
        )
    if names >= VALIDATION:
        raise DataError(f"{folder} has both val and validation; remove one of them")
    train = _classes(folder / "train")
    others = {name: _of_known(folder / name, tuple(train)) for name in sorted(names - {"train"})}
    test = others.pop("test")
    if others:
        return [train, *others.values(), test]
    return _checked(folder, [_part(train, 1 / 6, 1), _part(train, 0, 1 / 6), test])


def _of_known(folder: Path, known: tuple[str, ...]) -> Classes:
    """Return the files of a split by the classes of train, of which it can lack some."""
    found = _classes(folder)
    if unknown := [name for name in found if name not in known]:
        raise DataError(
            f"{folder} has the class {unknown[0]!r}, which train does not have; add training "
            "images of this class, or rename or remove the subfolder"
        )
    return {name: found.get(name, []) for name in known}


def _refuse_unknown_splits(folder: Path, names: set[str]) -> None:
    """Raise a DataError if train, val or test has subfolders, as a split and not a class has."""
    for name in sorted(names & SPLIT_FOLDERS):
        if not _images(folder / name) and _subfolders(folder / name):
            other = sorted(names - SPLIT_FOLDERS)[0]
            raise DataError(
                f"{folder} has {name!r} with subfolders, and {other!r}; the splits of a folder "
                f"are train, test and optionally val or validation: rename or move {other!r}"
            )


def _part(classes: Classes, low: float, high: float) -> Classes:
    """Return the files of each class whose `split_fraction` is at least `low` and below `high`."""
    return {
        label: [path for path in files if low <= split_fraction(label, path.name) < high]
        for label, files in classes.items()
    }


def _checked(folder: Path, plan: list[Classes]) -> list[Classes]:
    """Raise a DataError if a split, or the training set of a class, has no images."""
    counts = {
        split: sum(map(len, classes.values())) for split, classes in zip(SPLITS, plan, strict=True)
    }
    bare = [label for label, files in plan[0].items() if not files]
    if bare or 0 in counts.values():
        what = ", ".join(f"{count} {split}" for split, count in counts.items())
        also = f", and no training image of class {bare[0]!r}" if bare else ""
        raise DataError(
            f"splitting the images of {folder} gives {what}{also}; add images, or create the "
            "subfolders train, val and test yourself"
        )
    return plan


def _classes(folder: Path) -> Classes:
    classes = {name: _images(path) for name, path in _subfolders(folder).items()}
    if not classes:
        raise DataError(
            f"{folder} has no class subfolders; move the images of each class to a subfolder"
        )
    for name, files in classes.items():
        if not files:
            known = " ".join(sorted(extension[1:] for extension in EXTENSIONS))
            raise DataError(
                f"class {name!r} in {folder} has no images; add some ({known}) "
                "or remove the subfolder"
            )
    return classes


def _subfolders(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in _entries(folder) if path.is_dir()}


def _images(folder: Path) -> list[Path]:
    paths = _entries(folder)
    return [path for path in paths if path.suffix.lower() in EXTENSIONS and not path.is_dir()]


def _entries(folder: Path) -> list[Path]:
    """List `folder` sorted by name, without hidden and system entries (__pycache__, __MACOSX)."""
    if not folder.exists():
        raise DataError(f"folder {folder} does not exist; check the path")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; use one with a subfolder of images per class")
    try:
        paths = sorted(folder.iterdir(), key=lambda path: unicodedata.normalize("NFC", path.name))
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror}; check its permissions") from error
    return [path for path in paths if not path.name.startswith((".", "__"))]


def _interleave(classes: Classes) -> list[Item]:
    """List the first file of every class, then the second of every class that has one, etc."""
    columns: list[list[Item]] = [
        [(path, label) for path in files] for label, files in enumerate(classes.values())
    ]
    rounds: Iterable[tuple[Item | None, ...]] = itertools.zip_longest(*columns)
    return [item for turn in rounds for item in turn if item is not None]


def _decode_all(paths: Sequence[Path]) -> Tensor:
    """Read images of equal size into one tensor (N, C, H, W)."""
    pictures: list[Pixels] = []
    for path in paths:
        pictures.append(read_picture(path))
        if pictures[-1].shape[:2] != pictures[0].shape[:2]:
            first, other = (f"{p.shape[1]}x{p.shape[0]}" for p in (pictures[0], pictures[-1]))
            raise DataError(
                f"images differ in size: {paths[0]} is {first} and {path} is {other}; "
                "resize them to one size"
            )
    channels = max(picture.shape[2] for picture in pictures)
    images = np.empty((len(paths), channels, *pictures[0].shape[:2]), dtype=np.uint8)
    for image, picture in zip(images, pictures, strict=True):
        image[:] = picture.transpose(2, 0, 1)  # broadcasting turns grey images into RGB
    return torch.from_numpy(images)
