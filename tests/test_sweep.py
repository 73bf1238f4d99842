"""Studies in TOML: read right, refused with the key of a mistake, run, and told of."""

import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tiny_runs import STUDY as GOOD
from tiny_runs import tiny

from foveate.cli.app import run
from foveate.errors import ConfigError
from foveate.evaluation.test_sets import find_test_source
from foveate.paper.tables import SCALES
from foveate.scales import ScaleGrid
from foveate.sweeps.records import read_records
from foveate.sweeps.study import read_study
from foveate.training.presets import preset

# What is refused


def written(tmp_path, text=GOOD):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


BAD = [
    ("epochs = 2", "epoch = 2", "defaults.epoch is not a known key; did you mean epochs?"),
    ("seeds = 2", "sedes = 2", "sedes is not a known key; did you mean seeds?"),
    ("model.size = 12", "model.sise = 12", "defaults.model.sise is not a known key; did you mean"),
    ("cpus = 1", "cpu = 1", "resources.cpu is not a known key; did you mean cpus?"),
    ("batch = 16", "seed = 16", "defaults.seed is not a known key; set seeds at the top level"),
    (
        'preset = "fovavg"',
        'model = "cnn"',
        "runs[0].model is not a known key; choose a network",
    ),
    ("epochs = 2", 'epochs = "2"', "defaults.epochs must be a whole number, got '2'"),
    ("epochs = 2", "epochs = 2.5", "defaults.epochs must be a whole number, got 2.5"),
    ("epochs = 2", "epochs = true", "defaults.epochs must be a whole number, got True"),
    ("epochs = 2", "epochs = 1979-05-27", "defaults.epochs must be a whole number, got datetime"),
    ('"mnist-5k"', "5", "defaults.source must be a string, got 5"),
    ("= [4, 8]", "= [4, 8.5]", "defaults.model.features must be a list of whole numbers, got"),
    (
        '= "1:2:1"',
        "= [1, 2, 1]",
        'model.scales must be text such as "0.5:8:4" (low:high:per_octave), got [1, 2, 1]',
    ),
    ('= "1:2:1"', "= true", "defaults.model.scales must be a string or a finite number, got True"),
    ('= "1:2:1"', '= "2:1:1"', "defaults.model.scales: high must be"),
    ('= "1:2:1"', '= "1,2"', "defaults.model.scales"),
    ("scales = 1\n", "scales = [1, 2]\n", 'scales must be text such as "0.5:8:4"'),
    ("model.hidden = 8", 'model.batch_norm = "no"', "defaults.model.batch_norm must be true or"),
    ("learning_rate = 0.001", 'learning_rate = "x"', "runs[1].learning_rate must be a finite num"),
    ("learning_rate = 0.001", "learning_rate = nan", "runs[1].learning_rate must be a finite num"),
    ('preset = "fovmax"', "preset = 3", "runs[1].preset must be a string, got 3"),
    ("cpus = 1", "cpus = 1.5", "resources.cpus must be a whole number, got 1.5"),
    ("seeds = 2", 'seeds = "2"', "seeds must be a whole number, got '2'"),
    ("seeds = 2", "seeds = [0, 0.5]", "seeds must be a whole number, got 0.5"),
    ("[defaults]", "[[defaults]]", "defaults must be a table, got ["),
    ("test_scales = [1, 2]", "test_scales = [2, 1]", "test_scales: scales out of order"),
    ("test_scales = [1, 2]", "test_scales = 2", "test_scales: scales must be a list of numbers"),
    ("= [0, 0.15]", "= 0.15", "grid.model.dropout must be a list, got 0.15"),
    ("= [0, 0.15]", "= []", "grid.model.dropout: this key has no values"),
    ("epochs = 2", "epochs = 0", "defaults.epochs must be 1 to 1,000,000, got 0"),
    ("learning_rate = 0.001", "learning_rate = -1", "runs[1].learning_rate must be above 0"),
    ("= [0, 0.15]", "= [0, 1.5]", "grid.model.dropout must be at least 0 and below 1, got 1.5"),
    ('"mnist-5k"', '"mnist-6k"', "defaults.source: unknown data source 'mnist-6k'"),
    ('preset = "fovmax"', 'preset = "fovmix"', "did you mean fovmax?"),
    ("samples = 96", "samples = 9600", "defaults.samples must be at most 3500"),
    (
        "model.hidden = 8",
        "model.classes = 3",
        "defaults.model.classes: mnist-5k has 10 classes, but the model has 3",
    ),
    ("model.hidden = 8", "model.channels = 3", "defaults.model.channels: mnist-5k has images of 1"),
    ('preset = "fovmax"', 'preset = "cnn"', "but size is 24; set both to the same number"),
    (
        '"fovmax"',
        '"fovavg"\nbackbone = "a"',
        "runs[1].backbone must be given as package.module",
    ),
    (
        "seeds = 2",
        "seeds = [1, 1]",
        "seeds must be a number from 1 to 1000 or a list of distinct seeds",
    ),
    ("seeds = 2", "seeds = 0", "seeds must be a number from 1 to 1000 or"),
    ("seeds = 2", "seeds = 1_000_000_000_000", "seeds must be a number from 1 to 1000 or"),
    ("seeds = 2", "seeds = [-1]", "seeds: seed must be 0 to 2^32 - 1"),
    (
        "= [0, 0.15]",
        "= [0, 0.0]",
        "is the same run as fovavg_model.dropout=0 in runs[0]",
    ),
    ('"fovmax"\nlearning_rate = 0.001', '"fovavg"', "runs[1]: fovavg_model.dropout=0 is the same"),
    ('"fovmax"\nlearning_rate = 0.001', '"fovavg-tr2"\nscales = 1', "in runs[0]; remove one"),
    (
        'preset = "fovmax"',
        'preset = "fovmax"\nname = "a b"',
        "runs[1].name: a name can only contain letters",
    ),
    ('"fovmax"', f'"fovmax"\nname = "{"a" * 121}"', "aaa... has more than 120 characters"),
    (
        "learning_rate = 0.001",
        "model.dropout = 0",
        "runs[1].model.dropout: this key is also in the grid",
    ),
    ('preset = "fovmax"\n', "", 'runs[1]: preset is missing; add preset = "fovavg"'),
    ("cpus = 1", "cpus = 0", "resources.cpus must be at least 1, got 0"),
    ("cpus = 1", "gpus = 2", "resources.gpus must be a fraction of a GPU from 0 to 1, got 2"),
    ('name = "small"', 'name = "../small"', "name: a name can only contain letters"),
    ('name = "small"\n', "", "name is missing; add name"),
]
NOT_TOML = [
    ("batch = 16", 'model = "cnn"', "at line 13"),
    ("epochs = 2", "epochs = ", "at line 12, column 10"),
    ("epochs = 2", "epochs = 2\nepochs = 3", "at line 13"),
    ("epochs = 2", f"epochs = {'1' * 5000}", "limit"),
    ("epochs = 2", f"epochs = {'[' * 100_000}", "maximum recursion depth"),
]


