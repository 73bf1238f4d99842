"""Read a model from a TorchScript, torch.export or ONNX file, told apart by what is in it.

Pickles are never opened: not those of `torch.save`, and not those that a torch.export file may
carry beside its graph. TorchScript and torch.export files can run code all the same, and are loaded
only if they are trusted. An ONNX graph cannot: it is data for operators that onnxruntime has.
"""

import logging
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from foveate.errors import ConfigError, DataError, FoveateError
from foveate.trust import require_trust

Shape: TypeAlias = tuple[int | None, int | None, int | None, int | None]
"""Of the images (B, C, H, W) that a model takes; None where any number will do."""
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
OLDEST_ONNX = (1, 24)  # 1.23 reads external data at any path, and at addresses in memory
# What a torch.export archive may hold: graphs, tensors and settings; no objects, no compiled code.
KNOWN = re.compile(
    r"models/|data/weights/|data/constants/(tensor_|[^/]*\.json$)|data/sample_inputs/|extra/|"
    r"\.data/|(archive_format|archive_version|byteorder|version)$"
)


def load_file(
    path: Path, device: torch.device, trust: bool = False
) -> tuple[Callable[[Tensor], Any], Shape]:
    """Read the model in `path`, and the shape of the images that it takes.

    TorchScript and torch.export files can run code when they are loaded, and need `trust`.
    """
    try:
        match _kind(path):
            case "script":
                require_trust(trust, f"{path} is a TorchScript program, which can run code")
                return _load_script(path, device)
            case "export":
                require_trust(trust, f"{path} is a torch.export program, which can run any code")
                return _load_export(path, device)
            case _:
                return _load_onnx(path, device)
    except FoveateError:
        raise
    except Exception as error:  # each runtime has errors of its own
        raise DataError(f"cannot load the model in {path} ({reason(error)})") from error


def reason(error: Exception) -> str:
    """What an error of someone else's code says, in one line that is not too long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _kind(path: Path) -> str:
    if path.suffix.lower() == ".onnx":
        return "onnx"
    names = _members(path)
    if "constants.pkl" in names:
        return "script"
    if "archive_format" in names:
        return "export"
    raise DataError(
        f"{path} holds no TorchScript, torch.export or ONNX model; weights and pickled models are "
        "not loaded from files: name a function that makes the model, as package.module:factory"
    )


def _members(path: Path) -> set[str]:
    """The names in a zip archive without their common folder; none of another file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.partition("/")[2] for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return set()


def _load_script(path: Path, device: torch.device) -> tuple[nn.Module, Shape]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        return torch.jit.load(str(path), map_location=device), (None, None, None, None)


def _load_export(path: Path, device: torch.device) -> tuple[nn.Module, Shape]:
    strange = sorted(name for name in _members(path) if not KNOWN.match(name))
    if strange:
        raise ConfigError(f"{path} holds {strange[0]}, which is no graph or tensor: not loaded")
    with _tensors_only():
        program = torch.export.load(str(path))
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    taken = program.graph_signature.user_inputs[0]
    node = next(node for node in program.graph.nodes if node.name == taken)
    return program.module(), _shape(node.meta["val"].shape)


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Keep PyTorch's own loader from unpickling anything but tensors, and from long warnings."""
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(disabled)
        if before is None:
            del os.environ[WEIGHTS_ONLY]
        else:
            os.environ[WEIGHTS_ONLY] = before


def _load_onnx(path: Path, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Shape]:
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(
            "an ONNX model needs the package onnxruntime: pip install 'foveate[onnx]'"
        ) from None
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < OLDEST_ONNX:
        raise ConfigError(
            f"onnxruntime {onnxruntime.__version__} lets a model read any file and memory; "
            "update it: pip install 'foveate[onnx]'"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    there = [name for name in wanted if name in onnxruntime.get_available_providers()]
    session = onnxruntime.InferenceSession(
        str(path), options, providers=[*there, "CPUExecutionProvider"]
    )
    taken = session.get_inputs()[0]
    dtype = {"tensor(float16)": torch.float16, "tensor(double)": torch.float64}.get(taken.type)

    def ask(images: Tensor) -> Tensor:
        pixels = images.detach().cpu().to(dtype or torch.float32).contiguous().numpy()
        return torch.from_numpy(session.run(None, {taken.name: pixels})[0]).to(images.device)

    return ask, _shape(taken.shape)


def _shape(dims: Any) -> Shape:
    """The sizes that are fixed; symbols and names stand for any."""
    if len(dims) != 4:
        raise ConfigError(f"the model takes {tuple(dims)}, not images of the shape (B, C, H, W)")
    batch, channels, height, width = (d if isinstance(d, int) and d > 0 else None for d in dims)
    return batch, channels, height, width
