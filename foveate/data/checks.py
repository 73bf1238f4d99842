"""Validate the labels and pixels of a data file, whatever its format."""
# Shape letters: N images, C image channel, H W pixels.

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foveate.errors import DataError

MAX_CLASSES = 100_000  # where nothing says how many classes there are
NUMBERS = "biuf"  # NumPy's kinds of real numbers: no complex ones, strings, objects or records


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


def _shown(values: NDArray[Any], index: int) -> str:
    return reprlib.repr(values.reshape(-1)[index : index + 1].tolist()[0])
