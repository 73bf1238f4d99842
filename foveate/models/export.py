"""Write a network as one file for other programs, and hold the file against the network."""
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
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.files import replacing
from foveate.models.outputs import plain_outputs

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
NEEDS = "exporting to ONNX needs more packages: pip install 'foveate[onnx]'"
NOTE = "foveate.json"
"""Under this name the file says more: version, scales of the channels, and the caller's `about`."""
BATCHES = (1, 3)  # that a file is tried with; it was traced with 2

Ask: TypeAlias = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written, and how far its outputs are from the network's."""

    path: Path
    outputs: tuple[str, ...]
    difference: float
    allowed: float


def export(
    net: nn.Module,
    path: Path,
    *,
    shape: tuple[int, int, int],
    format: Format | None = None,
    about: dict[str, Any] | None = None,
) -> Exported:
    """Write `net` for images (B, *shape), any B, as ONNX or as a `torch.export` program.

    The file's input is `images`, its outputs are `logits` (B, K) and, if the network has scale
    channels, `channels` (B, S, K). Before it gets its name it is read back and asked about new
    random images; a file that differs from the network by more than rounding is not kept.
    """
    kind = _format(path, format)
    if kind == "onnx":
        _check_packages()
    asked = _Asked(net).eval()
    program = _trace(asked, shape)
    names = ("logits", "channels")[: len(program.graph_signature.user_outputs)]
    note = json.dumps({"version": __version__, **_channels(net), **(about or {})})
    data = _to_onnx(program, names, note) if kind == "onnx" else _to_torch(program, note)
    load = _load_onnx if kind == "onnx" else _load_torch
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
            difference, allowed = _compare(asked, load(temporary.read_bytes()), shape)
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror})") from None
    return Exported(path=path, outputs=names, difference=difference, allowed=allowed)


class _Asked(nn.Module):
    """A copy of the network that gives all its answers as a plain tuple."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).cpu().float()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(answer for answer in plain_outputs(self.net, images) if answer is not None)


def _format(path: Path, format: str | None) -> Format:
    if format is None:
        near = [kind for kind, suffix in SUFFIXES.items() if path.suffix == suffix]
        if near:
            return near[0]
        raise ConfigError(f"{path.name!r} ends in neither .onnx nor .pt2: say which format it is")
    if format not in get_args(Format):
        raise ConfigError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    return cast(Format, format)


def _check_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401  (the file is tried with it)
        import onnxscript  # noqa: F401  (torch.onnx is built on it)
    except ImportError:
        raise ConfigError(NEEDS) from None


def _channels(net: nn.Module) -> dict[str, Any]:
    scales = getattr(net, "scales", None)
    return {} if scales is None else {"scales": list(scales)}


def _trace(asked: _Asked, shape: tuple[int, int, int]) -> torch.export.ExportedProgram:
    images = torch.zeros(2, *shape)
    try:
        with torch.no_grad():
            asked(images)
            return torch.export.export(asked, (images,), dynamic_shapes=_dynamic())
    except FoveateError:
        raise
    except Exception as error:  # of a user's backbone anything may come
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"this network cannot be exported for images of the shape {shape} ({reason})"
        ) from error


def _dynamic() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch", min=1)},)


def _to_torch(program: torch.export.ExportedProgram, note: str) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={NOTE: note})
    return file.getvalue()


def _load_torch(data: bytes) -> Ask:
    with _quiet():  # torch 2.11 warns of a buffer of its own
        return torch.export.load(io.BytesIO(data)).module()


def _to_onnx(program: torch.export.ExportedProgram, names: Sequence[str], note: str) -> bytes:
    import onnx

    with _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            dynamic_shapes=_dynamic(),
            input_names=["images"],
            output_names=list(names),
        )
    assert made is not None
    model = made.model_proto
    onnx.helper.set_model_props(model, {NOTE: note})
    return model.SerializeToString()  # type: ignore[no-any-return]


def _load_onnx(data: bytes) -> Ask:
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def ask(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(part) for part in session.run(None, {"images": images.numpy()})]

    return ask


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's remarks about itself, and about torchvision, from the user."""
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
def _compare(asked: _Asked, ask: Ask, shape: tuple[int, int, int]) -> tuple[float, float]:
    """The largest difference between file and network, and what rounding allows.

    Both round the same sums. Ours are added in blocks, which is nearly as good as exact; a runtime
    that adds n terms one after another is a random walk of n roundings, √n times as far off. How
    far ours are off is measured against float64; n is the longest sum that any weight takes part
    in. (Measured for SWMax in onnxruntime: 4 to 8 times as far off, with √n = 23.)
    """
    exact = copy.deepcopy(asked).double()
    random = torch.Generator()
    random.seed()  # new images each time
    apart: list[Tensor] = []
    rounding: list[Tensor] = []
    for batch in BATCHES:
        images = torch.randn(batch, *shape, generator=random)
        for ours, theirs, right in zip(
            asked(images), ask(images), exact(images.double()), strict=True
        ):
            if theirs.shape != ours.shape:
                raise DataError(f"the file gives {tuple(theirs.shape)}, not {tuple(ours.shape)}")
            ulp = torch.finfo(torch.float32).eps * right.abs().max()
            rounding += [ulp, (ours - right).abs().max()]
            apart.append((ours - theirs).abs().max())
    difference = float(torch.stack(apart).max())  # unlike Python's max, this keeps a NaN
    longest = max((p[0].numel() for p in asked.parameters() if p.ndim), default=1)
    allowed = (1 + longest**0.5) * float(torch.stack(rounding).max())
    if not difference <= allowed:
        raise DataError(
            f"the file differs from the network by {difference:.2g}, where rounding allows "
            f"{allowed:.2g}; it was not kept"
        )
    return difference, allowed
