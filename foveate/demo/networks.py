"""Networks that the demo compares, and their predictions for digits and photographs."""
# Shape letters: S scale channel, C image channel, H W pixels, P patch pixels.

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.data.large_scale import rescale
from foveate.data.recipes import Recipe
from foveate.data.sources import DIGITS
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import TIMM, Model
from foveate.evaluation.predict import Prediction, classify, to_prediction
from foveate.evaluation.results import read_results
from foveate.execution import patches
from foveate.models.channels import ScaleChannels
from foveate.models.pretrained import pretrained_info
from foveate.models.wrap import wrap
from foveate.models.zoo import ModelConfig
from foveate.paper.tables import network_title
from foveate.training.backbones import fixed_size
from foveate.training.config import TrainConfig
from foveate.training.presets import model_name

SIZE = 160  # patch size in pixels for timm models that accept any size


@dataclass(frozen=True, kw_only=True, eq=False)
class PageNetwork:
    """A network of the demo, and its accuracy by test scale, if known, on the images `tested`."""

    title: str
    model: Model
    accuracy: Mapping[float, float] = field(default_factory=dict)
    tested: str = ""

    @property
    def window(self) -> int:
        """Window of the channel with scale 1, in pixels of the input."""
        net: Any = self.model.net
        return int(getattr(net, "size", None) or net.backbone.size)

    @property
    def windows(self) -> tuple[float, ...]:
        """Windows of the channels in pixels of the input."""
        return tuple(self.window * scale for scale in self.model.scales)


class View(NamedTuple):
    """Prediction of one network for an image.

    `patches` (S, C, P, P) are the input of its scale channels; None for a network without channels.
    """

    network: PageNetwork
    prediction: Prediction
    patches: Tensor | None = None

    @property
    def window(self) -> float | None:
        """Window of the strongest channel in pixels; None for a network without channels."""
        channel = self.prediction.channel
        return None if channel is None else self.network.windows[channel]


def to_digit_networks(models: Sequence[Model]) -> list[PageNetwork]:
    """Check that all models classify digits in the same frames; give them distinct titles."""
    found, first = [_digit_network(model) for model in models], models[0]
    for other in models:
        if (other.size, other.border) != (first.size, first.border):
            raise ConfigError(
                f"{first.name} and {other.name} need frames of {first.size} and {other.size} "
                f"pixels with border {first.border} and {other.border}; choose matching networks"
            )
    return _titled(found)


def _titled(networks: Sequence[PageNetwork]) -> list[PageNetwork]:
    """Add the name of the model to titles that are not unique."""
    titles = [network.title for network in networks]
    return [
        n if titles.count(n.title) == 1 else replace(n, title=f"{n.title} ({n.model.name})")
        for n in networks
    ]


def _digit_network(model: Model) -> PageNetwork:
    """Prepare a digit model, with its accuracy if results are stored with it."""
    config, trained = model.config, model.source or Path(model.name).is_file()
    if config is None:
        raise ConfigError(
            f"the demo compares runs, pretrained networks and timm models, and {model.name} is "
            "none; pass the run folder or its weights (.safetensors)"
        )
    if not (trained and config and config.channels == 1 and model.classes == DIGITS):
        raise ConfigError(
            f"{model.name} was not trained on digits; for photographs, pass the folder of a run "
            "with the recipe photo, or timm:NAME with --pretrained"
        )
    accuracy, tested = _evaluated(model.name, config)
    title = network_title(model_name(TrainConfig(model=config)))
    return PageNetwork(title=title, model=model, accuracy=accuracy, tested=tested)


def _evaluated(name: str, config: ModelConfig) -> tuple[Mapping[float, float], str]:
    """Return the stored accuracy over scale, and a description of the test images."""
    folder = Path(name)
    if not folder.exists():
        info = pretrained_info(name)
        return info.accuracy, f"{info.tested:,} test images of {info.source}"
    try:
        (result,) = read_results(folder)
        about = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        sources = ", ".join(source["name"] for source in about["sources"])
        tested = f"{result.scales[0].count:,} {about['split']} images of {sources}"
    except (DataError, ValueError, KeyError, TypeError):
        return {}, ""
    if result.config.model != config:  # another pool or other windows
        return {}, ""
    return {at.scale: at.accuracy for at in result.scales}, tested


