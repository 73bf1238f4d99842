"""Measure how cost grows with channels, patch size, batch, images, processes and number of runs.

python benchmarks/scaling.py                   measure on one CPU thread and print JSON (minutes)
python benchmarks/scaling.py --only channels   measure one part
python benchmarks/scaling.py --write           also write results/ and update docs/scaling.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from channels import Step
from scaling_tables import DOC, RESULTS, refresh

from foveate.data.sources import load_source
from foveate.execution.captured import Batch, plain_step
from foveate.execution.plan import prepare
from foveate.execution.windows import cut_windows
from foveate.models.zoo import ModelConfig, model_config
from foveate.provenance import hardware
from foveate.scales import ScaleGrid
from foveate.sweeps.jobs import Job, Outcome, make_records, make_winners, perform
from foveate.sweeps.ray_engine import RayEngine
from foveate.sweeps.records import write_results
from foveate.sweeps.runner import Done
from foveate.training.checkpoint import Progress, RunWriter
from foveate.training.config import TrainConfig
from foveate.training.distributed import Norms, Team, join_processes
from foveate.training.loop import train
from foveate.training.optimiser import make_optimiser
from foveate.training.presets import preset
from foveate.training.state import capture_state

CPU = torch.device("cpu")
Table = dict[str, float]
ROUNDS = 15


def medians(steps: dict[str, Step], rounds: int = ROUNDS) -> Table:
    """Return the median time of each step in ms; steps are interleaved, so noise affects all."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(times) for name, times in taken.items()}


def step_of(model: ModelConfig, count: int = 32) -> Step:
    """Return a training step on prepared random images."""
    torch.manual_seed(0)
    config = TrainConfig(model=model)
    net = model.build()
    images, labels = torch.randn(count, 1, 112, 112), torch.randint(0, 10, (count,))
    with torch.no_grad():
        batch = Batch(prepare(net, images), labels)
    train_on = plain_step(net, make_optimiser(net, config, CPU), "float32")

    def step() -> None:
        train_on(batch)

    return step


def channels(count: int) -> ModelConfig:
    """Configure FovAvg with `count` channels at the spacing of the paper."""
    return model_config("fovavg", scales=ScaleGrid(0.5, 0.5 * 2 ** ((count - 1) / 4), per_octave=4))


def by_channels() -> Table:
    return medians({str(n): step_of(channels(n)) for n in (1, 3, 5, 9, 13, 17)})


def by_patch() -> Table:
    sizes = (14, 20, 28, 40, 56)
    return medians({str(size): step_of(model_config("fovavg", size=size)) for size in sizes})


def by_batch() -> Table:
    return medians({str(n): step_of(model_config("fovavg"), n) for n in (8, 16, 32, 64, 128)})


def by_images(counts: Sequence[int] = (500, 1000, 2000, 3500)) -> dict[str, Table]:
    """Measure an epoch, and the time before its first step, for several numbers of images."""
    found = {}
    for count in (32, *counts):  # the run with 32 images only warms up
        config = replace(preset("fovavg"), source="mnist-5k", samples=count, epochs=1)
        first = list[float]()

        def callback(
            config: TrainConfig, progress: Progress, steps: int, first: list[float] = first
        ) -> None:
            first.append(time.perf_counter() - progress.seconds)

        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run = train(config, Path(folder), callback=callback)
            epoch = run.metrics()[-1]["seconds"]
        found[str(count)] = {"epoch, s": epoch, "before the first step, s": first[0] - begun}
    return {key: value for key, value in found.items() if key != "32"}


