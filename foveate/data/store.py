"""Write and read data set files in the layout of the official MNIST Large Scale files."""

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from foveate.data.checks import checked_pixels
from foveate.data.folder import SPLITS, SplitName
from foveate.data.hdf5 import has_dataset, own_dataset, read_labels, read_scales
from foveate.data.large_scale import (
    RECIPE,
    Border,
    check_border,
    check_scale,
    check_size,
    rescale,
)
from foveate.data.sources import Source, Split
from foveate.errors import ConfigError, DataError
from foveate.files import regular, replacing

# Images are always computed in the same blocks by one thread each, because matrix products round
# differently for other shapes and thread counts: so the file does not depend on either.
BLOCK = 128
MAX_SEED = 2**32 - 1  # training multiplies it by a million, within 64 bits


@dataclass(frozen=True)
class ScaleRange:
    """The scales of a set: one factor (low == high), or log-uniform between two."""

    low: float
    high: float

    def __post_init__(self) -> None:
        check_scale(self.low)
        check_scale(self.high)
        if self.low > self.high:
            raise ConfigError(f"scale range {self.low:g}-{self.high:g} is reversed, swap the two")

    @classmethod
    def parse(cls, text: str) -> "ScaleRange":
        """Read `2` or `1-4`."""
        low, _, high = text.strip().partition("-")
        try:
            return cls(float(low), float(high or low))
        except ValueError:
            raise ConfigError(f"scale must look like 2 or 1-4, got {text!r}") from None

    def __str__(self) -> str:
        """Spell the range as the official file names do: 2p000 or 1p000-4p000."""
        ends = (self.low,) if self.low == self.high else (self.low, self.high)
        return "-".join(f"{end:.3f}".replace(".", "p") for end in ends)

    def draw(self, count: int, seed: int, split: SplitName) -> Tensor:
        """Draw a scale for each of `count` images; each split has a stream of its own."""
        random = np.random.default_rng([seed, SPLITS.index(split)]).random(count)
        return torch.from_numpy(self.low * (self.high / self.low) ** random)


@dataclass(frozen=True, kw_only=True)
class FileSpec:
    """One file to make: scales for training and validation, scales for testing, and the recipe."""

    test: ScaleRange
    train: ScaleRange | None = None
    size: int = 112
    seed: int = 0
    border: Border = "replicate"

    def __post_init__(self) -> None:
        check_size(self.size)
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed must be 0 to 2^32 - 1, got {self.seed}")
        check_border(self.border)

    def splits(self) -> tuple[SplitName, ...]:
        """Name the splits that hold images (a test-only file has one dummy in the others)."""
        return SPLITS if self.train else ("test",)

    def scales(self, split: SplitName) -> ScaleRange:
        """Give the scales of one split."""
        return self.train if self.train and split != "test" else self.test

    def name(self, source: Source) -> str:
        """Name the file as the official ones are named."""
        stem = re.sub(r"[^A-Za-z0-9-]+", "-", source.name.split("/")[-1].replace(":", "-"))
        frame = f"outsize{self.size}-{self.size}"
        if self.train is None:
            return f"{stem}_large_scale_te{len(source.test)}_{frame}_scte{self.test}.h5"
        counts = f"tr{len(source.train)}_vl{len(source.val)}_te{len(source.test)}"
        return f"{stem}_large_scale_{counts}_{frame}_sctr{self.train}_scte{self.test}.h5"

    def bytes(self, source: Source) -> int:
        """Estimate the size of the file."""
        count = sum(len(getattr(source, split)) for split in self.splits())
        return count * source.test.images.shape[1] * self.size**2 * 4

    def manifest(self, source: Source) -> dict[str, Any]:
        """Say how the file is made, so that it can be made again and told from others."""
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
    """Make one file of the data set in `folder`, unless it is there already.

    The file holds the same bytes of images whatever `workers` is. It appears under its name only
    when it is whole. `advance` is told the number of images done.
    """
    path = folder / spec.name(source)
    if path.exists():
        _same_or_raise(path, spec.manifest(source))
        advance(sum(len(getattr(source, split)) for split in spec.splits()))
        return path
    with (
        _one_line(path),
        replacing(path) as temporary,
        _Disk(temporary, "w+b") as disk,
        h5py.File(disk, "w") as file,
        one_thread(),
        ThreadPoolExecutor(workers) as pool,
    ):
        for split in SPLITS:
            if split in spec.splits():
                data = getattr(source, split)
                _write_split(file, spec, split, data, pool, workers, disk.checked(advance))
            else:
                _write_dummy(file, spec, split, source)
        manifest = {**spec.manifest(source), "version": __version__}
        file.attrs["foveate"] = json.dumps(manifest)
        file.flush()
        disk.check()
    return path


