"""Load or open a data source by name: MNIST, CIFAR-10, folders, shards and HDF5 files."""
# Shape letters: N images, C image channel, H W pixels.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foveate.data import cifar
from foveate.data.fetch import Report, fetch
from foveate.data.idx import FILES, decode, find, read_idx
from foveate.data.shards import Shards, open_folder, open_shards, read_folder
from foveate.data.splits import Source as Source
from foveate.data.splits import Split as Split
from foveate.data.splits import describe_tensor
from foveate.errors import DataError

Load = Callable[[str], Source]
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
EMBEDDED = ("images.idx3-ubyte.gz", "labels.idx1-ubyte.gz")


def load_source(name: str, report: Report | None = None) -> Source:
    """Load a data source into memory.

    The splits of each source are fixed:

    - ``mnist``, ``fashion-mnist``, ``idx:DIR``, ``cifar10`` and ``cifar10:DIR``: the last sixth of
      the training images is the validation set (of 60,000 images, the first 50,000 are for
      training; of 50,000, the first 41,667). The test set is unchanged.
    - ``mnist-5k``: the first 500 images of each class of MNIST's training set, in an order that
      alternates between the classes. The first 3,500 are the training set, the next 500 the
      validation set and the last 1,000 the test set, each with equally many images per class. All
      of them, including the test set, belong to MNIST's *training* set: never use ``mnist`` and
      ``mnist-5k`` in the same experiment.
    - ``folder:DIR``: subfolders define the splits, or a hash of the file names does; see
      `foveate.data.pictures.PictureFolder`.

    ``mnist``, ``fashion-mnist`` and ``cifar10`` are downloaded once and then read from the cache.
    ``cifar10:DIR`` reads ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, or
    ``cifar-10-binary.tar.gz``, in a folder.

    Args:
        name: ``mnist``, ``fashion-mnist``, ``cifar10``, ``mnist-5k``, ``idx:DIR``, ``cifar10:DIR``
            or ``folder:DIR``.
        report: Called with a line of text for each file that is downloaded or found damaged.

    Returns:
        The images and labels of all splits.

    Raises:
        DataError: If the source is unknown, missing or damaged, if a download fails, or if the
            source is of a kind that can only be streamed (``shards:DIR`` and HDF5 files).

    Examples:
        >>> source = load_source("mnist-5k")
        >>> source.counts
        {'train': 3500, 'val': 500, 'test': 1000}
        >>> source.train.images.shape, source.train.images.dtype
        (torch.Size([3500, 1, 28, 28]), torch.uint8)
    """
    kind = find_kind(name)
    if kind is None:
        raise DataError(f"unknown data source {name!r}; use one of: {', '.join(SOURCES)}")
    if kind.load is None:
        whole = ", ".join(key for key, kind in SOURCES.items() if kind.load)
        raise DataError(f"{name} can only be used for training; use one of: {whole}")
    return kind.load(name, report)


def open_source(name: str, load: Load = load_source, stream: bool = False) -> Source | Shards:
    """Open a source, loaded into memory by `load`, or read on demand if `stream` or if it must."""
    kind = find_kind(name)
    if kind and kind.open and (stream or kind.load is None):
        return kind.open(name)
    return load(name)


def _place(name: str) -> Path:
    """Return the path in a name such as folder:DIR."""
    prefix, _, folder = name.partition(":")
    if not folder:
        raise DataError(f"{name!r} has no folder name; use {prefix}:DIR")
    path = Path(folder).expanduser()
    if not path.exists():
        raise DataError(f"folder {path} does not exist; check the path")
    return path


def _read_idx_folder(name: str, report: Report | None) -> Source:
    folder, files = _place(name), {}
    for file in FILES:
        paths = find(folder, file)
        if not paths:
            raise DataError(f"{folder} has no {file} or {file}.gz; add the file")
        files[str(paths[0])] = decode(paths[0])
    return _from_idx(name, files)


def _from_idx(name: str, files: Mapping[str, bytes], classes: tuple[str, ...] = ()) -> Source:
    """Build a source from training images and labels, and test images and labels, in this order."""
    tensors = [read_idx(data, file) for file, data in files.items()]
    training = _split(tensors[0], tensors[1], f"training set of {name}")
    test = _split(tensors[2], tensors[3], f"test set of {name}")
    if training.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"training and test images of {name} differ in shape: "
            f"{describe_tensor(training.images)} and {describe_tensor(test.images)}; "
            "resize them to one size"
        )
    count = 1 + max(int(split.labels.max()) for split in (training, test))
    return _from_splits(name, training, test, classes or tuple(map(str, range(count))))


def _from_splits(name: str, training: Split, test: Split, classes: tuple[str, ...]) -> Source:
    """Build a source whose validation set is the last sixth of the training images."""
    count = len(training) - len(training) // 6
    if count == len(training):
        raise DataError(
            f"{name} has {count} training images; use at least 6, as one sixth is for validation"
        )
    return Source.of(name, (training[:count], training[count:], test), classes)


def _from_batches(name: str, files: Mapping[str, bytes]) -> Source:
    """Build a source from the binary batches of CIFAR-10; the last one is the test set."""
    *batches, test = (Split(*cifar.read_records(data, file)) for file, data in files.items())
    images, labels = (torch.cat([getattr(b, key) for b in batches]) for key in ("images", "labels"))
    return _from_splits(name, Split(images, labels), test, cifar.CLASSES)


def _read_embedded(name: str, report: Report | None) -> Source:
    paths = [Path(__file__).with_name("embedded") / file for file in EMBEDDED]
    images, labels = (read_idx(decode(path), str(path)) for path in paths)
    digits = _split(images, labels, name)
    return Source.of(name, (digits[:3500], digits[3500:4000], digits[4000:]), DIGITS)


def _split(images: Tensor, labels: Tensor, what: str) -> Split:
    """Return a split of grey images (N, H, W) and labels (N,), the shapes in IDX files."""
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"the {what} must have images (N, H, W) and labels (N,), "
            f"got {describe_tensor(images)} and {describe_tensor(labels)}; "
            "check whether the files are swapped, or download both again"
        )
    return Split(images.unsqueeze(1), labels.long())


@dataclass(frozen=True)
class Kind:
    """Functions that load a kind of source into memory, or open it for streaming."""

    load: Callable[[str, Report | None], Source] | None = None
    open: Callable[[str], Shards] | None = None


SOURCES = {
    "mnist": Kind(lambda name, report: _from_idx(name, fetch(name, report), DIGITS)),
    "fashion-mnist": Kind(lambda name, report: _from_idx(name, fetch(name, report), CLOTHES)),
    "cifar10": Kind(lambda name, report: _from_batches(name, fetch(name, report))),
    "mnist-5k": Kind(_read_embedded),
    "idx:DIR": Kind(_read_idx_folder),
    "cifar10:DIR": Kind(
        lambda name, report: _from_batches(name, cifar.read_folder_batches(_place(name)))
    ),
    "folder:DIR": Kind(
        lambda name, report: read_folder(name, _place(name)),
        lambda name: open_folder(_place(name)),
    ),
    "shards:DIR": Kind(open=open_shards),
    "FILE.h5": Kind(open=open_shards),
}
"""Every kind of source, keyed by the form of its name."""


def find_kind(name: str) -> Kind | None:
    """Return the kind of a source by its full name, its prefix or its file extension."""
    prefix, colon, _ = name.partition(":")
    if found := SOURCES.get(f"{prefix}:DIR" if colon else name):
        return found
    return SOURCES["FILE.h5"] if name.endswith((".h5", ".hdf5")) else None
