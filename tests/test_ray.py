"""A real Ray cluster of three nodes: what it gives equals a local run, whoever dies on the way."""

import csv
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer

import pytest
from tiny_runs import STUDY, python, same_bits, tiny, weights

from foveate.cli.app import run
from foveate.errors import ConfigError
from foveate.sweeps import ray_engine
from foveate.sweeps.jobs import Job
from foveate.sweeps.ray_engine import RayEngine
from foveate.sweeps.runner import Done, Failure, LocalEngine, Study
from foveate.training.checkpoint import RunFolder, RunWriter

ray = pytest.importorskip("ray", reason="needs ray: pip install 'foveate[ray]'")
pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all

TIMES = ("seconds", "training_seconds", "images_per_second", "memory")
LONG = STUDY.replace("learning_rate = 0.001\n", "").replace("seeds = 2", "seeds = 3")
LONG = LONG.replace("samples = 96", "samples = 240").replace("epochs = 2", "epochs = 12")
LONG = LONG.replace("model.dropout = [0, 0.15]", "learning_rate = [0.003, 0.001]")


@contextmanager
def sweeping(cluster, study, out):
    """`foveate sweep` on the cluster, in a process of its own."""
    options = ["--engine", "ray", "--address", cluster.address, "--out", out]
    with python("-m", "foveate", "sweep", study, *options) as sweep:
        try:
            yield sweep
        finally:
            sweep.kill()


@pytest.fixture(scope="module")
def cluster():
    """A head and two more nodes, each with one CPU, where torch would take three threads.

    They ignore SIGINT, like all commands that a shell script starts in the background.
    """
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80 << 20}
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        made.others = [made.add_node(**size) for _ in range(2)]
    signal.signal(signal.SIGINT, handler)
    yield made
    made.shutdown()


def busy(node, folder):
    """The worker of a node that is training within `folder`, and its run; else nothing."""
    (raylet,) = (entry.process.pid for entry in node.all_processes["raylet"])
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            held = [os.readlink(fd) for fd in (status.parent / "fd").iterdir()]
        except OSError:  # it has ended
            continue
        for path in held:
            if parent == raylet and path.endswith("/.lock") and str(folder) in path:
                return int(status.parent.name), Path(path).parent
    return None


