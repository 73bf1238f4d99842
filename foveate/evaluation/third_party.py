"""Load third-party models from Python or from files, call them in batches and check their outputs.

The file formats are ONNX, torch.export and TorchScript, detected from the content. Pickles are
never loaded, neither those of `torch.save` nor those that a torch.export file can contain next to
its graph. TorchScript and torch.export files can still run code and require `trust`. An ONNX file
cannot run code: its graph is data for the operators of onnxruntime.
"""
# Shape letters: B batch, C image channel, H W pixels, K classes.

import inspect
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
from foveate.execution.plan import predict
from foveate.models.export import NOTE
from foveate.trust import find_factory, require_trust

ImageClassifier: TypeAlias = Callable[[Tensor], Any]
"""Any callable from images (B, C, H, W) to logits (B, K)."""
Shape: TypeAlias = tuple[int | None, int | None, int | None, int | None]
"""Input shape (B, C, H, W) of a model; None for an axis of variable size."""
ANY_SHAPE: Shape = (None, None, None, None)
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
OLDEST_ONNX = (1, 24)  # 1.23 reads external data from any path and from memory addresses
# Members allowed in a torch.export archive: graphs, tensors and settings, but no pickled objects
# and no compiled code.
KNOWN = re.compile(
    r"models/|data/weights/|data/constants/(tensor_|[^/]*\.json$)|data/sample_inputs/|extra/|"
    r"\.data/|(archive_format|archive_version|byteorder|version)$"
)


def load_file(
    path: Path, device: torch.device, trust: bool = False
) -> tuple[ImageClassifier, Shape, str]:
    """Load the model in `path`; return it with its input shape and the metadata of `export`."""
    names = _members(path)
    try:
        if path.suffix.lower() == ".onnx":
            return _load_onnx(path, device)
        if "constants.pkl" in names:
            require_trust(trust, f"{path} is a TorchScript program, which can run code")
            return _load_script(path, device), ANY_SHAPE, ""
        if "archive_format" in names:
            require_trust(trust, f"{path} is a torch.export program, which can run arbitrary code")
            return _load_export(path, device, names)
    except FoveateError:
        raise
    except Exception as error:  # each runtime raises its own exception types
        raise DataError(
            f"cannot load the model in {path} ({summarise_error(error)}); export it again"
        ) from error
    raise DataError(
        f"{path} contains no TorchScript, torch.export or ONNX model; pickled models and weights "
        "are never loaded: pass a function that builds the model, as package.module:factory"
    )


def summarise_error(error: Exception) -> str:
    """Summarise an exception of third-party code in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def load_factory(ref: str) -> ImageClassifier:
    """Return the model named by ``package.module:factory``; call it if it takes no arguments."""
    found = find_factory(ref, "model")
    if isinstance(found, nn.Module):
        return found
    needed = _required_arguments(found)
    if needed == 1 and not inspect.isclass(found):
        return found
    if needed:
        raise ConfigError(
            f"{ref} needs {needed} arguments; pass a function that takes none and returns a model, "
            "or one that takes images and returns logits"
        )
    try:
        made = found()
    except Exception as error:
        raise ConfigError(f"calling {ref} failed ({summarise_error(error)})") from error
    if not callable(made):
        raise ConfigError(f"{ref} must return a callable model, got {type(made).__name__}")
    return made  # type: ignore[no-any-return]


def forward_batch(net: ImageClassifier, images: Tensor) -> Any:
    """Compute the outputs of a model without gradients; modules use the fastest available plan."""
    if isinstance(net, nn.Module):
        return predict(net, images).logits
    with torch.no_grad():
        return net(images)


class Classifier(nn.Module):
    """Call a model in batches of at most `batch` images and check its outputs.

    Probabilities (rows of non-negative values that sum to 1) are replaced by their logarithms, so
    that softmax recovers them. With `exact`, every batch is padded to `batch` images, for graphs
    with a fixed batch size.
    """

    def __init__(
        self,
        net: ImageClassifier,
        classes: int | None = None,
        batch: int = 64,
        *,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.net, self.classes, self.batch, self.exact = net, classes, batch, exact

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (B, K) of images (B, C, H, W)."""
        return torch.cat([self._part(part) for part in images.split(self.batch)])

    def _part(self, images: Tensor) -> Tensor:
        count = len(images)
        if self.exact and count < self.batch:  # pad with the last image
            images = torch.cat([images, images[-1:].expand(self.batch - count, -1, -1, -1)])
        try:
            outputs = forward_batch(self.net, images)
        except FoveateError:
            raise
        except Exception as error:  # a third-party model can raise any exception
            raise ConfigError(
                f"the model failed on images of shape {tuple(images.shape)} "
                f"({summarise_error(error)}); check that it accepts this size and number of "
                "channels"
            ) from error
        return _as_logits(_checked(outputs, len(images), self.classes)[:count])


