"""Load a classifier by name, or from a run, a model file, a Python factory or timm."""
# Shape letters: B batch, C image channel, H W pixels, K classes.

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate.checks import check_names, suggest
from foveate.data.cifar import CLASSES
from foveate.data.large_scale import Border
from foveate.data.pictures import list_pictures
from foveate.data.recipes import Recipe
from foveate.data.sources import CLOTHES, DIGITS
from foveate.errors import ConfigError, DataError
from foveate.evaluation.exported import read_metadata
from foveate.evaluation.runs import PretrainedRun
from foveate.evaluation.third_party import (
    ANY_SHAPE,
    ImageClassifier,
    Shape,
    forward_batch,
    load_factory,
    load_file,
    summarise_error,
)
from foveate.execution.precision import Precision
from foveate.files import parse_json
from foveate.models.channels import ScaleChannels
from foveate.models.pretrained import load_weights, pretrained_names
from foveate.models.zoo import ZOO, ModelConfig, model_config
from foveate.training.backbones import classes_of, load_backbone, timm_model
from foveate.training.checkpoint import RunFolder
from foveate.training.config import is_mirrored
from foveate.training.data import generated_from, is_photo
from foveate.training.tensors import read_tensors

TIMM = "timm:"
FRAME = 112  # width and height of images in MNIST Large Scale
ACCEPTED_REFERENCES = (
    "a zoo name (fovmax), a pretrained network (fovmax-mnist-tr2), a run folder, a model file "
    "(.safetensors, .onnx, .pt2, TorchScript), package.module:factory, or timm:NAME"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A classifier with its input shape, preprocessing, class names and training source.

    Calling the model computes logits without gradients. Use `net` for training.

    Attributes:
        name: Reference from which the model was loaded.
        net: Callable from images to logits: a module in eval mode, or a function for ONNX and
            ``torch.export`` files.
        shape: Input shape ``(B, C, H, W)``; None for an axis of variable size.
        config: Architecture of a foveate network; None for other models.
        source: Data source of the training images; empty if unknown.
        trained_on: Training scales, in the notation of ``foveate train``; empty if unknown.
        border: Border mode of the training images.
        mean: Mean used to normalise the input of third-party models, one value or one per image
            channel.
        std: Standard deviation used to normalise it, one value or one per image channel.
        recipe: Preprocessing of a run with the recipe ``photo`` or ``mirrored``, or of any network
            in a file of ``foveate export``; None for other models.
        class_names: Class names stored with the run or in the file; empty if there are none.
        precision: Precision in which a run on photographs is trained and evaluated.
        weights: For a timm model, ``pretrained`` or the path of its file of weights; empty if they
            are random, and for other models.
        device: Device of the weights and of the input.

    Shape:
        - Input: ``(B, C, H, W)``.
        - Output: ``(B, K)``.

    Examples:
        >>> model = load_model("fovmax-mnist-tr2")
        >>> model.source, model.trained_on, model.size, len(model.scales)
        ('mnist', '2', 112, 17)
        >>> model.classes[:3]
        ('0', '1', '2')
        >>> model(torch.zeros(4, 1, 112, 112)).shape
        torch.Size([4, 10])
    """

    name: str
    net: ImageClassifier
    shape: Shape = ANY_SHAPE
    config: ModelConfig | None = None
    source: str = ""
    trained_on: str = ""
    border: Border = "replicate"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    recipe: Recipe | None = None
    class_names: tuple[str, ...] = ()
    precision: Precision = "float32"
    weights: str = ""
    device: torch.device | str = "cpu"

    def __call__(self, images: Tensor) -> Tensor:
        """Compute logits ``(B, K)`` of images ``(B, C, H, W)``, without gradients."""
        return forward_batch(self.net, images)  # type: ignore[no-any-return]

    @property
    def photo(self) -> Recipe | None:
        """The recipe of a run on photographs, also if it was exported; None for other models."""
        return self.recipe if self.recipe and self.recipe.name == "photo" else None

    @property
    def scales(self) -> tuple[float, ...]:
        """Scales of the scale channels; empty for a model without scale channels."""
        return tuple(getattr(self.net, "scales", ()))

    @property
    def size(self) -> int:
        """Side of the square input in pixels.

        For a run on photographs, this is the smallest square that contains every window. Raises a
        ConfigError if the size is unknown.
        """
        if self.photo is not None and isinstance(self.net, ScaleChannels):
            return frame_of(self.net)
        if side := self.shape[2] or (FRAME if self.config else None):
            return side
        raise ConfigError(
            f"{self.name} has an unknown input size; export it to ONNX with a fixed size"
        )

    @property
    def native_scale(self) -> float:
        """The training scale; 1 if there are several or if it is unknown."""
        try:
            return float(self.trained_on)
        except ValueError:
            return 1.0

    @property
    def trainable(self) -> bool:
        """Whether the model is a PyTorch module with weights."""
        return isinstance(self.net, nn.Module) and any(True for _ in self.net.parameters())

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names stored with the run, else those of its source, else class indices.

        Empty if the number of classes is unknown.
        """
        count = self.config.classes if self.config else len(self.class_names)
        if self.class_names and len(self.class_names) == count:
            return self.class_names
        known = {"mnist": DIGITS, "mnist-5k": DIGITS, "fashion-mnist": CLOTHES, "cifar10": CLASSES}
        names = known.get(self.source, ())
        if self.source.startswith("folder:"):
            with suppress(DataError):
                names = list_pictures(Path(self.source.removeprefix("folder:")).expanduser())[1]
        return names if len(names) == count else tuple(map(str, range(count)))

    def metadata(self) -> dict[str, Any]:
        """Return the metadata to store with an exported file: class names and preprocessing.

        Returns:
            A dictionary that can be serialised as JSON. Its keys are ``model``, ``source`` and
            ``classes``, plus ``recipe`` for networks of foveate, with ``padding`` for the recipes
            ``photo`` and ``mirrored`` and ``border`` for ``mnist-large-scale``, and ``mean`` and
            ``std`` for timm models.
        """
        known = {"model": self.name, "source": self.source, "classes": list(self.classes)}
        if self.config is None:
            return known | {"mean": list(self.mean), "std": list(self.std)}
        if self.recipe is None:
            return known | {"recipe": {"name": "mnist-large-scale"}, "border": self.border}
        keys = ("name", "base", "mean", "std") if self.photo else ("name", "mean", "std")
        recipe = {key: self.recipe.to_dict()[key] for key in keys}
        return known | {"recipe": recipe, "padding": getattr(self.net, "padding", "border")}

    def was_trained_on(self, source: str, split: str) -> bool:
        """Return whether the model was trained on images of this split.

        ``mnist-5k`` counts as a subset of ``mnist``.

        Args:
            source: Name of a data source.
            split: ``train``, ``val``, ``test`` or ``all``.

        Returns:
            True if the training set of the model overlaps the split.
        """
        if source == self.source or (self.source, source) == ("mnist-5k", "mnist"):
            return split not in ("val", "test")
        return (self.source, source) == ("mnist", "mnist-5k")


def load_model(
    ref: str | Path,
    *,
    trust: bool = False,
    device: torch.device | str = "cpu",
    pretrained: bool = False,
    weights: str | Path | None = None,
    **changes: Any,
) -> Model:
    """Load a classifier by name, or from a run, a file, a Python factory or timm.

    The reference is one of:

    - a zoo name such as ``fovmax``, which creates a network with random weights;
    - the name of a pretrained network of this package, such as ``fovmax-mnist-tr2``;
    - the folder of a finished run of ``foveate train``;
    - a model file: weights written by ``foveate train`` (``.safetensors``), ONNX, ``torch.export``
      (``.pt2``) or TorchScript. The format is detected from the content, and pickles are never
      loaded;
    - ``package.module:factory``: a module, a function from images to logits, or a function without
      arguments that returns either;
    - ``timm:NAME``, a timm model.

    An existing file or folder takes precedence over a zoo or pretrained name. ``./fovmax`` is
    therefore always a path, and ``fovmax`` is the network unless a path of that name exists.

    Args:
        ref: Reference to the model.
        trust: Allow the reference to run code. TorchScript files, ``torch.export`` files and runs
            with a custom backbone require it.
        device: Device to load the model to.
        pretrained: Download the pretrained weights of a timm model.
        weights: A ``.safetensors`` file with the weights of a timm model, which also determines its
            number of classes.
        **changes: Options of the zoo's `create_model` or of ``timm.create_model``, such as
            ``num_classes=5``.

    Returns:
        The model. Call it to compute logits; ``model.net`` is the module, in eval mode.

    Raises:
        ConfigError: If the reference is unknown, requires ``trust``, or does not accept an option.
        DataError: If a file or run is damaged.

    Examples:
        >>> model = load_model("fovmax-mnist-tr2")
        >>> model(torch.zeros(1, 1, 112, 112)).shape
        torch.Size([1, 10])
    """
    if weights is not None and pretrained:
        raise ConfigError("pretrained and weights exclude each other; set only one of them")
    start = Path(weights).expanduser() if weights else pretrained
    model = _find(str(ref), torch.device(device), trust, start, changes)
    if isinstance(model.net, nn.Module):
        model.net.to(device).eval()
    return replace(model, device=device)


def _find(
    ref: str, device: torch.device, trust: bool, start: Path | bool, changes: dict[str, Any]
) -> Model:
    path = os.path.expanduser(ref)
    found = os.path.isdir(path) or os.path.isfile(path)
    if ref.startswith(TIMM):
        return _from_timm(ref, start, changes)
    if start:
        option = "pretrained" if start is True else "weights"
        raise ConfigError(
            f"{option} is only for timm models, got {ref!r}; load a pretrained network of "
            "foveate by its name, such as fovmax-mnist-tr2"
        )
    if ref in ZOO and not found:
        config = model_config(ref, **changes)
        return _of_config(ref, config.build(), config)
    if changes:
        given = ", ".join(changes)
        raise ConfigError(f"{given} cannot be set for {ref!r}, only for zoo and timm models")
    if os.path.isdir(path):
        return _from_run(RunFolder(Path(path)), trust)
    if found:
        return _from_file(ref, Path(path), device, trust)
    names = pretrained_names()
    if ref in names:
        return _from_run(PretrainedRun(Path(ref)), trust)
    if ":" in ref:
        return Model(name=ref, net=load_factory(ref))
    near = suggest(ref, [*ZOO, *names], "", most=2)
    hint = f" ({near})" if near else ""
    raise ConfigError(f"no model {ref!r}{hint}; pass {ACCEPTED_REFERENCES}")


def _of_config(
    name: str, net: nn.Module, config: ModelConfig, size: int | None = None, **known: Any
) -> Model:
    side = config.size if config.form == "plain" else size
    shape = None, config.channels, side, side
    return Model(name=name, net=net, shape=shape, config=config, **known)


def frame_of(net: ScaleChannels) -> int:
    """Return the smallest even side of a square image that contains every window."""
    scale = net.scales[-1]
    beyond = max(scale, 1.0) if net.antialias else 1.0  # half-width of the resampling kernel
    return 2 * math.ceil((net.size - 1) / 2 * scale + beyond + 0.5 - 1e-9)


def _from_run(folder: RunFolder, trust: bool) -> Model:
    config, net = folder.config(), folder.net(trust)
    source = config.source
    if os.path.exists(source):  # a dataset file stores the name of its source
        source = generated_from(source) or source
    known: dict[str, Any] = {"source": source, "trained_on": config.scales}
    known |= {"border": config.border, "class_names": folder.classes()}
    if is_photo(config):
        known["precision"] = config.precision
    if is_photo(config) or is_mirrored(config):
        known["recipe"] = config.recipe
    size = None if is_photo(config) else config.size
    return _of_config(str(folder.path), net, config.model, size, **known)


def _from_file(ref: str, path: Path, device: torch.device, trust: bool) -> Model:
    if path.suffix.lower() != ".safetensors":
        net, shape, about = load_file(path, device, trust)
        return Model(name=ref, net=net, shape=shape, **read_metadata(about, path))
    weights, note = read_tensors(path)
    try:
        config = ModelConfig.from_dict(parse_json(note["model"]))
        recipe = Recipe.from_dict(parse_json(note["recipe"])) if "recipe" in note else None
        names = check_names(parse_json(note.get("classes", "[]")))
    except (KeyError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(
            f"{path} has no valid description of its architecture ({summarise_error(error)}); pass "
            "the run folder or package.module:factory"
        ) from None
    with torch.random.fork_rng(devices=[]):
        own = config.build()
    load_weights(own, weights, path)
    kept = None if recipe and recipe.name == "mnist-large-scale" else recipe
    return _of_config(ref, own, config, recipe=kept, class_names=names)


def _from_timm(ref: str, start: Path | bool, changes: dict[str, Any]) -> Model:
    """Create a timm model, with downloaded weights if `start` is True, or those of a file."""
    name = ref.removeprefix(TIMM)
    weights = read_tensors(start)[0] if isinstance(start, Path) else {}
    changes = classes_of(name, weights) | changes
    net = timm_model(name, pretrained=start is True, **changes)
    if isinstance(start, Path):
        load_backbone(net, weights, start, new_head=False)
    settings: Any = net.pretrained_cfg
    channels, height, width = settings["input_size"]
    channels = changes.get("in_chans", channels)
    fits = len(settings["mean"]) == channels
    return Model(
        name=ref,
        net=net,
        shape=(None, channels, height, width),
        mean=tuple(settings["mean"]) if fits else (0.0,),
        std=tuple(settings["std"]) if fits else (1.0,),
        class_names=_class_names(net),
        weights="pretrained" if start is True else str(start or ""),
    )


def _class_names(net: Any) -> tuple[str, ...]:
    """Return the first name of each ImageNet class, or numbers if timm has no class names."""
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    if not (subset := infer_imagenet_subset(net)):
        return tuple(map(str, range(net.num_classes)))
    info = ImageNetInfo(subset)
    names = (info.index_to_description(k) for k in range(net.num_classes))
    return tuple(name.partition(",")[0] for name in names)
