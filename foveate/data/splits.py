"""Labelled images in three splits, and validation of labels and pixels from any file."""
# Shape letters: N images, C image channel, H W pixels.

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
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
MAX_CLASSES = 100_000  # limit for files that do not declare their number of classes
NUMBERS = "biuf"  # NumPy's kind codes of bool, integer and floating-point dtypes


@dataclass(frozen=True, eq=False)
class Split:
    """Images with their labels.

    Indexing with a slice returns a split of those images.

    Args:
        images: Images of dtype uint8, shape ``(N, C, H, W)``.
        labels: Class indices of dtype int64, shape ``(N,)``.

    Raises:
        DataError: If a shape or dtype is wrong.

    Examples:
        >>> split = Split(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1, 1]))
        >>> len(split), split[1:].labels
        (3, tensor([1, 1]))
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise DataError(
                f"images must be (N, C, H, W) uint8, got {describe_tensor(self.images)}"
            )
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise DataError(
                f"labels must be int64, one for each of {len(self.images)} images, "
                f"got {describe_tensor(self.labels)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> "Split":
        return Split(self.images[part], self.labels[part])


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset in memory, in three splits.

    Use `Source.of` to create one: it computes the checksum.

    Args:
        name: Name of the source, as given to `load_source`.
        train: Training set.
        val: Validation set.
        test: Test set.
        classes: Names of the classes; ``classes[label]`` is the name of a class index.
        checksum: sha256 of the shapes, pixels and labels of train, val and test, in this order.
            Equal checksums mean equal data, whatever the origin.

    Raises:
        DataError: If a label is not a class index.

    Examples:
        >>> images = torch.zeros(3, 1, 28, 28, dtype=torch.uint8)
        >>> split = Split(images, torch.tensor([0, 1, 1]))
        >>> source = Source.of("own", (split, split, split), classes=("cat", "dog"))
        >>> source.num_classes, source.shape
        (2, (1, 28, 28))
        >>> batch, labels = source.read_batch("train", torch.tensor([2, 0]))
        >>> batch.shape, labels
        (torch.Size([2, 1, 28, 28]), tensor([1, 0]))
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
        """Create a source from its splits and compute the checksum.

        Args:
            name: Name of the source.
            splits: The training, validation and test set, in this order.
            classes: Names of the classes, in the order of the class indices.

        Returns:
            The source.
        """
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
        """Number of images in each split."""
        return {split: len(getattr(self, split)) for split in SPLITS}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def labels(self, split: SplitName) -> Tensor:
        """Return the labels of a split.

        Args:
            split: ``train``, ``val`` or ``test``.

        Returns:
            Class indices of dtype int64, shape ``(N,)``.
        """
        labels: Tensor = getattr(self, split).labels
        return labels

    def read_batch(self, split: SplitName, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels at given indices.

        Args:
            split: ``train``, ``val`` or ``test``.
            indices: Indices of the images, shape ``(B,)``.

        Returns:
            Images of dtype uint8, shape ``(B, C, H, W)``, and class indices, shape ``(B,)``.
        """
        data: Split = getattr(self, split)
        return data.images[indices], data.labels[indices]


def check_split(where: object, split: SplitName, counts: Mapping[SplitName, int]) -> None:
    """Raise a DataError if a source, described by `where`, has no images of a split."""
    if split not in counts:
        raise DataError(
            f"{where} has no {split} images, only {', '.join(counts)}; use a source that has them"
        )


def checked_labels(
    labels: NDArray[Any], where: str, classes: int = MAX_CLASSES
) -> NDArray[np.int64]:
    """Return labels (N,) as int64, or raise a DataError for `where` and the first invalid label."""
    if labels.dtype.kind not in NUMBERS:
        good = np.zeros(labels.shape, bool)
    else:
        with np.errstate(over="ignore"):  # MAX_CLASSES overflows float16
            good = (labels >= 0) & (labels < classes) & (labels == np.floor(labels))  # rejects NaN
    if not good.all():
        index = int(np.argmin(good))
        raise DataError(
            f"{where}: label {index} is {_shown(labels, index)}, not a whole number from 0 to "
            f"{classes - 1}; correct the labels"
        )
    return labels.astype(np.int64)


def checked_pixels(values: NDArray[Any], where: str, indices: Sequence[int]) -> NDArray[np.float32]:
    """Return pixels as float32, or raise a DataError for `where` and image `indices[i]`."""
    if values.dtype.kind not in NUMBERS:
        raise DataError(f"{where}: pixels are {values.dtype}, not real numbers; convert them")
    with np.errstate(over="ignore"):  # float64 values beyond the range of float32 become infinite
        pixels = values.astype(np.float32, copy=False)
    finite = np.isfinite(pixels)
    if not finite.all():
        place = int(np.argmin(finite))
        image = indices[int(np.unravel_index(place, finite.shape)[0])]
        raise DataError(
            f"{where}: image {image} has a pixel of {_shown(values, place)}; replace it with a "
            "value that is finite in float32"
        )
    return pixels


def digest(values: NDArray[Any]) -> str:
    """Return the sha256 of an array's bytes."""
    return hashlib.sha256(values.tobytes()).hexdigest()


def describe_tensor(tensor: Tensor) -> str:
    """Return the shape and dtype of a tensor as text, for an error message."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shown(values: NDArray[Any], index: int) -> str:
    return reprlib.repr(values.reshape(-1)[index : index + 1].tolist()[0])
