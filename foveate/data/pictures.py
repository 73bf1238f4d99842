"""Pictures: one file of any kind as 8-bit pixels, and a folder with a sub-folder per class."""
# Shape letters: N images, C image channel, H W pixels.

import hashlib
import itertools
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, ImageStat
from torch import Tensor

from foveate.data.splits import SPLITS, Labels, Source, Split, SplitName
from foveate.errors import DataError
from foveate.files import regular

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
)
VALIDATION = frozenset(("val", "validation"))

Classes: TypeAlias = dict[str, list[Path]]
"""The files of each class, both in the order of their names."""
Item: TypeAlias = tuple[Path, int]
"""A file and its label."""
Pixels: TypeAlias = npt.NDArray[np.uint8]
Behind: TypeAlias = Literal["black", "contrast"]


def read_picture(path: Path | BinaryIO, behind: Behind = "black") -> Pixels:
    """Read one picture as (H, W, C), C being 1 or 3.

    A picture with a palette, as in a GIF, is grey if all its pixels are. 16-bit grey keeps its
    upper 8 bits, EXIF orientation is applied, and of an animation the first frame is taken.
    Transparency is flattened over `behind`: black, or what contrasts with the picture, which is
    white where its visible pixels are dark on average.
    """
    if isinstance(path, Path):
        regular(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged tags that change no pixel
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if image.format == "EPS":  # Pillow would hand the program to Ghostscript
                    raise DataError("is PostScript, a program; save it as PNG")
                pixels = _pixels(ImageOps.exif_transpose(image), behind)
    except DataError as error:
        raise DataError(f"image {path} {error}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"image {path} has more than {Image.MAX_IMAGE_PIXELS} pixels; resize it first"
        ) from error
    except Exception as error:  # decoders raise anything from SyntaxError to struct.error
        said = str(getattr(error, "strerror", None) or error)
        reason = " ".join(said.split()) or type(error).__name__
        raise DataError(f"cannot read image {path} ({reason}); replace or remove it") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def _pixels(image: Image.Image, behind: Behind) -> Pixels:
    if image.mode.startswith("I"):
        return _upper_byte(np.asarray(image))
    if image.mode == "F":
        raise DataError("has floating-point pixels of unknown range; save it with 8 or 16 bits")
    flat = _flatten(image, behind) if image.has_transparency_data else image
    if image.mode in ("1", "L", "LA"):
        return np.asarray(flat.convert("L"))
    pixels = np.asarray(flat.convert("RGB"))
    if image.mode in ("P", "PA") and (pixels == pixels[..., :1]).all():
        return pixels[..., :1]
    return pixels


def _upper_byte(values: npt.NDArray[np.integer]) -> Pixels:
    """Scale 16-bit grey to 8 bits; some decoders hand it over in 32-bit integers."""
    if values.min() < 0 or values.max() > 0xFFFF:
        raise DataError("has pixels of more than 16 bits; save it with 8 or 16 bits")
    return (values >> 8).astype(np.uint8)


def _flatten(image: Image.Image, behind: Behind) -> Image.Image:
    drawn = image.convert("RGBA")
    white = behind == "contrast" and _is_dark(drawn)
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255) if white else (0, 0, 0, 255))
    return Image.alpha_composite(ground, drawn)


def _is_dark(drawn: Image.Image) -> bool:
    """Whether the pixels that are visible are dark on average."""
    visible = ImageStat.Stat(drawn.convert("L"), mask=drawn.getchannel("A"))
    return visible.count[0] > 0 and visible.mean[0] < 128


