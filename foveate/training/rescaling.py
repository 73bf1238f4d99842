"""Rescaling of training images to their training scales, with random augmentation."""
# Shape letters: N images, C image channel, h w source pixels.

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from foveate.data.large_scale import Weights, apply_weights, rescaling_weights, send
from foveate.data.mirrored import crop_and_flip, draw_augmentation, draw_sizes
from foveate.data.recipes import NO_SIZES, Recipe
from foveate.data.splits import SplitName
from foveate.data.store import draw_scales
from foveate.scales import parse_scales
from foveate.training.config import NO_ZOOMS, TrainConfig, is_mirrored
from foveate.training.distortions import Distortions, distort, draw_distortions
from foveate.training.zooms import Zooms

AugmentationSeed = tuple[int, int]
"""The seed of a run and the epoch, on which random augmentation depends."""
RescaleFunction = Callable[[Tensor, Tensor, AugmentationSeed], Tensor]
"""Rescales images (N, C, h, w), given their indices (N,), to their training scales."""


def rescaling(config: TrainConfig, scales: Tensor, training: bool = True) -> RescaleFunction:
    """Return a function that rescales each image to its scale, in `training` with augmentation."""
    recipe, count = config.recipe or Recipe(), len(scales)
    distorted, mirrored = training and config.distortions > 0, training and is_augmented(config)
    zooms = find_zooms(config) if training else None
    shown_size = config.size + (2 * zooms.margin if zooms else 0)
    shift = int(recipe.shift) if mirrored else 0
    repeated = training and is_random(config) and recipe.name == "mnist-large-scale"

    @cache  # 6 MB for 100 images; computing them takes a third of the time of an epoch
    def find_weights(shape: torch.Size, device: torch.device) -> Weights:
        return rescaling_weights(shape, device, scales, config.size, config.border)

    def rescale_images(images: Tensor, indices: Tensor, seed: AugmentationSeed) -> Tensor:
        factors = scales
        if distorted:
            drawn = draw_distortions(count, seed, config.distortions)
            chosen = (send(values[indices], images.device) for values in drawn)
            images = distort(images, Distortions(*chosen))
        if mirrored and recipe.sizes != NO_SIZES:
            factors = scales * draw_sizes(count, *seed, recipe.sizes)
        same = bool((factors == factors[0]).all())
        if repeated and not same and torch.equal(indices, torch.arange(count)):
            return apply_weights(images, find_weights(images.shape[2:], images.device))
        wanted = float(factors[0]) if same else factors[indices]
        size = shown_size + 2 * shift
        shown = recipe.rescale(images, wanted, size=size, border=config.border)
        if not mirrored:
            return shown
        augmentation = draw_augmentation(count, *seed, recipe.flip, shift)
        flips, offsets = (send(values[indices], images.device) for values in augmentation)
        return crop_and_flip(shown, flips, offsets, shown_size)

    return rescale_images


def find_zooms(config: TrainConfig) -> Zooms | None:
    """Return the zooms of a run, or None if they are off."""
    if config.zooms == NO_ZOOMS:
        return None
    if not is_mirrored(config):
        return Zooms(limits=config.zooms)
    margin = max(0, math.ceil(config.size * (1 / config.zooms[0] - 1) / 2))
    return Zooms(limits=config.zooms, margin=margin, stretch=False)


def is_augmented(config: TrainConfig) -> bool:
    """Whether the recipe of a run is `mirrored`, with random flips, shifts or sizes in training."""
    if config.recipe is None or not is_mirrored(config):
        return False
    return config.recipe.flip or config.recipe.shift > 0 or config.recipe.sizes != NO_SIZES


def is_random(config: TrainConfig) -> bool:
    """Whether a run draws new training images for each epoch, from its seed."""
    return config.zooms != NO_ZOOMS or config.distortions > 0 or is_augmented(config)


def draw_training_scales(config: TrainConfig, count: int, split: SplitName) -> Tensor:
    """Draw the scale of each image; the result does not depend on the training seed."""
    ranges = parse_scales(config.scales)
    drawn = torch.stack([draw_scales(r, count, config.data_seed, split) for r in ranges])
    if len(ranges) == 1:
        return drawn[0]
    choice = np.random.default_rng([config.data_seed, 9]).integers(len(ranges), size=count)
    return drawn[torch.from_numpy(choice), torch.arange(count)]
