"""Write and read HDF5 files in the layout of the official MNIST Large Scale dataset."""
# Shape letters: N images, C image channel, F frame pixels.

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foveate import __version__
from foveate.checks import check_range
from foveate.data.large_scale import RECIPE, Border, check_border, check_size, rescale
from foveate.data.splits import (
    NUMBERS,
    SPLITS,
    Labels,
    Source,
    Split,
    SplitName,
    check_split,
    checked_labels,
    checked_pixels,
)
from foveate.errors import ConfigError, DataError
from foveate.files import check_regular, reason_of, replacing, wrap_read_errors
from foveate.scales import ScaleRange

# Matrix products round differently for other shapes and thread counts. Images are therefore always
# computed in blocks of this size, by one thread each, so that a file does not depend on either.
BLOCK = 128
MAX_SEED = 2**32 - 1  # training multiplies the seed by a million, which must fit in 64 bits
MAX_UNSTORED = 1 << 30  # bytes that a dataset may declare without having them on disk
MAX_RATIO = 1_100  # declared bytes per byte of the file beyond that; gzip reaches 1,032


def draw_scales(scales: ScaleRange, count: int, seed: int, split: SplitName) -> Tensor:
    """Draw a scale for each of `count` images; each split has its own random stream."""
    random = np.random.default_rng([seed, SPLITS.index(split)]).random(count)
    return torch.from_numpy(scales.low * (scales.high / scales.low) ** random)


def _spelled(scales: ScaleRange) -> str:
    """Return a range in the notation of the official file names: 2p000 or 1p000-4p000."""
    ends = sorted({scales.low, scales.high})
    return "-".join(f"{end:.3f}".replace(".", "p") for end in ends)


@dataclass(frozen=True, kw_only=True)
class FileSpec:
    """Description of one MNIST Large Scale file: the scales of its splits and the recipe.

    Args:
        test: Scales of the test images.
        train: Scales of the training and validation images; without them, the file has test images
            only.
        size: Width and height of the images in pixels.
        seed: Seed for drawing the scale of each image, 0 to 2^32 - 1.
        border: Values outside the frame when smoothing; see `foveate.data.large_scale.rescale`.

    Raises:
        ConfigError: If a field is out of range.

    Examples:
        >>> from foveate.data.sources import load_source
        >>> spec = FileSpec(train=ScaleRange(1, 4), test=ScaleRange(2, 2))
        >>> source = load_source("mnist-5k")
        >>> spec.count(source)
        5000
        >>> spec.name(source)
        'mnist-5k_large_scale_tr3500_vl500_te1000_outsize112-112_sctr1p000-4p000_scte2p000.h5'
    """

    test: ScaleRange
    train: ScaleRange | None = None
    size: int = 112
    seed: int = 0
    border: Border = "replicate"

    def __post_init__(self) -> None:
        check_size(self.size)
        check_range("seed", self.seed, 0, MAX_SEED, "0 to 2^32 - 1")
        check_border(self.border)

    def splits(self) -> tuple[SplitName, ...]:
        """List the splits that hold images.

        Returns:
            All splits, or ``("test",)``. A test-only file has one placeholder image in each of the
            other splits.
        """
        return SPLITS if self.train else ("test",)

    def scales(self, split: SplitName) -> ScaleRange:
        """Return the scales of a split.

        Args:
            split: ``train``, ``val`` or ``test``.

        Returns:
            The range from which scales are drawn.
        """
        return self.train if self.train and split != "test" else self.test

    def name(self, source: Source) -> str:
        """Return the file name, in the scheme of the official files.

        Args:
            source: Source of the images.

        Returns:
            File name that ends in ``.h5``.
        """
        stem = re.sub(r"[^A-Za-z0-9-]+", "-", source.name.split("/")[-1].replace(":", "-"))
        counts, scales = f"te{len(source.test)}", f"scte{_spelled(self.test)}"
        if self.train is not None:
            counts = f"tr{len(source.train)}_vl{len(source.val)}_{counts}"
            scales = f"sctr{_spelled(self.train)}_{scales}"
        return f"{stem}_large_scale_{counts}_outsize{self.size}-{self.size}_{scales}.h5"

    def count(self, source: Source) -> int:
        """Count the images in the file.

        Args:
            source: Source of the images.

        Returns:
            Number of images, without placeholders.
        """
        return sum(source.counts[split] for split in self.splits())

    def size_in_bytes(self, source: Source) -> int:
        """Estimate the size of the file.

        Args:
            source: Source of the images.

        Returns:
            Size of the pixels in bytes.
        """
        return self.count(source) * source.shape[0] * self.size**2 * 4

    def manifest(self, source: Source) -> dict[str, Any]:
        """Return the settings that define the content of the file.

        They are stored in the file, so that it can be reproduced and distinguished from others.

        Args:
            source: Source of the images.

        Returns:
            The fields, the version of the recipe, and the name and checksum of the source.
        """
        made_from = {"name": source.name, "checksum": source.checksum}
        return {"recipe": RECIPE, "source": made_from, **asdict(self)}