def by_processes() -> dict[str, Table]:
    """Measure an epoch of one run on one and on two processes, started by torchrun."""
    found = {}
    for processes, norms in ((1, "shared"), (2, "shared"), (2, "local")):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        arguments = [*command, __file__, "--as-process", norms]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=True,
            env=environment,
        )  # fmt: skip
        name = f"{processes}, {norms} norms" if processes > 1 else "1"
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def as_process(norms: Norms) -> None:
    """Run one of the processes of `by_processes`; the first one prints the result."""
    torch.set_num_threads(1)
    config = replace(preset("fovavg"), source="mnist-5k", samples=1000, epochs=2)
    with join_processes("cpu", norms) as team, tempfile.TemporaryDirectory() as folder:
        calls = counted_reductions() if team.count > 1 else [0]
        run = train(config, Path(folder), team=team)
        if not team.is_main:
            reduction_times(team)
            return
        seconds = [entry["seconds"] for entry in run.metrics()]
        steps = 2 * -(-config.samples // config.batch)
        found = {"epoch, s": seconds[1] - seconds[0], "sums per step": round(calls[0] / steps)}
        print(json.dumps({**found, **reduction_times(team)}))


def counted_reductions() -> list[int]:
    """Count the calls of all_reduce from now on; return the counter as a list of one number."""
    calls, original = [0], dist.all_reduce

    def counting(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return original(*arguments, **options)

    dist.all_reduce = counting
    return calls


def reduction_times(team: Team, rounds: int = 200) -> Table:
    """Measure an all_reduce in ms, for the statistics of a norm layer and for all gradients."""
    if team.count == 1:
        return {}
    found = {}
    for name, size in (("a norm's sum, ms", 65), ("all gradients, ms", 68_870)):
        tensor = torch.zeros(size)
        for turn in range(rounds + 20):
            if turn == 20:
                start = time.perf_counter()
            team.all_reduce_sum(tensor)
        found[name] = 1e3 * (time.perf_counter() - start) / rounds
    return found


def of_a_run() -> Table:
    """Measure the sizes of files and inputs of a run, and the time of a save that reaches disk."""
    config = preset("fovavg")
    net = config.model.build()
    optimiser = make_optimiser(net, config, CPU)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    with tempfile.TemporaryDirectory() as folder:
        run, state = RunWriter(Path(folder)), capture_state(net, optimiser)
        run.write_or_check_config(config, CPU)
        saving = medians({"save": lambda: run.save(Progress(), state)})["save"]
        run.finish(Progress(), net.state_dict(), config)
        weights = run.weights.stat().st_size
        run.save(Progress(), state)
        checkpoint = run.resume.stat().st_size
    with torch.no_grad():
        (patches,) = prepare(net, torch.zeros(1, 1, 112, 112)).inputs
        windows = cut_windows(patches.flatten(0, 1))  # the prepared form of an image on a GPU
    return {
        "weights, kB": weights / 1e3,
        "checkpoint, kB": checkpoint / 1e3,
        "a save, ms": saving,
        "patches of an image, kB": patches.numel() * patches.element_size() / 1e3,
        "windows of an image, kB": windows.numel() * windows.element_size() / 1e3,
    }


def tiny_job(folder: Path) -> tuple[Job, Outcome]:
    """Train a run that takes a second and evaluate it at 17 scales."""
    model = replace(model_config("fovavg"), features=(4, 8), size=12, hidden=8)
    config = TrainConfig(model=model, source="mnist-5k", samples=32, size=24, epochs=1)
    job = Job(name="tiny", config=config, scales=tuple(model.scales), rows=(("t", "tiny"),))
    test = replace(load_source("mnist-5k"), test=load_source("mnist-5k").val)
    (outcome,) = perform([job], folder, load=lambda name: test)
    return job, outcome


def by_runs(counts: Sequence[int] = (100, 1000)) -> Table:
    """Measure the seconds to write the tables of a study, for several numbers of runs."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        job, outcome = tiny_job(Path(folder))
        for count in counts:
            outcomes = [replace(outcome, seed=seed) for seed in range(count)]
            records = [r for one in outcomes for r in make_records(job, one)]
            winners = [w for one in outcomes for w in make_winners(job, one)]
            start = time.perf_counter()
            write_results(Path(folder), records, winners)
            found[str(count)] = time.perf_counter() - start
    return found


def of_ray(count: int = 200) -> Table:
    """Measure the start of Ray, and its results per second for runs that are already finished."""
    start = time.perf_counter()
    engine = RayEngine(cpus=1)
    engine.check()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        job, _ = tiny_job(Path(folder))
        list(engine.run([job], Path(folder)))  # starts a worker process
        ready = time.perf_counter()
        done = [one for one in engine.run([job] * count, Path(folder)) if isinstance(one, Done)]
        taken = time.perf_counter() - ready
    assert len(done) == count
    return {"start, s": begun - start, "results per s": count / taken}


PARTS: dict[str, Callable[[], object]] = {
    "channels": by_channels,
    "patch": by_patch,
    "batch": by_batch,
    "images": by_images,
    "processes": by_processes,
    "run": of_a_run,
    "table": by_runs,
    "ray": of_ray,
}


def rounded(found: object) -> object:
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return float(f"{found:.3g}")


def measure(only: str | None) -> dict[str, object]:
    torch.set_num_threads(1)
    return {name: rounded(part()) for name, part in PARTS.items() if only in (None, name)}


def write_results_and_page(printed: dict[str, object], note: str) -> None:
    """Write the results, and update the tables of the page from them."""
    entry = {
        "command": "python benchmarks/scaling.py",
        "hardware": f"{os.cpu_count()} cores, {hardware(CPU)}",
        "date": datetime.now(UTC).date().isoformat(),
        "note": note,
        "printed": printed,
    }
    RESULTS.write_text(json.dumps([entry], indent=1) + "\n")
    DOC.write_text(refresh(DOC.read_text(), printed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[*PARTS], help="measure one part")
    parser.add_argument("--write", action="store_true", help="write results and docs/scaling.md")
    parser.add_argument("--note", default="nothing else running", help="stored with the results")
    parser.add_argument("--as-process", choices=["shared", "local"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_process:
        as_process(options.as_process)
        sys.exit()
    found = measure(options.only)
    print(json.dumps(found))
    if options.write and not options.only:
        write_results_and_page(found, options.note)
