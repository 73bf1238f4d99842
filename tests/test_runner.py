"""Many runs: done once each, resumed after an interruption, merged, and failures told apart."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_runs import tiny
from typer.testing import CliRunner

from foveate.cli.app import app, run
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.evaluation.curve import accuracy_over_scale
from foveate.sweeps import records, runner
from foveate.sweeps.jobs import Job, Outcome, find_outcome, perform
from foveate.sweeps.records import (
    Record,
    merge_records,
    read_records,
    read_winners,
    write_results,
)
from foveate.sweeps.runner import Done, Failure, LocalEngine, Study
from foveate.training.checkpoint import RunFolder
from foveate.training.interrupt import Terminated

SCALES = (0.5, 1.0)


def jobs(count=3, **changes):
    return [
        Job(name="row", config=tiny(seed=seed, **changes), scales=SCALES, rows=(("t", "row"),))
        for seed in range(count)
    ]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study of three runs."""
    study = Study(jobs(), tmp_path_factory.mktemp("study"))
    ended = list(study.run(LocalEngine()))
    assert all(isinstance(one, Done) for one in ended)
    return study


def test_every_run_is_in_the_table_with_how_it_was_made(done):
    records = read_records(done.folder)
    assert sorted(r.key for r in records) == [("t", "row", s, x) for s in range(3) for x in SCALES]
    for record in records:
        folder = RunFolder(done.folder / f"row-s{record.seed}")
        assert record.config == folder.config().digest()
        assert record.validation == folder.metrics()[-1]["validation"]
        assert record.seconds > 0 and record.memory > 10
        assert (record.version, record.hardware) == (
            folder.provenance()["version"],
            folder.provenance()["hardware"],
        )


def test_accuracies_and_winners_are_those_of_the_trained_network(done):
    folder = RunFolder(done.folder / "row-s1")
    config, test = folder.config(), load_source("mnist-5k").test
    found = accuracy_over_scale(folder.net(), test, SCALES, size=config.size)
    records = [r.accuracy for r in read_records(done.folder) if r.seed == 1]
    assert records == [at.accuracy for at in found]
    winners = [w for w in read_winners(done.folder) if w.seed == 1 and w.scale == 0.5]
    assert [w.count for w in winners] == list(found[0].winners)
    assert [w.channel for w in winners] == list(config.model.scales)


def test_what_is_done_is_not_done_again(done, monkeypatch):
    monkeypatch.setattr(runner, "perform", lambda *a, **k: pytest.fail("it was done already"))
    again = Study(jobs(), done.folder)
    assert again.remaining == [] and list(again.run(LocalEngine())) == []
    assert len(Study(jobs(4), done.folder).remaining) == 1


@pytest.mark.parametrize("kept", [0, 1])
def test_a_kill_while_the_tables_are_written_loses_nothing(done, tmp_path, monkeypatch, kept):
    for seed in range(3):
        shutil.copytree(done.folder / f"row-s{seed}", tmp_path / f"row-s{seed}")
    written, write = [], records.write_lines

    def killed(path, kind, lines):
        if len(written) == kept:
            raise KeyboardInterrupt
        written.append(write(path, kind, lines))

    monkeypatch.setattr(records, "write_lines", killed)
    with pytest.raises(KeyboardInterrupt):
        Study(jobs(), tmp_path)
    monkeypatch.undo()
    Study(jobs(), tmp_path)
    for name in ("results.csv", "winners.csv"):
        assert (tmp_path / name).read_text() == (done.folder / name).read_text()


def test_runs_side_by_side_give_the_same_results(done, tmp_path):
    found = perform(jobs(), tmp_path)
    for job, outcome in zip(jobs(), found, strict=True):
        assert outcome.scales == find_outcome(job, done.folder).scales
        assert find_outcome(job, tmp_path) == outcome


def test_a_failed_run_does_not_stop_the_others(tmp_path):
    wrong = jobs(1, samples=10_000_000)[0]
    (good,) = jobs(1)
    study = Study([replace(wrong, name="wrong", rows=(("t", "wrong"),)), good], tmp_path)
    ended = list(study.run(LocalEngine(together=2)))
    assert [type(one) for one in ended] == [Failure, Done]
    assert "the size of the training set" in ended[0].reason
    assert [job.name for job in study.remaining] == ["wrong"]