def caught_in_the_middle(nodes, folder):
    """Wait until a run has a checkpoint; give its node, worker, folder, and what it measured."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        for node in nodes:
            found = busy(node, folder)
            if found and (lines := metrics(found[1])) and len(lines) < 9:
                return node, *found, lines
        time.sleep(0.02)
    pytest.fail("no run came to its first checkpoint")


def metrics(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def told(folder):
    """All of results.csv but how long it took and how much memory was in use."""
    with (folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_a_sweep_survives_a_killed_worker_and_a_removed_node(cluster, tmp_path, two_threads):
    study, there, here = tmp_path / "study.toml", tmp_path / "there", tmp_path / "here"
    study.write_text(LONG)
    with sweeping(cluster, study, there) as sweep:
        _, worker, first, before_kill = caught_in_the_middle(cluster.others, there)
        os.kill(worker, signal.SIGKILL)
        node, _, second, before_removal = caught_in_the_middle(cluster.others, there)
        cluster.others.remove(node)
        cluster.remove_node(node, allow_graceful=False)
        said, errors = sweep.communicate(timeout=200)
    assert (sweep.returncode, errors) == (0, ""), said
    assert run(["sweep", str(study), "--out", str(here)]) == 0
    assert len(told(there)) == 12 * 2
    assert {" 1 thread," in line["hardware"] for line in told(there)} == {True}
    assert told(there) == told(here)
    for folder in here.glob("*-s?"):
        assert same_bits(weights(folder), weights(there / folder.name)), folder.name
    # The seconds in the lines are of the attempt that died: the next one went on from there.
    assert metrics(first)[: len(before_kill)] == before_kill
    assert metrics(second)[: len(before_removal)] == before_removal


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_saves_the_runs_under_way(cluster, tmp_path, number, code, word):
    study, out = tmp_path / "study.toml", tmp_path / "out"
    study.write_text(LONG.replace("seeds = 3", "seeds = 1").replace("= 240", "= 3488"))
    with sweeping(cluster, study, out) as sweep:
        nodes = [cluster.head_node, *cluster.others]
        _, _, folder, _ = caught_in_the_middle(nodes, out)
        sweep.send_signal(number)
        said, errors = sweep.communicate(timeout=60)
    words = f"{word}: 4 runs remain; run the same command to resume"
    assert (sweep.returncode, errors.strip()) == (code, words), said
    progress, _ = RunFolder(folder).load()
    assert progress.step > 0  # else saved between epochs alone, one of 219 places to be caught at
    assert not any(busy(node, out) for node in nodes)


# One engine, called directly


@pytest.fixture(scope="module")
def connected(cluster):
    """This process as a driver of the cluster."""
    RayEngine(address=cluster.address, cpus=1).check()
    yield cluster
    ray.shutdown()


def jobs(*configs):
    return [
        Job(name=f"run{i}", config=config, scales=(1.0,), rows=(("t", f"run{i}"),))
        for i, config in enumerate(configs)
    ]


def ended(engine, chosen, folder):
    """How each of the jobs ended, by its name."""
    return {one.job.name: one for one in Study(chosen, folder).run(engine)}


def test_without_shared_storage_runs_are_sent_and_one_failure_stops_nothing(connected, tmp_path):
    chosen = jobs(tiny(), tiny(samples=10**7), tiny(seed=1))
    there, here = tmp_path / "there", tmp_path / "here"
    found = ended(RayEngine(cpus=1, shared=False), chosen, there)
    usual = ended(LocalEngine(cpus=1), chosen, here)
    assert {name: type(one) for name, one in found.items()} == {
        name: type(one) for name, one in usual.items()
    }
    assert "the size of the training set" in found["run1"].reason == usual["run1"].reason
    for name in ("run0-s0", "run2-s1"):
        assert same_bits(weights(here / name), weights(there / name))
        assert RunFolder(there / name).metrics()[-1]["epoch"] == 3
    assert not (there / "run1-s0").exists()  # nothing was tried here
    assert Study(chosen, there).remaining == [chosen[1]]


def test_a_run_that_was_interrupted_goes_on_from_its_checkpoint(connected, tmp_path):
    def stop(config, progress, steps):
        if progress.epoch == 1 and progress.step == 3:
            raise KeyboardInterrupt

    chosen = jobs(tiny())
    with pytest.raises(KeyboardInterrupt):
        ended(LocalEngine(callback=stop, cpus=1), chosen, tmp_path)
    before = metrics(tmp_path / "run0-s0")
    assert isinstance(ended(RayEngine(cpus=1), chosen, tmp_path)["run0"], Done)
    assert metrics(tmp_path / "run0-s0")[:1] == before
    ended(LocalEngine(cpus=1), chosen, tmp_path / "here")
    assert same_bits(weights(tmp_path / "run0-s0"), weights(tmp_path / "here" / "run0-s0"))


def test_a_run_that_kills_its_worker_fails_after_its_retries(connected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where workers look for it too
    code = "import os\ndef net(channels, classes):\n    open('tries', 'a').write('x')\n"
    (tmp_path / "deadly.py").write_text(code + "    os.kill(os.getpid(), 9)\n")
    chosen = jobs(tiny(backbone="deadly:net"))
    found = ended(RayEngine(cpus=1, retries=1), chosen, tmp_path / "out")["run0"]
    assert isinstance(found, Failure)
    assert found.reason.startswith("its worker died 2 times")
    assert (tmp_path / "tries").read_text() == "xx"


def test_a_straggler_is_waited_for_but_not_for_ever(connected, tmp_path):
    chosen = jobs(tiny())
    with RunWriter(tmp_path / "run0-s0").locked():  # as a process on a node that is given up
        found = ended(RayEngine(cpus=1, lock_timeout=1.0), chosen, tmp_path)["run0"]
        assert isinstance(found, Failure)
        assert "another process is training" in found.reason
    with ExitStack() as straggler:
        straggler.enter_context(RunWriter(tmp_path / "run0-s0").locked())
        Timer(3.0, straggler.close).start()
        found = ended(RayEngine(cpus=1, lock_timeout=60.0), chosen, tmp_path)["run0"]
    assert isinstance(found, Done)


def test_few_tasks_are_in_flight_and_results_of_before_are_taken(connected, tmp_path, monkeypatch):
    chosen, waited = jobs(*(tiny(seed=s, epochs=1) for s in range(4))), []
    assert len(ended(LocalEngine(cpus=1), chosen, tmp_path)) == 4
    (tmp_path / "results.csv").unlink()  # a driver that was killed: the outcomes are there
    wait = ray.wait
    monkeypatch.setattr(ray, "wait", lambda refs, **k: waited.append(len(refs)) or wait(refs, **k))
    monkeypatch.setattr(ray_engine, "IN_FLIGHT", 2)
    before = [(tmp_path / job.folder / "outcome.json").stat().st_mtime_ns for job in chosen]
    found = [one.outcome.seed for one in RayEngine(cpus=1).run(chosen, tmp_path)]
    assert sorted(found) == [0, 1, 2, 3]
    assert waited == [2, 2, 2, 1]
    assert before == [(tmp_path / job.folder / "outcome.json").stat().st_mtime_ns for job in chosen]


def test_a_cluster_that_lost_the_nodes_it_needs_is_not_waited_for(connected, tmp_path, monkeypatch):
    nodes = [ray.nodes(), [], []]  # what it has at the start, and what later
    monkeypatch.setattr(ray, "nodes", lambda: nodes.pop(0))
    monkeypatch.setattr(ray_engine, "LOOK_EVERY", 6.0)  # the worker must have begun by then
    with pytest.raises(ConfigError, match=r"requires 1 CPU, .*at most 0 CPU"):
        ended(RayEngine(cpus=1), jobs(tiny(epochs=10_000)), tmp_path)
    with RunWriter(tmp_path / "run0-s0").locked():  # the run was stopped
        assert RunFolder(tmp_path / "run0-s0").saved


def test_what_no_node_has_is_refused_before_anything_starts(connected, tmp_path, capsys):
    study, options = tmp_path / "study.toml", ["--engine", "ray", "--address", connected.address]
    study.write_text(LONG.replace("cpus = 1", "cpus = 3"))
    assert run(["sweep", str(study), *options, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: a run requires 3 CPU")
    assert "at most 1 CPU); lower resources in the study" in said
    assert not (tmp_path / "out").exists()
