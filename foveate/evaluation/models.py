"""The classifier of an audit: from a Python name, a file, a run or a pretrained network."""
# Shape letters: B batch, C image channel, H W pixels, K classes.

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from foveate.data.store import ScaledFile
from foveate.errors import ConfigError, FoveateError
from foveate.evaluation.formats import Shape, load_file, reason
from foveate.evaluation.invariance import measuring
from foveate.models.channels import ScaleChannels
from foveate.models.pooling import Pool
from foveate.models.pretrained import from_pretrained, overlap, pretrained_info
from foveate.models.sliding import SlidingChannels
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import is_file
from foveate.trust import find_factory

Ask: TypeAlias = Callable[[Tensor], Any]
"""From images (B, C, H, W) to logits (B, K)."""
PRETRAINED = "pretrained:"
WAYS = "package.module:factory, a TorchScript, torch.export or ONNX file, a run, or pretrained:NAME"


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network of this package was trained: the frame, and the scale if it was a single one.

    `overlap(source, split)` says in one line why it must not be scored on these images, or nothing.
    """

    size: int
    border: str
    scales: str
    overlap: Callable[[str, str], str | None]

    @property
    def native(self) -> float:
        """The training scale, or 1 where there are several."""
        try:
            return float(self.scales)
        except ValueError:
            return 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model and what is known of it: the shape (B, C, H, W) that it takes, None where any."""

    name: str
    ask: Ask
    shape: Shape = (None, None, None, None)
    training: Training | None = None

    def classifier(self, classes: int | None = None, batch: int = 64) -> "Classifier":
        """Ask it in batches, of the one size that a fixed graph takes if it is one."""
        fixed = self.shape[0]
        return Classifier(self.ask, classes, fixed or batch, exact=fixed is not None)

    @property
    def has_channels(self) -> bool:
        """Whether it has scale channels already."""
        return isinstance(self.ask, ScaleChannels | SlidingChannels)

    @property
    def trainable(self) -> bool:
        """Whether it can be trained on in PyTorch: a module with weights, and no exported graph."""
        weights = isinstance(self.ask, nn.Module) and any(True for _ in self.ask.parameters())
        return weights and not isinstance(self.ask, torch.fx.GraphModule)