def write(
    spec: FileSpec,
    source: Source,
    folder: Path,
    *,
    workers: int = 2,
    advance: Callable[[int], None] = lambda count: None,
) -> Path:
    """Write one MNIST Large Scale file, unless it already exists.

    The pixels do not depend on ``workers``. The file gets its final name only when it is complete.

    Args:
        spec: Description of the file.
        source: Source of the images.
        folder: Folder for the file; created if missing.
        workers: Number of threads that rescale images.
        advance: Called after each block with the number of images in it.

    Returns:
        Path of the file.

    Raises:
        DataError: If the file cannot be written, or a file of this name has other settings.

    Examples:
        >>> import torch
        >>> from foveate.data.splits import Source, Split
        >>> split = Split(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> source = Source.of("tiny", (split, split, split), ("zero", "one"))
        >>> path = write(FileSpec(test=ScaleRange(2, 2), size=32), source, Path("."))
        >>> path.name
        'tiny_large_scale_te2_outsize32-32_scte2p000.h5'
    """
    path = folder / spec.name(source)
    if path.exists():
        _same_or_raise(path, spec.manifest(source))
        advance(spec.count(source))
        return path
    try:
        with (
            replacing(path) as temporary,
            _Disk(temporary, "w+b") as disk,
            h5py.File(disk, "w") as file,
            cpu_threads(1),
        ):
            for split in SPLITS:
                for count in _write_split(file, spec, split, source, workers):
                    disk.check()
                    advance(count)
            manifest = {**spec.manifest(source), "version": __version__}
            file.attrs["foveate"] = json.dumps(manifest)
            file.flush()
            disk.check()
    except (OSError, RuntimeError) as error:
        reason = reason_of(error)
        raise DataError(
            f"cannot write {path} ({reason}); free some disk space or choose another --out"
        ) from None
    return path


