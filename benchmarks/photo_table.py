"""Measure accuracy over object size on photographs: scale channels against the whole frame.

python benchmarks/photo_table.py run FOLDER --weights FILE --out DIR   train and test, or resume
python benchmarks/photo_table.py run cifar10 --suite cifar --out DIR   the same on CIFAR-10
python benchmarks/photo_table.py collect DIR [--suite cifar] > FILE.csv
                            one line per network, seed and scale, for tools/photo_results.py

The script calls only `foveate train` and `foveate evaluate`. FOLDER has the subfolders train,
validation and test, each with one subfolder per class. FILE contains the weights of timm's
tf_efficientnet_lite0 (.safetensors). The networks for CIFAR-10, which can also be given as
cifar10:DIR, are trained from scratch. Use --split val to choose settings; the default is the test
split.
"""

import argparse
import csv
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FRAME = ["--set", "model.size=448", "--set", "model.scales=1", "--set", "model.pool=avg"]
SMALL = ["--set", "model.size=224", "--set", "model.scales=2", "--set", "model.pool=avg"]
SIZES = ["--set", "recipe.sizes=[0.25,2]"]
AVG = ["--set", "model.size=112", "--set", "model.pool=avg"]
CIFAR = [
    "--backbone", "timm:resnet18", "--recipe", "mirrored", "--epochs", "20", "--batch", "128",
    "--set", "model.size=64", "--set", "learning_rate=2e-3", "--set", "weight_decay=0.05",
]  # fmt: skip
WHOLE = ["--set", "model.scales=1", "--set", "model.pool=avg"]


class Suite(NamedTuple):
    """Rows of a table.

    Attributes:
        common: Options of `foveate train finetune` for all rows.
        scales: Test scales.
        rows: Title and training options of each row, by name.
        tests: Further evaluations of trained rows, by name: title, name of the row, and windows. A
            range of windows is used at all scales; a single window is scaled with the photograph.
    """

    common: list[str]
    scales: tuple[float, ...]
    rows: dict[str, tuple[str, list[str]]]
    tests: dict[str, tuple[str, str, str]]


SUITES = {
    "photographs": Suite(
        [],
        (0.25, 0.3536, 0.5, 0.7071, 1.0, 1.4142, 2.0),
        {
            "frame": ("whole frame of 448, one size", FRAME),
            "small": ("whole frame of 448 in 224 pixels, one size", SMALL),
            "sizes": ("whole frame of 448, all sizes in training", [*FRAME, *SIZES]),
            "longer": ("the same for 24 epochs", [*FRAME, *SIZES, "--epochs", "24"]),
            "avg": ("scale channels of 112 pixels, avg, one size", AVG),
            "finetune": ("scale channels of 160 pixels, logsumexp, one size", []),
            "both": ("the same, all sizes in training", SIZES),
        },
        {
            "averaged": ("all sizes, logits averaged over 5 windows", "sizes", "224-896"),
            "oracle": ("one size, the window scaled with the photograph (oracle)", "frame", "448"),
        },
    ),
    "cifar": Suite(
        CIFAR,
        (0.5, 0.5946, 0.7071, 0.8409, 1.0, 1.1892, 1.4142, 1.6818, 2.0),
        {
            "frame": ("whole frame of 64, one size", WHOLE),
            "sizes": ("the same, all sizes", [*WHOLE, "--set", "recipe.sizes=[0.5,2]"]),
            "channels": ("scale channels of 64 pixels, one size", ["--windows", "16-64"]),
        },
        {},
    ),
}


def run(options: argparse.Namespace) -> None:
    """Train and test every row with every seed, `options.parallel` at a time, then other tests."""
    suite: Suite = options.suite
    names = options.rows or [*suite.rows, *suite.tests]
    for work, known in ((_one, suite.rows), (_other, suite.tests)):
        jobs = [(name, seed) for seed in options.seeds for name in names if name in known]
        with ThreadPoolExecutor(options.parallel) as pool:
            for line in pool.map(lambda job, work=work: work(options, *job), jobs):
                print(line, flush=True)


