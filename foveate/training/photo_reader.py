"""Read and resize images with worker processes, for batches of photographs."""
# Shape letters: B batch, H W pixels.

import atexit
import math
import mmap
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from foveate.checks import free_memory
from foveate.data.recipes import Recipe, Transform, surround
from foveate.data.shards import Shards
from foveate.data.splits import SplitName
from foveate.errors import DataError, FoveateError
from foveate.files import reason_of
from foveate.training.interrupt import SIGNALS, end_with_parent
from foveate.training.rescaling import AugmentationSeed
from foveate.training.skipped import Bad

GRACE = 20  # seconds for which a worker survives SIGTERM, so that the run can be saved
AHEAD = 2  # batches that each worker reads in advance
BLOCKS = AHEAD + 1  # and one that the main process uses
MOST_DECODED = 1 << 30  # bytes per split; larger ones are decoded again in each epoch
MEMORY_SHARE = 1 / 8  # of the free memory, for decoded images
SAMPLED = 100  # images whose headers are read to estimate the sizes of all
Item = tuple[int, int, int]
Background = tuple[int, str | float | tuple[float, ...]]
"""Side of the largest window, and what fills it outside an image, see `surround`."""


class Sample(NamedTuple):
    """A resized uint8 image (3, H, W), the centre (y, x) of its windows, and its class index."""

    picture: Tensor
    centre: tuple[float, float]
    label: int


class Packed(NamedTuple):
    """A batch of images of different sizes: a tensor, which moves to the GPU, and three arrays."""

    values: Tensor  # pixels (H, W, 3) of all images, uint8, one after another
    shapes: NDArray[np.int64]  # (B, 2): height and width
    centres: NDArray[np.float64]  # (B, 2): centre (y, x) of the windows
    labels: NDArray[np.int64]

    def pictures(self) -> list[Tensor]:
        """Return the images, each (3, H, W) in the memory layout (H, W, 3)."""
        parts = self.values.split((3 * self.shapes.prod(1)).tolist())
        shapes = [(*shape, 3) for shape in self.shapes.tolist()]
        return [
            part.view(shape).permute(2, 0, 1) for part, shape in zip(parts, shapes, strict=True)
        ]


Missing = list[tuple[int, str]]
"""Index and error of each image that was left out of a batch."""


class PhotoReader:
    """A `DataLoader` with persistent workers."""

    def __init__(self, dataset: "PhotoDataset", workers: int, pinned: bool) -> None:
        self.groups: list[list[Item]] = []
        forked = workers > 0 and sys.platform == "linux"
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.groups,
            collate_fn=Packer(),
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pinned,
            worker_init_fn=_begin_worker,
            multiprocessing_context="fork" if forked else None,
            generator=torch.Generator(),  # leaves the random state of the run unchanged
        )
        atexit.register(self.close)

    def read(
        self, groups: list[list[int]], augmentation_seed: AugmentationSeed
    ) -> Iterator[tuple[Packed, Missing]]:
        """Yield batches of images by index; augmentation depends on the (seed, epoch).

        The pixels of a batch are valid until the next batch is requested; see `Packer`.
        """
        self.groups[:] = [
            [(*augmentation_seed, index) for index in group] for group in groups if group
        ]
        with _signals_blocked():  # until the workers have set their own handlers
            iterator = iter(self.loader)
        try:
            for found in iterator:
                if isinstance(found, FoveateError):
                    raise found
                yield found
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise FoveateError(
                f"a data loader process ended early ({reason_of(error)}); use a "
                "smaller batch or fewer workers, such as --workers 0"
            ) from error

    def close(self) -> None:
        """Stop the workers now; after an error, the garbage collector could be too late."""
        atexit.unregister(self.close)
        if shut_down := getattr(self.loader._iterator, "_shutdown_workers", None):
            shut_down()


class DecodedImages:
    """Decoded images (C, H, W) by index, written by any process that was forked from this one.

    Small photographs take 0.45 ms of one core to read, and 0.12 ms from here. Pages are allocated
    when an image is written; containers have too little space for a file of shared memory.
    """

    def __init__(self, count: int, size: int) -> None:
        self.places = np.frombuffer(mmap.mmap(-1, 32 * count), np.int64).reshape(count, 4)
        self.pixels = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.used = get_context("fork").Value("q", 0)

    def get(self, index: int) -> NDArray[Any] | None:
        """Return an image, or None if it has not been added."""
        with self.used.get_lock():
            begin, *shape = self.places[index].tolist()
        found = self.pixels[begin : begin + math.prod(shape)]
        return found.reshape(shape).transpose(2, 0, 1) if len(found) else None

    def add(self, index: int, image: NDArray[Any]) -> None:
        """Add an image if there is space for it."""
        with self.used.get_lock():
            begin = self.used.value
            if begin + image.size > len(self.pixels):
                return
            self.used.value += image.size
        pixels = image.transpose(1, 2, 0)  # the layout in which images are decoded
        self.pixels[begin : begin + image.size].reshape(pixels.shape)[:] = pixels
        with self.used.get_lock():  # after the pixels, also for other processes
            self.places[index] = begin, *pixels.shape


