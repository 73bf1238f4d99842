"""Read IDX files, the format of MNIST: a short header followed by unsigned bytes."""

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foveate.errors import DataError
from foveate.files import check_regular, wrap_read_errors

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""Training images, training labels, test images and test labels of an MNIST-like dataset."""

MAX_DECODED = 1 << 32  # bytes; a limit for gzip bombs, sixty times MNIST's largest file
MAX_RANK = 32
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20


def read_idx(data: bytes, name: str) -> Tensor:
    """Decode the bytes of the unsigned-byte IDX file `name` to a uint8 tensor.

    The layout is 0, 0, 8, rank, then `rank` big-endian 32-bit sizes, then the values.
    """
    rank = data[3] if len(data) > 3 else 0
    start = 4 + 4 * rank
    if data[:3] != b"\x00\x00\x08" or not 1 <= rank <= MAX_RANK or len(data) < start:
        raise DataError(
            f"{name} is not an IDX file of unsigned bytes, 00 00 08 and the rank, or is truncated: "
            f"it starts with {data[:4].hex(' ') or 'nothing'}; check the path, or download it again"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, dtype=">u4", count=rank, offset=4))
    expected = start + math.prod(shape)
    if 0 in shape or len(data) != expected:
        raise DataError(
            f"{name} is empty, truncated or too long: it has {len(data)} bytes, and its shape "
            f"{shape} takes {expected}; download it again"
        )
    values = np.frombuffer(data, dtype=np.uint8, offset=start)
    return torch.from_numpy(values.reshape(shape).copy())


def decode(path: Path, limit: int = MAX_DECODED) -> bytes:
    """Return the content of `path`, decompressed if it is gzip data, whatever the extension."""
    with wrap_read_errors(path):
        data = check_regular(path).read_bytes()
    return gunzip(data, str(path), limit)


def gunzip(data: bytes, name: str, limit: int) -> bytes:
    """Return `data`, decompressed if it is gzip data; raise a DataError beyond `limit` bytes."""
    if not data.startswith(_GZIP_MAGIC):
        return data
    parts: list[bytes] = []
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            while part := stream.read(_CHUNK):
                parts.append(part)
                limit -= len(part)
                if limit < 0:
                    raise DataError(f"{name} unpacks to more bytes than allowed; download it again")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} is a damaged gzip file ({error}); download it again") from error
    return b"".join(parts)


def find(folder: Path, name: str) -> list[Path]:
    """List the files in `folder` called `name`, with a dash or a dot before idx, plain or .gz."""
    spellings = dict.fromkeys((name, name.replace("-idx", ".idx")))  # equal for other files
    paths = [folder / f"{spelling}{suffix}" for spelling in spellings for suffix in ("", ".gz")]
    return [path for path in paths if path.is_file()]
