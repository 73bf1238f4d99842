"""The speed of a network in evaluation."""

import time

import torch
from torch import nn

from foveate.evaluation.curve import eval_mode
from foveate.execution.plan import predict
from foveate.training.config import TrainConfig
from foveate.training.data import is_photo

BATCH = {"cuda": 256, "cpu": 32}  # images
LEAST = 0.1  # seconds


def images_per_second(net: nn.Module, config: TrainConfig) -> float:
    """Measure how many images a network classifies per second, on its device.

    The images are already in memory at their final size, so the time to read and rescale them does
    not count. A first batch, which compiles kernels, does not count either.

    Args:
        net: Network of a run.
        config: Configuration of the run, for the size and the number of channels of an image.

    Returns:
        Images per second.
    """
    device = next(net.parameters()).device
    side = config.recipe.base if config.recipe and is_photo(config) else config.size
    images = torch.zeros(BATCH[device.type], config.model.channels, side, side, device=device)
    with eval_mode(net):
        predict(net, images, config.precision).logits.cpu()  # the copy waits for the GPU
        done, begun = 0, time.perf_counter()
        while (taken := time.perf_counter() - begun) < LEAST or not done:
            predict(net, images, config.precision).logits.cpu()
            done += len(images)
    return done / taken
