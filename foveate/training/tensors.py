"""Tensors as safetensors files, with a sha256 digest that detects damage."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from foveate.errors import DataError
from foveate.files import check_regular


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file, and verify their digest.

    Files of older versions have no digest. The file is opened once, so that another process can
    replace it meanwhile.
    """
    try:
        tensors, note = unpack_tensors(check_regular(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"no such file: {path}; check the path") from None
    except (SafetensorError, OSError, KeyError) as error:  # KeyError: unknown dtype
        raise DataError(
            f"{path} is not a complete safetensors file ({error}); choose another file, or remove "
            "it and train again"
        ) from None
    expected = note.pop("sha256", None)
    if expected is not None and expected != _digest(tensors, note):
        raise DataError(f"{path} is damaged: its sha256 does not match; remove it and train again")
    return tensors, note


def unpack_tensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata in the bytes of a safetensors file."""
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return tensors, header.get("__metadata__", {})


def pack_tensors(tensors: dict[str, Tensor], note: dict[str, str]) -> bytes:
    """Return the bytes of a safetensors file with a digest; equal content gives equal bytes."""
    # Copies, because safetensors rejects tensors that share memory, as tied weights do.
    copies = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    return _sort_metadata(save(copies, {**note, "sha256": _digest(copies, note)}))


def _sort_metadata(data: bytes) -> bytes:
    """Sort the metadata in the bytes of a safetensors file; `save` writes it in a random order."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as in the format, tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _digest(tensors: dict[str, Tensor], note: dict[str, str]) -> str:
    """Return the sha256 of the names, dtypes, shapes and bytes of all tensors and the metadata."""
    digest = hashlib.sha256(json.dumps(note, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
