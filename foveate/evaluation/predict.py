"""Predict the class of a picture of any size and mode.

How a picture becomes the input of a network of this package:

1. It is decoded by `foveate.data.pictures`; transparency is placed over white if the drawing is
   dark, over black if it is light.
2. A network of one channel gets it in grey (0.299 R + 0.587 G + 0.114 B); for one of three, a grey
   picture fills all three.
3. Its background is the median of its outermost pixels, channel by channel. The images of the MNIST
   family are light on dark: for networks trained on them, a picture whose background is lighter
   than the middle of its range is inverted. `invert` decides it for any network.
4. Its longer side fills the frame of the network (112 pixels), or one of its pixels becomes `scale`
   pixels of the frame; the background continues beside it. From here on it is treated as a source
   image of the data set, by the recipe of `foveate.data.large_scale`. A picture of more than 16
   times the frame is first reduced by averages over whole blocks of pixels.

For other models, step 4 is a resize to the size of their input, normalised with their mean and
standard deviation (`foveate.evaluation.audit.images.Transform`).

A search (`ScaleChannels.search`) needs no frame: the picture keeps its aspect ratio and its pixels,
and is reduced only if its longer side has more than twice the pixels of the largest window.

For a run on photographs, with or without a search, none of these steps applies. The picture is
transformed by the recipe of the run (`foveate.data.recipes.Recipe`), as in `foveate evaluate`: in
colour, transparency over black, its short side brought to the base size. It keeps its aspect ratio.
"""
# Shape letters: B batch, C image channel, H W pixels, S scale channel, K classes.

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from foveate.data.decoding import Behind
from foveate.data.large_scale import SMALLEST, check_scale, check_size, rescale
from foveate.data.pictures import Pixels, read_picture
from foveate.data.recipes import Recipe
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.report import classifier
from foveate.evaluation.models import Model
from foveate.execution.plan import predict as run
from foveate.execution.plan import search as run_search
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import Outputs, selected_scale, strongest_channel

