"""A folder of images with one subfolder per class."""
# Shape letters: N images, C image channel, H W pixels.

import hashlib
import itertools
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from foveate.data.decoding import Pixels as Pixels
from foveate.data.decoding import is_colour, read_size
from foveate.data.decoding import read_picture as read_picture
from foveate.data.splits import SPLITS, Labels, SplitName
from foveate.errors import DataError
from foveate.files import reason_of

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
)
VALIDATION = {"val", "validation"}
SPLIT_FOLDERS = {"train", "test", *VALIDATION}

Classes: TypeAlias = dict[str, list[Path]]
"""The files of each class; classes and files are sorted by name."""
Item: TypeAlias = tuple[Path, int]
"""A file and its class index."""


def list_pictures(folder: Path, split: str = "all") -> tuple[list[Item], tuple[str, ...]]:
    """List the files of a split with their labels, and the class names; opens no file.

    The split `all` also accepts folders that cannot be split.
    """
    if split != "all":
        plan = [_plan(folder)[list[str](SPLITS).index(split)]]
    else:
        plan = _plan(folder) if has_splits(folder) else [_classes(folder)]
    return [item for part in plan for item in _interleave(part)], tuple(plan[0])


class PictureFolder:
    """The images of a folder in three splits, read on demand.

    Classes and files are sorted by name. The subfolders `train`, `val` (or `validation`) and `test`
    are the splits. Without `val`, one sixth of `train` is the validation set. Without such
    subfolders, one fifth of all files is the test set and one tenth the validation set. The classes
    are those of `train`; other splits can lack some of them. A hash of class and file name assigns
    the files (see `split_fraction`), so adding or removing a file does not move any other. The
    images of each split alternate between the classes, so its first images are balanced. Hidden
    files and files with other extensions are ignored.
    """

    def __init__(self, folder: Path) -> None:
        plan = _plan(folder)
        self.path, self.classes = folder, tuple(plan[0])
        self.items = dict(zip(SPLITS, map(_interleave, plan), strict=True))
        self.labels: Labels = {
            split: np.array([label for _, label in items], np.int64)
            for split, items in self.items.items()
        }

    def images(self, split: SplitName, indices: Sequence[int]) -> list[Pixels]:
        """Read the images, each (C, H, W), at the given `indices`."""
        paths = [self.items[split][index][0] for index in indices]
        return [read_picture(path).transpose(2, 0, 1) for path in paths]

    def size(self, split: SplitName, index: int) -> tuple[int, int]:
        """Read height and width of an image."""
        return read_size(self.items[split][index][0])

    @cached_property
    def in_colour(self) -> bool:
        """Whether any readable image is in colour; reads headers until it finds one."""
        for path, _ in itertools.chain.from_iterable(self.items.values()):
            with suppress(DataError):
                if is_colour(path):
                    return True
        return False

    def listing(self) -> Iterator[list[Any]]:
        """Yield relative path and size of each file for a checksum; a broken link has no size."""
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
    splits, others = sorted(names & SPLIT_FOLDERS), sorted(names - SPLIT_FOLDERS)
    complete = {"train", "test"} <= names
    nested = any(_subfolders(folder / name) and not _images(folder / name) for name in splits)
    incomplete = splits and not complete and (nested or not others)
    if incomplete or (complete and others) or names >= VALIDATION:
        raise DataError(
            f"{folder} has {' and '.join([*splits, *others[:1]])}; its splits must be train, test "
            "and optionally val or validation: add, move or rename subfolders"
        )
    if not complete:
        classes = _classes(folder)
        shares = ((0.3, 1), (0.2, 0.3), (0, 0.2))
        return _checked(folder, [_part(classes, *share) for share in shares])
    train = _classes(folder / "train")
    test, *val = (_of_known(folder / name, tuple(train)) for name in splits if name != "train")
    if val:
        return [train, *val, test]
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


def _part(classes: Classes, low: float, high: float) -> Classes:
    """Return the files of each class whose `split_fraction` is at least `low` and below `high`."""
    return {
        label: [path for path in files if low <= split_fraction(label, path.name) < high]
        for label, files in classes.items()
    }


def _checked(folder: Path, plan: list[Classes]) -> list[Classes]:
    """Raise a DataError if a split, or the training set of a class, has no images."""
    splits = zip(SPLITS, plan, strict=True)
    empty = [str(split) for split, classes in splits if not any(classes.values())]
    empty += [f"class {label!r} of train" for label, files in plan[0].items() if not files]
    if empty:
        raise DataError(
            f"splitting the images of {folder} leaves {empty[0]} without images; add images, or "
            "create the subfolders train, val and test yourself"
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
    try:
        paths = sorted(folder.iterdir(), key=lambda path: unicodedata.normalize("NFC", path.name))
    except OSError as error:
        reason = error.strerror or reason_of(error)
        raise DataError(
            f"cannot list the folder {folder}: {reason}; check the path and its permissions"
        ) from error
    return [path for path in paths if not path.name.startswith((".", "__"))]


def _interleave(classes: Classes) -> list[Item]:
    """List the first file of every class, then the second of every class that has one, etc."""
    columns: list[list[Item]] = [
        [(path, label) for path in files] for label, files in enumerate(classes.values())
    ]
    rounds: Iterable[tuple[Item | None, ...]] = itertools.zip_longest(*columns)
    return [item for turn in rounds for item in turn if item is not None]
