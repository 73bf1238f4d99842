"""Compare data loading of foveate and torchvision, in images per second with two workers.

Usage: python benchmarks/photo_input.py FOLDER [--pictures 600] [--passes 5]

FOLDER has one subfolder of images per class. All three pipelines read JPEG files and return
batches of 32:

- `torchvision`: ImageFolder with RandomResizedCrop(224), a horizontal flip and normalisation.
- `resized`: the input of a run on a GPU. Images are resized to a short side of 224; the GPU cuts
  their windows.
- `cut`: the input of a run on a CPU. Seven windows of 56 to 448 pixels are cut into patches of 160.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from foveate import ScaleChannels, ScaleGrid
from foveate.data.pictures import PictureFolder
from foveate.data.recipes import Recipe
from foveate.data.shards import Shards
from foveate.training.photo_reader import PhotoDataset, pack
from foveate.training.photos import PhotoBatches

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torchvision_ops  # type: ignore[import-not-found]

torchvision_ops.declare_missing()

BATCH, WORKERS = 32, 2
RECIPE = Recipe(name="photo", base=224)
WINDOWS = ScaleGrid.windows(smallest=56, largest=448, size=160, per_octave=2)


def torchvision_batches(folder: Path, count: int) -> Iterator[int]:
    """Count the images of the batches of a typical torchvision pipeline."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(RECIPE.mean, RECIPE.std)]
    found = ImageFolder(folder, v2.Compose(steps))
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count]
    loader = DataLoader(Subset(found, chosen.tolist()), BATCH, num_workers=WORKERS)
    return (len(labels) for _, labels in loader)


def resized_batches(images: Shards, order: torch.Tensor) -> Iterator[int]:
    """Count the images of batches that are read, resized and flipped, but not cut into patches."""
    loader = DataLoader(
        PhotoDataset(images, "train", RECIPE),
        batch_sampler=[[(0, 0, i) for i in group.tolist()] for group in order.split(BATCH)],
        collate_fn=pack,
        num_workers=WORKERS,
    )
    return (len(packed.labels) for packed, _ in loader)


def patch_batches(images: Shards, order: torch.Tensor) -> Iterator[int]:
    """Count the images of batches of patches, as a run on a CPU reads them."""
    net = ScaleChannels(nn.Identity(), WINDOWS, 160, padding="border", antialias=True)
    cpu = torch.device("cpu")
    batches = PhotoBatches(
        images, "train", len(order), net, cpu, "float32", recipe=RECIPE, workers=WORKERS
    )
    yield from (len(batch.labels) for batch in batches(order, BATCH))
    batches.close()


def rate(counts: Callable[[], Iterator[int]]) -> float:
    """Return images per second, including the start of the workers."""
    begun = time.perf_counter()
    return sum(counts()) / (time.perf_counter() - begun)


def main() -> None:
    """Print the median rate of each pipeline and its ratio to torchvision."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with one subfolder of images per class")
    parser.add_argument("--pictures", type=int, default=600, help="images per pass (default: 600)")
    parser.add_argument("--passes", type=int, default=5, help="timed passes (default: 5)")
    options = parser.parse_args()
    images = Shards([PictureFolder(options.folder)])
    count = min(options.pictures, len(images.labels("train")))
    order = torch.randperm(len(images.labels("train")), generator=torch.Generator().manual_seed(0))
    ways = {
        "torchvision": partial(torchvision_batches, options.folder, count),
        "resized": partial(resized_batches, images, order[:count]),
        "cut": partial(patch_batches, images, order[:count]),
    }
    rates = {name: [rate(way)][:0] for name, way in ways.items()}  # untimed: fills the file cache
    for _ in range(options.passes):
        for name, way in ways.items():
            rates[name].append(rate(way))
    for name, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates["torchvision"], strict=True)]
        print(f"{name:12} {median(found):7.1f} images/s, {median(ratios):.2f} times torchvision")


if __name__ == "__main__":
    main()