def _members(path: Path) -> set[str]:
    """Return the member names of a zip archive without their top folder; empty for other files."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.partition("/")[2] for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return set()


def _load_script(path: Path, device: torch.device) -> ImageClassifier:
    with warnings.catch_warnings():
        # TorchScript is deprecated: torch 2.13 emits a DeprecationWarning, 2.15 a FutureWarning.
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        return torch.jit.load(str(path), map_location=device)  # type: ignore[no-any-return]


def _load_export(
    path: Path, device: torch.device, names: set[str]
) -> tuple[ImageClassifier, Shape, str]:
    if strange := sorted(name for name in names if not KNOWN.match(name)):
        raise ConfigError(
            f"cannot load {path}: its member {strange[0]} is neither a graph nor a tensor; export "
            "the model again with torch.export.save"
        )
    with _tensors_only():
        about = {NOTE: ""}  # unchanged if the file has none
        program = torch.export.load(str(path), extra_files=about)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    taken = program.graph_signature.user_inputs[0]
    node = next(node for node in program.graph.nodes if node.name == taken)
    graph = program.module()

    def classify(images: Tensor) -> Any:
        outputs = graph(images)
        return outputs[0] if isinstance(outputs, tuple) else outputs  # logits come first

    return classify, _shape(node.meta["val"].shape), about[NOTE]


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Restrict ``torch.load`` to pickles of tensors and silence its warnings."""
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


def _load_onnx(path: Path, device: torch.device) -> tuple[ImageClassifier, Shape, str]:
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(
            "ONNX models require the package onnxruntime: pip install 'foveate[onnx]'"
        ) from None
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < OLDEST_ONNX:
        raise ConfigError(
            f"onnxruntime {onnxruntime.__version__} lets a model read arbitrary files and memory; "
            "upgrade it: pip install 'foveate[onnx]'"
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

    def classify(images: Tensor) -> Tensor:
        pixels = images.detach().cpu().to(dtype or torch.float32).contiguous().numpy()
        return torch.from_numpy(session.run(None, {taken.name: pixels})[0]).to(images.device)

    about = session.get_modelmeta().custom_metadata_map
    return classify, _shape(taken.shape), about.get(NOTE, "")


def _shape(dims: Any) -> Shape:
    """Return the fixed dimensions; None for symbolic ones."""
    if len(dims) != 4:
        raise ConfigError(
            f"the input of the model must have the shape (B, C, H, W), got {tuple(dims)}"
        )
    batch, channels, height, width = (d if isinstance(d, int) and d > 0 else None for d in dims)
    return batch, channels, height, width


def _required_arguments(function: Callable[..., Any]) -> int:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return 0
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.default is p.empty and p.kind not in kinds for p in found)


def _checked(outputs: Any, count: int, classes: int | None) -> Tensor:
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    fits = isinstance(outputs, Tensor) and outputs.ndim == 2 and len(outputs) == count
    if not fits or classes not in (None, outputs.shape[1]):
        wanted = f"({count}, {'classes' if classes is None else classes})"
        more = fits and outputs.shape[1] > (classes or 0)
        remedy = "; if the model has more classes than the images, list them all with --classes"
        raise ConfigError(
            f"the model must return logits of shape {wanted}, one per class, got {shape}"
            f"{remedy if more else ''}"
        )
    return outputs  # type: ignore[no-any-return]


def _as_logits(outputs: Tensor) -> Tensor:
    # Rounding changes a sum of probabilities by at most half of eps: 0.004 in bfloat16.
    rounding = torch.finfo(outputs.dtype).eps / 2 if outputs.is_floating_point() else 0.0
    if outputs.dtype != torch.float64:  # such as one-hot predictions
        outputs = outputs.float()
    sums = outputs.sum(1)
    fits = torch.allclose(sums, torch.ones_like(sums), atol=max(1e-3, rounding))
    if fits and (outputs >= 0).all():
        return outputs.clamp_min(torch.finfo(outputs.dtype).tiny).log()
    return outputs
