"""The configuration of a training run: data, network, schedule and seed."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from foveate.checks import check_fields, check_keys, is_number
from foveate.data.large_scale import Border, check_size
from foveate.data.recipes import Recipe, find_recipe
from foveate.data.store import MAX_SEED
from foveate.errors import ConfigError
from foveate.execution.precision import Precision as Precision
from foveate.files import parse_json
from foveate.models.channels import ScaleChannels
from foveate.models.zoo import ModelConfig, model_config
from foveate.scales import ScaleGrid, parse_scales
from foveate.training.backbones import load_backbone, make_backbone
from foveate.training.tensors import read_tensors

MAX_EPOCHS = 1_000_000
MAX_BATCH = 65_536


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the weights a run ends with; the defaults are the paper's.

    `scales` are the training scales, as text that `foveate.scales` describes. For each image one
    of its items is drawn, by `data_seed`: all seeds see the same images.
    `samples` is how many of the first training images are used, 0 for all. The batch size is not
    in the paper; with 32 FovAvg reaches the paper's figures, with 128 it does not.

    `schedule` is "steps", the paper's, or "cosine": the rate rises over the first part `warmup` of
    the run to `learning_rate`, and falls to `smallest_rate`. With `weight_decay` the optimiser is
    AdamW; biases and norms do not decay. `clip` limits the norm of the gradient, 0 for no limit.
    `freeze_norms` keeps the running statistics of batch norm as they are. `keep` is "last", or
    "best" for the weights with the highest validation accuracy.

    `backbone` replaces the paper's network: timm:NAME, torchvision:NAME or package.module:factory
    (see `build_net`). Its weights are new, or with `pretrained` the library's, or those of the file
    `weights` (.safetensors).

    `recipe` defines how a picture becomes what the network sees. Without one, `fitted` in
    `foveate.training.data` chooses it by the source.
    """

    model: ModelConfig = field(default_factory=lambda: model_config("fovavg"))
    source: str = "mnist"
    scales: str = "2"
    samples: int = 0
    size: int = 112
    border: Border = "replicate"
    epochs: int = 20
    batch: int = 32
    seed: int = 0
    data_seed: int = 0
    learning_rate: float = 3e-3
    smallest_rate: float = 5e-5
    epochs_per_decay: float = 2.0
    schedule: Literal["steps", "cosine"] = "steps"
    warmup: float = 0.3
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    clip: float = 0.0
    freeze_norms: bool = False
    keep: Literal["last", "best"] = "last"
    precision: Precision = "float32"
    backbone: str = ""
    pretrained: bool = False
    weights: str = ""
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_size(self.size)
        for name, most in (("epochs", MAX_EPOCHS), ("batch", MAX_BATCH)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be 1 to {most:,}, got {getattr(self, name)}")
        for name in ("samples", "seed", "data_seed"):
            if not 0 <= getattr(self, name) <= MAX_SEED:
                raise ConfigError(f"{name} must be 0 to 2^32 - 1, got {getattr(self, name)}")
        for name in ("learning_rate", "smallest_rate", "epochs_per_decay"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name):g}")
        for name in ("warmup", "weight_decay", "label_smoothing", "clip"):
            if not 0 <= getattr(self, name) < (math.inf if name == "clip" else 1):
                limits = "0 or more" if name == "clip" else "at least 0 and below 1"
                raise ConfigError(f"{name} must be {limits}, got {getattr(self, name):g}")
        if (self.pretrained or self.weights) and not self.backbone:
            raise ConfigError("pretrained and weights are of a backbone: name one")
        if self.pretrained and self.weights:
            raise ConfigError("set pretrained or weights, not both")
        parse_scales(self.scales)

    def rate(self, epoch: float) -> float:
        """Learning rate after that many epochs.

        By steps it is divided by e every `epochs_per_decay` epochs, to a floor.
        """
        if self.schedule == "steps":
            steps = math.floor(math.floor(epoch) / self.epochs_per_decay + 1e-9)
            return max(self.learning_rate * math.exp(-steps), self.smallest_rate)
        done, low = epoch / self.epochs, min(self.smallest_rate, self.learning_rate)
        if done < self.warmup:
            low, part = self.learning_rate / 25, done / self.warmup
        else:
            part = 1 - (done - self.warmup) / (1 - self.warmup)
        return low + (self.learning_rate - low) * (1 - math.cos(math.pi * part)) / 2

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; without a recipe, as versions before recipes had it."""
        values = {**asdict(self), "model": self.model.to_dict()}
        recipe = {"recipe": self.recipe.to_dict()} if self.recipe else {}
        return {key: value for key, value in values.items() if key != "recipe"} | recipe

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Read what `to_dict` wrote."""
        check_keys("a run", values, {f.name for f in fields(cls)})
        parts: dict[str, Any] = {"model": ModelConfig.from_dict(values.get("model", {}))}
        if "recipe" in values:
            parts["recipe"] = Recipe.from_dict(values["recipe"])
        return cls(**{**values, **parts})

    def digest(self) -> str:
        """Twelve letters that differ where the configuration differs."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def changed(self, changes: dict[str, str]) -> "TrainConfig":
        """Apply `key=value` texts: a field of the run, or of a part as model.field."""
        config = self
        for key, text in changes.items():
            if key.startswith("model."):
                model = _set(config.model, key.removeprefix("model."), text)
                config = replace(config, model=model)
            elif key == "recipe":
                config = replace(config, recipe=find_recipe(text))
            elif key.startswith("recipe."):
                recipe = config.recipe or Recipe(name="photo")  # the one that has settings
                config = replace(config, recipe=_set(recipe, key.removeprefix("recipe."), text))
            else:
                config = _set(config, key, text)
        return config


def _set(config: Any, key: str, text: str) -> Any:
    parts = ("model", "recipe")
    known = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in parts}
    if key not in known:
        raise ConfigError(f"cannot set {key!r}; there are {', '.join(sorted(known))}")
    return replace(config, **{key: _read(key, text, known[key])})


def _read(key: str, text: str, now: Any) -> Any:
    """Read `text` as the kind of value that is there now."""
    if isinstance(now, str) and key != "padding":
        return text
    if isinstance(now, ScaleGrid):
        return ScaleGrid.parse(text)
    try:
        value = parse_json(text.lower() if isinstance(now, bool) else text)
    except ValueError:
        value = text
    if isinstance(now, tuple) and isinstance(value, list):
        kind = type(now[0])
        if all(type(v) is int or (type(v) is kind and is_number(v)) for v in value):
            return tuple(map(kind, value))
    if type(now) is float and type(value) is int and is_number(value):
        return float(value)
    if key != "padding" and type(value) is not type(now):
        raise ConfigError(f"{key} must be like {_shown(now)}, got {text!r}")
    return value


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def build_net(config: TrainConfig, *, trust: bool = False, start: bool = False) -> nn.Module:
    """Build the network of a configuration, its weights drawn from torch's random state.

    The backbone of `config` maps (N, C, P, P) to (N, K); the rest of `config.model` defines how it
    is shown the image.

    Args:
        config: Configuration of the run.
        trust: Whether a factory that `config.backbone` names may be imported and called.
        start: Load the pretrained weights of the backbone, as a new run does.
    """
    model = config.model
    if not config.backbone:
        if model.form == "plain" and model.size != config.size:
            raise ConfigError(
                f"this network sees whole images of model.size={model.size} pixels, but they have "
                f"size={config.size}; set both to one number"
            )
        return model.build()
    if model.form != "foveated":
        raise ConfigError("a backbone goes into fovmax, fovavg or fovconc, not this model")
    backbone = make_backbone(
        config.backbone,
        channels=model.channels,
        classes=model.classes,
        size=model.size,
        pretrained=start and config.pretrained,
        trust=trust,
    )
    if start and config.weights:
        path = Path(config.weights).expanduser()
        load_backbone(backbone, read_tensors(path)[0], path)
    net = ScaleChannels(
        backbone,
        model.scales,
        model.size,
        model.pool,
        padding=model.padding,
        antialias=model.antialias,
        classes=model.classes,
    )
    _try_out(net, config)
    return net


@torch.no_grad()
def _try_out(net: ScaleChannels, config: TrainConfig) -> None:
    """Show the backbone two empty patches, to hear of a wrong shape before the data is prepared."""
    model = config.model
    outputs = net.eval().forward_patches(torch.zeros(2, 1, model.channels, model.size, model.size))
    net.train()
    if outputs.shape[-1] != model.classes:
        raise ConfigError(
            f"{config.backbone} gives {outputs.shape[-1]} logits, not classes={model.classes}"
        )
