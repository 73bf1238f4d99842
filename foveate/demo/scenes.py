"""Scenes of several digits of different sizes, and the dense predictions of a network."""
# Shape letters: K classes, h w positions, H W pixels.

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageColor
from torch import Tensor

from foveate.data.large_scale import BACKGROUND, rescale
from foveate.data.sources import Split
from foveate.demo.networks import PageNetwork
from foveate.demo.panels import image, to_greyscale
from foveate.execution.plan import local_maps
from foveate.models.channels import ScaleChannels
from foveate.models.sliding import LocalMaps

HEIGHT, WIDTH = 224, 320
STEP = 4  # stride of the predictions in pixels
SMALLEST, LARGEST = 0.7, 3.5  # scales of the digits
MIN_DIGITS, MAX_DIGITS = 2, 10
HALF = 14  # pixels from the centre of a source image to its edge
REACH = 11  # pixels from the centre of a digit of scale 1 to the end of its strokes
TRIES = 40
# One colour per class, distinguishable on black.
CLASSES = (
    "#4e9af1", "#ff8c2a", "#43c565", "#f25f5c", "#b388eb",
    "#c08a6e", "#f48fd0", "#b0b7bf", "#d6d640", "#36cfd6",
)  # fmt: skip
DIM = 0.45  # brightness of the scene below a map


class PlacedDigit(NamedTuple):
    """A digit in a scene: centre in pixels from the top left, scale and class."""

    y: int
    x: int
    scale: float
    label: int


def compose(digits: Split, count: int, seed: int) -> tuple[Tensor, list[PlacedDigit]]:
    """Compose a scene (1, 1, H, W) of `count` digits of random sizes, and return their places."""
    chance = np.random.default_rng(seed)
    scene = torch.full((1, 1, HEIGHT, WIDTH), BACKGROUND)
    placed: list[PlacedDigit] = []
    for y, x, scale in _places(count, chance):
        index = int(chance.integers(len(digits)))
        half = round(HALF * scale)
        drawn = rescale(digits.images[index : index + 1], scale, size=2 * half)
        part = scene[..., y - half : y + half, x - half : x + half]
        torch.maximum(part, drawn, out=part)
        placed.append(PlacedDigit(y=y, x=x, scale=scale, label=int(digits.labels[index])))
    return scene, placed


def _places(count: int, chance: np.random.Generator) -> list[tuple[int, int, float]]:
    """Sample the place (y, x) and scale of each digit; those that would touch are made smaller."""
    ratio = LARGEST / SMALLEST
    scales = sorted((SMALLEST * ratio ** chance.random(count)).tolist(), reverse=True)
    found: list[tuple[int, int, float]] = []
    for scale in scales:
        half = round(HALF * scale)
        y = chance.integers(half, HEIGHT - half + 1, TRIES)
        x = chance.integers(half, WIDTH - half + 1, TRIES)
        room = np.full(TRIES, LARGEST)
        for v, u, other in found:
            room = np.minimum(room, np.hypot(y - v, x - u) / REACH - other)
        best = int(room.argmax())
        fitting = min(scale, max(SMALLEST, float(room[best])))
        found.append((int(y[best]), int(x[best]), fitting))
    return found


def draw(network: PageNetwork, scene: Tensor, placed: Sequence[PlacedDigit]) -> str:
    """Render the scene with its predictions, and the class map."""
    assert isinstance(network.model.net, ScaleChannels)
    maps = local_maps(network.model.net, scene, STEP)
    boxes = "".join(_box(digit, maps, network.window) for digit in placed)
    over = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{boxes}</svg>'
    best = "Prediction and strongest window at each digit: green is correct, red is incorrect"
    shown = _figure(image(to_greyscale(scene[0, 0]), "scene of digits") + over, best)
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{k}</span>' for k, colour in enumerate(CLASSES)
    )
    caption = f'Predicted class, where the network is confident<p class="legend">{legend}</p>'
    return f'<div class="maps">{shown}{_figure(_class_map(scene, maps), caption)}</div>'


def predict_at(maps: LocalMaps, digit: PlacedDigit) -> tuple[int, float]:
    """Return the predicted class and the estimated scale at the centre of a digit."""
    place = digit.y // STEP, digit.x // STEP
    return int(maps.logits[0, :, *place].argmax()), float(maps.scales[0, *place])


def _figure(shown: str, caption: str) -> str:
    return f'<figure><div class="screen">{shown}</div><figcaption>{caption}</figcaption></figure>'


def _box(digit: PlacedDigit, maps: LocalMaps, window: int) -> str:
    label, scale = predict_at(maps, digit)
    side = window * scale
    x, y = digit.x - side / 2, digit.y - side / 2
    kind = "right" if label == digit.label else "wrong"
    return (
        f'<g class="{kind}"><rect x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}"/>'
        f'<text x="{max(x, 2):.1f}" y="{max(y - 4, 14):.1f}">{label}</text></g>'
    )


def _class_map(scene: Tensor, maps: LocalMaps) -> str:
    """Overlay the colours of the classes on the grey scene where the network is confident."""
    colours = Image.fromarray(maps.logits[0].argmax(0).byte().numpy())
    colours.putpalette([value for colour in CLASSES for value in ImageColor.getrgb(colour)])
    first, second = maps.logits[0].topk(2, 0).values
    sure = ((first - second - 1) / 4).clamp(0, 0.85)  # a margin of 5 is a probability of 99 %
    below = to_greyscale(scene[0, 0], DIM).convert("RGB")
    mask = Image.fromarray((255 * sure).byte().numpy())
    mask = mask.resize(below.size, Image.Resampling.BILINEAR)
    above = colours.convert("RGB").resize(below.size, Image.Resampling.NEAREST)
    return image(Image.composite(above, below, mask), "map over the scene")
