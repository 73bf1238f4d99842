"""Load images of any size with worker processes, for runs with the recipe `photo`.

Workers read and resize the images. The main process resamples the patches, on the device of the
network: an image has one tenth of the bytes of its patches, and transferring patches from a worker
took twice as long as computing them.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import atexit
import ctypes
import math
import mmap
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from foveate.checks import check_memory
from foveate.data.decoding import read_header
from foveate.data.pictures import PictureFolder
from foveate.data.recipes import Recipe
from foveate.data.shards import Shards
from foveate.data.splits import SplitName
from foveate.data.store import one_thread
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.execution import patches
from foveate.execution.captured import Batch
from foveate.execution.plan import Prepared
from foveate.models.channels import ScaleChannels
from foveate.training.config import TrainConfig
from foveate.training.data import LISTED, Batches, open_pictures
from foveate.training.interrupt import SIGNALS
from foveate.training.skipped import Bad, Skipped

MOST_WORKERS = 8  # by default
PR_SET_PDEATHSIG = 1  # option of prctl(2): signal to receive when the parent dies
GRACE = 20  # seconds for which a worker survives SIGTERM, so that the run can be saved
AugmentationSeed = tuple[int, int]
Item = tuple[int, int, int]


class Sample(NamedTuple):
    """A resized uint8 image (3, H, W), the centre (y, x) of its windows, and its class index."""

    picture: Tensor
    centre: tuple[float, float]
    label: int


class Packed(NamedTuple):
    """A batch of images of different sizes, concatenated so that one tensor moves to the GPU.

    Attributes:
        values: Pixels of all images, uint8, one after another.
        shapes: Height and width of each image, (B, 2).
        centres: Centre (y, x) of the windows of each image, (B, 2).
        labels: Class indices, (B,).
    """

    values: Tensor
    shapes: Tensor
    centres: Tensor
    labels: Tensor

    def pictures(self) -> list[Tensor]:
        """Return the images, each (3, H, W)."""
        shapes = [(3, *shape) for shape in self.shapes.tolist()]
        parts = self.values.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


Missing = list[tuple[int, str]]
"""Index and error of each image that was left out of a batch."""


@dataclass(frozen=True, eq=False)
class PhotoBatches(Batches):
    """A loader for the images of a split as patches (B, S, C, P, P), in any order.

    A `DataLoader` reads, decodes and resizes the images. Augmentation depends only on the seed, the
    epoch and the index of an image, not on the number of workers or on interruptions. With `bad`
    "skip", an image that cannot be used is left out of its batch and listed in `skipped`. A batch
    without any usable image is empty in training, and left out otherwise.
    """

    recipe: Recipe = field(default_factory=lambda: Recipe(name="photo"))
    largest: int = 32
    workers: int = 0
    bad: Bad = "stop"
    skipped: Skipped = field(default_factory=dict)
    idle: "list[_Reader]" = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"workers must be 0 or more, got {self.workers}")
        self.recipe.resize()
        # Compiles the native kernels once, before workers start.
        windows_of(self.net).patches(torch.zeros(1, 3, 2, 2))

    def __call__(
        self, order: Tensor, batch: int, augmentation_seed: AugmentationSeed = (0, 0)
    ) -> Iterator[Batch]:
        """Yield the images at the indices `order` in batches of size `batch`.

        Outside training, a batch has at most `largest` images.
        """
        size = batch if self.split == "train" else min(batch, self.largest)
        reader = self.idle.pop() if self.idle else self._reader(min(size, max(1, len(order))))
        used = 0
        try:
            for found in reader.read(
                [group.tolist() for group in order.split(size)], augmentation_seed
            ):
                made = self._batch(found[0])
                self._skip(found[1])
                used += len(made.labels)
                if len(made.labels) or self.split == "train":
                    yield made
            if not used and len(order) == self.count:
                raise DataError(
                    f"none of the {self.count} {self.split} images can be used; check the source"
                )
        except BaseException:
            reader.close()
            raise
        self.idle.append(reader)

    def close(self) -> None:
        """Stop the workers, which wait for the next epoch."""
        while self.idle:
            self.idle.pop().close()

    def _batch(self, found: Packed) -> Batch:
        packed = Packed(*(tensor.to(self.device, non_blocking=True) for tensor in found))
        cut = cut_patches(packed, self.recipe, windows_of(self.net))
        return Batch(Prepared(patches, (cut,)), packed.labels)

    def _skip(self, missing: list[tuple[int, str]]) -> None:
        """Record images that were left out."""
        assert isinstance(self.images, Shards)
        for index, reason in missing:
            name = self.images.describe_image(self.split, index).removeprefix("image ")
            self.skipped[self.split, name] = reason

    def _reader(self, batch: int) -> "_Reader":
        assert isinstance(self.images, Shards) and isinstance(self.net, ScaleChannels)
        size = 4 * self.net.size**2 * 3 * len(self.net.scales) * batch
        remedy = "use a smaller batch or a smaller model.size"
        check_memory(2 * size, "two batches of patches", remedy)
        dataset = PhotoDataset(self.images, self.split, self.recipe, self.bad)
        workers = min(self.workers, math.ceil(self.count / batch))
        return _Reader(dataset, workers, pinned=self.device.type != "cpu")


class _Reader:
    """A `DataLoader` with persistent workers."""

    def __init__(self, dataset: "PhotoDataset", workers: int, pinned: bool) -> None:
        self.groups: list[list[Item]] = []
        forked = workers > 0 and sys.platform == "linux"
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.groups,
            collate_fn=_pack,
            num_workers=workers,
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
        """Yield batches of images by index; augmentation depends on the (seed, epoch)."""
        self.groups[:] = [
            [(*augmentation_seed, index) for index in group] for group in groups if group
        ]
        with _signals_blocked():  # until the workers have set their own handlers
            iterator = iter(self.loader)
        while (found := _next(iterator)) is not None:
            yield found

    def close(self) -> None:
        """Stop the workers now; after an error, the garbage collector could be too late."""
        atexit.unregister(self.close)
        if shut_down := getattr(self.loader._iterator, "_shutdown_workers", None):
            shut_down()


class PhotoDataset(Dataset[Sample]):
    """The resized images of a split, with the centres of their windows and their labels.

    The key of an item is (seed, epoch, index); augmentation depends on nothing else.

    Args:
        images: Images of any sizes, grey or in colour.
        split: ``train``, ``val`` or ``test``; images of ``train`` are augmented.
        recipe: Recipe ``photo``.
        bad: Treatment of images that cannot be used: ``stop`` makes the batch an error, ``skip``
            leaves the image out of the batch.
    """

    def __init__(
        self,
        images: Shards,
        split: SplitName,
        recipe: Recipe,
        bad: Bad = "stop",
    ) -> None:
        self.images, self.split, self.recipe = images, split, recipe
        self.bad, self.labels = bad, images.labels(split)
        self.training = split == "train"
        self.resize = recipe.resize(self.training)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: Item) -> Sample:
        seed, epoch, index = item
        picture = torch.from_numpy(np.array(self.images.read(self.split, index)))  # writable
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(_seed(seed, epoch, index))
            resized = self._resized(picture, index)
            y, x = self.recipe.draw_shift().tolist() if self.training else (0.0, 0.0)
        height, width = resized.shape[-2:]
        return Sample(resized, (height / 2 + y, width / 2 + x), int(self.labels[index]))

    def __getitems__(self, items: list[Item]) -> tuple[list[Sample], Missing] | FoveateError:
        """Return the samples of a batch, or the error of the first unusable one.

        The error is returned because the text of an error raised in a worker includes a traceback.
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

    def _resized(self, picture: Tensor, index: int) -> Tensor:
        try:
            return self.resize(picture)
        except DataError as error:
            raise DataError(f"{self.images.describe_image(self.split, index)} {error}") from error


