"""Load a classifier from a name, a run, a model file, a Python factory or timm."""
# Shape letters: B batch, C image channel, H W pixels, K classes.

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate.checks import check_names
from foveate.data.large_scale import Border, check_border
from foveate.data.pictures import list_pictures
from foveate.data.recipes import Recipe
from foveate.data.sources import CLOTHES, DIGITS
from foveate.errors import ConfigError, DataError
from foveate.evaluation.foreign import (
    ANY,
    Classify,
    Shape,
    compute,
    load_factory,
    load_file,
    reason,
)
from foveate.execution.precision import Precision
from foveate.files import parse_json
from foveate.models.channels import ScaleChannels
from foveate.models.pretrained import load_weights, pretrained_info, pretrained_names
from foveate.models.zoo import ZOO, ModelConfig, create_model, model_config
from foveate.training.backbones import timm_model
from foveate.training.checkpoint import RunFolder
from foveate.training.data import is_photo, made_from
from foveate.training.tensors import read_tensors

TIMM = "timm:"
FRAME = 112  # width and height of images in MNIST Large Scale
FORMS = (
    "a name of the zoo (fovmax), a trained network (fovmax-mnist-tr2), a run folder, a model file "
    "(.safetensors, .onnx, .pt2, TorchScript), package.module:factory, or timm:NAME"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A classifier, and what is known about it.

    Attributes:
        name: Reference from which it was loaded.
        net: Callable from images ``(B, C, H, W)`` to logits ``(B, K)``: a module in eval mode, or
            a function for ONNX and torch.export files.
        shape: Input shape ``(B, C, H, W)``; None where any number is accepted.
        config: Architecture, for networks of this package.
        source: Data source of the training images; empty unless trained by this package.
        trained_on: Training scales, as `foveate train` reads them.
        border: Border mode of the training images.
        mean: Mean that inputs of other models are normalised with, one value or one per channel.
        std: Standard deviation that they are normalised with.
        recipe: How pictures become its input, for a run on photographs; else None.
        class_names: Class names that the run recorded; empty if there are none.
        precision: Precision in which a run on photographs is trained and tested.
        device: Device of its input.
    """

    name: str
    net: Classify
    shape: Shape = ANY
    config: ModelConfig | None = None
    source: str = ""
    trained_on: str = ""
    border: Border = "replicate"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    recipe: Recipe | None = None
    class_names: tuple[str, ...] = ()
    precision: Precision = "float32"
    device: torch.device | str = "cpu"

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the logits of images, without gradients."""
        return compute(self.net, images)  # type: ignore[no-any-return]

    @property
    def scales(self) -> tuple[float, ...]:
        """Scales of the scale channels; empty for a model without any."""
        return tuple(getattr(self.net, "scales", ()))

    @property
    def size(self) -> int:
        """Width and height of the input in pixels; of a run on photographs, that of all windows."""
        if self.recipe is not None and isinstance(self.net, ScaleChannels):
            return _frame(self.net)
        if side := self.shape[2] or (FRAME if self.config else None):
            return side
        raise ConfigError(f"{self.name} does not state its input size; export it to ONNX")

    @property
    def native(self) -> float:
        """The training scale; 1 if there were several, or if it is not known."""
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
        """Class names: those that the run recorded, those of its source, or numbers.

        Empty if the number of classes is not known.
        """
        source, count = self.source, self.config.classes if self.config else 0
        if self.class_names and len(self.class_names) == count:
            return self.class_names
        names = {"mnist": DIGITS, "mnist-5k": DIGITS, "fashion-mnist": CLOTHES}.get(source, ())
        if source.startswith("folder:"):
            with suppress(DataError):
                names = list_pictures(Path(source.removeprefix("folder:")).expanduser())[1]
        return names if len(names) == count else tuple(map(str, range(count)))

    def about(self) -> dict[str, Any]:
        """What the user of an exported file must know, ready for JSON: classes, and the recipe."""
        known = {"model": self.name, "source": self.source, "classes": list(self.classes)}
        if self.recipe is None:
            return known
        recipe = {key: self.recipe.to_dict()[key] for key in ("name", "base", "mean", "std")}
        return known | {"recipe": recipe, "padding": getattr(self.net, "padding", "border")}

    def has_seen(self, source: str, split: str) -> bool:
        """Whether it was trained on images of this split; mnist-5k is a part of mnist."""
        unseen = {(self.source, self.source): ("test",), ("mnist-5k", "mnist"): ("val", "test")}
        unseen[("mnist", "mnist-5k")] = ()
        return split not in unseen.get((self.source, source), (split,))


def load_model(
    ref: str | Path,
    *,
    trust: bool = False,
    device: torch.device | str = "cpu",
    pretrained: bool = False,
    **changes: Any,
) -> Model:
    """Load a classifier from any of the references that the commands take.

    A reference is one of:

    - a name of the zoo, such as ``fovmax``, with newly initialised weights;
    - a trained network that comes with the package, such as ``fovmax-mnist-tr2``;
    - the folder of a finished run of ``foveate train``;
    - a model file: weights of ``foveate train`` (``.safetensors``), ONNX, ``torch.export``
      (``.pt2``) or TorchScript, recognised by its content. A pickle is never opened;
    - ``package.module:factory``: a function without arguments that returns a model, a module, or
      a function from images to logits;
    - ``timm:NAME``, a model of timm.

    A file or folder of that name comes before a name of the zoo or of a trained network, so
    ``./fovmax`` is always a path, and ``fovmax`` is the network unless such a path exists.

    Args:
        ref: The reference.
        trust: Allow code that the reference contains or names to run: TorchScript and
            ``torch.export`` files, and runs with a backbone of their own.
        device: Device to load the model to.
        pretrained: Download the weights of a timm model.
        **changes: Passed to `create_model` of the zoo or of timm, as ``num_classes=5``.

    Returns:
        The model. It can be called; ``.net`` is the module, in eval mode.

    Raises:
        ConfigError: If the reference is none of these, or needs ``trust``.
        DataError: If a file or run is damaged.

    Example:
        >>> model = load_model("fovmax-mnist-tr2")
        >>> model(torch.zeros(1, 1, 112, 112)).shape
        torch.Size([1, 10])
    """
    model = _find(str(ref), torch.device(device), trust, pretrained, changes)
    if isinstance(model.net, nn.Module):
        model.net.to(device).eval()
    return replace(model, device=device)


def _find(
    ref: str, device: torch.device, trust: bool, pretrained: bool, changes: dict[str, Any]
) -> Model:
    path = os.path.expanduser(ref)
    found = os.path.isdir(path) or os.path.isfile(path)
    if ref.startswith(TIMM):
        return _from_timm(ref, pretrained, changes)
    if pretrained:
        raise ConfigError(
            f"pretrained is for models of timm, got {ref!r}; trained networks of foveate have "
            "names of their own, such as fovmax-mnist-tr2"
        )
    if ref in ZOO and not found:
        config = model_config(ref, **changes)
        return _of_config(ref, config.build(), config)
    if changes:
        given = ", ".join(changes)
        raise ConfigError(f"{given} cannot be set for {ref!r}, only for names of the zoo and timm")
    if os.path.isdir(path):
        return _from_run(Path(path), trust)
    if found:
        return _from_file(ref, Path(path), device, trust)
    names = pretrained_names()
    if ref in names:
        return _from_pretrained(ref)
    if ":" in ref:
        return Model(name=ref, net=load_factory(ref))
    near = get_close_matches(ref, [*ZOO, *names], n=2)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ConfigError(f"there is no model {ref!r}{hint}; a model is {FORMS}")


def _of_config(
    name: str, net: nn.Module, config: ModelConfig, size: int | None = None, **known: Any
) -> Model:
    side = config.size if config.form == "plain" else size
    return Model(
        name=name, net=net, shape=(None, config.channels, side, side), config=config, **known
    )


def _frame(net: ScaleChannels) -> int:
    """The smallest even side of an image that holds all the network sees around its centre."""
    scale = net.scales[-1]
    beyond = max(scale, 1.0) if net.antialias else 1.0  # half-width of the kernel
    return 2 * math.ceil((net.size - 1) / 2 * scale + beyond + 0.5 - 1e-9)


def _from_run(path: Path, trust: bool) -> Model:
    folder = RunFolder(path)
    config, net = folder.config(), folder.net(trust)
    source = config.source
    if os.path.exists(source):  # a data set file states what it was made from
        source = made_from(source) or source
    known: dict[str, Any] = {"source": source, "trained_on": config.scales}
    known |= {"border": config.border, "class_names": folder.classes()}
    if not is_photo(config):
        return _of_config(str(path), net, config.model, config.size, **known)
    known |= {"recipe": config.recipe, "precision": config.precision}
    return _of_config(str(path), net, config.model, None, **known)


def _from_file(ref: str, path: Path, device: torch.device, trust: bool) -> Model:
    if path.suffix.lower() != ".safetensors":
        net, shape = load_file(path, device, trust)
        return Model(name=ref, net=net, shape=shape)
    weights, note = read_tensors(path)
    try:
        config = ModelConfig.from_dict(parse_json(note["model"]))
        recipe = Recipe.from_dict(parse_json(note["recipe"])) if "recipe" in note else None
        names = check_names(parse_json(note.get("classes", "[]")))
    except (KeyError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(
            f"{path} does not state its architecture ({reason(error)}); pass the run's folder, or "
            "package.module:factory"
        ) from None
    with torch.random.fork_rng(devices=[]):
        own = config.build()
    load_weights(own, weights, path)
    photo = recipe if recipe and recipe.name == "photo" else None
    return _of_config(ref, own, config, recipe=photo, class_names=names)


def _from_pretrained(name: str) -> Model:
    info = pretrained_info(name)
    border = check_border(str(info.recipe.get("border", "replicate")))
    known = {"source": info.source, "trained_on": info.scales, "border": border}
    net = create_model(name, pretrained=True)
    return _of_config(name, net, info.model, info.size, **known)


def _from_timm(ref: str, pretrained: bool, changes: dict[str, Any]) -> Model:
    name = ref.removeprefix(TIMM)
    net = timm_model(name, pretrained=pretrained, **changes)
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
    )
