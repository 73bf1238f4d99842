"""The networks that the page compares: loaded once, each with its accuracy over scale."""
# Shape letters: S scale channel, P patch pixels, K classes.

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foveate.data.large_scale import rescale
from foveate.data.sources import DIGITS
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import Model, load_model
from foveate.evaluation.predict import Prediction, classify
from foveate.evaluation.results import read_results
from foveate.models.channels import ScaleChannels
from foveate.models.pretrained import pretrained_info, pretrained_names
from foveate.paper.tables import network_title
from foveate.training.config import TrainConfig
from foveate.training.presets import model_name

USUAL = ("cnn-mnist-tr2", "fovmax-mnist-tr2", "fovavg-mnist-tr2")
MOST = 4  # networks that have room beside each other


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A network of the page: channel s of it covers `window` · s pixels of the frame.

    `accuracy` is by test scale, measured on `tested`; empty for a run that was not evaluated.
    """

    title: str
    model: Model
    window: int
    accuracy: Mapping[float, float]
    tested: str


@dataclass(frozen=True, kw_only=True, eq=False)
class DigitView:
    """A digit at a zoom: its frame of pixels, and the prediction of every network.

    `patches` (S, P, P) are those of the first network with scale channels, of these `scales`.
    """

    zoom: float
    frame: Tensor
    predictions: tuple[tuple[Contender, Prediction], ...]
    patches: Tensor | None = None
    scales: tuple[float, ...] = ()


def load_networks(refs: Sequence[str] = (), trust: bool = False) -> list[Contender]:
    """Load networks by name or run folder; without `refs`, those that come with the package."""
    if not refs and not set(USUAL) <= set(pretrained_names()):
        raise ConfigError(
            "no trained networks come with this version: run 'foveate quickstart', then 'foveate "
            "demo --model quickstart/cnn --model quickstart/fovmax --model quickstart/fovavg'"
        )
    check_room(refs)
    return as_contenders([load_model(ref, trust=trust) for ref in refs or USUAL])


def check_room(refs: Sequence[str]) -> None:
    """Refuse more networks than have room beside each other."""
    if len(refs) > MOST:
        raise ConfigError(f"the page has room for {MOST} networks, got {len(refs)}")


def as_contenders(models: Sequence[Model]) -> list[Contender]:
    """Check that all are networks of digits and see frames alike; title them apart."""
    found = [_contender(model) for model in models]
    first, titles = models[0], [contender.title for contender in found]
    for other in models:
        if (other.size, other.border) != (first.size, first.border):
            raise ConfigError(
                f"{first.name} and {other.name} see frames of {first.size} and {other.size} "
                f"pixels, border {first.border} and {other.border}; choose networks that agree"
            )
    return [
        c if titles.count(c.title) == 1 else replace(c, title=f"{c.title} ({c.model.name})")
        for c in found
    ]


def _contender(model: Model) -> Contender:
    """A network of digits, with its accuracy where it is stored beside it."""
    config, trained = model.config, model.source or Path(model.name).is_file()
    if not (trained and config and config.channels == 1 and model.classes == DIGITS):
        raise ConfigError(
            f"the page is about digits, and {model.name} was not trained on any; for photographs "
            "pass the folder of a run with the recipe photo, or timm:NAME with --pretrained"
        )
    accuracy, tested = _evaluated(model.name)
    title, window = network_title(model_name(TrainConfig(model=config))), config.size
    return Contender(title=title, model=model, window=window, accuracy=accuracy, tested=tested)


def _evaluated(name: str) -> tuple[Mapping[float, float], str]:
    """The accuracy over scale that was stored with a network, and the images it was measured on."""
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
def predict_digit(contenders: Sequence[Contender], digit: Tensor, zoom: float) -> DigitView:
    """Show a digit (1, 1, 28, 28) of 0 to 255 to all networks, at the scale `zoom`."""
    first = contenders[0].model
    frame = rescale(digit, zoom, size=first.size, border=first.border)
    predictions = tuple((contender, classify(contender.model, frame)) for contender in contenders)
    view = DigitView(zoom=zoom, frame=frame[0, 0], predictions=predictions)
    for net in (contender.model.net for contender in contenders):
        if isinstance(net, ScaleChannels):
            return replace(view, patches=net.patches(frame)[0, :, 0], scales=net.scales)
    return view
