"""Tensors as safetensors files, with a sha256 digest that detects damage."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from foveate.errors import DataError
from foveate.files import check_regular

MAX_READS = 20  # of a file that other processes keep replacing


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file, and verify their digest.

    Files of older versions have no digest. Nothing in a file is executed. If another process
    replaces the file meanwhile, it is read again: safetensors opens header and tensors separately.
    """
    for _ in range(MAX_READS - 1):
        before = _identity(path)
        try:
            return _read(path)
        except DataError:
            if _identity(path) == before:
                raise
    return _read(path)


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return numbers that change if the file is replaced, or None if it cannot be examined."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(check_regular(path), framework="pt") as file:
            # Copies, because the file can be replaced while its tensors are in use.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            note = file.metadata() or {}
    except FileNotFoundError:
        raise DataError(f"no such file: {path}; check the path") from None
    except (SafetensorError, OSError, RuntimeError) as error:  # PyTorch raises RuntimeError
        raise DataError(
            f"{path} is not a complete safetensors file ({error}); remove it and train again"
        ) from None
    expected = note.pop("sha256", None)
    if expected is not None and expected != _digest(tensors, note):
        raise DataError(f"{path} is damaged: its sha256 does not match; remove it and train again")
    return tensors, note


def pack_tensors(tensors: dict[str, Tensor], note: dict[str, str]) -> bytes:
    """Return the bytes of a safetensors file with these tensors, this metadata and a digest."""
    # Copies, because safetensors rejects tensors that share memory, as tied weights do.
    copies = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    return save(copies, {**note, "sha256": _digest(copies, note)})


def _digest(tensors: dict[str, Tensor], note: dict[str, str]) -> str:
    """Return the sha256 of the names, dtypes, shapes and bytes of all tensors and the metadata."""
    digest = hashlib.sha256(json.dumps(note, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