@torch.no_grad()
def cut_patches(packed: Packed, recipe: Recipe, windows: ScaleChannels) -> Tensor:
    """Normalise images and resample their patches (B, S, C, P, P).

    On a GPU, images of equal shape are processed together. On a CPU, they are processed one by one
    while each is in the cache, by one thread: the workers need the other cores.
    """
    pictures, shapes = packed.pictures(), list(map(tuple, packed.shapes.tolist()))
    size = (len(pictures), len(windows.scales), 3, windows.size, windows.size)
    on_cpu = packed.values.device.type == "cpu"
    if on_cpu:
        found, groups = _empty_pages(*size), [[i] for i in range(len(pictures))]
    else:
        found = torch.empty(size, device=packed.values.device)
        groups = [[i for i, other in enumerate(shapes) if other == one] for one in set(shapes)]
    with one_thread() if on_cpu else nullcontext():
        for alike in groups:
            images = recipe.normalise(torch.stack([pictures[i] for i in alike]))
            found[alike] = windows.patches(images, packed.centres[alike])
    return found


def _empty_pages(*size: int) -> Tensor:
    """Allocate a float32 tensor on the CPU, in huge pages if the system supports them.

    The first write to 70 MB of small pages takes longer than computing the patches that fill them.
    """
    count = math.prod(size)
    if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size)
    pages = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel does not support huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32).view(size)


