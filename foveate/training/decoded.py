"""Decoded photographs in memory that a run and its worker processes share.

Small photographs take 0.45 ms of one core to read, and 0.12 ms from here.
"""

import math
import mmap
import sys
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foveate.checks import free_memory
from foveate.data.shards import Shards
from foveate.data.splits import SplitName

MOST_BYTES = 1 << 30  # per split; a split of larger images is decoded again in each epoch
SHARE = 1 / 8  # of the free memory
SAMPLED = 100  # images whose headers are read to estimate the sizes of all


class DecodedImages:
    """Images (C, H, W) by index, written by any process that was forked from this one.

    Pages are allocated when an image is written. Containers have too little space for a file of
    shared memory.
    """

    def __init__(self, count: int, size: int) -> None:
        self.places = np.frombuffer(mmap.mmap(-1, 32 * count), np.int64).reshape(count, 4)
        self.pixels = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.used = get_context("fork").Value("q", 0)

    def get(self, index: int) -> NDArray[Any] | None:
        """Return an image, or None if it has not been added."""
        with self.used.get_lock():
            begin, *shape = self.places[index].tolist()
        found = self.pixels[begin : begin + math.prod(shape)]
        return found.reshape(shape).transpose(2, 0, 1) if len(found) else None

    def add(self, index: int, image: NDArray[Any]) -> None:
        """Add an image if there is space for it."""
        with self.used.get_lock():
            begin = self.used.value
            if begin + image.size > len(self.pixels):
                return
            self.used.value += image.size
        pixels = image.transpose(1, 2, 0)  # the layout in which images are decoded
        self.pixels[begin : begin + image.size].reshape(pixels.shape)[:] = pixels
        with self.used.get_lock():  # after the pixels, also for other processes
            self.places[index] = begin, *pixels.shape


def memory_for(images: Shards, split: SplitName) -> DecodedImages | None:
    """Return memory for the images of a split, or None if they are large or cannot be shared."""
    sizes = images.sizes(split, SAMPLED)
    limit = min(MOST_BYTES, int(SHARE * min(free_memory(), 1e15)))
    count = len(images.labels(split))
    needed = 3 * count * sum(height * width for height, width in sizes) / max(1, len(sizes))
    fits = 0 < needed <= limit and sys.platform == "linux"
    return DecodedImages(count, limit) if fits else None
