"""What all engines share: threads, refusals, and the one table of a study."""

import gc
import sys
from weakref import WeakSet

import pytest
import torch
from tiny_runs import same_bits, tiny, weights

from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.sweeps import runner
from foveate.sweeps.jobs import Job, find_outcome
from foveate.sweeps.records import read_records
from foveate.sweeps.runner import Done, Failure, LocalEngine, Study, make_engine
from foveate.training.checkpoint import RunWriter


def job(scales=(1.0,), **changes):
    return Job(name="run", config=tiny(epochs=1, **changes), scales=scales, rows=(("t", "run"),))


def test_the_number_of_threads_is_the_engines(tmp_path):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            folder = tmp_path / str(threads)
            (ended,) = Study([job()], folder).run(LocalEngine(cpus=1))
            assert ", 1 thread, " in ended.outcome.hardware
            assert torch.get_num_threads() == threads
        assert same_bits(weights(tmp_path / "1" / "run-s0"), weights(tmp_path / "2" / "run-s0"))
        (ended,) = Study([job()], tmp_path / "as it is").run(LocalEngine())
        assert ", 2 threads, " in ended.outcome.hardware
    finally:
        torch.set_num_threads(before)


def test_engines_are_made_by_name(monkeypatch):
    local = make_engine("local", device="cuda", gpus=0.25, cpus=2)
    assert (local.together, local.cpus) == (4, 2)
    assert make_engine("local", device="cpu", gpus=0.25).together == 0
    assert make_engine("ray", device="cuda", together=4).gpus == 0.25
    assert make_engine("ray", device="cuda").gpus == 1 / 3
    assert make_engine("ray", device="cpu", gpus=0.5).gpus == 0
    with pytest.raises(ConfigError, match="engine must be local or ray, got 'slurm'"):
        make_engine("slurm")
    with pytest.raises(ConfigError, match="add --engine ray"):
        make_engine("local", address="somewhere:6379")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'foveate\[ray\]'"):
        make_engine("ray").check()


def test_a_cluster_that_does_not_answer_is_named():
    pytest.importorskip("ray", reason="needs ray: pip install 'foveate[ray]'")
    with pytest.raises(FoveateError, match=r"a Ray cluster at localhost:1 .*'ray start --head'"):
        make_engine("ray", address="localhost:1").check()
    with pytest.raises(ConfigError, match=r"must be cpu or cuda, .* got cuda:1"):
        make_engine("ray", device="cuda:1").check()


# The table


def test_new_test_scales_are_tested_without_training_again(tmp_path):
    list(Study([job()], tmp_path).run(LocalEngine(cpus=1)))
    made = (tmp_path / "run-s0" / "weights.safetensors").stat().st_mtime_ns
    assert find_outcome(job(scales=(1.0, 2.0)), tmp_path) is None
    more = Study([job(scales=(1.0, 2.0))], tmp_path)
    assert len(more.remaining) == 1
    assert [type(one) for one in more.run(LocalEngine(cpus=1))] == [Done]
    assert [record.scale for record in read_records(tmp_path)] == [1.0, 2.0]
    assert (tmp_path / "run-s0" / "weights.safetensors").stat().st_mtime_ns == made
    assert Study([job()], tmp_path).remaining == []


def test_a_run_half_done_with_other_settings_is_refused_at_once(tmp_path):
    RunWriter(tmp_path / "run-s0").write_or_check_config(tiny(epochs=7), torch.device("cpu"))
    with pytest.raises(
        ConfigError, match="contains a run named run with other settings; choose another --out"
    ):
        Study([job()], tmp_path)


def test_a_table_that_takes_long_is_written_now_and_then_and_at_the_end(tmp_path, monkeypatch):
    class Instant:
        def check(self): ...

        def run(self, jobs, folder):
            yield from (Done(job, done.outcome) for job in jobs)

    first = Study([job()], tmp_path / "first")
    (done,) = first.run(LocalEngine(cpus=1))
    written, now = [], [0.0]

    def slow(folder, records, winners):
        written.append(len(records))
        now[0] += 1.0

    monkeypatch.setattr(runner, "write_results", slow)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    many = [Job(name=f"r{i}", config=job().config, scales=(1.0,), rows=(("t", f"r{i}"),))
            for i in range(30)]  # fmt: skip
    for _ in Study(many, tmp_path / "many").run(Instant()):
        now[0] += 1.0
    # A write takes as long as a run: after the first, 20 runs until the next, then the last.
    assert written == [1, 21, 30]


def test_a_failure_of_any_kind_is_that_of_one_run(tmp_path):
    def load(name):
        if name == "broken":
            raise OSError("the disk\nis gone")
        return load_source(name)

    good, bad = job(), job(source="broken", seed=1)
    ended = list(Study([bad, good], tmp_path).run(LocalEngine(cpus=1, together=2, load=load)))
    assert [type(one) for one in ended] == [Failure, Done]
    assert ended[0].reason == "OSError: the disk is gone"


def test_runs_are_retried_after_the_memory_of_their_group_is_free(tmp_path, monkeypatch):
    class Network: ...

    networks, groups = WeakSet(), []

    def perform(jobs, folder, **how):
        groups.append((len(jobs), len(networks)))
        networks.add(net := Network())
        raise RuntimeError(f"out of memory for {net}")

    monkeypatch.setattr(runner, "perform", perform)
    jobs = [job(seed=seed) for seed in range(3)]
    gc.disable()  # memory on a GPU does not wait for the garbage collector
    try:
        ended = list(LocalEngine(together=3).run(jobs, tmp_path))
    finally:
        gc.enable()
    assert [type(one) for one in ended] == 3 * [Failure]
    assert groups == [(3, 0), (1, 0), (1, 0), (1, 0)]