def test_an_interruption_keeps_what_is_done(tmp_path):
    def stop(config, progress, steps):
        if config.seed == 1 and progress.epoch == 1:
            raise KeyboardInterrupt

    study = Study(jobs(), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(study.run(LocalEngine(callback=stop)))
    again = Study(jobs(), tmp_path)
    assert [job.config.seed for job in again.remaining] == [1, 2]
    assert RunFolder(tmp_path / "row-s1").saved
    list(again.run(LocalEngine()))
    assert Study(jobs(), tmp_path).remaining == []


def test_another_run_of_the_same_name_is_refused(done):
    with pytest.raises(ConfigError, match="choose another --out"):
        find_outcome(jobs(1, epochs=7)[0], done.folder)


def test_results_with_other_settings_are_refused_before_a_run_is_trained(done, tmp_path):
    shutil.copy(done.folder / "results.csv", tmp_path)  # without the run folders
    assert Study(jobs(), tmp_path).remaining == []
    with pytest.raises(ConfigError, match=r"results\.csv has results of row with other settings"):
        Study(jobs(1, epochs=7), tmp_path)


def test_a_damaged_outcome_is_named(done, tmp_path):
    (tmp_path / "row-s0").mkdir()
    (tmp_path / "row-s0" / "outcome.json").write_text("{")
    with pytest.raises(DataError, match=r"outcome\.json is damaged"):
        Study(jobs(1), tmp_path)


def test_outcomes_survive_json(done):
    outcome = find_outcome(jobs(1)[0], done.folder)
    assert Outcome.read(done.folder / "row-s0" / "outcome.json") == outcome
    assert outcome.scales[0].count == len(load_source("mnist-5k").test)


# Merging


def record(**changes):
    values = {"table": "t", "row": "row", "seed": 0, "scale": 1.0, "accuracy": 0.5}
    values |= {"validation": 0.5, "seconds": 2.0, "memory": 1, "config": "abc", "version": "1"}
    values |= {"commit": "c", "hardware": "h, with a comma"}
    return Record(**{**values, **changes})


def test_runs_of_another_machine_are_collected_from_their_copied_folders(done, tmp_path):
    for seed in (0, 2):
        shutil.copytree(done.folder / f"row-s{seed}", tmp_path / f"row-s{seed}")
    study = Study(jobs(), tmp_path)
    assert [job.config.seed for job in study.remaining] == [1]
    assert read_records(tmp_path) == [r for r in done.records if r.seed != 1]


def test_results_merge_and_the_first_counts(tmp_path):
    parts = [record(), record(seed=1)], [record(accuracy=0.9), record(seed=2)]
    merged = merge_records(parts)
    assert merged == [record(), record(seed=1), record(seed=2)]
    write_results(tmp_path, merged, [])
    assert read_records(tmp_path) == merged


def test_runs_that_were_configured_differently_do_not_merge():
    with pytest.raises(DataError, match="has two configurations"):
        merge_records([[record()], [record(scale=2.0, config="other")]])


def test_a_damaged_table_is_named(tmp_path):
    write_results(tmp_path, [record()], [])
    text = (tmp_path / "results.csv").read_text()
    (tmp_path / "results.csv").write_text(text.replace("0.5", "half"))
    with pytest.raises(DataError, match=r"results\.csv is damaged"):
        read_records(tmp_path)


# The commands


def test_the_plan_says_what_is_to_do(tmp_path):
    arguments = ["reproduce", "table1", "--rows", "fovavg", "--dry-run", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "12 runs: 0 finished, 12 remaining" in found.output
    assert "FovAvg 17 tr14" in found.output


@pytest.mark.parametrize(
    ("signal", "code", "word"),
    [(KeyboardInterrupt, 130, "interrupted"), (Terminated, 143, "terminated")],
)
def test_ctrl_c_and_sigterm_say_what_is_left(signal, code, word, tmp_path, monkeypatch, capsys):
    def pressed(self, jobs, folder):
        raise signal

    monkeypatch.setattr(LocalEngine, "run", pressed)
    study = tmp_path / "study.toml"
    study.write_text(
        'name = "a"\nseeds = 3\n[defaults]\nsource = "mnist-5k"\n[grid]\npreset = ["cnn"]\n'
    )
    rows = ["table2", "--rows", "fovmax-tr2"]
    for count, command in ((9, ["reproduce", *rows]), (3, ["sweep", str(study)])):
        assert run([*command, "--device", "cpu", "--out", str(tmp_path / command[0])]) == code
        words = f"{word}: {count} runs remain; run the same command to resume\n"
        assert capsys.readouterr().err == words


def test_an_engine_that_is_not_there_is_named(tmp_path):
    arguments = ["reproduce", "table2", "--engine", "cloud", "--out", str(tmp_path)]
    with pytest.raises(FoveateError, match="cloud"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_large_gpu_trains_more_small_networks_at_once(monkeypatch, tmp_path):
    memory = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(runner.torch.cuda, "get_device_properties", lambda device: memory)
    groups = []

    def record(engine, group, folder):
        groups.append(len(group))
        return [Failure(job, "not run") for job in group]

    monkeypatch.setattr(LocalEngine, "_perform", record)
    wrapped = [replace(job, config=replace(job.config, backbone="timm:x")) for job in jobs(7)]
    for device, bytes_, given in (
        ("cuda", 80e9, [*jobs(7), *wrapped[:2]]), ("cuda:0", 16e9, jobs(7)),
        ("cuda", 80e9, wrapped), ("cpu", 0, jobs(2)),
    ):  # fmt: skip
        memory.total_memory = bytes_
        list(LocalEngine(device=device).run(given, tmp_path))
    assert groups == [6, 3, 3, 3, 1, 3, 3, 1, 1, 1]