class _Disk(io.FileIO):
    """A file that defers write errors until `check`, because HDF5 crashes on a full disk."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            self.failure = self.failure or error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None, /) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
        return size or 0

    def check(self) -> None:
        """Raise the first stored error, if there is one."""
        if self.failure is not None:
            raise self.failure


class ScaledFile:
    """An MNIST Large Scale file, generated by `write` or official, read on demand.

    The constructor reads and validates the labels, the shapes and the manifest. Pixels are
    validated when they are read.

    Args:
        path: Path of the HDF5 file.

    Attributes:
        manifest: Settings with which the file was generated; ``None`` for an official file.
        labels: Class indices of each split, shape ``(N,)``.
        counts: Number of images in each split.

    Raises:
        DataError: If the file is missing or damaged.

    Examples:
        >>> import torch
        >>> from foveate.data.splits import Source, Split
        >>> split = Split(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> source = Source.of("tiny", (split, split, split), ("zero", "one"))
        >>> spec = FileSpec(train=ScaleRange(1, 4), test=ScaleRange(8, 8), size=32)
        >>> file = ScaledFile(write(spec, source, Path(".")))
        >>> file.counts
        {'train': 2, 'val': 2, 'test': 2}
        >>> images, labels = file.read("test")
        >>> images.shape, labels
        (torch.Size([2, 1, 32, 32]), tensor([0, 1]))
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with wrap_read_errors(path), h5py.File(check_regular(path)) as file:
            self.manifest: dict[str, Any] | None = _manifest(file)
            self.labels = _read_labels(file)
        self.counts = {split: len(labels) for split, labels in self.labels.items()}

    def read(self, split: SplitName, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Read the images and labels of a split, or of a part of it.

        Args:
            split: ``train``, ``val`` or ``test``.
            part: Slice of the split.

        Returns:
            Images of dtype float32, shape ``(N, C, F, F)``, and class indices, shape ``(N,)``.

        Raises:
            DataError: If the file does not have this split, or cannot be read.
        """
        check_split(self.path.name, split, self.counts)
        images = np.ascontiguousarray(self.images(split, range(self.counts[split])[part]))
        return torch.from_numpy(images), torch.from_numpy(self.labels[split][part].copy())

    def images(self, split: SplitName, indices: Sequence[int]) -> Any:
        """Read the images at given indices.

        Args:
            split: ``train``, ``val`` or ``test``.
            indices: Indices in ascending order.

        Returns:
            Images of dtype float32, shape ``(N, C, F, F)``.
        """
        with wrap_read_errors(self.path), h5py.File(check_regular(self.path)) as file:
            stored = _own_dataset(file, f"x_{split}")
            if not len(indices) or stored.ndim == 3:
                pixels = stored[()].reshape(-1, *stored.shape[-3:])[list(indices)]
            elif indices[-1] - indices[0] == len(indices) - 1:  # h5py reads a slice much faster
                pixels = stored[indices[0] : indices[-1] + 1]
            else:
                pixels = stored[list(indices)]
        pixels = checked_pixels(pixels, f"x_{split} of {self.path}", indices)
        return np.moveaxis(pixels, -1, 1)

    def training_scales(self) -> str | None:
        """Return the scales of the training images, from the manifest or the file name.

        Returns:
            One scale or a range, such as ``"2"`` or ``"1-4"``; ``None`` if unknown.
        """
        if self.manifest and self.manifest.get("train"):
            return str(ScaleRange(**self.manifest["train"]))
        if found := re.search(r"_sctr(\d+p\d+(?:-\d+p\d+)?)", self.path.name):
            return "-".join(f"{float(end):g}" for end in found[1].replace("p", ".").split("-"))
        return None


def _has(file: h5py.File, name: str) -> bool:
    """Whether the file has an object or link of that name; links are not followed."""
    return bool(file.id.links.exists(name.encode()))


def _own_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset of the file, or raise an OSError if it is stored in another one.

    Links, virtual datasets and external storage could read files that the user did not name. No
    memory is allocated for a dataset that declares far more bytes than the file could hold.
    """
    if not _has(file, name):
        raise OSError(f"it has no {name}")
    if file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise OSError(f"{name} is a link")
    found = file[name]
    if not isinstance(found, h5py.Dataset) or found.shape is None:
        raise OSError(f"{name} is not an array")
    if found.is_virtual or found.external:
        raise OSError(f"{name} stores its values in other files")
    values = max(math.prod(found.shape), math.prod(found.chunks or ()))
    claimed, size = values * found.dtype.itemsize, file.id.get_filesize()
    if claimed > MAX_UNSTORED + MAX_RATIO * size:
        raise OSError(f"{name} declares {claimed:,} bytes in a file of {size:,}")
    return found


def _read_labels(file: h5py.File) -> Labels:
    """Read the labels of all splits in the file, except those that hold only a placeholder."""
    found = {s: _labels(file, s) for s in SPLITS if _has(file, f"x_{s}")}
    if not found:
        raise OSError("it has no images")
    test_only = len(found.get("test", ())) > 1  # test-only files have one placeholder per split
    return {s: n for s, n in found.items() if s == "test" or len(n) > 1 or not test_only}


def _labels(file: h5py.File, split: SplitName) -> NDArray[np.int64]:
    """Read the labels (N,) of a split after checking the shapes of labels and images."""
    images, labels = _own_dataset(file, f"x_{split}"), _own_dataset(file, f"y_{split}")
    count = images.shape[0] if images.ndim == 4 else 1
    square = images.ndim in (3, 4) and images.shape[-3] == images.shape[-2]
    fits = labels.shape in ((count,), (count, 1)) or (count == 1 and labels.shape == ())
    if not square or not fits or 0 in images.shape:
        raise OSError(
            f"x_{split} has shape {images.shape} and y_{split} has {labels.shape}, "
            "not (N, F, F, C) and (N,)"
        )
    if images.dtype.kind not in NUMBERS:
        raise OSError(f"x_{split} has dtype {images.dtype}, not real numbers")
    # The check rejects labels that are not numbers at the first one, so read only that.
    values = labels[()] if labels.dtype.kind in NUMBERS else labels[:1]
    return checked_labels(np.reshape(values, -1), f"y_{split} of {file.filename}")


def _write_split(
    file: h5py.File, spec: FileSpec, split: SplitName, source: Source, workers: int
) -> Iterator[int]:
    """Write the images of a split block by block, and yield the number of images per block."""
    shape = (spec.size, spec.size, source.shape[0])
    if split not in spec.splits():  # a placeholder
        file[f"x_{split}"] = np.zeros((1, *shape), np.float32)
        file[f"y_{split}"] = np.zeros(1, np.int64)
        return
    data: Split = getattr(source, split)
    target = file.create_dataset(f"x_{split}", (len(data), *shape), "f4")
    file[f"y_{split}"] = data.labels.numpy()
    wanted = spec.scales(split)
    scales = draw_scales(wanted, len(data), spec.seed, split)
    if wanted.low < wanted.high:
        file[f"scale_{split}"] = scales.numpy()

    def block(start: int) -> Tensor:
        part = slice(start, start + BLOCK)
        factor = wanted.low if wanted.low == wanted.high else scales[part]
        return rescale(data.images[part], factor, size=spec.size, border=spec.border)

    starts, ahead = range(0, len(data), BLOCK), 4 * workers  # at most `ahead` blocks in memory
    with ThreadPoolExecutor(workers) as pool:
        for first in range(0, len(starts), ahead):
            some = starts[first : first + ahead]
            for start, pixels in zip(some, pool.map(block, some), strict=True):
                target[start : start + len(pixels)] = pixels.movedim(1, -1).numpy()
                yield len(pixels)


def _manifest(file: h5py.File) -> dict[str, Any] | None:
    """Read the manifest: the settings with which the file was generated, if it has them."""
    text = file.attrs.get("foveate")
    if text is None:
        return None
    try:
        found: dict[str, Any] = json.loads(text)
        ranges = {key: ScaleRange(**found[key]) for key in ("train", "test") if found[key]}
        FileSpec(**{**{key: found[key] for key in ("size", "seed", "border")}, **ranges})
        if not all(isinstance(found["source"][key], str) for key in ("name", "checksum")):
            raise TypeError("the source has no name or checksum")
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise OSError(f"its manifest is damaged: {type(error).__name__} {error}") from None
    return found


def _same_or_raise(path: Path, wanted: dict[str, Any]) -> None:
    found = {k: v for k, v in (ScaledFile(path).manifest or {}).items() if k != "version"}
    if found != json.loads(json.dumps(wanted)):
        raise DataError(
            f"{path} exists and was made with other options; remove it or choose another --out"
        )


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Limit PyTorch to `count` CPU threads within the block; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