class Classifier(nn.Module):
    """A model asked a `batch` of images at a time, or exactly so many, its answers checked.

    Answers that are probabilities (no row has a value below 0 or a sum other than 1) become their
    logarithms, so that softmax gives them back.
    """

    def __init__(
        self, ask: Ask, classes: int | None = None, batch: int = 64, *, exact: bool = False
    ) -> None:
        super().__init__()
        self.ask, self.classes, self.batch, self.exact = ask, classes, batch, exact

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits (B, K)."""
        return torch.cat([self._part(part) for part in images.split(self.batch)])

    def _part(self, images: Tensor) -> Tensor:
        count = len(images)
        if self.exact and count < self.batch:  # a graph for one batch size: repeat the last image
            images = torch.cat([images, images[-1:].expand(self.batch - count, -1, -1, -1)])
        try:
            outputs = self.ask(images)
        except FoveateError:
            raise
        except Exception as error:  # a user's model may fail in any way
            raise ConfigError(
                f"the model refused images of the shape {tuple(images.shape)} ({reason(error)}); "
                "does it take this size and number of channels?"
            ) from error
        return _logits(_checked(outputs, len(images), self.classes)[:count])


def load_model(spec: str, device: torch.device | str = "cpu", trust: bool = False) -> Model:
    """Find the model that `spec` names, and put it on the device.

    - `package.module:factory`: a function without arguments that gives a model, a module, or a
      function from images to logits.
    - a TorchScript, torch.export (.pt2) or ONNX file, told apart by what is in it. The first two
      can run code and need `trust`. A pickle is never opened.
    - the folder of a run of `foveate train`, which needs `trust` if it names a backbone, or
      `pretrained:NAME`.

    Args:
        spec: Name or path of the model.
        device: Device to put it on.
        trust: Whether code in a file, or named by a run, may be executed.
    """
    path = Path(spec).expanduser()
    if spec.startswith(PRETRAINED):
        model = _pretrained(spec)
    elif path.is_dir():
        model = _run(path, trust)
    elif path.is_file():
        ask, shape = load_file(path, torch.device(device), trust)
        model = Model(name=spec, ask=ask, shape=shape)
    elif ":" in spec:
        model = Model(name=spec, ask=_from_python(spec))
    else:
        raise ConfigError(f"there is no model {spec!r}: no such file; a model is {WAYS}")
    if isinstance(model.ask, nn.Module):
        model.ask.to(device)
    return model


def in_channels(
    classifier: nn.Module, scales: Sequence[float], size: tuple[int, int], pool: Pool
) -> ScaleChannels:
    """Put a classifier into scale channels as it is: channel s sees the frame made s times larger.

    Patches are plain samples: an object made s times larger has no detail that they could alias.
    (A DenseNet on digits, 9 channels, kept 63 % at its native scale; antialiased 51 %.)
    """
    if size[0] != size[1]:
        shape = f"{size[0]} x {size[1]}"
        raise ConfigError(f"scale channels need a square frame, got {shape}: pass --size")
    return ScaleChannels(classifier, scales, size[0], pool)


def fitting_channels(
    classifier: nn.Module, size: tuple[int, int], own: int, device: torch.device | str = "cpu"
) -> int:
    """How many image channels the model takes: `own`, as the images have, or the other of 1 and 3.

    It is shown two empty images, so what it cannot take is said before the data is read.
    """
    refusals = []
    with measuring(classifier):
        for channels in (own, 4 - own):
            try:
                classifier(torch.zeros(2, channels, *size, device=device))
                return channels
            except FoveateError as error:
                refusals.append(error)
    raise refusals[0]


def _from_python(spec: str) -> Ask:
    found = find_factory(spec, "model")
    if isinstance(found, nn.Module):
        return found
    needed = _needed(found)
    if needed == 1 and not inspect.isclass(found):
        return found
    if needed:
        raise ConfigError(
            f"{spec} needs {needed} arguments; name a function that takes none and gives a model, "
            "or one that takes images and gives logits"
        )
    try:
        made = found()
    except Exception as error:
        raise ConfigError(f"{spec} failed ({reason(error)})") from error
    if not callable(made):
        raise ConfigError(f"{spec} must give a model that can be called, got {type(made).__name__}")
    return made  # type: ignore[no-any-return]


def _needed(function: Callable[..., Any]) -> int:
    """How many arguments a function cannot do without."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins do not say
        return 0
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.default is p.empty and p.kind not in kinds for p in found)


def _run(path: Path, trust: bool) -> Model:
    folder = RunFolder(path)
    config = folder.config()
    training = Training(
        size=config.size,
        border=config.border,
        scales=config.scales,
        overlap=partial(_seen, str(path), _source(config)),
    )
    return Model(name=str(path), ask=folder.net(trust), training=training)


def _pretrained(spec: str) -> Model:
    name = spec.removeprefix(PRETRAINED)
    info = pretrained_info(name)
    training = Training(
        size=info.size,
        border=str(info.recipe.get("border", "replicate")),
        scales=info.scales,
        overlap=lambda source, split: overlap(name, source, "train" if split == "all" else split),
    )
    return Model(name=spec, ask=from_pretrained(name), training=training)


def _source(config: TrainConfig) -> str:
    """What a run was trained on; of a data set file, what that was made from."""
    if not is_file(config.source) or not Path(config.source).exists():
        return config.source
    manifest = ScaledFile(Path(config.source)).manifest
    return config.source if manifest is None else str(manifest["source"]["name"])


def _seen(run: str, trained_on: str, source: str, split: str) -> str | None:
    if source == trained_on:
        unseen: tuple[str, ...] = ("test",)
    elif (trained_on, source) == ("mnist", "mnist-5k"):
        unseen = ()
    elif (trained_on, source) == ("mnist-5k", "mnist"):
        unseen = ("val", "test")
    else:
        return None
    if split in unseen:
        return None
    return f"{run} was trained on {trained_on}, so it has seen images of {source} ({split})"


def _checked(outputs: Any, count: int, classes: int | None) -> Tensor:
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    fits = isinstance(outputs, Tensor) and outputs.ndim == 2 and len(outputs) == count
    if not fits or classes not in (None, outputs.shape[1]):
        wanted = f"({count}, {'classes' if classes is None else classes})"
        raise ConfigError(
            f"the model must give logits of the shape {wanted}, one for each class; got {shape}"
        )
    return outputs  # type: ignore[no-any-return]


def _logits(outputs: Tensor) -> Tensor:
    sums = outputs.sum(1)
    if (outputs >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        return outputs.clamp_min(torch.finfo(outputs.dtype).tiny).log()
    return outputs
