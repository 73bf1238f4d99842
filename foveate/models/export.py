"""Export a network to ONNX or `torch.export`, and compare the file with the network."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes.

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from foveate import __version__
from foveate.checks import check_choice
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.files import check_regular, replacing, wrap_write_errors
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import plain_outputs
from foveate.models.sliding import SlidingChannels

Format = Literal["onnx", "torch"]
FORMATS: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch"}
NEEDS = "exporting to ONNX requires more packages; run pip install 'foveate[onnx]'"
NOTE = "foveate.json"
"""Key of the metadata in the file: version, scales of the channels, and the caller's `about`."""
BATCHES = (1, 3)  # batch sizes for the comparison; the network is traced with 2
SIDES = ((64, 80), (97, 71))  # height and width for the trace and the comparison, if they vary

Shape: TypeAlias = tuple[int, int | None, int | None]
ForwardFunction: TypeAlias = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported file and its numerical difference from the network.

    Attributes:
        path: The file.
        outputs: Names of its outputs: ``logits``, and ``channels`` for scale channels.
        difference: Largest absolute difference between the outputs of the file and of the network.
        allowed: Upper limit of this difference that rounding can explain.

    Examples:
        >>> from pathlib import Path
        >>> from foveate import create_model
        >>> net = create_model("cnn", size=28, features=(16, 16))
        >>> exported = export(net, Path("net.pt2"), shape=(1, 28, 28))
        >>> exported.difference <= exported.allowed
        True
    """

    path: Path
    outputs: tuple[str, ...]
    difference: float
    allowed: float


def export(
    net: nn.Module,
    path: Path,
    *,
    shape: Shape,
    format: Format | None = None,
    about: dict[str, Any] | None = None,
) -> Exported:
    """Export a network as an ONNX model or a `torch.export` program.

    The file has the input ``images`` and the output ``logits``, and for networks with scale
    channels the output ``channels``. The batch size is dynamic, and so is the image size if
    ``shape`` does not give it. Before the file is saved under its final name, it is loaded and
    compared with the network on random images. A file that differs by more than rounding is
    deleted.

    Args:
        net: Network from images to logits. It is copied, and exported in float32 and evaluation
            mode.
        path: File to write, ending in ``.onnx`` or ``.pt2`` unless ``format`` is given.
        shape: Shape ``(C, H, W)`` of an image, or ``(C, None, None)`` for any height and width,
            which `ScaleChannels` accepts.
        format: ``"onnx"`` or ``"torch"``; by default chosen by the suffix of ``path``.
        about: Further metadata for the file; must be serialisable as JSON.

    Shape:
        - images: ``(B, C, H, W)``, any B.
        - logits: ``(B, K)``.
        - channels: ``(B, S, K)``.

    Returns:
        The path and outputs of the file, and its difference from the network.

    Raises:
        ConfigError: If the format is unknown, packages for ONNX are missing, or the network cannot
            be exported for images of this shape.
        DataError: If the file cannot be written, ``path`` is a device or a FIFO, or the outputs of
            the file differ from those of the network.

    Examples:
        >>> from pathlib import Path
        >>> from foveate import create_model
        >>> net = create_model("fovmax", size=28, features=(16, 16))
        >>> export(net, Path("net.pt2"), shape=(1, 64, 64)).outputs
        ('logits', 'channels')
    """
    kind = _format(check_regular(path), format)
    _check_shape(shape)
    if kind == "onnx":
        _check_packages()
    plain = _PlainOutputs(net).eval()
    program = _trace(plain, shape)
    names = ("logits", "channels")[: len(program.graph_signature.user_outputs)]
    note = json.dumps({"version": __version__, **_channels(net), **(about or {})})
    axes = _dynamic(shape)
    if kind == "onnx":
        with _explained(shape, "replace what ONNX does not support, or export to .pt2"):
            data, load = _to_onnx(program, axes, names, note), _load_onnx
    else:
        data, load = _to_torch(program, note), _load_torch
    with wrap_write_errors(path), replacing(path) as temporary:
        temporary.write_bytes(data)
        difference, allowed = _compare(plain, load(temporary.read_bytes()), shape)
    return Exported(path=path, outputs=names, difference=difference, allowed=allowed)


class _PlainOutputs(nn.Module):
    """A copy of the network that evaluates all channels and returns its outputs as a tuple."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).cpu().float()
        if isinstance(self.net, ScaleChannels):
            self.net.lazy = None

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(output for output in plain_outputs(self.net, images) if output is not None)


def _format(path: Path, format: str | None) -> Format:
    if format is not None:
        check_choice("format", format, get_args(Format))
        if FORMATS.get(path.suffix, format) != format:  # it could not be loaded again
            raise ConfigError(
                f"{path.name!r} ends in {path.suffix}, but the format is {format}; rename it or "
                "leave out the format"
            )
        return cast(Format, format)
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path.name!r} must end in .onnx or .pt2; rename it or pass a format")
    return FORMATS[path.suffix]