def refused(tmp_path, capsys, old, new):
    """What the command says about the study with `new` in the place of `old`."""
    assert GOOD.count(old) == 1
    study = written(tmp_path, GOOD.replace(old, new))
    assert run(["sweep", str(study), "--trust", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and not (tmp_path / "out").exists()
    return told.removeprefix(f"error: {study}")


@pytest.mark.parametrize(("old", "new", "words"), BAD, ids=[new[:40] for _, new, _ in BAD])
def test_a_bad_study_is_refused_before_anything_starts(tmp_path, capsys, old, new, words):
    told = refused(tmp_path, capsys, old, new)
    assert told.startswith(": ") and words in told


def test_a_study_may_have_a_byte_order_mark_and_windows_line_endings(tmp_path):
    study = written(tmp_path, GOOD)
    plain = read_study(study, trust=True)
    study.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert read_study(study, trust=True) == plain


@pytest.mark.parametrize(("old", "new", "words"), NOT_TOML, ids=range(5))
def test_what_is_not_toml_is_refused_with_its_line(tmp_path, capsys, old, new, words):
    told = refused(tmp_path, capsys, old, new)
    assert told.startswith(" is not valid TOML: ") and words in told


def test_more_cpus_than_the_machine_has_are_refused(tmp_path, capsys):
    told = refused(tmp_path, capsys, "cpus = 1", "cpus = 4000")
    assert "a run requires 4000 CPUs, but this machine has" in told and "resources.cpus" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path, capsys):
    study = written(tmp_path, GOOD.replace("cpus = 1", "gpus = 0.5"))
    assert run(["sweep", str(study), "--dry-run"]) == 2
    assert "no GPU was found; use --device cpu" in capsys.readouterr().err
    assert run(["sweep", str(study), "--dry-run", "--device", "cpu"]) == 0


@pytest.mark.parametrize("text", ['name = "x"\n', 'name = "x"\nruns = []\n'])
def test_a_study_without_runs_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="the study has no runs"):
        read_study(written(tmp_path, text))


