"""Networks that the demo compares, and the predictions of digit networks."""
# Shape letters: S scale channel, P patch pixels, K classes.

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate.data.large_scale import rescale
from foveate.data.sources import DIGITS
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import Model
from foveate.evaluation.predict import Prediction, classify
from foveate.evaluation.results import read_results
from foveate.models.channels import ScaleChannels
from foveate.models.pretrained import pretrained_info
from foveate.paper.tables import network_title
from foveate.training.config import TrainConfig
from foveate.training.presets import model_name


@dataclass(frozen=True, kw_only=True, eq=False)
class PageNetwork:
    """A network of the demo.

    Attributes:
        title: Name shown on the page.
        model: The loaded model.
        accuracy: Accuracy by test scale; empty for a run that was not evaluated.
        tested: Description of the images that `accuracy` was measured on.
    """

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


@dataclass(frozen=True, kw_only=True, eq=False)
class DigitView:
    """A digit at a zoom: its frame of pixels, and the prediction of every network.

    `patches` (S, P, P) and `scales` belong to the first network with scale channels.
    """

    zoom: float
    frame: Tensor
    predictions: tuple[tuple[PageNetwork, Prediction], ...]
    patches: Tensor | None = None
    scales: tuple[float, ...] = ()


def to_digit_networks(models: Sequence[Model]) -> list[PageNetwork]:
    """Check that all models classify digits in the same frames; give them distinct titles."""
    found = [_digit_network(model) for model in models]
    first, titles = models[0], [network.title for network in found]
    for other in models:
        if (other.size, other.border) != (first.size, first.border):
            raise ConfigError(
                f"{first.name} and {other.name} need frames of {first.size} and {other.size} "
                f"pixels with border {first.border} and {other.border}; choose matching networks"
            )
    return [
        c if titles.count(c.title) == 1 else replace(c, title=f"{c.title} ({c.model.name})")
        for c in found
    ]


def _digit_network(model: Model) -> PageNetwork:
    """Prepare a digit model, with its accuracy if results are stored with it."""
    config, trained = model.config, model.source or Path(model.name).is_file()
    if not (trained and config and config.channels == 1 and model.classes == DIGITS):
        raise ConfigError(
            f"{model.name} was not trained on digits; for photographs, pass the folder of a run "
            "with the recipe photo, or timm:NAME with --pretrained"
        )
    accuracy, tested = _evaluated(model.name)
    title = network_title(model_name(TrainConfig(model=config)))
    return PageNetwork(title=title, model=model, accuracy=accuracy, tested=tested)


def _evaluated(name: str) -> tuple[Mapping[float, float], str]:
    """Return the stored accuracy over scale, and a description of the test images."""
    folder = Path(name)
    if not folder.exists():
        info = pretrained_info(name)
        return info.accuracy, f"{info.tested:,} test images of {info.source}"
    try:
        (result,) = read_results(folder)
        about = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        sources = ", ".join(source["name"] for source in about["sources"])
    except (DataError, ValueError, KeyError):
        return {}, ""
    tested = f"{result.scales[0].count:,} {about['split']} images of {sources}"
    return {at.scale: at.accuracy for at in result.scales}, tested


@torch.no_grad()
def predict_digit(networks: Sequence[PageNetwork], digit: Tensor, zoom: float) -> DigitView:
    """Classify a digit (1, 1, 28, 28), values 0 to 255, with all networks at the scale `zoom`."""
    first = networks[0].model
    frame = rescale(digit, zoom, size=first.size, border=first.border)
    predictions = tuple((network, classify(network.model, frame)) for network in networks)
    view = DigitView(zoom=zoom, frame=frame[0, 0], predictions=predictions)
    for net in (network.model.net for network in networks):
        if isinstance(net, ScaleChannels):
            return replace(view, patches=net.patches(frame)[0, :, 0], scales=net.scales)
    return view
