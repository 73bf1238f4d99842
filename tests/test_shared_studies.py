"""Several processes that share the runs of one study."""

import os
import signal
import time

import pytest
from tiny_runs import python, same_bits, tiny, weights

from foveate.sweeps.jobs import Job
from foveate.sweeps.records import read_records, read_winners
from foveate.sweeps.runner import Done, Failure, LocalEngine, Study

RUNS = 6
# Trains the runs, and appends the number of its process to a file of each run after every step.
SHARE = """
import os, sys, time
from pathlib import Path
from foveate.sweeps.runner import Done, LocalEngine, Study
from test_shared_studies import jobs

folder = Path(sys.argv[1])
def step(config, progress, steps):
    with (folder / f"steps-{config.seed}").open("a") as file:
        print(os.getpid(), file=file)
    time.sleep(float(sys.argv[2]))

ended = list(Study(jobs(), folder).run(LocalEngine(cpus=1, callback=step)))
assert len(ended) == len(jobs()) and all(isinstance(one, Done) for one in ended)
"""


def jobs(count=RUNS):
    return [
        Job(name="row", config=tiny(seed=seed), scales=(1.0,), rows=(("t", "row"),))
        for seed in range(count)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same study, performed by one process."""
    folder = tmp_path_factory.mktemp("alone")
    list(Study(jobs(), folder).run(LocalEngine(cpus=1)))
    return folder


def steps_of_runs(folder):
    """Return the process of every step that was taken, by the seed of the run."""
    found = {path: path.read_text().split() for path in folder.glob("steps-*")}
    return {int(path.name.removeprefix("steps-")): pids for path, pids in found.items()}


def assert_same_results(folder, alone):
    for seed in range(RUNS):
        assert same_bits(weights(folder / f"row-s{seed}"), weights(alone / f"row-s{seed}"))
    one, other = read_records(folder), read_records(alone)
    assert [(r.key, r.accuracy) for r in one] == [(r.key, r.accuracy) for r in other]
    assert read_winners(folder) == read_winners(alone)


def test_processes_share_the_runs_and_each_run_is_trained_once(tmp_path, alone):
    started = [python("-c", SHARE, tmp_path, 0.05) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    trained = {seed: set(pids) for seed, pids in steps_of_runs(tmp_path).items()}
    assert sorted(trained) == list(range(RUNS))
    assert all(len(pids) == 1 for pids in trained.values())
    assert set.union(*trained.values()) == {str(process.pid) for process in started}
    assert_same_results(tmp_path, alone)


def test_the_run_of_a_killed_process_is_continued_by_another(tmp_path, alone):
    first, second = (python("-c", SHARE, tmp_path, 0.2) for _ in range(2))
    try:
        deadline, begun = time.monotonic() + 120, None
        while begun is None:
            assert time.monotonic() < deadline, "the processes did not start"
            time.sleep(0.05)
            steps = steps_of_runs(tmp_path)
            there = any(str(second.pid) in pids for pids in steps.values())
            own = (seed for seed, pids in steps.items() if pids == [str(first.pid)] * len(pids))
            begun = next((seed for seed in own if there and 1 <= len(steps[seed]) <= 9), None)
        os.kill(first.pid, signal.SIGKILL)  # in the middle of a run of 18 steps
        _, errors = second.communicate(timeout=300)
    finally:
        first.kill()
        first.communicate()
        second.kill()
    assert second.returncode == 0, errors
    assert set(steps_of_runs(tmp_path)[begun]) == {str(first.pid), str(second.pid)}
    assert_same_results(tmp_path, alone)


def test_studies_with_other_runs_add_to_the_same_table(tmp_path, alone):
    """A study writes what another one added to the table since it was opened."""
    half = RUNS // 2
    first, second = Study(jobs()[:half], tmp_path), Study(jobs()[half:], tmp_path)
    for study in (first, second):
        assert all(isinstance(one, Done) for one in study.run(LocalEngine(cpus=1)))
    assert_same_results(tmp_path, alone)


def test_a_run_whose_metrics_were_removed_names_the_remedy(tmp_path):
    """The error of a damaged metrics.jsonl asks for its removal."""
    list(Study(jobs(1), tmp_path).run(LocalEngine(cpus=1)))
    for path in ("row-s0/metrics.jsonl", "row-s0/outcome.json", "results.csv"):
        (tmp_path / path).unlink()
    (ended,) = Study(jobs(1), tmp_path).run(LocalEngine(cpus=1))
    assert isinstance(ended, Failure)
    assert "row-s0 has no validation accuracy; remove the folder" in ended.reason