def test_names_that_became_the_same_are_refused(tmp_path):
    text = GOOD.replace('preset = "fovmax"', 'preset = "fovmax"\nname = "fovavg"')
    with pytest.raises(ConfigError, match=r"runs\[1\]: the run in runs\[0\] is also named"):
        read_study(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        read_study(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_study(tmp_path / "latin.toml")


# What is read


def test_a_study_is_its_runs_times_its_grid_times_its_seeds(tmp_path):
    study = read_study(written(tmp_path))
    names = list(dict.fromkeys(job.name for job in study.jobs))
    dropouts = ("_model.dropout=0", "_model.dropout=0.15")
    assert names == [f"fovavg{d}" for d in dropouts] + [
        f"fovmax_learning_rate=0.001{d}" for d in dropouts
    ]
    assert [job.config.seed for job in study.jobs] == [0, 1] * 4
    assert {job.scales for job in study.jobs} == {(1.0, 2.0)}
    assert (study.name, study.cpus, study.gpus) == ("small", 1, None)
    assert study.jobs[0].rows == (("small", names[0]),)


def test_settings_mean_what_they_mean_for_train(tmp_path):
    last = read_study(written(tmp_path)).jobs[-1].config
    assert last == preset("fovmax").changed(
        {
            "source": "mnist-5k", "scales": "1", "samples": "96", "size": "24", "batch": "16",
            "epochs": "2", "model.features": "[4, 8]", "model.size": "12", "model.hidden": "8",
            "model.scales": "1:2:1", "learning_rate": "0.001", "model.dropout": "0.15", "seed": "1",
        }
    )  # fmt: skip


def test_whole_numbers_are_the_fractions_that_they_are_for_train(tmp_path):
    text = GOOD.replace("epochs = 2", "epochs = 2\nzooms = [1, 2]")
    config = read_study(written(tmp_path, text)).jobs[0].config
    assert config.digest() == replace(config, zooms=(1.0, 2.0)).digest()


def test_a_grid_alone_is_a_study(tmp_path):
    text = 'name = "x"\nseeds = [7]\n[defaults]\nsource = "mnist-5k"\n[grid]\n'
    grid = 'preset = ["cnn", "fovavg"]\nscales = [1, "1-4"]\nmodel.padding = ["border", 0.5]\n'
    jobs = read_study(written(tmp_path, text + grid)).jobs
    assert len(jobs) == 8
    assert jobs[0].name == "cnn_scales=1_model.padding=border"
    assert {job.config.scales for job in jobs} == {"1", "1-4"}
    assert {job.config.model.padding for job in jobs} == {"border", 0.5}
    assert {job.scales for job in jobs} == {SCALES}
    assert {job.config.seed for job in jobs} == {7}


def test_images_of_other_shapes_are_followed(tmp_path):
    text = 'name = "x"\n[[runs]]\npreset = "fovavg"\nsource = "mnist-5k"\nmodel.scales = "1:4:1"\n'
    (job,) = read_study(written(tmp_path, text)).jobs
    assert job.config.model.scales == ScaleGrid(1, 4, per_octave=1)
    assert (job.config.model.channels, job.config.model.classes) == (1, 10)


def test_images_that_are_made_already_decide_their_scales(tmp_path):
    path = tmp_path / "made.h5"
    with h5py.File(path, "w") as file:
        for split in ("train", "val", "test"):
            file[f"x_{split}"] = np.zeros((4, 24, 24, 1), np.float32)
            file[f"y_{split}"] = np.arange(4)
    with pytest.raises(ConfigError, match="does not name the source of its images"):
        find_test_source(tiny(source=str(path)))
    assert find_test_source(tiny()) == "mnist-5k"


# Running it


def test_the_example_runs_and_is_not_run_twice(tmp_path, capsys):
    study = Path(__file__).parent.parent / "examples" / "study.toml"
    arguments = ["sweep", str(study), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert run([*arguments, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("6 runs: 0 finished, 6 remaining\n") and len(told.splitlines()) == 2 + 6
    assert all(name in told for name in ("fovavg_samples=200", "logsumexp_samples=800"))
    assert not (tmp_path / "out").exists()
    assert run(arguments) == 0
    records = read_records(tmp_path / "out")
    assert len({record.key for record in records}) == 6 * 4
    assert len(records) == 6 * 4
    said = capsys.readouterr().out
    best = {r.row: f"{100 * r.accuracy:.2f}" for r in records if r.scale == 1}
    for row, shown in best.items():
        (line,) = [line for line in said.splitlines() if line.startswith(f"{row}  ")]
        assert line.split()[1] == "1" and line.split()[3] == shown
    before = (tmp_path / "out" / "results.csv").stat().st_mtime_ns
    assert run(arguments) == 0
    assert "6 runs: 6 finished, 0 remaining" in capsys.readouterr().out
    assert (tmp_path / "out" / "results.csv").stat().st_mtime_ns == before


FRAGILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = torch.nn.Linear(144, classes)

    def forward(self, x):
        if self.training:
            raise ValueError("it broke")
        return self.layer(x.flatten(1))

def net(channels, classes):
    return Net(classes)
"""


def test_failed_runs_are_named_and_the_others_done(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fragile.py").write_text(FRAGILE)
    text = GOOD.replace('"fovmax"', '"fovmax"\nname = "bad"\nbackbone = "fragile:net"')
    text = text.replace("[0, 0.15]", "[0]").replace("seeds = 2", "seeds = 1")
    assert run(["sweep", str(written(tmp_path, text)), "--trust", "--device", "cpu"]) == 1
    said = capsys.readouterr()
    first, last = said.err.splitlines()
    assert first.startswith("bad_model.dropout=0 seed 0 failed: ") and "it broke" in first
    assert last.startswith("1 runs failed: bad_model.dropout=0 seed 0; run the same")
    assert {r.row for r in read_records(tmp_path / "runs" / "small")} == {"fovavg_model.dropout=0"}
    assert "results.csv" in said.out
    alone = text.replace('[[runs]]\npreset = "fovavg"\n', "").replace("small", "alone")
    assert run(["sweep", str(written(tmp_path, alone)), "--trust", "--device", "cpu"]) == 1
    assert "results.csv" not in capsys.readouterr().out  # there is none
    sys.modules.pop("fragile")
