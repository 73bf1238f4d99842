"""Read the binary version of CIFAR-10: batches of records of a label and a colour image."""
# Shape letters: N images.

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from foveate.data.idx import decode
from foveate.errors import DataError

BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
"""Five files of training images and one of test images, 10,000 each."""
ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"  # of the files in the archive
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes: the label, then the red, green and blue pixels in row-major order


def read_records(data: bytes, name: str) -> tuple[Tensor, Tensor]:
    """Decode the batch `name` to uint8 images (N, 3, 32, 32) and int64 labels (N,)."""
    if not data or len(data) % RECORD:
        raise DataError(
            f"{name} is not a batch of CIFAR-10: its {len(data):,} bytes are not a multiple of "
            f"{RECORD:,}, the size of a record; download it again"
        )
    records = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, RECORD).copy())
    labels = records[:, 0].long()
    if int(labels.max()) >= len(CLASSES):
        index = int((labels >= len(CLASSES)).nonzero()[0])
        raise DataError(
            f"{name} is not a batch of CIFAR-10: label {index} is {int(labels[index])}, not 0 to "
            f"{len(CLASSES) - 1}; download the binary version again"
        )
    return records[:, 1:].reshape(-1, *SHAPE), labels


def read_folder_batches(folder: Path) -> dict[str, bytes]:
    """Return the content of each batch in `folder`, from the batches or from the archive."""
    for place in (folder, folder / FOLDER):
        if all((place / name).is_file() for name in BATCHES):
            return {name: decode(place / name) for name in BATCHES}
    path = folder / ARCHIVE
    if path.is_file():
        return unpack(decode(path), str(path), BATCHES)
    missing = next(name for name in BATCHES if not (folder / name).is_file())
    raise DataError(f"{folder} has no {missing} and no {ARCHIVE}; add the file")


def unpack(data: bytes, origin: str, names: Sequence[str]) -> dict[str, bytes]:
    """Return the content of the regular files `names` in a tar archive called `origin`.

    They are at the top level or in the folder of the official archive; all else is ignored.
    """
    places = {str(PurePosixPath(folder, name)): name for name in names for folder in (FOLDER, "")}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                plain = member.isreg() and not member.issparse()  # a sparse file can be a bomb
                file = tar.extractfile(member) if plain else None
                if file and (name := places.get(member.name)):
                    found[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())
        message = f"{origin} is a damaged tar archive ({reason}); download it again"
        raise DataError(message) from None
    if missing := [name for name in names if name not in found]:
        raise DataError(f"{origin} has no {missing[0]}; download {ARCHIVE}, the binary version")
    return found