Zooms: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for one picture.

    Attributes:
        label: Name of the predicted class.
        confidence: Its probability.
        probabilities: Probabilities of all classes, ``(K,)``.
        inverted: Whether the picture was inverted.
        scale: Estimated object scale, refined between the channels.
        channel: Index of the channel in which the predicted class responds most strongly.
        channels: Logits of every channel, ``(S, K)``. This, `scale` and `channel` are empty for a
            network without scale channels.
        centre: Point (y, x) of the picture, in pixels, about which the network saw it.
        window: Side of the window of `channel` in pixels of the picture. This and `centre` are
            None unless the network is a `ScaleChannels`.
    """

    label: str
    confidence: float
    probabilities: tuple[float, ...]
    inverted: bool
    scale: float | None = None
    channel: int | None = None
    channels: tuple[tuple[float, ...], ...] = ()
    centre: tuple[float, float] | None = None
    window: float | None = None


def predict(
    model: Model,
    path: Path,
    *,
    invert: bool | None = None,
    scale: float | None = None,
    search: bool = False,
    step: float | None = None,
) -> Prediction:
    """Predict the class of a picture, or of the object that a search finds in it.

    Args:
        model: Model from `load_model`.
        path: Picture file.
        invert: Whether to invert the picture; detected if None.
        scale: Pixels of the frame per pixel of the picture; fills the frame if None. In a search,
            pixels of the searched image per pixel of the picture. For a run on photographs, a
            factor of the base size of its recipe.
        search: Whether to search the picture for an off-centre object.
        step: Pixels of the searched image between the centres of the coarse grid.

    Raises:
        ConfigError: If the network cannot search, `step` is invalid, or `invert` is set for a run
            on photographs.
        DataError: If the picture cannot be read or shown to the network.
    """
    if search and not isinstance(model.net, ScaleChannels):
        raise ConfigError(f"a search needs a network of scale channels, {model.name} is none")
    if invert and model.recipe is not None:
        raise ConfigError(f"{model.name} sees photographs as they are: leave out --invert")
    make = prepare_search if search else prepare
    try:
        pixels = read_picture(path, background_of(model))
        image, inverted = make(pixels, model, invert, scale)
    except (DataError, ConfigError) as error:
        named = str(path) in str(error)
        raise DataError(str(error) if named else f"image {path}: {error}") from None
    height, width = pixels.shape[:2]
    zooms = _zooms(model, pixels, image, None if search else scale)
    if not search:
        return _in_picture(model, classify(model, image, inverted), (height / 2, width / 2), zooms)
    assert isinstance(model.net, ScaleChannels)
    image = image.to(model.device)
    found = run_search(model.net, image, step)
    apart = found.centres[0].cpu() - torch.tensor(image.shape[2:]) / 2
    y, x = (apart / torch.tensor(zooms)).tolist()
    with torch.no_grad():
        channels = model.net.channels(image, found.centres)
        prediction = _prediction(model, Outputs(model.net.combine(channels), channels), inverted)
    return _in_picture(model, prediction, (height / 2 + y, width / 2 + x), zooms)


def background_of(model: Model) -> Behind:
    """What a model sees through the transparent parts of a picture."""
    return "contrast" if model.recipe is None else "black"


def _zooms(model: Model, pixels: Pixels, image: Tensor, scale: float | None) -> Zooms:
    """Pixels of the input per pixel of the picture, along y and x.

    The two differ where a recipe rounds down the long side to whole pixels.
    """
    shown, size = image.shape[2:], pixels.shape[:2]
    if model.recipe is not None:
        return shown[0] / size[0], shown[1] / size[1]
    zoom = scale or max(shown) / max(size)
    return zoom, zoom


def _in_picture(
    model: Model, prediction: Prediction, centre: tuple[float, float], zooms: Zooms
) -> Prediction:
    """Add the centre, and the window of the channel in pixels of the picture."""
    if not isinstance(model.net, ScaleChannels) or prediction.channel is None:
        return prediction
    window = model.net.size * model.scales[prediction.channel] / max(zooms)
    return replace(prediction, centre=centre, window=window)


def prepare(
    pixels: Pixels, model: Model, invert: bool | None = None, scale: float | None = None
) -> tuple[Tensor, bool]:
    """Turn pixels (H, W, 1 or 3) into the input (1, C, H, W), as the module's docstring says.

    Returns:
        The input, and whether the picture was inverted.
    """
    if scale is not None:
        check_scale(scale)
    if model.recipe is not None:
        return _photo(pixels, model.recipe, scale), False
    side = model.size
    blocks = 1 if scale else math.ceil(max(pixels.shape[:2]) * SMALLEST / side)
    values, invert = _values(pixels, model, blocks, invert)
    factor = side / max(values.shape[1:]) if scale is None else scale
    padded = torch.from_numpy(_padded(values, side / factor))
    if model.config is not None:
        return rescale(padded[None], factor, size=side, border=model.border), invert
    channels, fill = len(padded), max(side / length for length in padded.shape[1:])
    transform = Transform(size=(side, side), channels=channels, mean=model.mean, std=model.std)
    return transform([padded], factor / fill), invert


def prepare_search(
    pixels: Pixels, model: Model, invert: bool | None = None, scale: float | None = None
) -> tuple[Tensor, bool]:
    """Turn pixels (H, W, 1 or 3) into an input (1, C, H, W) of their own shape, for a search."""
    assert isinstance(model.net, ScaleChannels)
    if model.recipe is not None:
        image, _ = prepare(pixels, model, invert, scale)
        check_size(max(image.shape[2:]))
        return image, False
    longest, largest = max(pixels.shape[:2]), model.net.size * model.net.scales[-1]
    zoom = min(1.0, 2 * largest / longest) if scale is None else check_scale(scale)
    side = round(longest * zoom)
    check_size(side)
    values, invert = _values(pixels, model, math.ceil(longest / (4 * side)), invert)
    factor = side / max(values.shape[1:])
    height, width = values.shape[1:]
    if model.config is None:
        size = max(1, round(height * factor)), max(1, round(width * factor))
        transform = Transform(size=size, channels=len(values), mean=model.mean, std=model.std)
        return transform([torch.tensor(values)], 1.0), invert
    padded = torch.from_numpy(_padded(values, max(height, width)))
    square = rescale(padded[None], factor, size=side, border=model.border)
    # Cutting both ends alike keeps the centre of the picture the centre of the input.
    top, left = (min(round((side - n * factor) / 2), (side - 1) // 2) for n in (height, width))
    return square[:, :, top : side - top, left : side - left].contiguous(), invert


def _photo(pixels: Pixels, recipe: Recipe, scale: float | None) -> Tensor:
    """Transform pixels (H, W, 1 or 3) into (1, 3, H', W'), as for a test of the run at a scale."""
    sized = replace(recipe, base=max(1, round(recipe.base * (scale or 1))))
    return sized.transform()(torch.tensor(pixels).permute(2, 0, 1)).unsqueeze(0)


def _values(pixels: Pixels, model: Model, blocks: int, invert: bool | None) -> tuple[Pixels, bool]:
    """The pixels as (C, H, W), averaged over square blocks; inverted if asked for or detected."""
    channels = model.shape[1] or pixels.shape[2]
    if channels not in (1, 3):
        raise ConfigError(f"{model.name} takes images of {channels} channels, no pictures")
    if (pixels == pixels[:1, :1]).all():
        raise DataError("is all of one colour: there is nothing to see")
    picture = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    picture = picture.convert("L" if channels == 1 else "RGB")
    values = np.asarray(picture.reduce(blocks))
    values = values[None] if channels == 1 else values.transpose(2, 0, 1)
    if invert is None:
        invert = "mnist" in Path(model.source).name and is_light(values)
    return 255 - values if invert else values, invert


def edge(values: Pixels) -> Pixels:
    """The outermost pixels of (C, H, W), as (C, N)."""
    sides = (values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1])
    return np.concatenate(sides, axis=1)


def is_light(values: Pixels) -> bool:
    """Whether the background of pixels (C, H, W) is lighter than the middle of their range."""
    grey = values.mean(0)
    return bool(np.median(edge(values).mean(0)) > (grey.min() + grey.max()) / 2)


def _padded(values: Pixels, side: float) -> Pixels:
    """Extend the background evenly on all sides to `side` pixels."""
    background = np.median(edge(values), axis=1).astype(np.uint8)
    missing = [max(0, math.ceil((side - length) / 2 - 1e-9)) for length in values.shape[1:]]
    shape = [length + 2 * more for length, more in zip(values.shape[1:], missing, strict=True)]
    canvas = np.empty((len(values), *shape), np.uint8)
    canvas[:] = background[:, None, None]
    down, right = missing
    canvas[:, down : shape[0] - down, right : shape[1] - right] = values
    return canvas


@torch.no_grad()
def classify(model: Model, image: Tensor, inverted: bool = False) -> Prediction:
    """Predict the class of an input (1, C, H, W) that `prepare` or a dataset made."""
    # A network of this package, or any model, whose outputs must be checked first.
    net = cast(nn.Module, model.net) if model.config else classifier(model)
    return _prediction(model, run(net, image.to(model.device)), inverted)


def _prediction(model: Model, outputs: Outputs, inverted: bool) -> Prediction:
    if not outputs.logits.isfinite().all():
        raise DataError(f"{model.name} returns non-finite logits; check its weights")
    shares = outputs.logits[0].double().softmax(0)
    best = int(shares.argmax())
    common: dict[str, Any] = {
        "label": model.classes[best] if model.classes else str(best),
        "confidence": float(shares[best]),
        "probabilities": tuple(shares.tolist()),
        "inverted": inverted,
    }
    if outputs.channels is None:
        return Prediction(**common)
    return Prediction(
        **common,
        scale=float(selected_scale(outputs, model.scales)),
        channel=int(strongest_channel(outputs)),
        channels=tuple(map(tuple, outputs.channels[0].tolist())),
    )
