"""Measure accuracy over object size on photographs: scale channels against the whole frame.

python benchmarks/photo_table.py run FOLDER --weights FILE --out DIR   train and test, or resume
python benchmarks/photo_table.py run cifar10 --suite cifar --out DIR   the same on CIFAR-10
python benchmarks/photo_table.py collect DIR [--suite cifar] > FILE.csv
                            one line per network, seed and scale, for tools/update_docs.py

The script calls only `foveate train` and `foveate evaluate`. Each process takes one row at a time
with all its seeds, which share the imports and the plans of cuDNN. FOLDER has the subfolders train,
validation and test, each with one subfolder per class. FILE contains the weights of timm's
tf_efficientnet_lite0 (.safetensors). The networks for CIFAR-10, which can also be given as
cifar10:DIR, are trained from scratch. Use --split val to choose settings; the default is the test
split.
"""

import argparse
import csv
import gc
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from foveate.training.interrupt import SIGNALS, end_with_parent, raise_interrupt

LOGSUMEXP = ["--set", "model.pool=logsumexp", "--set", "learning_rate=3e-4", "--epochs", "8"]
SHARP = [*LOGSUMEXP, "--set", "recipe.resolution=1", "--set", "ema=0"]
PLAIN = [*SHARP, "--set", "model.pool=avg", "--set", "learning_rate=6e-4"]
FRAME = ["--set", "model.size=448", "--set", "model.scales=1", *PLAIN]
SMALL = ["--set", "model.size=224", "--set", "model.scales=2", *PLAIN]
SIZES = ["--set", "recipe.sizes=[0.25,2]"]
AVG = [*SHARP, "--set", "model.size=112", "--set", "model.pool=avg"]
CIFAR = [
    *SHARP, "--backbone", "timm:resnet18", "--recipe", "mirrored", "--epochs", "20",
    "--batch", "128", "--set", "model.size=64", "--set", "learning_rate=2e-3",
    "--set", "weight_decay=0.05",
]  # fmt: skip
WHOLE = ["--set", "model.scales=1", "--set", "model.pool=avg"]
PRESET_EPOCHS = 12


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
            "sizes": ("whole frame of 448, all sizes", [*FRAME, *SIZES]),
            "longer": (
                "whole frame of 448, all sizes, 24 epochs",
                [*FRAME, *SIZES, "--epochs", "24"],
            ),
            "avg": ("scale channels of 112 pixels, avg, one size", AVG),
            "finetune": ("scale channels of 160 pixels, avg, one size", []),
            "logsumexp": ("scale channels of 160 pixels, logsumexp, one size", LOGSUMEXP),
            "sharp": ("scale channels of 160 pixels, logsumexp, one size, full resolution", SHARP),
            "both": ("scale channels of 160 pixels, logsumexp, all sizes", [*SHARP, *SIZES]),
        },
        {
            "averaged": (
                "whole frame, all sizes, logits averaged over 5 windows",
                "sizes",
                "224-896",
            ),
            "oracle": (
                "whole frame, one size, scaled with the photograph (oracle)",
                "frame",
                "448",
            ),
        },
    ),
    "cifar": Suite(
        CIFAR,
        (0.5, 0.5946, 0.7071, 0.8409, 1.0, 1.1892, 1.4142, 1.6818, 2.0),
        {
            "frame": ("whole frame of 64, one size", WHOLE),
            "sizes": ("whole frame of 64, all sizes", [*WHOLE, "--set", "recipe.sizes=[0.5,2]"]),
            "narrow": (
                "scale channels of 64 pixels, windows of 16 to 64, one size",
                ["--windows", "16-64"],
            ),
            "channels": (
                "scale channels of 64 pixels, windows of 16 to 128, one size",
                ["--windows", "16-128", "--set", "model.padding=reflect"],
            ),
        },
        {},
    ),
}


def run(options: argparse.Namespace) -> None:
    """Train and test every row, `options.parallel` at a time, then run the other tests."""
    suite: Suite = options.suite
    names = options.rows or [*suite.rows, *suite.tests]
    if unknown := sorted({*names} - {*suite.rows, *suite.tests}):
        sys.exit(f"no row {unknown[0]}; choose from {', '.join([*suite.rows, *suite.tests])}")
    # Rows with the most epochs take longest; sorting keeps the order of the others.
    rows = [name for name in names if name in suite.rows]
    rows.sort(key=lambda name: _epochs(suite.rows[name][1]), reverse=True)
    tests = [name for name in names if name in suite.tests]
    failures = []
    with ProcessPoolExecutor(options.parallel, get_context("spawn"), _begin_process) as pool:
        for work, asked in ((_one, rows), (_other, tests)):
            jobs = {name: pool.submit(_seeds, work, options, name) for name in asked}
            failures += [f"{name}: {e}" for name, job in jobs.items() if (e := job.exception())]
            if any(isinstance(job.exception(), BrokenExecutor) for job in jobs.values()):
                break  # a process was killed, which ends the pool
    if failures:
        sys.exit("\n".join(failures))


def _epochs(options: Sequence[str]) -> int:
    """Return the number of epochs in training options, of which the last counts."""
    found = [value for option, value in pairwise(options) if option == "--epochs"]
    return int(found[-1]) if found else PRESET_EPOCHS


def _begin_process() -> None:
    """Let a process of the pool save its run at a signal, and end with its parent."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    end_with_parent(signal.SIGTERM)
    # cuBLAS reads this once. `foveate train` sets it, but an evaluation can be first here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _interrupt(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt at the first signal; others must not interrupt saving.

    The signal of `end_with_parent` can arrive several times if the parent has several threads.
    """
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise_interrupt(number, frame)


def _seeds(work: Callable[..., str], options: argparse.Namespace, name: str) -> None:
    """Call `work` for each seed of a row or test, and print its lines."""
    try:
        for seed in options.seeds:
            late = time.time() - options.begun > options.limit
            line = f"{name} {seed}: not started, the time limit is over"
            print(line if late else work(options, name, seed), flush=True)
    except KeyboardInterrupt:
        os._exit(130)  # an exception would let this process begin the next row


def _one(options: argparse.Namespace, row: str, seed: int) -> str:
    folder, begun = options.out / f"{row}-{seed}", time.perf_counter()
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
    """Run a command in this process, with its output in the log of the run."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with _output_to(log):
        import torch

        from foveate.cli.app import run as call  # its consoles write to the log

        print("foveate", *arguments, flush=True)
        code = call(list(arguments))
        gc.collect()  # the memory of this network would add to that of the next one
        torch.cuda.empty_cache()
    if code in (130, 143):
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"foveate {arguments[0]} failed with exit code {code}; see {log}")


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Append stdout and stderr to a file, also those of C libraries and of child processes."""
    before = [os.dup(1), os.dup(2)]
    try:
        with path.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in enumerate(before, start=1):
            os.dup2(saved, number)
            os.close(saved)


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
    given.begun, given.suite = time.time(), SUITES[given.suite]
    given.work(given)
