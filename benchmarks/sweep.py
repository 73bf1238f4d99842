"""Measure the overhead of Ray over the local engine, which trains the runs in one process.

python benchmarks/sweep.py                         six runs of a minute each, with both engines
python benchmarks/sweep.py --seconds 5 --runs 2    a quick check

Both engines train one run at a time on one CPU thread. Each run is trained with the local engine
and then with Ray, so that other load on the machine affects both. The start of Ray and of its
worker is counted once, as in a sweep.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foveate.sweeps.jobs import Job
from foveate.sweeps.ray_engine import RayEngine
from foveate.sweeps.runner import Done, Engine, LocalEngine
from foveate.training.presets import preset

CALIBRATION = 2  # epochs


def make_jobs(runs: int, epochs: int) -> list[Job]:
    """Create jobs that train FovAvg on the embedded digits, with one seed each."""
    config = replace(preset("fovavg"), source="mnist-5k", samples=640, epochs=epochs)
    rows = (("sweep", "fovavg"),)
    return [
        Job(name="fovavg", config=replace(config, seed=seed), scales=(2.0,), rows=rows)
        for seed in range(runs)
    ]


def timed(engine: Engine, jobs: Sequence[Job], folder: Path) -> tuple[float, list[Done]]:
    """Run all jobs; return the time in seconds and the results."""
    start = time.perf_counter()
    ended = [one for one in engine.run(jobs, folder) if isinstance(one, Done)]
    assert len(ended) == len(jobs)
    return time.perf_counter() - start, ended


def epochs_of(seconds: float, folder: Path) -> int:
    """Estimate the number of epochs of a run that takes about `seconds`."""
    local = LocalEngine(cpus=1)
    timed(local, make_jobs(1, 1), folder / "warm")  # compiles kernels and reads the images
    short, _ = timed(local, make_jobs(1, 1), folder / "short")
    longer, _ = timed(local, make_jobs(1, 1 + CALIBRATION), folder / "longer")
    return max(1, round((seconds - short) / ((longer - short) / CALIBRATION)))


def compare(runs: int, seconds: float, folder: Path) -> dict[str, float]:
    """Train every run with both engines and return their times."""
    import ray

    jobs = make_jobs(runs, epochs_of(seconds, folder))
    begun = time.perf_counter()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    start = time.perf_counter() - begun
    local, cluster = 0.0, 0.0
    for job in jobs:
        here, one = timed(LocalEngine(cpus=1), [job], folder / "local")
        there, other = timed(RayEngine(cpus=1), [job], folder / "ray")
        assert one[0].outcome.scales == other[0].outcome.scales
        local, cluster = local + here, cluster + there
        print(f"seed {job.config.seed}: local {here:.2f} s, ray {there:.2f} s", flush=True)
    return {
        "runs": runs,
        "epochs of a run": jobs[0].config.epochs,
        "a run, local, s": local / runs,
        "a run, Ray, s": cluster / runs,
        "start of Ray, s": start,
        "overhead without the start, %": 100 * (cluster / local - 1),
        "overhead, %": 100 * ((start + cluster) / local - 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=6, help="number of runs (default: 6)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of a run (default: 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = compare(options.runs, options.seconds, Path(place))
    print(json.dumps({key: round(value, 2) for key, value in found.items()}))