def read_folder(name: str, folder: Path) -> Source:
    """Read all pictures of `folder` into memory, as a source called `name`.

    Classes are numbered, and files ordered, by
    name. Sub-folders `train`, `val` (or `validation`) and `test` are the splits. Where there is no
    `val`, a sixth of `train` is; without sub-folders a fifth of all files is test and a tenth val.
    A hash of class and file name decides which, see `fraction`: adding or removing a file moves no
    other one. Near-duplicates, as the frames of a film, can fall into different splits then; make
    the sub-folders yourself for those. In each split the classes take turns, so its first images
    are balanced. Hidden files and other extensions are ignored.

    C is 1 if all pictures are grey; a single colour picture makes all of them RGB. A picture with
    a palette, as in a GIF, is grey if all its pixels are. Transparency is flattened over black,
    16-bit grey keeps its upper 8 bits, EXIF orientation is applied, and of an animation the first
    frame is taken.
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

    def where(self, split: SplitName, index: int) -> str:
        """Name a picture in an error."""
        return f"image {self.items[split][index][0]}"

    def listing(self) -> Iterator[list[Any]]:
        """What identifies the pictures without decoding them: relative path and size."""
        for path, _ in itertools.chain.from_iterable(self.items.values()):
            name = unicodedata.normalize("NFC", path.relative_to(self.path).as_posix())
            try:
                yield [name, path.stat().st_size]
            except OSError as error:
                raise DataError(
                    f"cannot read image {path} ({error.strerror}); replace or remove it"
                ) from None


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
    if {"train", "test"} <= names:
        return _plan_from_splits(folder, names - {"train", "test"})
    if names and names <= {"train", "test", *VALIDATION}:
        raise DataError(
            f"{folder} has only {' and '.join(sorted(names))}; give it both train and test, "
            "or one sub-folder per class"
        )
    classes = _classes(folder)
    plan = [_part(classes, *ends) for ends in ((0.3, 1), (0.2, 0.3), (0, 0.2))]
    return _checked(folder, plan)


def _plan_from_splits(folder: Path, others: set[str]) -> list[Classes]:
    if unknown := sorted(others - VALIDATION):
        raise DataError(
            f"{folder} has {unknown[0]!r} beside train and test; move it away, or call it val"
        )
    if len(others) > 1:
        raise DataError(f"{folder} has both val and validation; keep one of them")
    train, test = _classes(folder / "train"), _classes(folder / "test")
    _check_same_classes(folder, train, test, "test")
    if others:
        (name,) = others
        val = _classes(folder / name)
        _check_same_classes(folder, train, val, name)
        return [train, val, test]
    return _checked(folder, [_part(train, 1 / 6, 1), _part(train, 0, 1 / 6), test])


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


def _check_same_classes(folder: Path, train: Classes, other: Classes, split: str) -> None:
    different = sorted(train.keys() ^ other.keys())
    if different:
        raise DataError(
            f"train and {split} in {folder} must hold the same classes; only one of them has "
            f"{', '.join(different)}"
        )


def _classes(folder: Path) -> Classes:
    classes = {path.name: _images(path) for path in _entries(folder) if path.is_dir()}
    if not classes:
        raise DataError(f"{folder} has no class sub-folders; put the images of each class into one")
    for name, files in classes.items():
        if not files:
            raise DataError(
                f"class {name!r} in {folder} has no images; add some ({_extensions()}) "
                "or remove the sub-folder"
            )
    return classes


def _images(folder: Path) -> list[Path]:
    paths = _entries(folder)
    return [path for path in paths if path.suffix.lower() in EXTENSIONS and not path.is_dir()]


def _extensions() -> str:
    return " ".join(sorted(extension[1:] for extension in EXTENSIONS))


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
            raise DataError(
                f"images differ in size: {paths[0]} is {_size(pictures[0])} and {path} is "
                f"{_size(pictures[-1])}; resize them to one size first"
            )
    channels = max(picture.shape[2] for picture in pictures)
    images = np.empty((len(paths), channels, *pictures[0].shape[:2]), dtype=np.uint8)
    for image, picture in zip(images, pictures, strict=True):
        image[:] = picture.transpose(2, 0, 1)  # a grey picture fills all three channels
    return torch.from_numpy(images)


def _size(picture: Pixels) -> str:
    return f"{picture.shape[1]}x{picture.shape[0]}"
