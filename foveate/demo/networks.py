"""The networks of the page: loaded once, and asked about one digit at one zoom."""
# Shape letters: S scale channel, P patch pixels, K classes.

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from foveate.data.large_scale import rescale
from foveate.data.sources import DIGITS
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import Model, load_model
from foveate.evaluation.results import read_results
from foveate.models.answers import answers, seen_at, strongest_channel
from foveate.models.channels import ScaleChannels
from foveate.models.pretrained import pretrained_info, pretrained_names
from foveate.models.zoo import ModelConfig
from foveate.paper.tables import network_title
from foveate.training.config import TrainConfig
from foveate.training.presets import model_name

USUAL = ("cnn-mnist-tr2", "fovmax-mnist-tr2", "fovavg-mnist-tr2")
MOST = 4  # networks that have room beside each other


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A network with its title, and its accuracy over scale as far as that was measured.

    `tested` says on what.
    """

    title: str
    network: Model
    accuracy: Mapping[float, float]
    tested: str

    @property
    def window(self) -> int:
        """Width and height of a patch in pixels."""
        return self.network.config.size if self.network.config else self.network.size


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one network says: the probability of each class, and of networks with channels more.

    `strengths` is what each channel said about the predicted class, `channel` where that was
    strongest, and `scale` where between the channels.
    """

    probabilities: tuple[float, ...]
    strengths: tuple[float, ...] = ()
    channel: int | None = None
    scale: float | None = None

    @property
    def label(self) -> int:
        """The predicted class."""
        return self.probabilities.index(max(self.probabilities))


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """A digit in its frame (pixels), the patches (S, P, P) that channels see, and the answers."""

    zoom: float
    frame: Tensor
    patches: Tensor | None
    answers: tuple[Answer, ...]


def load_networks(specs: Sequence[str] = (), trust: bool = False) -> list[Contender]:
    """Load networks by name or run folder, without `specs` those that come with the package."""
    if not specs and not set(USUAL) <= set(pretrained_names()):
        raise ConfigError(
            "no trained networks come with this version: run 'foveate quickstart', then 'foveate "
            "demo --model quickstart/cnn --model quickstart/fovmax --model quickstart/fovavg'"
        )
    if len(specs) > MOST:
        raise ConfigError(f"the page has room for {MOST} networks, got {len(specs)}")
    found = [load_model(spec, trust=trust) for spec in specs or USUAL]
    _check_alike(found)
    titles = [_title(network) for network in found]
    return [
        Contender(
            title=title if titles.count(title) == 1 else f"{title} ({network.name})",
            network=network,
            accuracy=scored[0],
            tested=scored[1],
        )
        for title, network, scored in zip(titles, found, map(_scored, found), strict=True)
    ]


@torch.no_grad()
def ask(contenders: Sequence[Contender], digit: Tensor, zoom: float) -> Seen:
    """Show a digit (1, 1, 28, 28) of 0 to 255 to all networks, at the scale `zoom`."""
    first = contenders[0].network
    frame = rescale(digit, zoom, size=first.size, border=first.border)
    with_channels = [c.network.net for c in contenders if isinstance(c.network.net, ScaleChannels)]
    return Seen(
        zoom=zoom,
        frame=frame[0, 0],
        patches=with_channels[0].patches(frame)[0, :, 0] if with_channels else None,
        answers=tuple(_answer(c.network, frame) for c in contenders),
    )


def channel_scales(contenders: Sequence[Contender]) -> tuple[float, ...]:
    """The scales of the channels whose patches `ask` gives; none if no network has any."""
    nets = [c.network for c in contenders if isinstance(c.network.net, ScaleChannels)]
    return nets[0].scales if nets else ()


def _answer(network: Model, frame: Tensor) -> Answer:
    said = answers(cast(nn.Module, network.net), frame)
    probabilities = tuple(said.logits[0].double().softmax(0).tolist())
    if said.channels is None:
        return Answer(probabilities=probabilities)
    return Answer(
        probabilities=probabilities,
        strengths=tuple(said.channels[0, :, int(said.logits[0].argmax())].tolist()),
        channel=int(strongest_channel(said)),
        scale=float(seen_at(said, network.scales)),
    )


def _check_alike(networks: Sequence[Model]) -> None:
    first = networks[0]
    for network in networks:
        config = network.config
        if config is None or config.channels != 1 or network.classes != DIGITS:
            raise ConfigError(
                f"the page is about digits, and {network.name} was not trained on any"
            )
        if (network.size, network.border) != (first.size, first.border):
            raise ConfigError(
                f"{first.name} and {network.name} see frames of {first.size} and {network.size} "
                f"pixels, border {first.border} and {network.border}; choose networks that agree"
            )


def _title(network: Model) -> str:
    return network_title(model_name(TrainConfig(model=network.config or ModelConfig())))


def _scored(network: Model) -> tuple[Mapping[float, float], str]:
    """The accuracy over scale that was stored with the network, and on what it was measured."""
    folder = Path(network.name)
    if not network.source:
        return {}, ""
    if not folder.is_dir():
        info = pretrained_info(network.name)
        return info.accuracy, f"{info.tested:,} test images of {info.source}"
    try:
        (result,) = read_results(folder)
        about = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        sources = ", ".join(source["name"] for source in about["sources"])
    except (DataError, ValueError, KeyError):
        return {}, ""
    tested = f"{result.scales[0].count:,} {about['split']} images of {sources}"
    return {at.scale: at.accuracy for at in result.scales}, tested
