"""The configuration of a training run: data, network, schedule and seed."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from foveate.checks import check_fields, check_keys, check_range, is_number
from foveate.data.large_scale import MAX_SIZE, Border, check_size
from foveate.data.recipes import Recipe, find_recipe
from foveate.data.store import MAX_SEED
from foveate.errors import ConfigError
from foveate.execution.precision import Precision as Precision
from foveate.files import parse_json
from foveate.models.channels import ScaleChannels
from foveate.models.zoo import ModelConfig, model_config
from foveate.scales import ScaleGrid, parse_scales
from foveate.training.backbones import load_backbone, make_backbone
from foveate.training.distortions import MAX_STRENGTH
from foveate.training.tensors import read_tensors

MAX_EPOCHS = 1_000_000
MAX_BATCH = 65_536
NO_ZOOMS = (1.0, 1.0)
VALIDATIONS = 20  # with 20 epochs, after each
LATER = ("recipe", "zooms", "distortions", "ema", "validations")
"""Fields that earlier versions do not have; the defaults stand for their behaviour."""
PARTS = ("model", "recipe")  # fields that have fields


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings that determine the final weights of a run; the defaults are the paper's.

    Args:
        model: Configuration of the network.
        source: Data source, such as ``mnist``, ``folder:DIR`` or ``shards:DIR``.
        scales: Scales of the training images: one scale ``2``, a range ``1-4``, a grid
            ``0.5:8:4``, or a list of these. Each image is shown at one scale, drawn from them.
        samples: Number of training images to use, from the start of the training set; 0 uses all.
        size: Width and height in pixels of the frame in which images are shown; the recipe
            ``photo`` has no frame.
        border: Values outside the frame when smoothing; see `foveate.data.large_scale.rescale`.
        epochs: Number of epochs.
        batch: Number of images per step. The paper does not state it. FovAvg requires small
            batches: with 128, it is less accurate at scales far from the training scale.
        seed: Seed of the initial weights, the order of the images, dropout and augmentation.
        data_seed: Seed for drawing the scale of each image. Runs that differ only in ``seed`` see
            the same images.
        learning_rate: Highest learning rate.
        smallest_rate: Lowest learning rate to which the schedule decays.
        epochs_per_decay: Number of epochs after which the schedule ``steps`` divides the learning
            rate by e.
        schedule: ``steps``, the paper's schedule, or ``cosine``: the learning rate rises from 1/25
            of ``learning_rate`` during the warm-up, and then falls to ``smallest_rate``.
        warmup: Fraction of the run that is warm-up; only for the schedule ``cosine``.
        weight_decay: Weight decay. If above 0, the optimiser is AdamW instead of Adam. Parameters
            with fewer than two dimensions, such as biases and batch norms, do not decay.
        label_smoothing: Label smoothing of the cross-entropy loss.
        clip: Largest norm of the gradient; 0 turns clipping off.
        freeze_norms: Whether batch norms use their stored running statistics and do not update
            them.
        keep: Weights that the run saves at its end: ``last``, or ``best`` for those with the
            highest validation accuracy, the latest of several.
        precision: ``float32``, or ``bf16`` for autocast to bfloat16.
        backbone: Network that replaces the paper's in each channel: ``timm:NAME``,
            ``torchvision:NAME`` or ``package.module:factory``. A factory is called with
            ``channels=`` and ``classes=``, and with ``size=`` if it has a parameter of this name.
        pretrained: Whether to start from the pretrained weights that timm or torchvision offers.
        weights: Path of a ``.safetensors`` file with initial weights of the backbone.
        recipe: Preprocessing of the images. ``None`` is the paper's recipe, ``mnist-large-scale``.
            Colour images require an explicit recipe; ``foveate train`` selects ``photo`` for image
            files and ``mirrored`` for CIFAR-10.
        zooms: Smallest and largest factor by which training images appear magnified, drawn
            log-uniformly for each image in each epoch; ``(1, 1)`` turns this off. A network trained
            on scale 2 with ``(0.25, 4)`` is trained for objects of scale 1/2 to 8. To magnify, the
            scales of the channels are divided by the factor, and the frame is cropped as it would
            crop the magnified image; for networks without channels, the cropped frame is resampled.
            Reduced images are resampled for all networks; with the recipe ``mirrored``, they are
            surrounded by more mirror images.
        distortions: Strength of random distortions of training images, drawn for each image in
            each epoch: rotation, shear, aspect ratio, elastic displacement and stroke width; 0
            turns them off. Strength 1 rotates by up to 15 degrees and displaces by up to 3 % of
            the side of the image.
        ema: Decay per step of an exponential moving average of the weights and batch norm
            statistics; 0 turns it off. The run validates and saves the average, and trains with
            the weights themselves. In step t the decay is at most (1 + t) / (10 + t), from t = 0.
        validations: Approximate number of validations; 1 validates at the end of the run only. A
            validation set that is large relative to the training set is used less often.

    Raises:
        ConfigError: If a field is out of range, or fields contradict each other.

    Examples:
        >>> config = TrainConfig(source="mnist-5k", scales="1-4", epochs=2)
        >>> config.rate(0), config.batch
        (0.003, 32)
        >>> config.changed({"model.dropout": "0", "seed": "1"}).model.dropout
        0.0
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
    zooms: tuple[float, ...] = NO_ZOOMS
    distortions: float = 0.0
    ema: float = 0.0
    validations: int = VALIDATIONS

    def __post_init__(self) -> None:
        if isinstance(self.zooms, list):
            object.__setattr__(self, "zooms", tuple(self.zooms))
        check_fields(self)
        check_size(self.size)
        limits = {"epochs": MAX_EPOCHS, "batch": MAX_BATCH, "validations": MAX_EPOCHS}
        for name, most in limits.items():
            check_range(name, getattr(self, name), 1, most, f"1 to {most:,}")
        for name in ("samples", "seed", "data_seed"):
            check_range(name, getattr(self, name), 0, MAX_SEED, "0 to 2^32 - 1")
        for name in ("learning_rate", "smallest_rate", "epochs_per_decay"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name):g}")
        for name in ("warmup", "weight_decay", "label_smoothing", "clip", "ema"):
            if not 0 <= getattr(self, name) < (math.inf if name == "clip" else 1):
                allowed = "0 or more" if name == "clip" else "at least 0 and below 1"
                raise ConfigError(f"{name} must be {allowed}, got {getattr(self, name):g}")
        if (self.pretrained or self.weights) and not self.backbone:
            raise ConfigError("pretrained and weights need a backbone; set backbone=timm:NAME")
        if self.pretrained and self.weights:
            raise ConfigError("pretrained and weights exclude each other; set only one of them")
        parse_scales(self.scales)
        if self.zooms != NO_ZOOMS:
            self._check_zooms()
        check_range("distortions", self.distortions, 0, MAX_STRENGTH, f"0 to {MAX_STRENGTH:g}")
        if self.distortions and self.recipe and self.recipe.name != "mnist-large-scale":
            raise ConfigError(
                f"distortions do not apply to the recipe {self.recipe.name}; leave them out"
            )

    def _check_zooms(self) -> None:
        if len(self.zooms) != 2 or not 1 / 64 <= self.zooms[0] <= self.zooms[1] <= 64:
            raise ConfigError(
                f"zooms must be two factors from 1/64 to 64 in ascending order, "
                f"got {list(self.zooms)}"
            )
        if self.model.form == "sliding" or self.model.pool == "concat":
            raise ConfigError(
                "zooms need a network without sliding windows, and a pool that does not depend on "
                "the scales; use cnn, fovmax or fovavg"
            )
        if self.recipe is not None and self.recipe.name == "photo":
            raise ConfigError("zooms do not apply to the recipe photo; set recipe.sizes")
        if self.recipe is not None and self.recipe.name == "mirrored":
            side = math.ceil(self.size / self.zooms[0] + 2 * self.recipe.shift)
            if side > MAX_SIZE:
                raise ConfigError(
                    f"zooms from {self.zooms[0]:g} show frames of {side:,} pixels, the limit is "
                    f"{MAX_SIZE:,}; increase the smallest factor"
                )

    def rate(self, epoch: float) -> float:
        """Return the learning rate at a point of the run.

        Args:
            epoch: Number of completed epochs, with the fraction of the current one.

        Returns:
            The learning rate.
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
        """Return all fields as values that JSON can store.

        Returns:
            A dictionary of the fields. ``recipe`` is absent if it is ``None``, ``zooms``,
            ``distortions`` and ``ema`` if they are off, and ``validations`` if it is the default,
            so that digests equal those of versions without them.
        """
        values = {**asdict(self), "model": self.model.to_dict(), "zooms": list(self.zooms)}
        values["recipe"] = self.recipe and self.recipe.to_dict()
        absent = {name for name in LATER if getattr(self, name) == getattr(TrainConfig, name)}
        return {name: value for name, value in values.items() if name not in absent}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Create a configuration from the output of `to_dict`.

        Args:
            values: Fields of the configuration; missing fields have their defaults.

        Returns:
            The configuration.

        Raises:
            ConfigError: If a field is unknown or out of range.
        """
        check_keys("a run", values, {f.name for f in fields(cls)})
        parts: dict[str, Any] = {"model": ModelConfig.from_dict(values.get("model", {}))}
        if "recipe" in values:
            parts["recipe"] = Recipe.from_dict(values["recipe"])
        return cls(**{**values, **parts})

    def digest(self) -> str:
        """Return a short hash of the configuration.

        Returns:
            The first twelve hexadecimal digits of the sha256 of all fields.
        """
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def changed(self, changes: dict[str, str]) -> "TrainConfig":
        """Return a copy with some fields changed.

        Args:
            changes: New values as text, by field name; ``model.FIELD`` and ``recipe.FIELD`` change
                the model and the recipe. Their order does not matter.

        Returns:
            The changed configuration.

        Raises:
            ConfigError: If a field is unknown, or a value is invalid.
        """
        recipe = find_recipe(changes["recipe"]) if "recipe" in changes else self.recipe
        usual = recipe or Recipe(name="photo")  # the first with settings
        owners: dict[str, Any] = {"": self, "model": self.model, "recipe": usual}
        new: dict[str, dict[str, Any]] = {part: {} for part in owners}
        for key, text in changes.items():
            part, dot, name = key.partition(".")
            part, name = (part, name) if dot and part in PARTS else ("", key)
            if key != "recipe":
                new[part][name] = _read(name, text, _current(owners[part], name))
        model = replace(self.model, **new["model"])
        recipe = replace(usual, **new["recipe"]) if new["recipe"] else recipe
        return replace(self, **new[""], model=model, recipe=recipe)


def _current(config: Any, key: str) -> Any:
    known = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in PARTS}
    if key not in known:
        raise ConfigError(f"cannot set {key!r}; use one of {', '.join(sorted(known))}")
    return known[key]


def _read(key: str, text: str, now: Any) -> Any:
    """Parse `text` as a value of the same type as the current one."""
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
        raise ConfigError(f"{key} must be a value such as {_shown(now)}, got {text!r}")
    return value


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def is_photo(config: TrainConfig) -> bool:
    """Whether the recipe of a run is `photo`."""
    return config.recipe is not None and config.recipe.name == "photo"


def is_mirrored(config: TrainConfig) -> bool:
    """Whether the recipe of a run is `mirrored`."""
    return config.recipe is not None and config.recipe.name == "mirrored"


def build_net(config: TrainConfig, *, trust: bool = False, start: bool = False) -> nn.Module:
    """Build the network of a configuration, with weights from PyTorch's default generator.

    The backbone maps (N, C, P, P) to (N, K); `config.model` defines its scale channels. `trust`
    allows a factory named in `config.backbone` to be imported and called. At the `start` of a run,
    the pretrained weights of the backbone are loaded.
    """
    model = config.model
    if not config.backbone:
        if model.form == "plain" and model.size != config.size:
            raise ConfigError(
                f"this network takes whole images: model.size is {model.size} pixels, but size is "
                f"{config.size}; set both to the same number"
            )
        return model.build()
    if model.form != "foveated":
        raise ConfigError(
            f"a model of the form {model.form} does not take a backbone; "
            "use fovmax, fovavg or fovconc"
        )
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
    """Run the backbone on two empty patches, to detect wrong shapes before preparing the data."""
    model = config.model
    outputs = net.eval().forward_patches(torch.zeros(2, 1, model.channels, model.size, model.size))
    net.train()
    if outputs.shape[-1] != model.classes:
        raise ConfigError(
            f"{config.backbone} must return {model.classes} logits, one per class, "
            f"got {outputs.shape[-1]}"
        )
