"""Predict the class of an image file of any size and colour mode.

A network trained on digits or other small images receives its input in four steps:

1. `foveate.data.pictures` decodes the file. Transparent pixels become white if the drawing is dark,
   and black if it is light.
2. The image is converted to the channels of the network: to grey (0.299 R + 0.587 G + 0.114 B) for
   one channel, or from grey to three equal channels.
3. The background is the median of the outermost pixels, per channel. Images of the MNIST family are
   light on dark: for networks trained on them, an image whose background is lighter than the middle
   of its value range is inverted. `invert` overrides this for any network.
4. The longer side is resized to the input of the network (112 pixels), or the image is magnified by
   `scale`; the background colour fills the rest. The recipe of `foveate.data.large_scale` then
   makes the input, as for the images of the dataset. An image more than 16 times the size of the
   input is first reduced by averaging square blocks of pixels. For a run with the recipe
   `mirrored`, that recipe makes the input, and mirror images fill the rest.

For third-party models, step 4 resizes the image to their input and normalises it with their mean
and standard deviation (`foveate.evaluation.audit.images.Transform`).

A search (`ScaleChannels.search`) has no fixed input size: the image keeps its aspect ratio and its
resolution. It is reduced only if its longer side exceeds twice the side of the largest window.

A run on photographs uses its own recipe (`foveate.data.recipes.Recipe`) instead of these steps,
with or without a search, as `foveate evaluate` does: the image stays in colour, transparent pixels
become black, and the short side is resized to the base size at the original aspect ratio.
"""
# Shape letters: B batch, C image channel, H W pixels, S scale channel, K classes.

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from foveate.data.decoding import Background
from foveate.data.large_scale import check_size, rescale
from foveate.data.pictures import Pixels, read_picture
from foveate.data.recipes import Recipe, surround
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.transforms import classifier
from foveate.evaluation.models import Model
from foveate.execution.plan import predict as run
from foveate.execution.plan import search as run_search
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import Outputs, selected_scale, strongest_channel
from foveate.models.search import Progress, no_progress
from foveate.scales import MIN_SCALE, check_scale

Zooms: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted class, probabilities and estimated scale of one image.

    Attributes:
        label: Name of the predicted class.
        confidence: Probability of the predicted class.
        probabilities: Probabilities of all classes, ``(K,)``.
        inverted: Whether the image was inverted.
        scale: Estimated object scale, interpolated between the channels; None for a network without
            scale channels.
        channel: Index of the channel with the largest logit of the predicted class; None for a
            network without scale channels.
        channels: Logits of every channel, ``(S, K)``; empty for a network without scale channels.
        centre: Centre (y, x) of the windows in pixels of the image file; None unless the network is
            a `ScaleChannels`.
        window: Side of the window of `channel` in pixels of the image file; None unless the network
            is a `ScaleChannels`.

    Examples:
        >>> found = Prediction(
        ...     label="7", confidence=0.75, probabilities=(0.25, 0.75), inverted=False, scale=2.1
        ... )
        >>> f"{found.label} with {found.confidence:.0%} at scale {found.scale}"
        '7 with 75% at scale 2.1'
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
    progress: Progress = no_progress,
) -> Prediction:
    """Predict the class of an image file.

    Networks of foveate receive the same preprocessing as their training images. Third-party models
    receive the image resized to their input and normalised.

    Args:
        model: Model from `load_model`.
        path: Image file.
        invert: Whether to invert the image. If None, an image with a light background is inverted
            for networks trained on the MNIST family.
        scale: Magnification from the image file to the input. If None, the image fills the input;
            a search keeps the original resolution, unless the longer side exceeds twice the largest
            window. For a run on photographs, a factor applied to the base size of its recipe.
        search: Whether to search the image for an off-centre object.
        step: Distance between the centres of the coarse search grid, in pixels of the searched
            image.
        progress: Context manager that shows the progress of a search, given the title "positions"
            and their number.

    Returns:
        The prediction.

    Raises:
        ConfigError: If the network cannot search, its input size is unknown, `step` is invalid,
            `scale` is out of range, or `invert` is set for a run on photographs.
        DataError: If the image cannot be read, has only one colour, or becomes too large.

    Examples:
        >>> from foveate import load_model, load_source
        >>> digit = load_source("mnist-5k").test.images[0, 0]
        >>> Image.fromarray(digit.numpy()).save("digit.png")
        >>> found = predict(load_model("fovmax-mnist-tr2"), Path("digit.png"))
        >>> found.label, len(found.probabilities), len(found.channels)
        ('0', 10, 17)
    """
    check_input(model, invert, scale, search)
    make = prepare_search if search else prepare
    try:
        pixels = read_picture(path, choose_background(model))
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
    found = run_search(model.net, image, step, progress)
    apart = found.centres[0].cpu() - torch.tensor(image.shape[2:]) / 2
    y, x = (apart / torch.tensor(zooms)).tolist()
    with torch.no_grad():
        channels = model.net.channels(image, found.centres)
        prediction = to_prediction(model, Outputs(model.net.combine(channels), channels), inverted)
    return _in_picture(model, prediction, (height / 2 + y, width / 2 + x), zooms)


