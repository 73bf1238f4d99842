"""What a network says about a picture of any size and kind.

How a picture becomes what the network was trained on:

1. It is decoded as `foveate.data.pictures` says, with transparency over white if what is drawn is
   dark, over black if it is light.
2. A network of one channel gets it in grey (0.299 R + 0.587 G + 0.114 B); for one of three, a grey
   picture fills all three.
3. Its background is the median of its outermost pixels, channel by channel. The digits and clothes
   of the MNIST family are light on dark: for networks trained on them, a picture whose background
   is lighter than the middle of its range is inverted. `invert` says yes or no for any network.
4. Its longer side fills the frame of the network (112 pixels), or one of its pixels becomes `scale`
   pixels of the frame; beside it the background goes on. From here on it is treated as a source
   image of the data set, by the recipe of `foveate.data.large_scale`: bicubic, smoothed by 7/8
   of its own pixels, stretched to 0 and 255, then (2 / pi) atan(0.02 (I - 128)). A picture of more
   than 16 times the frame is first reduced by averages over whole blocks of pixels.
"""
# Shape letters: B batch, C image channel, H W pixels, S scale channel, K classes.

import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from foveate.data.large_scale import SMALLEST, Border, check_border, check_scale, rescale
from foveate.data.pictures import Pixels, list_pictures, read_picture
from foveate.data.sources import CLOTHES, DIGITS
from foveate.errors import ConfigError, DataError
from foveate.execution.plan import predict as run
from foveate.models.outputs import selected_scale, strongest_channel
from foveate.models.pretrained import from_pretrained, pretrained_info
from foveate.models.zoo import ModelConfig
from foveate.training.checkpoint import RunFolder


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A trained network, and what must be known to show it a picture and to read its answer."""

    name: str
    net: nn.Module
    model: ModelConfig
    source: str
    size: int
    border: Border
    classes: tuple[str, ...]

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales of its channels, if it has any."""
        return tuple(getattr(self.net, "scales", ()))

    @property
    def light_on_dark(self) -> bool:
        """Whether it was trained on images of the MNIST family, going by the source's name."""
        return "mnist" in Path(self.source).name


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer to one picture: its class by name, and the softmax of the logits for all (K).

    `channel` is the scale channel in which that class answered most strongly, and `scale` where
    between the channels that was; a channel of scale s looks at `model.size` · s pixels of the
    frame. `channels` is what each of them said, (S, K) logits. The last three are empty for a
    network without scale channels.
    """

    label: str
    confidence: float
    probabilities: tuple[float, ...]
    inverted: bool
    scale: float | None = None
    channel: int | None = None
    channels: tuple[tuple[float, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


def find_network(spec: str, trust: bool = False) -> Network:
    """Load a finished run by its folder, or a network that comes with the package by its name.

    Args:
        spec: Folder of a run, or name of a pretrained network.
        trust: Whether a backbone that the run names may be imported and called.
    """
    if Path(spec).is_dir():
        folder = RunFolder(Path(spec))
        net, config = folder.net(trust).eval(), folder.config()
        known = (config.source, config.size, config.border)
        return _network(spec, net, config.model, *known)
    if "/" in spec:
        raise DataError(f"{spec} is no folder of a run; 'foveate train' makes one")
    info = pretrained_info(spec)
    border = check_border(info.recipe["border"])
    return _network(spec, from_pretrained(spec), info.model, info.source, info.size, border)


def predict(
    network: Network, path: Path, *, invert: bool | None = None, scale: float | None = None
) -> Prediction:
    """Say what is on the picture; without `invert`, whether to invert it is found out."""
    try:
        shown, inverted = prepare(read_picture(path, "contrast"), network, invert, scale)
    except (DataError, ConfigError) as error:
        named = str(path) in str(error)
        raise DataError(str(error) if named else f"image {path}: {error}") from None
    return _answer(network, shown, inverted)


def prepare(
    pixels: Pixels, network: Network, invert: bool | None = None, scale: float | None = None
) -> tuple[Tensor, bool]:
    """Turn pixels (H, W, 1 or 3) into the network's input (1, C, size, size), as said above.

    Also says whether the picture was inverted.
    """
    if scale is not None:
        check_scale(scale)
    values = _values(pixels, network, shrink=scale is None)
    if invert is None:
        invert = network.light_on_dark and is_light(values)
    values = 255 - values if invert else values
    factor = network.size / max(values.shape[1:]) if scale is None else scale
    padded = torch.from_numpy(_padded(values, network.size / factor))
    return rescale(padded[None], factor, size=network.size, border=network.border), invert


def _values(pixels: Pixels, network: Network, shrink: bool) -> Pixels:
    """The pixels as (C, H, W), not more of them than the data set's recipe can take."""
    channels = network.model.channels
    if channels not in (1, 3):
        raise ConfigError(f"{network.name} takes images of {channels} channels, no pictures")
    if (pixels == pixels[:1, :1]).all():
        raise DataError("is all of one colour: there is nothing to see")
    picture = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    picture = picture.convert("L" if channels == 1 else "RGB")
    blocks = math.ceil(max(picture.size) * SMALLEST / network.size) if shrink else 1
    values = np.asarray(picture.reduce(blocks))
    return values[None] if channels == 1 else values.transpose(2, 0, 1)


