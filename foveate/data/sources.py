"""The door to the data: every kind of source, and `load_source` and `open_source` by name."""
# Shape letters: N images, C image channel, H W pixels.

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foveate.data.fetch import Report, fetch
from foveate.data.idx import FILES, decode, find, read_idx
from foveate.data.pictures import read_folder
from foveate.data.shards import Shards, open_folder, open_shards
from foveate.data.splits import Source as Source
from foveate.data.splits import Split as Split
from foveate.data.splits import kind_of
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
EMBEDDED = {
    "images.idx3-ubyte.gz": "d880cf6cc71c80335012c59deb78e95e7b2c1d8aa8b78312f62bb489ae9ffb96",
    "labels.idx1-ubyte.gz": "e18e6fe44bbeb980f85a745210a0a269a8bb7b98201e0f223576115fd7d5dc6c",
}
"""The files of mnist-5k and the sha256 of their decoded content."""


def load_source(name: str, report: Report | None = None) -> Source:
    """Load one of `SOURCES` into memory, with its splits fixed as follows.

    - `mnist`, `fashion-mnist`, `idx:DIR`: the last sixth of the training images is val (of 60,000
      the first 50,000 are train), and the test images are test.
    - `mnist-5k`: the first 500 of each class of MNIST's training images, the classes taking turns;
      3,500 are train, the next 500 val and the last 1,000 test, each balanced. All of them,
      the test split too, belong to MNIST's *training* set: never mix the two in one experiment.
    - `folder:DIR`: see `foveate.data.pictures.read_folder`.

    `report` is told in words what is being fetched from where.
    """
    kind = find_kind(name)
    if kind is None:
        raise DataError(f"unknown data source {name!r}; there are: {', '.join(SOURCES)}")
    if kind.load is None:
        whole = ", ".join(key for key, kind in SOURCES.items() if kind.load)
        raise DataError(f"{name} can only be trained on; give images of one of: {whole}")
    return kind.load(name, report)


def open_source(name: str, load: Load = load_source, stream: bool = False) -> Source | Shards:
    """Open a source to read its images by index.

    Args:
        name: One of `SOURCES`.
        load: Loads the kinds that are held in memory.
        stream: Whether images stay on the disk until they are read, where the kind can do both.
    """
    kind = find_kind(name)
    if kind and kind.open and (stream or kind.load is None):
        return kind.open(name)
    return load(name)


def _fetched(name: str, report: Report | None) -> Source:
    files = fetch(name, report)
    tensors = [read_idx(files[file], file) for file in FILES]
    return _from_tensors(name, tensors, DIGITS if name == "mnist" else CLOTHES)


def _place(name: str) -> Path:
    """The folder of a name as folder:DIR."""
    prefix, _, folder = name.partition(":")
    if not folder:
        raise DataError(f"{name!r} names no folder; write {prefix}:DIR")
    return Path(folder).expanduser()


def _read_idx_folder(name: str, report: Report | None) -> Source:
    folder = _place(name)
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist; check the path")
    found = {file: find(folder, file) for file in FILES}
    for file, paths in found.items():
        if not paths:
            raise DataError(f"{folder} has no {file} (nor {file}.gz); put it there")
    tensors = [read_idx(decode(paths[0]), str(paths[0])) for paths in found.values()]
    if tensors[0].shape[1:] != tensors[2].shape[1:]:
        raise DataError(
            f"training and test images in {folder} differ in shape: {kind_of(tensors[0])} and "
            f"{kind_of(tensors[2])}; bring them to one size"
        )
    count = int(max(tensors[1].max(), tensors[3].max())) + 1
    return _from_tensors(name, tensors, tuple(str(label) for label in range(count)))


def _from_tensors(name: str, tensors: Sequence[Tensor], classes: tuple[str, ...]) -> Source:
    """Cut training images, their labels, test images and their labels into the three splits."""
    training = _split(tensors[0], tensors[1], f"training set of {name}")
    test = _split(tensors[2], tensors[3], f"test set of {name}")
    count = len(training) - len(training) // 6
    if count == len(training):
        raise DataError(
            f"{name} has {count} training images; at least 6 are needed, a sixth is for validation"
        )
    return Source.of(name, (training[:count], training[count:], test), classes)


def _read_embedded(name: str, report: Report | None) -> Source:
    images, labels = (_read_verified(file, sha256) for file, sha256 in EMBEDDED.items())
    digits = _split(images, labels, name)
    return Source.of(name, (digits[:3500], digits[3500:4000], digits[4000:]), DIGITS)


def _read_verified(file: str, sha256: str) -> Tensor:
    path = Path(__file__).with_name("embedded") / file
    data = decode(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(f"{path} is not the file that foveate came with; install foveate again")
    return read_idx(data, str(path))


def _split(images: Tensor, labels: Tensor, what: str) -> Split:
    """Join grey images (N, H, W) and labels (N,) as IDX files have them."""
    if images.ndim != 3 or labels.ndim != 1:
        raise DataError(
            f"the {what} must have images (N, H, W) and labels (N,), got {kind_of(images)} and "
            f"{kind_of(labels)}; check that the files are not swapped"
        )
    if len(images) != len(labels):
        raise DataError(
            f"the {what} has {len(images)} images but {len(labels)} labels; get both files again"
        )
    return Split(images.unsqueeze(1), labels.long())


@dataclass(frozen=True)
class Kind:
    """A kind of source: what it is, and how to read it, into memory or image by image."""

    about: str
    load: Callable[[str, Report | None], Source] | None = None
    open: Callable[[str], Shards] | None = None


SOURCES = {
    "mnist": Kind("60,000 handwritten digits for training, 10,000 to test; fetched once", _fetched),
    "fashion-mnist": Kind("the same number of pictures of clothes; fetched once", _fetched),
    "mnist-5k": Kind("5,000 of MNIST's training digits, part of this package", _read_embedded),
    "idx:DIR": Kind("the four IDX files in the folder DIR, plain or .gz", _read_idx_folder),
    "folder:DIR": Kind(
        "pictures in the folder DIR, one sub-folder per class, or train/ and test/ first",
        lambda name, report: read_folder(name, _place(name)),
        lambda name: open_folder(_place(name)),
    ),
    "shards:DIR": Kind("the .h5 or .tar files in the folder DIR", open=open_shards),
    "FILE.h5": Kind("a file of 'foveate generate', or an official one", open=open_shards),
}
"""Every kind of source, by how it is named."""


def find_kind(name: str) -> Kind | None:
    """The kind of a source by its name: all of it, what is before a colon, or how it ends."""
    prefix, colon, _ = name.partition(":")
    if found := SOURCES.get(f"{prefix}:DIR" if colon else name):
        return found
    return SOURCES["FILE.h5"] if name.endswith((".h5", ".hdf5")) else None
