"""Labelled images in three splits, and the checks of labels and pixels of any origin."""
# Shape letters: N images, C image channel, H W pixels.

import hashlib
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foveate.errors import DataError

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
Labels: TypeAlias = dict[SplitName, NDArray[np.int64]]
MAX_CLASSES = 100_000  # where nothing says how many classes there are
NUMBERS = "biuf"  # NumPy's kinds of real numbers: no complex ones, strings, objects or records


@dataclass(frozen=True, eq=False)
class Split:
    """Images (N, C, H, W) uint8 with their labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise DataError(f"images must be (N, C, H, W) uint8, got {kind_of(self.images)}")
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise DataError(
                f"labels must be int64, one for each of {len(self.images)} images, "
                f"got {kind_of(self.labels)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> "Split":
        return Split(self.images[part], self.labels[part])


@dataclass(frozen=True, eq=False)
class Source:
    """A data set in memory, in three splits; `classes[label]` is the name of a label.

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
            labels = self.labels(split).numpy()
            checked_labels(labels, f"the {split} labels of {self.name}", len(self.classes))

    @classmethod
    def of(cls, name: str, splits: Sequence[Split], classes: tuple[str, ...]) -> "Source":
        """Make a source of its three splits, with their checksum."""
        sha256 = hashlib.sha256()
        for split in splits:
            sha256.update(f"{tuple(split.images.shape)}".encode())
            sha256.update(split.images.numpy().tobytes())
            sha256.update(split.labels.numpy().astype("<i8").tobytes())
        train, val, test = splits
        return cls(name, train, val, test, classes, sha256.hexdigest())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (C, H, W) of an image."""
        return tuple(self.train.images.shape[1:])

    @property
    def counts(self) -> dict[SplitName, int]:
        """Number of images of each split."""
        return {split: len(getattr(self, split)) for split in SPLITS}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def labels(self, split: SplitName) -> Tensor:
        """The labels (N,) of a split."""
        labels: Tensor = getattr(self, split).labels
        return labels

    def pick(self, split: SplitName, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Images (N, C, H, W) and labels (N,) at the indices `chosen`."""
        data: Split = getattr(self, split)
        return data.images[chosen], data.labels[chosen]


def checked_labels(
    labels: NDArray[Any], where: str, classes: int = MAX_CLASSES
) -> NDArray[np.int64]:
    """Return labels (N,) as int64 if each is a whole number from 0 to `classes` - 1.

    Args:
        labels: Labels of any dtype.
        where: The file, and the data set in it, that an error names.
        classes: Number of classes.
    """
    if labels.dtype.kind not in NUMBERS:
        good = np.zeros(labels.shape, bool)
    else:
        with np.errstate(over="ignore"):  # float16 ends below MAX_CLASSES
            good = (labels >= 0) & (labels < classes) & (labels == np.floor(labels))  # not NaN
    if not good.all():
        index = int(np.argmin(good))
        raise DataError(
            f"{where}: label {index} is {_shown(labels, index)}, not a whole number from 0 to "
            f"{classes - 1}; correct the labels"
        )
    return labels.astype(np.int64)


def checked_pixels(values: NDArray[Any], where: str, indices: Sequence[int]) -> NDArray[np.float32]:
    """Return pixels as float32 if all are finite; `indices` numbers the images along axis 0."""
    if values.dtype.kind not in NUMBERS:
        raise DataError(f"{where}: pixels are {values.dtype}, not real numbers; convert them")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite
        pixels = values.astype(np.float32, copy=False)
    finite = np.isfinite(pixels)
    if not finite.all():
        place = int(np.argmin(finite))
        image = indices[int(np.unravel_index(place, finite.shape)[0])]
        raise DataError(
            f"{where}: image {image} has a pixel of {_shown(values, place)}; pixels must be finite "
            "as float32"
        )
    return pixels


def digest(values: NDArray[Any]) -> str:
    """The sha256 of an array's bytes."""
    return hashlib.sha256(values.tobytes()).hexdigest()


def kind_of(tensor: Tensor) -> str:
    """Shape and dtype of a tensor, for an error."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shown(values: NDArray[Any], index: int) -> str:
    return reprlib.repr(values.reshape(-1)[index : index + 1].tolist()[0])
