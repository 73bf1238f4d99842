"""The networks that the page compares: loaded once, each with its accuracy over scale."""
# Shape letters: S scale channel, P patch pixels, K classes.

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from foveate.data.large_scale import Border, rescale
from foveate.data.sources import DIGITS
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import load_model
from foveate.evaluation.results import read_results
from foveate.execution.plan import predict
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import selected_scale, strongest_channel
from foveate.models.pretrained import pretrained_info, pretrained_names
from foveate.paper.tables import network_title
from foveate.training.config import TrainConfig
from foveate.training.presets import model_name

USUAL = ("cnn-mnist-tr2", "fovmax-mnist-tr2", "fovavg-mnist-tr2")
MOST = 4  # networks that have room beside each other


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A network of the page: where it came from, how to call it, and how accurate it is.

    Channel s covers `window` · s pixels of its input frame of `size` by `size`. `source` and
    `border` are those of its training data, `accuracy` is by test scale, measured on `tested`.
    """

    name: str
    title: str
    net: nn.Module
    window: int
    size: int
    border: Border
    source: str
    accuracy: Mapping[float, float]
    tested: str

    @property
    def scales(self) -> tuple[float, ...]:
        """Scales of its channels; empty for a network without any."""
        return tuple(getattr(self.net, "scales", ()))


@dataclass(frozen=True, kw_only=True, eq=False)
class DigitPrediction:
    """A network's prediction for a digit.

    `strengths` has the logit of the predicted class in each channel, `channel` the index of the
    largest, and `scale` the estimated object scale; they are empty without scale channels.
    """

    contender: Contender
    probabilities: tuple[float, ...]
    strengths: tuple[float, ...] = ()
    channel: int | None = None
    scale: float | None = None

    @property
    def label(self) -> int:
        """The predicted class."""
        return self.probabilities.index(max(self.probabilities))


@dataclass(frozen=True, kw_only=True, eq=False)
class DigitView:
    """A digit at a zoom: its frame of pixels, and the prediction of every network.

    `patches` (S, P, P) are those of the first network with scale channels, of these `scales`.
    """

    zoom: float
    frame: Tensor
    predictions: tuple[DigitPrediction, ...]
    patches: Tensor | None = None
    scales: tuple[float, ...] = ()


def load_networks(refs: Sequence[str] = (), trust: bool = False) -> list[Contender]:
    """Load networks by name or run folder; without `refs`, those that come with the package."""
    if not refs and not set(USUAL) <= set(pretrained_names()):
        raise ConfigError(
            "no trained networks come with this version: run 'foveate quickstart', then 'foveate "
            "demo --model quickstart/cnn --model quickstart/fovmax --model quickstart/fovavg'"
        )
    if len(refs) > MOST:
        raise ConfigError(f"the page has room for {MOST} networks, got {len(refs)}")
    found = [load_contender(ref, trust) for ref in refs or USUAL]
    first, titles = found[0], [contender.title for contender in found]
    for other in found:
        if (other.size, other.border) != (first.size, first.border):
            raise ConfigError(
                f"{first.name} and {other.name} see frames of {first.size} and {other.size} "
                f"pixels, border {first.border} and {other.border}; choose networks that agree"
            )
    return [
        c if titles.count(c.title) == 1 else replace(c, title=f"{c.title} ({c.name})")
        for c in found
    ]


def load_contender(ref: str, trust: bool) -> Contender:
    """Load one network; the rest of the page knows only the `Contender`."""
    network = load_model(ref, trust=trust)
    config, net = network.config, network.net
    if config is None or config.channels != 1 or network.classes != DIGITS:
        raise ConfigError(f"the page is about digits, and {ref} was not trained on any")
    accuracy, tested = _evaluated(ref)
    return Contender(
        name=ref,
        title=network_title(model_name(TrainConfig(model=config))),
        net=cast(nn.Module, net),
        window=config.size,
        size=network.size,
        border=network.border,
        source=network.source,
        accuracy=accuracy,
        tested=tested,
    )


def _evaluated(ref: str) -> tuple[Mapping[float, float], str]:
    """The accuracy over scale that was stored with a network, and the images it was measured on."""
    folder = Path(ref)
    if not folder.is_dir():
        info = pretrained_info(ref)
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
    frame = rescale(digit, zoom, size=contenders[0].size, border=contenders[0].border)
    predictions = tuple(_predict(contender, frame) for contender in contenders)
    view = DigitView(zoom=zoom, frame=frame[0, 0], predictions=predictions)
    for net in (c.net for c in contenders if isinstance(c.net, ScaleChannels)):
        return replace(view, patches=net.patches(frame)[0, :, 0], scales=net.scales)
    return view


def _predict(contender: Contender, frame: Tensor) -> DigitPrediction:
    outputs = predict(contender.net, frame)
    probabilities = tuple(outputs.logits[0].double().softmax(0).tolist())
    if outputs.channels is None:
        return DigitPrediction(contender=contender, probabilities=probabilities)
    return DigitPrediction(
        contender=contender,
        probabilities=probabilities,
        strengths=tuple(outputs.channels[0, :, int(outputs.logits[0].argmax())].tolist()),
        channel=int(strongest_channel(outputs)),
        scale=float(selected_scale(outputs, contender.scales)),
    )