def _check_shape(shape: Shape) -> None:
    lengths = tuple(shape)
    sizes = [length for length in lengths if length is not None]
    whole = all(type(size) is int and size >= 1 for size in sizes)
    if len(lengths) != 3 or lengths[0] is None or not whole:
        raise ConfigError(
            f"shape must be (C, H, W) in whole numbers from 1, or (C, None, None), got {lengths}"
        )


def _check_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401  (runs the file for the comparison)
        import onnxscript  # noqa: F401  (required by torch.onnx)
    except ImportError:
        raise ConfigError(NEEDS) from None


def _channels(net: nn.Module) -> dict[str, Any]:
    if isinstance(net, ScaleChannels | SlidingChannels):  # others can use the name for anything
        return {"scales": list(net.scales)}
    return {}


def _trace(plain: _PlainOutputs, shape: Shape) -> torch.export.ExportedProgram:
    images = torch.zeros(2, *_sized(shape, SIDES[0]))
    with _explained(shape, "check that torch.export accepts the backbone"), torch.no_grad():
        plain(images)
        return torch.export.export(plain, (images,), dynamic_shapes=_dynamic(shape))


@contextmanager
def _explained(shape: Shape, remedy: str) -> Iterator[None]:
    """Convert any error of a custom backbone into a ConfigError."""
    try:
        yield
    except FoveateError:
        raise
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ConfigError(
            f"cannot export this network for images of shape {shape}: {reason}; {remedy}"
        ) from error


def _sized(shape: Shape, sides: tuple[int, int]) -> tuple[int, int, int]:
    """Return a shape (C, H, W) with `sides` for a height and width that are not given."""
    channels, height, width = shape
    return channels, height or sides[0], width or sides[1]


def _dynamic(shape: Shape) -> tuple[dict[int, Any]]:
    """Return the axes of the input that have no fixed size."""
    free = [i for i, length in enumerate((None, *shape)) if length is None]
    names = ("batch", "channels", "height", "width")
    return ({i: torch.export.Dim(names[i], min=1) for i in free},)


def _to_torch(program: torch.export.ExportedProgram, note: str) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={NOTE: note})
    return file.getvalue()


def _load_torch(data: bytes) -> ForwardFunction:
    with _quiet():  # torch 2.11 warns about an internal buffer
        return torch.export.load(io.BytesIO(data)).module()


def _to_onnx(
    program: torch.export.ExportedProgram,
    axes: tuple[dict[int, Any]],
    names: Sequence[str],
    note: str,
) -> bytes:
    import onnx

    with _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            dynamic_shapes=axes,
            input_names=["images"],
            output_names=list(names),
        )
    assert made is not None
    model = made.model_proto
    onnx.helper.set_model_props(model, {NOTE: note})
    return model.SerializeToString()  # type: ignore[no-any-return]


def _load_onnx(data: bytes) -> ForwardFunction:
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def forward(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(part) for part in session.run(None, {"images": images.numpy()})]

    return forward


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of torch about its internals and about torchvision."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


@torch.no_grad()
def _compare(plain: _PlainOutputs, forward: ForwardFunction, shape: Shape) -> tuple[float, float]:
    """Return the largest difference between file and network, and the limit due to rounding.

    Both round the same sums. PyTorch adds in blocks, which is nearly exact. In a runtime that adds
    n terms one after another, n rounding errors form a random walk, so its error is √n times as
    large. The error of PyTorch is measured against float64, and n is the length of the longest sum
    over the weights. (Measured for SWMax in onnxruntime: 4 to 8 times the error, with √n = 23.)
    """
    exact = copy.deepcopy(plain).double()
    random = torch.Generator()
    random.seed()  # different images in every call
    apart: list[Tensor] = []
    rounding: list[Tensor] = []
    for batch, sides in zip(BATCHES, SIDES, strict=True):
        images = torch.randn(batch, *_sized(shape, sides), generator=random)
        with _explained(shape, "check that the backbone runs in float64, which shows its rounding"):
            wide = exact(images.double())
        for ours, theirs, right in zip(plain(images), forward(images), wide, strict=True):
            if theirs.shape != ours.shape:
                raise DataError(
                    f"the file returns shape {tuple(theirs.shape)}, expected {tuple(ours.shape)}"
                )
            ulp = torch.finfo(torch.float32).eps * right.abs().max()
            rounding += [ulp, (ours - right).abs().max()]
            apart.append((ours - theirs).abs().max())
    difference = float(torch.stack(apart).max())  # unlike Python's max, this propagates NaN
    longest = max((p[0].numel() for p in plain.parameters() if p.ndim), default=1)
    allowed = (1 + longest**0.5) * float(torch.stack(rounding).max())
    if not difference <= allowed:
        raise DataError(
            f"the file differs from the network by {difference:.2g}, but rounding explains only "
            f"{allowed:.2g}; it was deleted"
        )
    return difference, allowed
