"""The quickstart experiment: train three networks on one scale, evaluate them on 17."""

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from foveate.data.sources import load_source
from foveate.errors import DataError
from foveate.evaluation.curve import accuracy_over_scale
from foveate.evaluation.results import Curve, RunResult, read_results, save_results
from foveate.native.build import library
from foveate.paper.tables import SCALES, Summaries, published_folder
from foveate.provenance import hardware
from foveate.sweeps.records import read_records
from foveate.training.checkpoint import Progress, RunFolder
from foveate.training.config import TrainConfig
from foveate.training.interrupt import end_with_parent, raise_interrupt
from foveate.training.loop import train
from foveate.training.presets import preset

NETWORKS = ("cnn", "fovavg", "fovmax")
SOURCE = "mnist-5k"
EPOCHS = 6
Runs = Mapping[str, TrainConfig]
EpochCallback = Callable[[str, TrainConfig, Progress], None]
"""Function of the name of a run, its configuration and its progress."""
Send = Callable[[Any], None]


def quick_runs(seed: int = 0) -> dict[str, TrainConfig]:
    """Return one run per network: the paper's, on scale 2, with 3,500 digits and 6 epochs."""
    runs = {}
    for name in NETWORKS:
        full = preset(f"{name}-tr2")
        decay = full.epochs_per_decay * EPOCHS / full.epochs
        short = replace(full, epochs=EPOCHS, epochs_per_decay=decay)
        runs[name] = replace(short, source=SOURCE, seed=seed)
    return runs


def train_runs(
    runs: Runs, folder: Path, callback: EpochCallback = lambda name, config, progress: None
) -> None:
    """Train the runs in subfolders of `folder`, in parallel on few cores; skip finished runs."""
    library()  # compiles it once, instead of in every process
    tasks = [partial(_train, name, config, folder / name) for name, config in runs.items()]
    run_tasks(tasks, lambda message: callback(*message))
    for name, config in runs.items():
        train(config, folder / name)  # repeats what failed


def _train(name: str, config: TrainConfig, folder: Path, send: Send) -> None:
    def callback(config: TrainConfig, progress: Progress, steps: int) -> None:
        if progress.step == 0:
            send((name, config, progress))

    train(config, folder, callback=callback)


def evaluate_runs(
    runs: Runs,
    folder: Path,
    scales: Sequence[float] = SCALES,
    advance: Callable[[int], None] = lambda count: None,
) -> list[RunResult]:
    """Evaluate trained runs over scale and save the results; reuse earlier results."""
    folders = [RunFolder(folder / name) for name in runs]
    run_tasks([partial(_tested, run, scales) for run in folders], advance)
    results = [_tested(run, scales) for run in folders]
    save_results(results, folder, _about(results))
    return results


def count_images(runs: Runs, scales: Sequence[float] = SCALES) -> int:
    """Return the number of images that `evaluate_runs` evaluates over all runs and scales."""
    return len(scales) * sum(len(load_source(config.source).test) for config in runs.values())


def full_size_curves() -> list[Curve]:
    """Return the published curves of the same networks trained on all of MNIST."""
    rows = Summaries(read_records(published_folder()))
    found = []
    for row in (rows.row(f"{name}-tr2") for name in NETWORKS):
        values = [[percent / 100 for percent in point.values] for point in row.points]
        found.append(Curve.of(row.network, row.config.scales, row.scales, values))
    return found


def _tested(
    run: RunFolder, scales: Sequence[float], advance: Callable[[int], None] = lambda count: None
) -> RunResult:
    config, data = run.config(), load_source(run.config().source).test
    if known := _known(run, scales):
        advance(len(data) * len(scales))
        return known
    found = accuracy_over_scale(
        run.net(), data, scales, size=config.size, border=config.border, advance=advance
    )
    result = RunResult(
        run=str(run.path), config=config, scales=tuple(found), made_with=run.provenance()
    )
    save_results([result], run.path, _about([result]))
    return result


def _known(run: RunFolder, scales: Sequence[float]) -> RunResult | None:
    """Return the saved result of an earlier call with the same configuration and scales."""
    try:
        (result,) = read_results(run.path)
    except (DataError, ValueError):
        return None
    same = result.config == run.config() and [at.scale for at in result.scales] == list(scales)
    return replace(result, run=str(run.path)) if same else None


def _about(results: Sequence[RunResult]) -> dict[str, object]:
    names = sorted({result.config.source for result in results})
    sources = [{"name": name, "checksum": load_source(name).checksum} for name in names]
    return {"split": "test", "sources": sources, "hardware": hardware(torch.device("cpu"))}


def run_tasks(tasks: Sequence[Callable[[Send], object]], receive: Send) -> None:
    """Run tasks, which save their results themselves, and pass what they send to `receive`.

    If each gets less than two cores, they run in parallel, in processes of one thread, which have
    no serial part during which other cores wait. A task that fails in a process has no effect: the
    caller finds its result missing, and repeats it to get the error. Ctrl-C and SIGTERM end all.
    """
    threads = torch.get_num_threads()
    if sys.platform != "linux" or not 1 < threads < 2 * len(tasks):
        for task in tasks:
            task(receive)
        return
    context, children = multiprocessing.get_context("fork"), []
    ends: list[Connection] = []
    try:
        for task in tasks:
            end, child_end = context.Pipe(duplex=False)
            child = context.Process(target=_run_alone, args=(task, child_end), daemon=True)
            with warnings.catch_warnings():  # one thread is safe in a copy of a threaded process
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            child_end.close()
            children.append(child)
            ends.append(end)
        while ends:
            for ready in wait(ends):
                assert isinstance(ready, Connection)
                try:
                    receive(ready.recv())
                except EOFError:  # the process has ended
                    ends.remove(ready)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.join()


def _run_alone(task: Callable[[Send], object], end: Connection) -> None:
    """Run a task in a new process. Only the parent reacts to Ctrl-C, and then sends SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, raise_interrupt)
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    with suppress(BaseException):  # the caller repeats the task and gets the error
        task(end.send)