@dataclass(eq=False)
class PhotoDataset(Dataset[Sample]):
    """The resized images of a split, with the centres of their windows and their labels.

    The key of an item is (seed, epoch, index); augmentation, of the split ``train`` alone, depends
    on nothing else. An image that cannot be used makes its batch an error, or with `bad` "skip" is
    left out of it. Images are reduced to a `share` of the pixels along each axis, and extended by
    `surround` with a `background`. Images in `decoded` are not decoded again.
    """

    images: Shards
    split: SplitName
    recipe: Recipe
    bad: Bad = "stop"
    share: float = 1.0
    background: Background | None = None
    decoded: DecodedImages | None = None

    def __post_init__(self) -> None:
        self.labels = self.images.labels(self.split)

    @cached_property
    def resize(self) -> Transform:
        """The resizing of the recipe; made in each worker, because a function cannot be pickled."""
        return self.recipe.resize(self.split == "train", self.share)

    def __getitem__(self, item: Item) -> Sample:
        index = item[-1]
        picture = torch.from_numpy(np.array(self._read(index)))  # writable
        with torch.random.fork_rng([]):
            seed = np.random.SeedSequence(item).generate_state(1, np.uint64)[0]
            torch.default_generator.manual_seed(int(seed))
            resized = self._resized(picture, index)
            y, x = self.recipe.draw_shift().tolist() if self.split == "train" else (0.0, 0.0)
        height, width = resized.shape[-2:]
        return Sample(resized, (height / 2 + y, width / 2 + x), int(self.labels[index]))

    def __getitems__(self, items: list[Item]) -> tuple[list[Sample], Missing] | FoveateError:
        """Return the samples of a batch, or the error of the first unusable one.

        The text of an error raised in a worker would include a traceback.
        """
        samples, missing = [], []
        for item in items:
            try:
                samples.append(self[item])
            except DataError as error:
                if self.bad == "stop":
                    return DataError(f"{error}, or skip it with --bad skip")
                missing.append((item[-1], str(error)))
            except FoveateError as error:
                return error
        return samples, missing

    def _read(self, index: int) -> NDArray[Any]:
        if self.decoded is not None and (found := self.decoded.get(index)) is not None:
            return found
        image = self.images.read(self.split, index)
        if self.decoded is not None:
            self.decoded.add(index, image)
        return image

    def _resized(self, picture: Tensor, index: int) -> Tensor:
        try:
            resized = self.resize(picture)
        except DataError as error:
            raise DataError(f"{self.images.describe_image(self.split, index)} {error}") from error
        return resized if self.background is None else surround(resized, *self.background)


class Packer:
    """Collate the output of `PhotoDataset.__getitems__`; an error is returned unchanged.

    A worker writes its batches to `BLOCKS` blocks of shared memory in turn, because the system
    fills new memory with zeros (0.2 of 1.6 ms per photograph). The main process therefore must not
    use a batch after it has requested the next one.
    """

    def __init__(self) -> None:
        self.blocks = [torch.UntypedStorage()] * BLOCKS

    def __call__(self, found: Any) -> "tuple[Packed, Missing] | FoveateError":
        """Concatenate the images of a batch."""
        if isinstance(found, FoveateError):
            return found
        samples, missing = found
        shapes = np.array([s.picture.shape[1:] for s in samples], np.int64).reshape(-1, 2)
        packed = Packed(
            self._empty(3 * int(shapes.prod(1).sum())),
            shapes,
            np.array([s.centre for s in samples], np.float64).reshape(-1, 2),
            np.array([s.label for s in samples], np.int64),
        )
        for place, sample in zip(packed.pictures(), samples, strict=True):
            place.copy_(sample.picture)
        return packed, missing

    def _empty(self, count: int) -> Tensor:
        """Return memory for pixels; in a worker, the block that was used least recently."""
        if get_worker_info() is None:
            return torch.empty(count, dtype=torch.uint8)
        block = self.blocks.pop(0)
        if block.nbytes() < count:
            block = torch.UntypedStorage._new_shared(count)
        self.blocks.append(block)
        return torch.empty(0, dtype=torch.uint8).set_(block, 0, (count,), (1,))


def _begin_worker(number: int) -> None:
    """Leave signals to the main process, which saves the run and stops its workers.

    Ctrl-C and many schedulers signal all processes at once, and a worker that ended before the main
    process had completed its step would cause an error.
    """
    # A worker that waits on a full queue would outlive a killed parent.
    end_with_parent(signal.SIGKILL)
    if hasattr(signal, "alarm"):
        signal.set_wakeup_fd(-1)  # detach from the pipe of the parent
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread and in the processes that it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def memory_for(images: Shards, split: SplitName) -> DecodedImages | None:
    """Return memory for the images of a split, or None if they are large or cannot be shared."""
    sizes = images.sizes(split, SAMPLED)
    limit = min(MOST_DECODED, int(MEMORY_SHARE * min(free_memory(), 1e15)))
    count = len(images.labels(split))
    needed = 3 * count * sum(height * width for height, width in sizes) / max(1, len(sizes))
    fits = 0 < needed <= limit and sys.platform == "linux"
    return DecodedImages(count, limit) if fits else None
