"""Read HDF5 data sets that are stored in their own file, and no others."""

import math
from typing import TypeAlias

import h5py
import numpy as np
from numpy.typing import NDArray

from foveate.data.checks import NUMBERS, checked_labels
from foveate.data.folder import SPLITS, SplitName
from foveate.data.large_scale import check_scale

Labels: TypeAlias = dict[SplitName, NDArray[np.int64]]
MAX_UNSTORED = 1 << 30  # bytes; a data set may claim so many without being on the disk
MAX_RATIO = 1_100  # claimed bytes per byte of the file beyond that; gzip reaches 1,032


def has_dataset(file: h5py.File, name: str) -> bool:
    """Whether the file has an object or link of that name; nothing is followed."""
    return bool(file.id.links.exists(name.encode()))


def own_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return a data set of the file, or raise an OSError if reading it could open another file.

    Links, virtual data sets and external storage name other files, which the user did not. A data
    set that claims far more bytes than the file could hold is refused before memory is allocated.
    """
    if not has_dataset(file, name):
        raise OSError(f"it has no {name}")
    if file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise OSError(f"{name} is a link")
    found = file[name]
    if not isinstance(found, h5py.Dataset) or found.shape is None:
        raise OSError(f"{name} is not an array")
    if found.is_virtual or found.external:
        raise OSError(f"the values of {name} are in other files")
    values = max(math.prod(found.shape), math.prod(found.chunks or ()))
    claimed, size = values * found.dtype.itemsize, file.id.get_filesize()
    if claimed > MAX_UNSTORED + MAX_RATIO * size:
        raise OSError(f"{name} claims {claimed:,} bytes in a file of {size:,}")
    return found


def read_labels(file: h5py.File) -> Labels:
    """Read the labels of the splits that the file has; a single image beside a test set is none."""
    found = {s: _labels(file, s) for s in SPLITS if has_dataset(file, f"x_{s}")}
    if not found:
        raise OSError("it has no images")
    test_only = len(found.get("test", ())) > 1  # such files hold a dummy in the other splits
    return {s: n for s, n in found.items() if s == "test" or len(n) > 1 or not test_only}


def _labels(file: h5py.File, split: SplitName) -> NDArray[np.int64]:
    """Read the labels (N,) of a split after checking the shapes of labels and images."""
    images, labels = own_dataset(file, f"x_{split}"), own_dataset(file, f"y_{split}")
    count = images.shape[0] if images.ndim == 4 else 1
    square = images.ndim in (3, 4) and images.shape[-3] == images.shape[-2]
    fits = labels.shape in ((count,), (count, 1)) or (count == 1 and labels.shape == ())
    if not square or not fits or 0 in images.shape:
        raise OSError(f"x_{split} is {images.shape} and y_{split} is {labels.shape}")
    if images.dtype.kind not in NUMBERS:
        raise OSError(f"x_{split} holds {images.dtype}, not real numbers")
    # Labels that are not numbers are refused at the first one: the others need not be read.
    values = labels[()] if labels.dtype.kind in NUMBERS else labels[:1]
    return checked_labels(np.reshape(values, -1), f"y_{split} of {file.filename}")


def read_scales(file: h5py.File, split: SplitName, count: int) -> NDArray[np.float64]:
    """Read the scale of each of `count` images."""
    found = own_dataset(file, f"scale_{split}")
    if found.shape != (count,) or found.dtype.kind not in NUMBERS:
        raise OSError(f"scale_{split} is {found.shape} {found.dtype}, not one number per image")
    scales: NDArray[np.float64] = found[()].astype(np.float64)
    check_scale(float(scales.min()))  # NaN if any is
    check_scale(float(scales.max()))
    return scales
