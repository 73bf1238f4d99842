"""Scenes with several digits of different sizes, and what a network says at every place."""
# Shape letters: B batch, K classes, h w places, H W pixels.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foveate.data.large_scale import BACKGROUND, rescale
from foveate.data.sources import Split
from foveate.demo.networks import Contender
from foveate.errors import ConfigError
from foveate.execution.plan import local_maps
from foveate.models.channels import ScaleChannels
from foveate.models.sliding import LocalMaps

HEIGHT, WIDTH = 224, 320
STEP = 4  # pixels from one place to the next
SMALLEST, LARGEST = 0.7, 3.5  # scales of the digits
FEWEST, MOST = 2, 10
HALF = 14  # pixels from the middle of a source image to its edge
REACH = 11  # pixels from the middle of a digit of scale 1 to the end of its strokes
TRIES = 40


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A digit in a scene: its middle in pixels from the top left, its scale and its class."""

    y: int
    x: int
    scale: float
    label: int


def compose(digits: Split, count: int, seed: int) -> tuple[Tensor, list[Placed]]:
    """Put that many digits of random sizes beside each other: a scene (1, 1, H, W), and where."""
    chance = np.random.default_rng(seed)
    scene = torch.full((1, 1, HEIGHT, WIDTH), BACKGROUND)
    placed: list[Placed] = []
    for y, x, scale in _places(count, chance):
        index = int(chance.integers(len(digits)))
        half = round(HALF * scale)
        drawn = rescale(digits.images[index : index + 1], scale, size=2 * half)
        part = scene[..., y - half : y + half, x - half : x + half]
        torch.maximum(part, drawn, out=part)
        placed.append(Placed(y=y, x=x, scale=scale, label=int(digits.labels[index])))
    return scene, placed


def _places(count: int, chance: np.random.Generator) -> list[tuple[int, int, float]]:
    """Draw a place (y, x) and a scale for each digit, the largest first.

    Of many places the one is taken that leaves most room to the digits that are there; a digit
    that would still touch another is drawn smaller.
    """
    if not FEWEST <= count <= MOST:
        raise ConfigError(f"a scene has from {FEWEST} to {MOST} digits, got {count}")
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


def suitable(contenders: Sequence[Contender]) -> list[Contender]:
    """The networks that can be asked at every place: all that have scale channels."""
    return [c for c in contenders if isinstance(c.network.net, ScaleChannels)]


@torch.no_grad()
def explore(contender: Contender, scene: Tensor) -> LocalMaps:
    """Ask the network at every place of a scene (1, 1, H, W), `STEP` pixels apart."""
    net = contender.network.net
    assert isinstance(net, ScaleChannels)
    return local_maps(net, scene, STEP)


def said_at(maps: LocalMaps, digit: Placed) -> tuple[int, float]:
    """The class and the scale that the network gives for the middle of a digit."""
    place = digit.y // STEP, digit.x // STEP
    return int(maps.logits[0, :, *place].argmax()), float(maps.scales[0, *place])