def check_input(
    model: Model, invert: bool | None = None, scale: float | None = None, search: bool = False
) -> None:
    """Raise a ConfigError for a model or arguments of `predict` that suit no image."""
    if search and not isinstance(model.net, ScaleChannels):
        raise ConfigError(
            f"search requires a ScaleChannels network, and {model.name} is not one; leave out "
            "--search"
        )
    if invert and model.photo is not None:
        raise ConfigError(
            f"{model.name} was trained on photographs, which are never inverted; leave out --invert"
        )
    factor = 1.0 if scale is None else check_scale(scale)
    if model.photo is not None:
        model.photo.at_scale(factor)
        return
    if model.shape[1] not in (None, 1, 3):
        raise ConfigError(
            f"{model.name} takes {model.shape[1]} image channels, but image files have 1 or 3"
        )
    if not search:
        _ = model.size


def choose_background(model: Model) -> Background:
    """Return the background that replaces the transparent pixels of an image."""
    return "contrast" if model.photo is None else "black"


def _zooms(model: Model, pixels: Pixels, image: Tensor, scale: float | None) -> Zooms:
    """Return the pixels of the input per pixel of the image file, along y and x.

    The two differ where a recipe rounds down the long side to whole pixels.
    """
    shown, size = image.shape[2:], pixels.shape[:2]
    if model.photo is not None:
        return shown[0] / size[0], shown[1] / size[1]
    zoom = scale or max(shown) / max(size)
    return zoom, zoom


def _in_picture(
    model: Model, prediction: Prediction, centre: tuple[float, float], zooms: Zooms
) -> Prediction:
    """Add the centre and the window of the strongest channel, in pixels of the image file."""
    if not isinstance(model.net, ScaleChannels) or prediction.channel is None:
        return prediction
    window = model.net.size * model.scales[prediction.channel] / max(zooms)
    return replace(prediction, centre=centre, window=window)


def prepare(
    pixels: Pixels, model: Model, invert: bool | None = None, scale: float | None = None
) -> tuple[Tensor, bool]:
    """Return the input (1, C, H, W) for pixels (H, W, 1 or 3), and whether they were inverted."""
    if model.photo is not None:
        return _photograph(pixels, model, model.photo.at_scale(scale or 1)), False
    side = model.size
    blocks = 1 if scale else math.ceil(max(pixels.shape[:2]) * MIN_SCALE / side)
    values, invert = _values(pixels, model, blocks, invert)
    factor = side / max(values.shape[1:]) if scale is None else scale
    if model.config is not None or model.recipe is not None:
        return _in_frame(values, model, factor, side), invert
    padded = _padded(values, side / factor)
    channels, fill = len(padded), max(side / length for length in padded.shape[1:])
    transform = Transform(size=(side, side), channels=channels, mean=model.mean, std=model.std)
    return transform([padded], factor / fill), invert


def _photograph(pixels: Pixels, model: Model, recipe: Recipe) -> Tensor:
    """Resize a photograph; an exported network with a fixed input sees its centre."""
    resized = recipe.resize()(torch.tensor(pixels).permute(2, 0, 1))
    if model.config is None and (shape := (model.shape[2], model.shape[3])) != (None, None):
        height, width = (n or m for n, m in zip(shape, resized.shape[1:], strict=True))
        resized = surround(resized, max(height, width), "replicate")
        top, left = (resized.shape[1] - height) // 2, (resized.shape[2] - width) // 2
        resized = resized[:, top : top + height, left : left + width]
    return recipe.normalise(resized)[None]