def windows_of(net: nn.Module) -> ScaleChannels:
    """Return the scale channels of a network without its backbone, to resample patches."""
    if not isinstance(net, ScaleChannels) or not patches.fits(net, torch.empty(0)):
        raise ConfigError(
            "the recipe photo needs a network with scale channels; use fovmax, fovavg or fovconc, "
            "or --recipe mnist-large-scale"
        )
    options: dict[str, Any] = {"padding": net.padding, "antialias": net.antialias}
    return ScaleChannels(nn.Identity(), net.scales, net.size, **options)


def describe_photos(config: TrainConfig) -> str:
    """Describe the images, the recipe and the windows of a run in one line.

    The range of sizes is that of the first `LISTED` training images, read from their headers.
    """
    assert config.recipe is not None
    images, model = open_pictures(config.source), config.model
    counts = [len(images.labels("train")), len(images.labels("val"))]
    windows = [round(model.size * scale) for scale in model.scales]
    return (
        f"{config.source}: {counts[0]:,} training and {counts[1]:,} validation images of "
        f"{images.num_classes} classes"
        f"{_sizes(images)}; recipe photo: short side {config.recipe.base}; {len(windows)} windows "
        f"of {windows[0]} to {windows[-1]} pixels, patches of {model.size}"
    )


def _sizes(images: Shards) -> str:
    """Return the range of image sizes in a folder as text; empty for tar files."""
    if not isinstance(folder := images.shards[0], PictureFolder):
        return ""
    sizes = []
    for path, _ in folder.items["train"][:LISTED]:
        with suppress(DataError):  # reported when the image is used
            header = read_header(path)
            sizes.append((header.width * header.height, f"{header.width}x{header.height}"))
    return f", {min(sizes)[1]} to {max(sizes)[1]} pixels" if sizes else ""


def default_workers(runs: int = 1) -> int:
    """Return the number of worker processes for each of `runs` concurrent runs."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * runs
    return max(1, min(MOST_WORKERS, cores // processes))


def _seed(seed: int, epoch: int, index: int) -> int:
    return int(np.random.SeedSequence([seed, epoch, index]).generate_state(1, np.uint64)[0])


def _pack(found: Any) -> tuple[Packed, Missing] | FoveateError:
    """Collate the output of `PhotoDataset.__getitems__`; an error is returned unchanged."""
    if isinstance(found, FoveateError):
        return found
    samples, missing = found
    shapes = torch.tensor([s.picture.shape[1:] for s in samples], dtype=torch.int64).reshape(-1, 2)
    packed = Packed(
        _empty(3 * int(shapes.prod(1).sum())),
        shapes,
        torch.tensor([s.centre for s in samples], dtype=torch.float64).reshape(-1, 2),
        torch.tensor([s.label for s in samples], dtype=torch.int64),
    )
    for place, sample in zip(packed.pictures(), samples, strict=True):
        place.copy_(sample.picture)
    return packed, missing


def _empty(count: int) -> Tensor:
    """Allocate bytes; a worker allocates them in shared memory, for the main process to read."""
    if get_worker_info() is None:
        return torch.empty(count, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(count)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (count,), (1,))


def _next(iterator: Iterator[Any]) -> Any:
    """Return the next batch and the images left out of it, or None at the end."""
    try:
        found = next(iterator, None)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise FoveateError(
            f"a data loader process ended early ({reason}); use a smaller batch or fewer workers, "
            "such as --workers 0"
        ) from error
    if isinstance(found, FoveateError):
        raise found
    return found


def _begin_worker(number: int) -> None:
    """Leave signals to the main process, which saves the run and stops its workers.

    Ctrl-C and many schedulers signal all processes at once. A worker that died before the main
    process had completed its step would cause an error.
    """
    if sys.platform == "linux":  # a worker that waits on a full queue would outlive a killed parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # the parent died before prctl was called
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