def edge(values: Pixels) -> Pixels:
    """The outermost pixels of (C, H, W), as (C, N)."""
    sides = (values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1])
    return np.concatenate(sides, axis=1)


def is_light(values: Pixels) -> bool:
    """Whether the background of pixels (C, H, W) is lighter than the middle of their range."""
    grey = values.mean(0)
    return bool(np.median(edge(values).mean(0)) > (grey.min() + grey.max()) / 2)


def _padded(values: Pixels, side: float) -> Pixels:
    """Let the background go on evenly on all sides until there are `side` pixels of it."""
    background = np.median(edge(values), axis=1).astype(np.uint8)
    missing = [max(0, math.ceil((side - length) / 2 - 1e-9)) for length in values.shape[1:]]
    shape = [length + 2 * more for length, more in zip(values.shape[1:], missing, strict=True)]
    canvas = np.empty((len(values), *shape), np.uint8)
    canvas[:] = background[:, None, None]
    down, right = missing
    canvas[:, down : shape[0] - down, right : shape[1] - right] = values
    return canvas


@torch.no_grad()
def _answer(network: Network, image: Tensor, inverted: bool) -> Prediction:
    net = network.net
    said = run(net, image.to(next(net.parameters()).device))
    if not said.logits.isfinite().all():
        raise DataError(f"{network.name} answers with numbers that are none; train it again")
    shares = said.logits[0].double().softmax(0)
    best = int(shares.argmax())
    common: dict[str, Any] = {
        "label": network.classes[best],
        "confidence": float(shares[best]),
        "probabilities": tuple(shares.tolist()),
        "inverted": inverted,
    }
    if said.channels is None:
        return Prediction(**common)
    return Prediction(
        **common,
        scale=float(selected_scale(said, network.scales)),
        channel=int(strongest_channel(said)),
        channels=tuple(map(tuple, said.channels[0].tolist())),
    )


def _network(
    name: str, net: nn.Module, model: ModelConfig, source: str, size: int, border: Border
) -> Network:
    classes = _class_names(source, model.classes)
    return Network(
        name=name, net=net, model=model, source=source, size=size, border=border, classes=classes
    )


def _class_names(source: str, count: int) -> tuple[str, ...]:
    """Names where the source is known or can still be looked at, else numbers."""
    names = {"mnist": DIGITS, "mnist-5k": DIGITS, "fashion-mnist": CLOTHES}.get(source, ())
    if source.startswith("folder:"):
        with suppress(DataError):
            names = list_pictures(Path(source.removeprefix("folder:")).expanduser())[1]
    return names if len(names) == count else tuple(map(str, range(count)))
