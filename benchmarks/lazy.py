"""Measure lazy evaluation of scale channels: speed, channels evaluated, and changed predictions.

python benchmarks/lazy.py mnist [--count 1000]                   four trained FovMax, 17 channels
python benchmarks/lazy.py mnist --photos FOLDER --weights FILE   also photographs, 8 windows
python benchmarks/lazy.py mnist --photos FOLDER --tuned FILE     also photographs, 17 windows

The first argument is the source of the digits; none measures photographs only. FOLDER has the
subfolders train, validation and test, each with one subfolder per class. The weights are those of
timm's tf_efficientnet_lite0, which is used without training, or those of a run of `foveate train
finetune --source folder:FOLDER --set model.pool=logsumexp --set learning_rate=3e-4 --epochs 8`: the
pool of the preset itself depends on all channels. The tolerance is calibrated on validation images,
for half of the disagreement that is allowed on the test images, which are used once.

Both evaluations go through `execution.plan.predict` on one thread, alternating batch by batch. The
ratio is that of their CPU times. The results are written to results/benchmarks/lazy.json.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate import ScaleChannels, ScaleGrid, create_model, load_source, wrap
from foveate.data.large_scale import rescale
from foveate.data.pictures import read_picture
from foveate.data.recipes import Recipe
from foveate.evaluation.calibration import calibrate
from foveate.execution.plan import predict
from foveate.models.lazy import evaluate
from foveate.training.config import build_net
from foveate.training.data import adapt_to_source
from foveate.training.presets import preset

ALLOWED = 0.001
BATCH = 250
NETWORKS = ("fovmax-mnist-tr1", "fovmax-mnist-tr2", "fovmax-mnist-tr4", "fovmax-mnist-tr14")
OUT = Path(__file__).parents[1] / "results" / "benchmarks" / "lazy.json"
SIZES = tuple(2 ** (k / 2) for k in range(-4, 3))
Batches = Callable[[str, float], Iterator[Tensor]]
"""Batches of images of a split at a scale."""


def timed(net: ScaleChannels, images: Tensor, tolerance: float | None) -> tuple[Any, float]:
    net.lazy = tolerance
    start = time.process_time()
    found = predict(net, images)
    return found, time.process_time() - start


def measure(
    name: str,
    net: ScaleChannels,
    batches: Batches,
    scales: tuple[float, ...],
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Calibrate a network on validation images, without a tolerance; measure it on test images."""
    if tolerance is None:
        shown = (images for scale in scales for images in batches("val", scale))
        tolerance = calibrate(net, shown, ALLOWED / 2)
    predict(net, next(batches("test", scales[0])))  # warm up
    times, used, changed = [0.0, 0.0], [], {}
    for scale in scales:
        differs = []
        for images in batches("test", scale):
            complete, seconds = timed(net, images, None)
            lazy, fewer = timed(net, images, tolerance)
            times = [times[0] + seconds, times[1] + fewer]
            taken = evaluate(complete.channels, lambda values: values, net.pool, tolerance)
            used.append((taken[..., 0] > -torch.inf).sum(1))
            differs.append(complete.logits.argmax(1) != lazy.logits.argmax(1))
        changed[f"{scale:.3f}"] = float(torch.cat(differs).double().mean())
    channels = torch.cat(used)
    return {
        "network": name,
        "test images": len(channels),
        "tolerance": round(tolerance, 3),
        "channels": len(net.scales),
        "mean channels evaluated": round(float(channels.double().mean()), 3),
        "ratio of CPU time": round(times[0] / times[1], 3),
        "disagreement": round(sum(changed.values()) / len(changed), 6),
        "disagreement by scale": changed,
    }


def digits(source: str, counts: dict[str, int]) -> Batches:
    data = load_source(source)

    def batches(split: str, scale: float) -> Iterator[Tensor]:
        for images in getattr(data, split).images[: counts[split]].split(BATCH):
            yield rescale(images, scale)

    return batches


