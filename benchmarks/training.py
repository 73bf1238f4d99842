"""Measure training speed on a GPU: one step, concurrent runs, and a plain loop over the channels.

python benchmarks/training.py                 all parts; requires MNIST in the cache
python benchmarks/training.py --only swmax    one network
"""
# ruff: noqa: E402

import time

BEGUN = time.perf_counter()

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from channels import captured, fovavg, loop_over_channels, training_step
from timing import Step, duration

from foveate.execution.captured import Batch, CapturedStep
from foveate.execution.plan import prepare
from foveate.training.checkpoint import Progress, RunFolder
from foveate.training.config import TrainConfig
from foveate.training.loop import train_together
from foveate.training.optimiser import PiecewiseAdam
from foveate.training.presets import preset

# Of the paper's 20; fewer suffice to measure the rate.
EPOCHS = {"fovavg": 5, "fovmax": 5, "cnn": 5, "swmax": 2}


def one_step() -> dict[str, float]:
    """Measure a captured step of FovAvg, 17 channels, batch 128, and the plain loop."""
    images, labels = torch.randn(128, 1, 112, 112).cuda(), torch.randint(0, 10, (128,)).cuda()
    net, loop = fovavg("cuda"), fovavg("cuda")
    adam = PiecewiseAdam(net.parameters(), 3e-3, fused=True, capturable=True)
    with torch.no_grad():
        batch = Batch(prepare(net, images, "bf16"), labels)
    step = CapturedStep(net, adam, "bf16", batch=128, compiled=True)
    slow = training_step(lambda: loop_over_channels(loop, images), loop, labels)

    def milliseconds(work: Step) -> float:
        duration(work, 10, labels.device)  # a warm-up
        return 1e3 * duration(work, 100, labels.device)

    return {
        "step, ms": milliseconds(lambda: step(batch)),
        "obvious loop, ms": milliseconds(slow),
        "obvious loop captured, ms": milliseconds(captured(slow)),
    }


def whole_runs(name: str, batch: int, seeds: int = 3) -> dict[str, float]:
    """Measure concurrent runs: seconds per run, and to the first step."""
    epochs, first = EPOCHS[name], list[float]()

    def callback(config: TrainConfig, progress: Progress, steps: int) -> None:
        if not first:
            torch.cuda.synchronize()
            first.append(time.perf_counter() - BEGUN)

    config = replace(preset(f"{name}-tr2"), precision="bf16", epochs=epochs)
    config = replace(config, batch=batch or config.batch)
    with tempfile.TemporaryDirectory() as folder:
        runs = [(replace(config, seed=s), Path(folder) / str(s)) for s in range(seeds)]
        folders = train_together(runs, device="cuda", callback=callback)
        total = time.perf_counter() - BEGUN
        steady = [_per_epoch(f) for f in folders]
        validation = [f.metrics()[-1]["validation"] for f in folders]
    return {
        "epochs run": epochs,
        "20 epochs per run after the first epoch's rate, s": 20 * sum(steady) / seeds**2,
        "per run with set-up and compiling, s": total / seeds,
        "first step, cold, s": first[0],
        "validation accuracy, lowest": min(validation),
    }


def _per_epoch(folder: RunFolder) -> float:
    """Return the seconds per epoch, without the first epoch, which includes compilation."""
    seconds = [entry["seconds"] for entry in folder.metrics()]
    return (seconds[-1] - seconds[0]) / (len(seconds) - 1)


def cold(name: str) -> None:
    """Measure one part in a separate process with empty compiler caches."""
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": f"{empty}/triton"}
        command = [sys.executable, __file__, "--only", name]
        subprocess.run(command, env={**os.environ, **caches}, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["step", *EPOCHS], help="measure one part")
    parser.add_argument("--batch", type=int, default=0, help="of whole runs; as published if 0")
    only, batch = (given := parser.parse_args()).only, given.batch
    if only is None:
        for name in ["step", *EPOCHS]:
            cold(name)
    else:
        found = one_step() if only == "step" else whole_runs(only, batch)
        print(only, json.dumps({key: round(value, 3) for key, value in found.items()}), flush=True)