@torch.no_grad()
def predict_digit(
    networks: Sequence[PageNetwork], digit: Tensor, zoom: float
) -> tuple[Tensor, list[View]]:
    """Return the frame (1, 1, H, W) with a digit at the scale `zoom`, and all predictions."""
    first, views = networks[0].model, []
    frame = rescale(digit, zoom, size=first.size, border=first.border)
    for network in networks:
        net = network.model.net
        patches = net.patches(frame)[0] if isinstance(net, ScaleChannels) else None
        views.append(View(network, classify(network.model, frame), patches))
    return frame, views


def to_photo_networks(models: Sequence[Model]) -> list[PageNetwork]:
    """Prepare models for the page; add a whole-frame baseline if there is only one."""
    found = [_photo_network(model) for model in models]
    base = recipe_of(found[0]).base
    for model, network in zip(models, found, strict=True):
        if recipe_of(network).base != base:
            raise ConfigError(
                f"{models[0].name} and {model.name} need images with short sides of "
                f"{base} and {recipe_of(network).base} pixels; choose matching networks"
            )
    network, count = found[0], len(found[0].windows)
    if len(found) > 1 or count == 1:
        return _titled(found)
    return [_on_whole_frame(network), replace(network, title=f"{network.title}, {count} channels")]


def recipe_of(network: PageNetwork) -> Recipe:
    """Return the preprocessing of a network for photographs."""
    assert network.model.photo is not None
    return network.model.photo


def _photo_network(model: Model) -> PageNetwork:
    """Wrap a timm model in scale channels without changing its weights; keep a run as it is."""
    if not model.name.startswith(TIMM):
        return PageNetwork(title=Path(model.name).name or model.name, model=model)
    net: Any = model.net
    if model.shape[1] != 3 or net.num_classes < 1:
        raise ConfigError(f"{model.name} is not a classifier of RGB images; choose another model")
    recipe = Recipe(name="photo", mean=model.mean, std=model.std)
    name = model.name.removeprefix(TIMM)
    size = model.size if fixed_size(name) else SIZE
    wrapped = wrap(net, recipe.base / 4, 2 * recipe.base, size=size, pool="logsumexp").eval()
    return PageNetwork(title=name, model=replace(model, net=wrapped, recipe=recipe))


def _on_whole_frame(network: PageNetwork) -> PageNetwork:
    """Build a baseline: the backbone with the same weights on the largest window only."""
    net = network.model.net
    assert isinstance(net, ScaleChannels)
    plain = ScaleChannels(
        net.backbone, net.scales[-1:], net.size, padding=net.padding, antialias=net.antialias
    )
    model = replace(network.model, net=plain.eval())
    return PageNetwork(title=f"{network.title}, whole frame", model=model)


@torch.no_grad()
def predict_photo(
    networks: Sequence[PageNetwork],
    picture: Tensor,
    scale: float,
    shift: tuple[float, float] = (0.0, 0.0),
) -> list[View]:
    """Classify a uint8 image (C, H, W), resized as in `foveate evaluate` and shifted by (y, x)."""
    return [_predict(n, _resized(picture, recipe_of(n), scale), shift) for n in networks]


def _resized(picture: Tensor, recipe: Recipe, scale: float) -> Tensor:
    try:
        return recipe.at_scale(scale).transform()(picture).unsqueeze(0)
    except DataError as error:
        raise DataError(f"the image {error}") from None


def _predict(network: PageNetwork, image: Tensor, shift: tuple[float, float]) -> View:
    net, centres = network.model.net, None
    assert isinstance(net, ScaleChannels)
    if any(shift):
        middle = torch.tensor(image.shape[-2:], dtype=torch.float64) / 2
        centres = (middle - torch.tensor(shift, dtype=torch.float64)).unsqueeze(0)
    cut = net.patches(image, centres)
    prediction = to_prediction(network.model, patches.outputs(net, (cut,)))
    return View(network, prediction, cut[0])