def prepare_search(
    pixels: Pixels, model: Model, invert: bool | None = None, scale: float | None = None
) -> tuple[Tensor, bool]:
    """Compute `prepare` for a search: the input (1, C, H', W') keeps the aspect ratio."""
    assert isinstance(model.net, ScaleChannels)
    if model.photo is not None:
        image, _ = prepare(pixels, model, invert, scale)
        check_size(max(image.shape[2:]))
        return image, False
    longest, largest = max(pixels.shape[:2]), model.net.size * model.net.scales[-1]
    zoom = min(1.0, 2 * largest / longest) if scale is None else scale
    side = round(longest * zoom)
    check_size(side)
    values, invert = _values(pixels, model, math.ceil(longest / (4 * side)), invert)
    factor = side / max(values.shape[1:])
    height, width = values.shape[1:]
    if model.config is None:
        size = max(1, round(height * factor)), max(1, round(width * factor))
        transform = Transform(size=size, channels=len(values), mean=model.mean, std=model.std)
        return transform([torch.tensor(values)], 1.0), invert
    square = _in_frame(values, model, factor, side)
    # Cropping both ends equally keeps the centre of the image at the centre of the input.
    top, left = (min(round((side - n * factor) / 2), (side - 1) // 2) for n in (height, width))
    return square[:, :, top : side - top, left : side - left].contiguous(), invert


def _in_frame(values: Pixels, model: Model, factor: float, side: int) -> Tensor:
    """Rescale pixels (C, H, W) into a frame (1, C, side, side), with the recipe of the model."""
    if model.recipe is not None and model.recipe.name == "mirrored":
        return model.recipe.rescale(torch.tensor(values)[None], factor, size=side)
    padded = _padded(values, side / factor)
    return rescale(padded[None], factor, size=side, border=model.border)


def _values(pixels: Pixels, model: Model, blocks: int, invert: bool | None) -> tuple[Pixels, bool]:
    """Return pixels (C, H, W) averaged over square blocks, and whether they were inverted."""
    if (pixels == pixels[:1, :1]).all():
        raise DataError("all pixels have the same colour; choose another image")
    picture = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    channels = model.shape[1] or pixels.shape[2]
    picture = picture.convert("L" if channels == 1 else "RGB")
    values = np.asarray(picture.reduce(blocks))
    values = values[None] if channels == 1 else values.transpose(2, 0, 1)
    if invert is None:
        invert = "mnist" in Path(model.source).name and has_light_background(values)
    return 255 - values if invert else values, invert


def edge_pixels(values: Pixels) -> Pixels:
    """Return the outermost pixels of (C, H, W), as (C, N)."""
    sides = (values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1])
    return np.concatenate(sides, axis=1)


def has_light_background(values: Pixels) -> bool:
    """Return whether the background of (C, H, W) is lighter than the middle of the value range."""
    grey = values.mean(0)
    return bool(np.median(edge_pixels(values).mean(0)) > (grey.min() + grey.max()) / 2)


def _padded(values: Pixels, side: float) -> Tensor:
    """Pad the image with its background colour, evenly on all sides, to `side` pixels."""
    background = np.median(edge_pixels(values), axis=1).astype(np.uint8) / 255
    return surround(torch.tensor(values), side - 2e-9, tuple(background.tolist()))


@torch.no_grad()
def classify(model: Model, image: Tensor, inverted: bool = False) -> Prediction:
    """Predict the class of an input (1, C, H, W) from `prepare` or from a dataset."""
    # The outputs of third-party models are checked; a foveate network always returns logits.
    count = len(model.class_names) or None
    net = cast(nn.Module, model.net) if model.config else classifier(model, count)
    return to_prediction(model, run(net, image.to(model.device)), inverted)


def to_prediction(model: Model, outputs: Outputs, inverted: bool = False) -> Prediction:
    """Convert the outputs of a model for one image to a prediction."""
    if not outputs.logits.isfinite().all():
        raise DataError(f"{model.name} returns non-finite logits; check its weights")
    shares = outputs.logits[0].double().softmax(0)
    best = int(shares.argmax())
    found = Prediction(
        label=model.classes[best] if model.classes else str(best),
        confidence=float(shares[best]),
        probabilities=tuple(shares.tolist()),
        inverted=inverted,
    )
    if outputs.channels is None:
        return found
    return replace(
        found,
        scale=float(selected_scale(outputs, model.scales)),
        channel=int(strongest_channel(outputs)),
        channels=tuple(map(tuple, outputs.channels[0].tolist())),
    )
