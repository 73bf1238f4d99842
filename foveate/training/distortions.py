"""Random distortions in training: rotation, shear, aspect ratio and elastic displacement.

An image is distorted at the size in which the source stores it, before it is rescaled. All
distances are therefore proportional to the scale at which it is shown, and its values pass through
the same steps of the data set as those of any other image.
"""
# Shape letters: N images, C image channel, h w source pixels, H W pixels with the margin.

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MAX_STRENGTH = 4.0
ROTATION = math.pi / 12  # largest angle at strength 1, either way
SHEAR = 0.2
STRETCH = 0.12  # of the logarithm of the width; the height is divided by the same factor
ELASTIC = 0.03  # largest displacement of a knot along each axis, as a fraction of the longer side
KNOTS = 6  # per axis; the displacement between them is interpolated with cubic polynomials
MARGIN = 1 / 8  # of the longer side on each side, for what moves out of the image
STREAM = 17  # separates these draws from others with the same seed and epoch


@lru_cache(maxsize=32)  # one entry for each of several concurrent runs
def draw_distortions(count: int, seed: tuple[int, int], strength: float) -> tuple[Tensor, Tensor]:
    """Draw a distortion for each of `count` images, from the seed and the epoch.

    Returns linear maps (count, 2, 2), and displacements of the knots (count, 2, KNOTS, KNOTS) as
    fractions of the longer side. Both have x first, and map the distorted image to the original.
    Entry i depends only on the seed, the epoch and i.
    """
    random = np.random.default_rng([*seed, STREAM])
    drawn = strength * random.uniform(-1, 1, (count, 3 + 2 * KNOTS**2))
    angle, shear, stretch = drawn[:, :3].T * [[ROTATION], [SHEAR], [STRETCH]]
    cos, sin, wide = np.cos(angle), np.sin(angle), np.exp(stretch)
    rotate_and_shear = [[cos, cos * shear - sin], [sin, sin * shear + cos]]
    maps = np.array(rotate_and_shear).transpose(2, 0, 1) * np.stack((wide, 1 / wide), 1)[:, None]
    moves = ELASTIC * drawn[:, 3:].reshape(-1, 2, KNOTS, KNOTS)
    return torch.from_numpy(maps).float(), torch.from_numpy(moves).float()


def distort(images: Tensor, maps: Tensor, moves: Tensor) -> Tensor:
    """Distort images (N, C, h, w), values 0 to 255, about their centre.

    The result (N, C, H, W) has a margin on each side. Beyond the original image, values are 0.
    """
    (height, width), longer = images.shape[-2:], max(images.shape[-2:])
    margin = math.ceil(MARGIN * longer)
    offsets = [
        torch.arange(0.5 - side / 2 - margin, side / 2 + margin, device=images.device)
        for side in (height, width)
    ]
    y, x = torch.meshgrid(*offsets, indexing="ij")
    places = torch.stack((x, y), -1) @ maps.mT[:, None]
    shape = (height + 2 * margin, width + 2 * margin)
    elastic = F.interpolate(moves, shape, mode="bicubic", align_corners=False)
    places = places + longer * elastic.permute(0, 2, 3, 1)
    places = places / torch.tensor([width / 2, height / 2], device=images.device)
    moved = F.grid_sample(images.float(), places, mode="bicubic", align_corners=False)
    return moved.clamp_(0, 255)
