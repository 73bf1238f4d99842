"""Compare wrapped backbones with a loop over scales on a CPU, as ratios of their times.

Usage: python benchmarks/backbones.py [--threads 2] [--batches 1 2 4 8 16 32] [--passes 5]
           [--out results/benchmarks/backbones.json]

The loop crops the window of each scale, resizes it with `F.interpolate`, runs the backbone, and
pools the stacked logits. Images have 448 x 448 x 3 pixels; seven windows of 56 to 448 pixels become
patches of 160. Both ways alternate, and a ratio is the median over passes of the loop's time
divided by the time of `ScaleChannels`: above 1, the wrapped backbone is faster. Training steps
(forward and backward) use batches of 4 and weights in `channels_last`, and keep freed memory as
`foveate train` does.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate import ScaleChannels, ScaleGrid
from foveate.provenance import commit, hardware
from foveate.training.state import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torchvision_ops  # type: ignore[import-not-found]

torchvision_ops.declare_missing()

BACKBONES = ("tf_efficientnet_lite0", "resnet18", "vit_tiny_patch16_224")
SIZED = ("vit_tiny_patch16_224",)  # built for one size of images
SIZE = 160
WINDOWS = ScaleGrid.windows(smallest=56, largest=448, size=SIZE, per_octave=2)
TRAINING_BATCH = 4


def build(name: str, side: int = SIZE) -> nn.Module:
    """Return a backbone of timm with random weights, for images of `side` pixels."""
    import timm

    arguments: dict[str, Any] = {"img_size": side} if name in SIZED else {}
    return timm.create_model(name, num_classes=10, **arguments)


def wrap_backbone(backbone: nn.Module, antialias: bool = True) -> ScaleChannels:
    return ScaleChannels(backbone, WINDOWS, SIZE, antialias=antialias)


def loop(net: ScaleChannels, images: Tensor) -> Tensor:
    """Compute the logits one scale after another."""
    logits, whole = [], images.shape[-1]
    for scale in net.scales:
        window = round(SIZE * scale)
        begin = (whole - window) // 2
        crop = images[..., begin : begin + window, begin : begin + window]
        patches = F.interpolate(crop, (SIZE, SIZE), mode="bilinear", antialias=net.antialias)
        logits.append(net.backbone(patches))
    return torch.stack(logits, 1).amax(1)


def ratio(one: Callable[[], object], other: Callable[[], object], passes: int) -> float:
    """Return the median ratio of the times of two functions, which alternate."""
    ratios = []
    for number in range(passes + 1):
        times = []
        for function in (one, other):
            begun = time.perf_counter()
            function()
            times.append(time.perf_counter() - begun)
        if number:  # the first pass is a warm-up
            ratios.append(times[0] / times[1])
    return median(ratios)


def evaluation_ratio(backbone: nn.Module, batch: int, antialias: bool, passes: int) -> float:
    """Compare evaluation without gradients."""
    net = wrap_backbone(backbone, antialias).eval()
    images = torch.randn(batch, 3, 448, 448)
    with torch.no_grad():
        return ratio(lambda: loop(net, images), lambda: net(images), passes)


def training_ratio(backbone: nn.Module, passes: int) -> float:
    """Compare forward and backward pass in training mode."""
    net = wrap_backbone(backbone).train()
    images = torch.randn(TRAINING_BATCH, 3, 448, 448)

    def step(forward: Callable[[], Tensor]) -> None:
        net.zero_grad()
        forward().logsumexp(1).sum().backward()

    return ratio(lambda: step(lambda: loop(net, images)), lambda: step(lambda: net(images)), passes)


def show(name: str, case: str, found: float) -> dict[str, float]:
    """Print one ratio, and return it by its case."""
    print(f"{name}, {case}: {found:.2f} times as fast as the loop", flush=True)
    return {case: found}


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the ratios by backbone and case."""
    found: dict[str, dict[str, float]] = {}
    for name in BACKBONES:
        backbone, found[name] = build(name), {}
        for antialias in (True, False):
            for batch in options.batches:
                speed = evaluation_ratio(backbone, batch, antialias, options.passes)
                found[name] |= show(name, f"batch {batch}, antialias={antialias}", speed)
    keep_freed_memory()  # last, because it affects all later allocations
    for name in BACKBONES:
        backbone = build(name)
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        speed = training_ratio(backbone, options.passes)
        found[name] |= show(name, f"training step, batch {TRAINING_BATCH}", speed)
    return found


def main() -> None:
    """Print the ratios and save them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--passes", type=int, default=5, help="timed passes (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/backbones.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    about = {"commit": commit(), "hardware": hardware(torch.device("cpu"))}
    table = {"about": about, "ratios": measure(options)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