def photographs(folder: Path, recipe: Recipe, count: int) -> Batches:
    def batches(split: str, scale: float) -> Iterator[Tensor]:
        place = folder / {"val": "validation"}.get(split, split)
        paths = sorted(path for path in place.rglob("*") if path.is_file())
        order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))[:count]
        transform = recipe.at_scale(scale).transform()
        for index in order.tolist():
            pixels = torch.tensor(read_picture(paths[index], "black"))
            yield transform(pixels.permute(2, 0, 1)).unsqueeze(0)

    return batches


def fine_tuned(folder: Path, weights: Path) -> tuple[ScaleChannels, Recipe]:
    """Return a network of finetune, pooled by logsumexp, in 17 windows of 56 to 896 pixels."""
    _declare_torchvision()
    from safetensors.torch import load_file

    changes = {"source": f"folder:{folder}", "precision": "float32", "model.pool": "logsumexp"}
    config = adapt_to_source(preset("finetune").changed(changes), load_source, ())
    net = build_net(config)
    assert isinstance(net, ScaleChannels) and config.recipe is not None
    net.load_state_dict(load_file(weights))
    net.scales = ScaleGrid.windows(56, 896, net.size, per_octave=4)
    return net.eval(), config.recipe


def zero_shot(weights: Path) -> tuple[ScaleChannels, Recipe]:
    """Return EfficientNet-Lite0 in eight windows of 40 to 448 pixels, and its preprocessing."""
    _declare_torchvision()
    import timm
    from safetensors.torch import load_file

    backbone = timm.create_model("tf_efficientnet_lite0")
    backbone.load_state_dict(load_file(weights))
    config: Any = backbone.pretrained_cfg
    recipe = Recipe(name="photo", mean=tuple(config["mean"]), std=tuple(config["std"]))
    return wrap(backbone, 40, 448, size=160, pool="logsumexp").eval(), recipe


def _declare_torchvision() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import torchvision_ops  # type: ignore[import-not-found]

    torchvision_ops.declare_missing()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("source", help="source of the digits, such as mnist, or none")
    parser.add_argument("--count", type=int, default=1000, help="test digits per scale")
    parser.add_argument("--calibration", type=int, default=2000, help="the same for calibration")
    parser.add_argument("--tolerance", type=float, help="instead of calibration")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--weights", type=Path, help="weights of tf_efficientnet_lite0")
    parser.add_argument("--tuned", type=Path, help="weights of finetune with logsumexp")
    parser.add_argument("--pictures", type=int, default=100, help="photographs per split")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    counts = {"val": options.calibration, "test": options.count}
    scales = tuple(ScaleGrid(0.5, 8, per_octave=4))
    for name in NETWORKS if options.source != "none" else ():
        net = create_model(name, pretrained=True)
        assert isinstance(net, ScaleChannels)
        shown = digits(options.source, counts)
        found.append(measure(name, net, shown, scales, options.tolerance))
        print_row(found[-1])
    made = []
    if options.weights:
        made.append(("EfficientNet-Lite0, zero-shot", *zero_shot(options.weights)))
    if options.tuned:
        made.append(("EfficientNet-Lite0, fine-tuned", *fine_tuned(options.photos, options.tuned)))
    for name, net, recipe in made:
        shown = photographs(options.photos, recipe, options.pictures)
        found.append(measure(name, net, shown, SIZES, options.tolerance))
        print_row(found[-1])
    about = {
        "command": "python benchmarks/lazy.py",
        "hardware": f"1 thread of {platform.processor() or platform.machine()}, "
        f"torch {torch.__version__}",
        "date": date.today().isoformat(),
        "digits per scale": counts if options.tolerance is None else {"test": options.count},
        "photographs per split": options.pictures if options.photos else 0,
    }
    text = json.dumps([{**about, "networks": found}], indent=1)  # the list that table.py reads
    options.out.write_text(text + "\n", encoding="utf-8")


def print_row(row: dict[str, Any]) -> None:
    worst = max(row["disagreement by scale"].values())
    print(
        f"{row['network']:<30} {row['test images']:>6} images  tolerance {row['tolerance']:6.2f}  "
        f"{row['mean channels evaluated']:5.2f} of {row['channels']} channels  "
        f"{row['ratio of CPU time']:5.2f} times  disagreement {100 * row['disagreement']:.3f} %, "
        f"at most {100 * worst:.2f} % at one scale",
        flush=True,
    )


if __name__ == "__main__":
    main()
