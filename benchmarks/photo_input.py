"""Pictures per second that two worker processes read: foveate's and torchvision's, in turn.

Usage: python benchmarks/photo_input.py FOLDER [--pictures 600] [--passes 5]

FOLDER has a sub-folder of pictures per class. All three begin with JPEG files and hand over batches
of 32: `torchvision` is ImageFolder with RandomResizedCrop(224), a flip and normalisation; `resized`
is what a run on a GPU reads, whole pictures with a short side of 224, whose windows the GPU cuts;
`cut` is what a run on a CPU reads, seven windows of 56 to 448 pixels in patches of 160.
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
from foveate.training.photos import PhotoBatches, PhotoDataset, _pack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torchvision_ops  # type: ignore[import-not-found]

torchvision_ops.declare_missing()

BATCH, WORKERS = 32, 2
RECIPE = Recipe(name="photo", base=224)
WINDOWS = ScaleGrid.windows(smallest=56, largest=448, size=160, per_octave=2)


def theirs(folder: Path, count: int) -> Iterator[int]:
    """Read pictures as most training scripts do."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(RECIPE.mean, RECIPE.std)]
    found = ImageFolder(folder, v2.Compose(steps))
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count]
    loader = DataLoader(Subset(found, chosen.tolist()), BATCH, num_workers=WORKERS)
    return (len(labels) for _, labels in loader)


def resized(images: Shards, order: torch.Tensor) -> Iterator[int]:
    """Read, resize and flip pictures, without cutting them."""
    loader = DataLoader(
        PhotoDataset(images, "train", RECIPE),
        batch_sampler=[[(0, 0, i) for i in group.tolist()] for group in order.split(BATCH)],
        collate_fn=_pack,
        num_workers=WORKERS,
    )
    return (len(packed.labels) for packed, _ in loader)


def cut(images: Shards, order: torch.Tensor) -> Iterator[int]:
    """Read pictures as a run on a CPU does."""
    net = ScaleChannels(nn.Identity(), WINDOWS, 160, padding="border", antialias=True)
    cpu = torch.device("cpu")
    batches = PhotoBatches(
        images, "train", len(order), net, cpu, "float32", recipe=RECIPE, workers=WORKERS
    )
    yield from (len(batch.labels) for batch in batches(order, BATCH))
    batches.close()


def rate(counts: Callable[[], Iterator[int]]) -> float:
    """Return pictures per second, including the start of the workers."""
    begun = time.perf_counter()
    return sum(counts()) / (time.perf_counter() - begun)


def main() -> None:
    """Print the medians over all passes, and the ratios to torchvision's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=600)
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    images = Shards([PictureFolder(options.folder)])
    count = min(options.pictures, len(images.labels("train")))
    order = torch.randperm(len(images.labels("train")), generator=torch.Generator().manual_seed(0))
    ways = {
        "torchvision": partial(theirs, options.folder, count),
        "resized": partial(resized, images, order[:count]),
        "cut": partial(cut, images, order[:count]),
    }
    rates = {name: [rate(way)][:0] for name, way in ways.items()}  # a first pass fills the cache
    for _ in range(options.passes):
        for name, way in ways.items():
            rates[name].append(rate(way))
    for name, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates["torchvision"], strict=True)]
        print(f"{name:12} {median(found):7.1f} pictures/s, {median(ratios):.2f} times torchvision")


if __name__ == "__main__":
    main()
