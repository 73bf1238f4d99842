"""Compare data loading of foveate and torchvision, in images per second with two workers.

Usage: python benchmarks/photo_input.py FOLDER [--pictures 600] [--passes 5]
       python benchmarks/photo_input.py FOLDER --training

FOLDER has one subfolder of images per class. All three pipelines read JPEG files and return
batches of 32:

- `torchvision`: ImageFolder with RandomResizedCrop(224), a horizontal flip and normalisation.
- `resized`: the input of a run on a GPU. Images are resized to a short side of 224; the GPU cuts
  their windows.
- `cut`: the input of a run on a CPU. Seven windows of 56 to 448 pixels are cut into patches of 160.

A pass is an epoch of a run: the workers of all pipelines exist already, and the C library keeps
freed memory, as in `foveate train`. CPU time is that of all processes.

With --training, the time that training on a GPU waits for input: steps of EfficientNet-Lite0 with
random weights in seven channels, over epochs of all images, and on one batch that stays in memory.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing import active_children
from pathlib import Path
from statistics import median

import torch
from backbones import SIZE, WINDOWS
from torch import nn
from torch.utils.data import DataLoader, Subset

from foveate import ScaleChannels
from foveate.data.pictures import PictureFolder
from foveate.data.recipes import Recipe
from foveate.data.shards import Shards
from foveate.execution.captured import Batch, make_step
from foveate.training.photo_reader import PhotoDataset, PhotoReader
from foveate.training.photos import PhotoBatches, default_workers
from foveate.training.state import keep_freed_memory

BATCH, WORKERS = 32, 2
RECIPE = Recipe(name="photo", base=224)
CPU = torch.device("cpu")
Pass = Callable[[], int]
"""Reads every image once and returns their number."""


def torchvision_pass(folder: Path, count: int) -> Pass:
    """Read images with a typical torchvision pipeline."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(RECIPE.mean, RECIPE.std)]
    found = ImageFolder(folder, v2.Compose(steps))
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count]
    subset = Subset(found, chosen.tolist())
    loader = DataLoader(subset, BATCH, num_workers=WORKERS, persistent_workers=True)
    return lambda: sum(len(labels) for _, labels in loader)


def resized_pass(images: Shards, order: torch.Tensor) -> Pass:
    """Read, resize and flip images, without cutting patches."""
    reader = PhotoReader(PhotoDataset(images, "train", RECIPE), WORKERS, pinned=False)
    groups = [group.tolist() for group in order.split(BATCH)]
    return lambda: sum(len(packed.labels) for packed, _ in reader.read(groups, (0, 0)))


def patch_pass(images: Shards, order: torch.Tensor) -> Pass:
    """Read images as patches, as a run on a CPU does."""
    net = ScaleChannels(nn.Identity(), WINDOWS, SIZE, padding="border", antialias=True)
    batches = PhotoBatches(
        images, "train", len(order), net, CPU, "float32", recipe=RECIPE, workers=WORKERS
    )
    return lambda: sum(len(batch.labels) for batch in batches(order, BATCH))


def cpu_time() -> float:
    """Return the seconds of CPU time of this process and its workers (Linux)."""
    total = time.process_time()
    for worker in active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(read: Pass) -> tuple[float, float]:
    """Return images per second, and milliseconds of CPU time per image."""
    begun, used = time.perf_counter(), cpu_time()
    count = read()
    return count / (time.perf_counter() - begun), 1000 * (cpu_time() - used) / count


def measure_waiting(images: Shards, epochs: int) -> None:
    """Print the time per training step on a GPU with all images, and with one batch in memory."""
    import timm

    device = torch.device("cuda")
    backbone = timm.create_model("tf_efficientnet_lite0", num_classes=10)
    net = ScaleChannels(backbone, WINDOWS, SIZE, "avg", padding="border", antialias=True)
    net.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(net.parameters(), 1e-4, fused=True, capturable=True)
    count = len(images.labels("train")) // BATCH * BATCH
    batches = PhotoBatches(
        images, "train", count, net, device, "bf16", recipe=RECIPE, workers=default_workers()
    )
    step = make_step(net, optimiser, "bf16", device, batch=BATCH, compiled=False)

    def time_steps(source: Iterable[Batch]) -> float:
        torch.cuda.synchronize()
        begun, steps = time.perf_counter(), 0
        for batch in source:
            step(batch)
            steps += 1
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begun) / steps

    held = next(iter(batches(torch.arange(BATCH), BATCH)))
    time_steps(batches(torch.arange(count), BATCH))  # untimed: captures the step, starts workers
    for _ in range(epochs):
        streamed = time_steps(batches(torch.randperm(count), BATCH))
        memory = time_steps([held] * (count // BATCH))
        print(
            f"{streamed:.2f} ms per step with photographs, {memory:.2f} with one batch in memory: "
            f"{100 * (1 - memory / streamed):.1f} % of the time is spent waiting"
        )
    batches.close()


def main() -> None:
    """Print the median rate of each pipeline and its ratio to torchvision."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with one subfolder of images per class")
    parser.add_argument("--pictures", type=int, default=600, help="images per pass (default: 600)")
    parser.add_argument("--passes", type=int, default=5, help="timed passes (default: 5)")
    parser.add_argument("--training", action="store_true", help="measure training on a GPU")
    options = parser.parse_args()
    keep_freed_memory()
    images = Shards([PictureFolder(options.folder)])
    if options.training:
        return measure_waiting(images, options.passes)
    count = min(options.pictures, len(images.labels("train")))
    order = torch.randperm(len(images.labels("train")), generator=torch.Generator().manual_seed(0))
    passes = {
        "torchvision": torchvision_pass(options.folder, count),
        "resized": resized_pass(images, order[:count]),
        "cut": patch_pass(images, order[:count]),
    }
    for read in passes.values():
        read()  # untimed: starts the workers and fills the file cache
    found = [{name: measure(read) for name, read in passes.items()} for _ in range(options.passes)]
    for name in passes:
        rate, cpu = (median(one[name][i] for one in found) for i in range(2))
        faster = median(one[name][0] / one["torchvision"][0] for one in found)
        more = median(one["torchvision"][1] / one[name][1] for one in found)
        print(
            f"{name:12} {rate:7.1f} images/s, {faster:.2f} times torchvision; "
            f"{cpu:.2f} ms of CPU time per image, torchvision {more:.2f} times as much"
        )


if __name__ == "__main__":
    main()