class _Disk(io.FileIO):
    """A file that keeps a failed write to itself until `check`: HDF5 crashes on a full disk."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all of `data`, or remember why not."""
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            self.failure = self.failure or error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size, or remember why not."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
        return size or 0

    def check(self) -> None:
        """Raise the error of the first write that failed, if one did."""
        if self.failure is not None:
            raise self.failure

    def checked(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """Give a function that calls `check` before `advance`."""

        def both(count: int) -> None:
            self.check()
            advance(count)

        return both


class ScaledFile:
    """A data set file, ours or an official one, read split by split or image by image.

    Its labels, shapes and manifest are checked and the labels read when it is opened; pixels are
    checked when they are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.manifest: dict[str, Any] | None = _manifest(file)
            self.labels = read_labels(file)
        self.counts = {split: len(labels) for split, labels in self.labels.items()}

    def read(self, split: SplitName, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Read images (N, C, F, F) and labels (N,) of a split, or of a part of it."""
        with self._open() as file:
            self._require(split)
            images = own_dataset(file, f"x_{split}")
            batch = images[part] if images.ndim == 4 else images[()][None][part]
        pixels = self._pixels(batch, split, range(self.counts[split])[part])
        return pixels, torch.from_numpy(self.labels[split][part].copy())

    def pick(self, split: SplitName, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Read the images and labels at the indices `chosen`, in their order."""
        order, back = torch.unique(chosen, return_inverse=True)  # HDF5 reads in rising order
        with self._open() as file:
            self._require(split)
            batch = own_dataset(file, f"x_{split}")[order.numpy()]
        pixels = self._pixels(batch, split, order.tolist())
        return pixels[back], torch.from_numpy(self.labels[split][chosen.numpy()])

    def _pixels(self, batch: NDArray[Any], split: SplitName, indices: Sequence[int]) -> Tensor:
        pixels = checked_pixels(batch, f"x_{split} of {self.path}", indices)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, 1)))

    def scales(self, split: SplitName) -> Tensor:
        """Give the scale of each image (N,): stored, or the one scale that the file's name says."""
        with self._open() as file:
            self._require(split)
            if has_dataset(file, f"scale_{split}"):
                return torch.from_numpy(read_scales(file, split, self.counts[split]))
        key = "te" if split == "test" else "tr"
        found = re.search(rf"_sc{key}(\d+p\d+)(?!\d*-)", self.path.name)
        if not found:
            raise DataError(f"{self.path.name} does not say the scale of each image")
        scale = float(found[1].replace("p", "."))
        return torch.full((self.counts[split],), scale, dtype=torch.float64)

    def _require(self, split: SplitName) -> None:
        if split not in self.counts:
            holds = ", ".join(self.counts)
            raise DataError(f"{self.path.name} holds no {split} images, only {holds}")

    @contextmanager
    def _open(self) -> Iterator[h5py.File]:
        try:
            with h5py.File(regular(self.path)) as file:
                yield file
        except DataError:
            raise
        except FileNotFoundError:
            raise DataError(f"no such file: {self.path}") from None
        except Exception as error:  # h5py raises anything from KeyError to MemoryError
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.path} is not a whole data set file ({reason}); make or download it again"
            ) from None


def _write_split(
    file: h5py.File,
    spec: FileSpec,
    split: SplitName,
    data: Split,
    pool: ThreadPoolExecutor,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    images, frame = data.images, (spec.size, spec.size)
    target = file.create_dataset(f"x_{split}", (len(images), *frame, images.shape[1]), "f4")
    file[f"y_{split}"] = data.labels.numpy()
    wanted = spec.scales(split)
    scales = wanted.draw(len(images), spec.seed, split)
    if wanted.low < wanted.high:
        file[f"scale_{split}"] = scales.numpy()

    def block(start: int) -> tuple[int, np.ndarray[Any, Any]]:
        stop = start + BLOCK
        factor = wanted.low if wanted.low == wanted.high else scales[start:stop]
        done = rescale(images[start:stop], factor, size=spec.size, border=spec.border)
        return start, done.movedim(1, -1).numpy()

    for start, pixels in _in_order(pool, block, range(0, len(images), BLOCK), 2 * workers):
        target[start : start + len(pixels)] = pixels
        advance(len(pixels))


def _in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[int], tuple[int, np.ndarray[Any, Any]]],
    starts: range,
    ahead: int,
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Run `work` over `starts`, at most `ahead` results in memory, and give them in order."""
    waiting: list[Future[tuple[int, np.ndarray[Any, Any]]]] = []
    for start in starts:
        waiting.append(pool.submit(work, start))
        if len(waiting) >= ahead:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


def _write_dummy(file: h5py.File, spec: FileSpec, split: SplitName, source: Source) -> None:
    channels = source.test.images.shape[1]
    file[f"x_{split}"] = np.zeros((1, spec.size, spec.size, channels), np.float32)
    file[f"y_{split}"] = np.zeros(1, np.int64)


def _manifest(file: h5py.File) -> dict[str, Any] | None:
    """Read how the file was made, if it says so."""
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
    found = dict(ScaledFile(path).manifest or {})
    found.pop("version", None)
    if found != json.loads(json.dumps(wanted)):
        raise DataError(f"{path} was made with other options; remove it or choose another --out")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"cannot write {path} ({reason}); free some space or choose --out"
        ) from None
