"""Test whether runs are reproducible bit for bit.

python benchmarks/repeat.py --models fovmax-tr2 fovavg-tr2 --seeds 5 --epochs 20 --out repeat.json
python benchmarks/repeat.py --loose ...     without deterministic kernels, to measure their cost

Each run is trained twice: concurrently with the other seeds, then alone in another process. The
script compares the final weights.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train, train_together
from foveate.training.presets import preset
from foveate.training.tensors import read_tensors


def digest(folder: RunFolder) -> str:
    weights, _ = read_tensors(folder.weights)
    data = b"".join(weights[key].numpy().tobytes() for key in sorted(weights))
    return hashlib.sha256(data).hexdigest()[:16]


def run(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Train all runs alone or together; return digest, validation accuracy and time of each."""
    found: dict[str, dict[str, object]] = {}
    for name in options.models:
        config = replace(preset(name), precision="bf16", epochs=options.epochs)
        runs = [
            (replace(config, seed=seed), options.folder / f"{options.way}-{name}-{seed}")
            for seed in range(options.seeds)
        ]
        begun = time.perf_counter()
        how = {"device": options.device, "deterministic": not options.loose}
        if options.way == "alone":
            folders = [train(config, path, **how) for config, path in runs]
        else:
            folders = train_together(runs, **how)
        seconds = time.perf_counter() - begun
        for (config, _), folder in zip(runs, folders, strict=True):
            metrics = folder.metrics()
            later = (metrics[-1]["seconds"] - metrics[0]["seconds"]) / max(1, len(metrics) - 1)
            found[f"{name} seed {config.seed}"] = {
                "weights": digest(folder),
                "validation": metrics[-1]["validation"],
                "seconds of all": seconds,
                "seconds per epoch": later,
            }
    return found


def in_process(way: str, options: argparse.Namespace, folder: str) -> dict[str, dict[str, object]]:
    command = [sys.executable, __file__, "--way", way, "--folder", folder]
    command += ["--models", *options.models, "--device", options.device]
    command += ["--seeds", str(options.seeds), "--epochs", str(options.epochs)]
    command += ["--loose"] if options.loose else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=["fovmax-tr2", "fovavg-tr2"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loose", action="store_true", help="without deterministic kernels")
    parser.add_argument("--way", choices=["alone", "together"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run(options)))
        return
    with tempfile.TemporaryDirectory() as empty:
        folder = str(options.folder or empty)
        ways = {way: in_process(way, options, folder) for way in ("together", "alone")}
    equal = 0
    for key, one in ways["together"].items():
        other = ways["alone"][key]
        same = one["weights"] == other["weights"]
        equal += same
        print(key, "equal" if same else "DIFFERENT", one, other, flush=True)
    print(f"{equal} of {len(ways['together'])} equal")
    if options.out:
        options.out.write_text(json.dumps(ways, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