def _one(options: argparse.Namespace, row: str, seed: int) -> str:
    folder, begun = options.out / f"{row}-{seed}", time.perf_counter()
    if time.perf_counter() - options.begun > options.limit:
        return f"{row} {seed}: not started, the time limit is over"
    suite, source = options.suite, ["--source", options.source]
    if options.weights:
        source += ["--weights", str(options.weights)]
    change = [*suite.common, *suite.rows[row][1], *options.options, "--seed", str(seed)]
    workers = ["--workers", str(options.workers), "--device", options.device]
    _foveate(folder, "train", "finetune", *source, *change, *workers, "--out", str(folder))
    seconds = time.perf_counter() - begun
    found = _test(options, folder, "all", suite.scales)
    return f"{row} {seed}: {seconds:.0f} s, {' '.join(f'{100 * a:.1f}' for a in found)}"


def _other(options: argparse.Namespace, name: str, seed: int) -> str:
    """Test a trained row with other windows."""
    _, row, windows = options.suite.tests[name]
    folder, scales = options.out / f"{row}-{seed}", options.suite.scales
    if "-" in windows:
        found = _test(options, folder, name, scales, "--windows", windows, "--pool", "avg")
    else:
        found = [
            _test(options, folder, name, [s], "--windows", f"{int(windows) * s:.0f}")[0]
            for s in scales
        ]
    return f"{name} {seed}: {' '.join(f'{100 * a:.1f}' for a in found)}"


def _test(
    options: argparse.Namespace, folder: Path, name: str, scales: Sequence[float], *change: str
) -> list[float]:
    out = folder / options.split / (name if len(scales) > 1 else f"{name}-{scales[0]}")
    if not (out / "accuracy.csv").exists():
        asked = ["--split", options.split, "--scales", ",".join(map(str, scales)), *change]
        _foveate(folder, "evaluate", str(folder), *asked, "--device", options.device, "--trust",
                 "--out", str(out))  # fmt: skip
    with (out / "accuracy.csv").open() as file:
        return [float(line["accuracy"]) for line in csv.DictReader(file)]


def _source(text: str) -> str:
    return text if text.partition(":")[0] == "cifar10" else f"folder:{text}"


def _foveate(folder: Path, *arguments: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("a") as log:
        print("foveate", *arguments, file=log, flush=True)
        command = [sys.executable, "-m", "foveate", *arguments]
        subprocess.run(command, stdout=log, stderr=log, check=True)


def collect(options: argparse.Namespace) -> None:
    """Print the accuracy of every network, seed and scale as CSV."""
    named = options.suite.rows | options.suite.tests
    titles = {name: title for name, (title, *_) in named.items()}
    lines = []
    for path in sorted(options.out.glob(f"*/{options.split}/*/accuracy.csv")):
        row, _, seed = path.parts[-4].rpartition("-")
        name = path.parts[-2].partition("-")[0]
        with path.open() as file:
            for line in csv.DictReader(file):
                title = titles[row if name == "all" else name]
                lines.append((title, seed, line["scale"], line["accuracy"]))
    order = list(titles.values())
    lines.sort(key=lambda line: order.index(line[0]))
    columns = ("network", "seed", "scale", "accuracy")
    csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *lines])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    one, other = commands.add_parser("run"), commands.add_parser("collect")
    one.add_argument("source", metavar="SOURCE", type=_source, help="folder, or cifar10[:DIR]")
    one.add_argument("--weights", type=Path)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--rows", nargs="*", help="names of rows and tests; all by default")
    one.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    one.add_argument("--parallel", type=int, default=2)
    one.add_argument("--workers", type=int, default=3)
    one.add_argument("--device", default="cuda")
    one.add_argument("--limit", type=float, default=1e9, help="start no run after this time, s")
    one.add_argument("--options", default=[], type=shlex.split, help="for foveate train")
    other.add_argument("out", type=Path)
    for command, work in ((one, run), (other, collect)):
        command.add_argument("--suite", choices=SUITES, default="photographs")
        command.add_argument("--split", choices=["val", "test"], default="test")
        command.set_defaults(work=work)
    given = parser.parse_args()
    given.begun, given.suite = time.perf_counter(), SUITES[given.suite]
    given.work(given)
