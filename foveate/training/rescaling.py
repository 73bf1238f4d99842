"""Rescaling of training images to their training scales, with random augmentation."""
# Shape letters: N images, C image channel, h w source pixels.

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from foveate.data.large_scale import send
from foveate.data.mirrored import crop_and_flip, draw_augmentation, draw_sizes
from foveate.data.recipes import NO_SIZES, Recipe
from foveate.data.splits import SplitName
from foveate.data.store import draw_scales
from foveate.scales import parse_scales
from foveate.training.config import TrainConfig
from foveate.training.distortions import Distortions, distort, draw_distortions

AugmentationSeed = tuple[int, int]
"""The seed of a run and the epoch, on which random augmentation depends."""
RescaleFunction = Callable[[Tensor, Tensor, AugmentationSeed], Tensor]
"""Rescales images (N, C, h, w), given their indices (N,), to their training scales."""


def rescaling(config: TrainConfig, scales: Tensor, margin: int = 0) -> RescaleFunction:
    """Return a function that rescales each image to its training scale.

    The frame is `margin` pixels larger on each side than `config.size`.
    """
    same, recipe = bool((scales == scales[0]).all()), config.recipe or Recipe()
    size = config.size + 2 * margin

    def rescale_images(images: Tensor, indices: Tensor, seed: AugmentationSeed) -> Tensor:
        factors = float(scales[0]) if same else scales[indices]
        return recipe.rescale(images, factors, size=size, border=config.border)

    return rescale_images


def augmented_rescaling(config: TrainConfig, scales: Tensor) -> RescaleFunction:
    """Return a function that augments images with the recipe `mirrored` and rescales them."""
    assert config.recipe is not None
    flip, shift, sizes = config.recipe.flip, int(config.recipe.shift), config.recipe.sizes
    enlarge = rescaling(config, scales, margin=shift)

    def rescale_images(images: Tensor, indices: Tensor, seed: AugmentationSeed) -> Tensor:
        drawn = draw_augmentation(len(scales), *seed, flip, shift)
        flips, offsets = (send(values[indices], images.device) for values in drawn)
        if sizes == NO_SIZES:
            shown = enlarge(images, indices, seed)
        else:
            factors = scales * draw_sizes(len(scales), *seed, sizes)
            shown = rescaling(config, factors, margin=shift)(images, indices, seed)
        return crop_and_flip(shown, flips, offsets, config.size)

    return rescale_images


def distorted_rescaling(config: TrainConfig, scales: Tensor) -> RescaleFunction:
    """Return a function that distorts each image, and rescales it to its training scale."""
    enlarge, count = rescaling(config, scales), len(scales)

    def rescale_images(images: Tensor, indices: Tensor, seed: AugmentationSeed) -> Tensor:
        drawn = draw_distortions(count, seed, config.distortions)
        chosen = Distortions(*(send(values[indices], images.device) for values in drawn))
        return enlarge(distort(images, chosen), indices, seed)

    return rescale_images


def draw_training_scales(config: TrainConfig, count: int, split: SplitName) -> Tensor:
    """Draw the scale of each image; the result does not depend on the training seed."""
    ranges = parse_scales(config.scales)
    drawn = torch.stack([draw_scales(r, count, config.data_seed, split) for r in ranges])
    if len(ranges) == 1:
        return drawn[0]
    choice = np.random.default_rng([config.data_seed, 9]).integers(len(ranges), size=count)
    return drawn[torch.from_numpy(choice), torch.arange(count)]
