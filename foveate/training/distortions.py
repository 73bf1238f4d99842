"""Random distortions in training: rotation, shear, aspect ratio, displacement, stroke width.

Images are distorted at their original resolution and rescaled afterwards, so the displacements are
proportional to the training scale.
"""
# Shape letters: N images, C image channel, h w source pixels, H W pixels with the margin.

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MAX_STRENGTH = 4.0
ROTATION = math.pi / 12  # largest angle at strength 1, either way
SHEAR = 0.2
STRETCH = 0.12  # of the logarithm of the width; the height is divided by the same factor
ELASTIC = 0.03  # largest displacement of a knot along each axis, as a fraction of the longer side
WIDTH = 0.4  # largest weight of an image whose strokes are one pixel wider or narrower on each side
KNOTS = 6  # per axis; the displacement between them is interpolated with cubic polynomials
MARGIN = 1 / 8  # added on each side, as a fraction of the longer side, for displaced pixels
STREAM = 17  # separates these draws from others with the same seed and epoch


class Distortions(NamedTuple):
    """One distortion for each of N images; places and displacements have x first."""

    maps: Tensor
    """Linear maps (N, 2, 2) from a place in the distorted image to the original."""
    moves: Tensor
    """Displacements (N, 2, KNOTS, KNOTS) of that place, as fractions of the longer side."""
    widths: Tensor
    """Changes of the width of strokes (N,), from -1 to 1 pixel on each side."""


@lru_cache(maxsize=4)  # all chunks of an epoch; 15 MB an entry for 50,000 images
def draw_distortions(count: int, seed: tuple[int, int], strength: float) -> Distortions:
    """Draw a distortion for each image; entry i depends only on strength, seed, epoch and i."""
    random = np.random.default_rng([*seed, STREAM])
    drawn = strength * random.uniform(-1, 1, (count, 4 + 2 * KNOTS**2))
    angle, shear, stretch, width = drawn[:, :4].T * [[ROTATION], [SHEAR], [STRETCH], [WIDTH]]
    cos, sin, wide = np.cos(angle), np.sin(angle), np.exp(stretch)
    rotate_and_shear = [[cos, cos * shear - sin], [sin, sin * shear + cos]]
    maps = np.array(rotate_and_shear).transpose(2, 0, 1) * np.stack((wide, 1 / wide), 1)[:, None]
    moves = ELASTIC * drawn[:, 4:].reshape(-1, 2, KNOTS, KNOTS)
    values = (maps, moves, width.clip(-1, 1))
    return Distortions(*(torch.from_numpy(part).float() for part in values))


def distort(images: Tensor, drawn: Distortions) -> Tensor:
    """Distort images (N, C, h, w), values 0 to 255, about their centre.

    The result (N, C, H, W) has a margin of values 0 on each side.
    """
    (height, width), longer = images.shape[-2:], max(images.shape[-2:])
    margin = math.ceil(MARGIN * longer)
    offsets = [
        torch.arange(0.5 - side / 2 - margin, side / 2 + margin, device=images.device)
        for side in (height, width)
    ]
    y, x = torch.meshgrid(*offsets, indexing="ij")
    places = torch.stack((x, y), -1) @ drawn.maps.mT[:, None]
    shape = (height + 2 * margin, width + 2 * margin)
    elastic = F.interpolate(drawn.moves, shape, mode="bicubic", align_corners=False)
    places = places + longer * elastic.permute(0, 2, 3, 1)
    places = places / torch.tensor([width / 2, height / 2], device=images.device)
    moved = F.grid_sample(images.float(), places, mode="bicubic", align_corners=False)
    return change_widths(moved.clamp_(0, 255), drawn.widths)


def change_widths(images: Tensor, widths: Tensor) -> Tensor:
    """Widen or narrow the bright strokes of images (N, C, H, W) by -1 to 1 pixel on each side.

    Fractions (N,) mix an image with its largest or smallest values in squares of 3 pixels.
    """
    weight = widths.view(-1, 1, 1, 1)
    wider, narrower = F.max_pool2d(images, 3, 1, 1), -F.max_pool2d(-images, 3, 1, 1)
    return images.lerp(torch.where(weight > 0, wider, narrower), weight.abs())
