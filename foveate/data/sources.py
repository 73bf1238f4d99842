"""The door to the data: `load_source(name)` gives images and labels in three fixed splits."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foveate.data.checks import checked_labels
from foveate.data.fetch import Report, fetch
from foveate.data.folder import SPLITS, read_folder
from foveate.data.idx import FILES, decode, find, read_idx
from foveate.errors import DataError

# Shape letters: N images, C image channel, H W pixels.
SOURCES = {
    "mnist": "60,000 handwritten digits for training and 10,000 for the test; fetched once",
    "fashion-mnist": "the same number of pictures of clothes; fetched once",
    "mnist-5k": "5,000 of MNIST's training digits, part of this package; needs no network",
    "idx:DIR": "the four IDX files in the folder DIR, plain or .gz",
    "folder:DIR": "pictures in the folder DIR, one sub-folder per class, or train/ and test/ first",
}
"""The names that `load_source` takes, each with what it is."""

DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
EMBEDDED = {
    "images.idx3-ubyte.gz": "d880cf6cc71c80335012c59deb78e95e7b2c1d8aa8b78312f62bb489ae9ffb96",
    "labels.idx1-ubyte.gz": "e18e6fe44bbeb980f85a745210a0a269a8bb7b98201e0f223576115fd7d5dc6c",
}
"""The files of mnist-5k and the sha256 of their decoded content."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images (N, C, H, W) uint8 with their labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise DataError(f"images must be (N, C, H, W) uint8, got {_kind(self.images)}")
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise DataError(
                f"labels must be int64, one for each of {len(self.images)} images, "
                f"got {_kind(self.labels)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Source:
    """A data set in three splits; `classes[label]` is the name of a label.

    `checksum` is the sha256 over the content: shapes, image bytes and labels of train, val and
    test in this order. Equal checksums mean equal data, wherever it came from.
    """

    name: str
    train: Split
    val: Split
    test: Split
    classes: tuple[str, ...]
    checksum: str

    def __post_init__(self) -> None:
        for split in SPLITS:
            labels = getattr(self, split).labels.numpy()
            checked_labels(labels, f"the {split} labels of {self.name}", len(self.classes))


def load_source(name: str, report: Report | None = None) -> Source:
    """Load one of `SOURCES`, with its splits fixed as follows.

    - `mnist`, `fashion-mnist`, `idx:DIR`: the last sixth of the training images is val (of 60,000
      the first 50,000 are train), and the test images are test.
    - `mnist-5k`: the first 500 of each class of MNIST's training images, the classes taking turns;
      3,500 are train, the next 500 val and the last 1,000 test, each balanced. All of them,
      the test split too, belong to MNIST's *training* set: never mix the two in one experiment.
    - `folder:DIR`: see `foveate.data.folder.read_folder`.

    `report` is told in words what is being fetched from where.
    """
    kind, colon, folder = name.partition(":")
    if colon and kind in ("idx", "folder"):
        if not folder:
            raise DataError(f"{name!r} names no folder; write {kind}:DIR")
        read = _read_idx_folder if kind == "idx" else _read_pictures
        return read(name, Path(folder).expanduser())
    if name == "mnist-5k":
        return _read_embedded()
    if name in ("mnist", "fashion-mnist"):
        files = fetch(name, report)
        tensors = [read_idx(files[file], file) for file in FILES]
        return _from_tensors(name, tensors, DIGITS if name == "mnist" else CLOTHES)
    raise DataError(f"unknown data source {name!r}; there are: {', '.join(SOURCES)}")


def _read_idx_folder(name: str, folder: Path) -> Source:
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist; check the path")
    tensors = [read_idx(decode(path), str(path)) for path in _four_files(folder)]
    if tensors[0].shape[1:] != tensors[2].shape[1:]:
        raise DataError(
            f"training and test images in {folder} differ in shape: {_kind(tensors[0])} and "
            f"{_kind(tensors[2])}; bring them to one size"
        )
    count = int(max(tensors[1].max(), tensors[3].max())) + 1
    return _from_tensors(name, tensors, tuple(str(label) for label in range(count)))


def _four_files(folder: Path) -> list[Path]:
    found = {file: find(folder, file) for file in FILES}
    for file, paths in found.items():
        if not paths:
            raise DataError(f"{folder} has no {file} (nor {file}.gz); put it there")
    return [paths[0] for paths in found.values()]


def _from_tensors(name: str, tensors: Sequence[Tensor], classes: tuple[str, ...]) -> Source:
    """Cut training images, their labels, test images and their labels into the three splits."""
    training = _split(tensors[0], tensors[1], f"training set of {name}")
    test = _split(tensors[2], tensors[3], f"test set of {name}")
    count = len(training) - len(training) // 6
    if count == len(training):
        raise DataError(
            f"{name} has {count} training images; at least 6 are needed, a sixth is for validation"
        )
    return _source(name, _part(training, 0, count), _part(training, count, None), test, classes)


def _read_embedded() -> Source:
    images, labels = (_read_verified(file, sha256) for file, sha256 in EMBEDDED.items())
    digits = _split(images, labels, "mnist-5k")
    train, val, test = _part(digits, 0, 3500), _part(digits, 3500, 4000), _part(digits, 4000, None)
    return _source("mnist-5k", train, val, test, DIGITS)


def _read_verified(file: str, sha256: str) -> Tensor:
    path = Path(__file__).with_name("embedded") / file
    data = decode(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(f"{path} is not the file that foveate came with; install foveate again")
    return read_idx(data, str(path))


def _read_pictures(name: str, folder: Path) -> Source:
    splits, classes = read_folder(folder)
    train, val, test = (Split(images, labels) for images, labels in splits)
    return _source(name, train, val, test, classes)


def _split(images: Tensor, labels: Tensor, what: str) -> Split:
    """Join grey images (N, H, W) and labels (N,) as IDX files have them."""
    if images.ndim != 3 or labels.ndim != 1:
        raise DataError(
            f"the {what} must have images (N, H, W) and labels (N,), got {_kind(images)} and "
            f"{_kind(labels)}; check that the files are not swapped"
        )
    if len(images) != len(labels):
        raise DataError(
            f"the {what} has {len(images)} images but {len(labels)} labels; get both files again"
        )
    return Split(images.unsqueeze(1), labels.long())


def _part(split: Split, start: int, stop: int | None) -> Split:
    return Split(split.images[start:stop], split.labels[start:stop])


def _source(name: str, train: Split, val: Split, test: Split, classes: tuple[str, ...]) -> Source:
    return Source(name, train, val, test, classes, _checksum((train, val, test)))


def _checksum(splits: Sequence[Split]) -> str:
    digest = hashlib.sha256()
    for split in splits:
        digest.update(f"{tuple(split.images.shape)}".encode())
        digest.update(split.images.numpy().tobytes())
        digest.update(split.labels.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
