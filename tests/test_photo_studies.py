"""Studies of runs on photographs: settings of the recipe, trained, tested and resumed."""

import json
import shutil

import pytest
from photo_runs import PHOTOGRAPHS, SOURCE, photo_config

from foveate.cli.app import run
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.evaluation.curve import default_scales
from foveate.evaluation.test_sets import open_test_set
from foveate.sweeps.records import read_records
from foveate.sweeps.study import read_study
from foveate.training.checkpoint import RunFolder
from foveate.training.photos import PhotoBatches

STUDY = f"""\
name = "photos"
test_scales = [0.5, 1]
[defaults]
preset = "fovavg"
source = "{SOURCE}"
epochs = 2
batch = 10
backbone = "photo_runs:backbone"
recipe.shift = 6
recipe.base = 48
model.size = 16
model.features = [4, 8]
model.hidden = 8
model.scales = "1:4:1"
[grid]
recipe.base = [32, 48]
"""


def read(tmp_path, text, **options):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return read_study(path, load_source, trust=True, **options)


def plain(text):
    return text.replace("[grid]\nrecipe.base = [32, 48]\n", "[[runs]]\n")


@pytest.mark.parametrize(
    "setting",
    [
        "recipe.shift = 6\nrecipe.base = 48",
        '"recipe.base" = 48\nrecipe = "photo"\n"recipe.shift" = 6',
        'recipe = {name = "photo", base = 48, shift = 6.0}',
        'recipe.base = 48\nrecipe.shift = 6\nrecipe.name = "photo"',
    ],
)
def test_settings_of_the_recipe_mean_what_they_mean_for_train(tmp_path, setting):
    text = plain(STUDY).replace("recipe.shift = 6\nrecipe.base = 48", setting)
    (job,) = read(tmp_path, text).jobs
    assert job.config == photo_config(epochs="2", backbone="photo_runs:backbone")


def test_runs_are_tested_at_the_default_scales_of_evaluate(tmp_path):
    (job,) = read(tmp_path, plain(STUDY).replace("test_scales = [0.5, 1]", "")).jobs
    assert job.scales == default_scales("photo").values


def test_a_mean_may_be_whole_numbers(tmp_path):
    text = plain(STUDY).replace("recipe.shift = 6", "recipe.mean = [0, 0.5, 1]")
    (job,) = read(tmp_path, text).jobs
    assert job.config.recipe.mean == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("recipe.shift = 6", "recipe.shfit = 6", "defaults.recipe.shfit is not a known key"),
        ("recipe.shift = 6", "recipe.shift = -1", "defaults.recipe.shift must be 0 to 4096"),
        ("recipe.base = 48", 'recipe.base = "48"', "defaults.recipe.base must be"),
        ("recipe.shift = 6", 'recipe.name = "fotos"', "defaults.recipe: unknown recipe"),
        ("recipe.shift = 6", "recipe.mean = [1]", "defaults.recipe.mean must have 3 values"),
        ("epochs = 2", "scales = 2", "defaults.scales: the recipe photo does not use scales"),
        ("epochs = 2", "samples = 25", "samples must be at most 24, .* got 25"),
        (
            "[0.5, 1]",
            "[0.5, 90]",
            "test_scales: .* short side is 4320 pixels, above the limit",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_key(tmp_path, old, new, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, plain(STUDY).replace(old, new))
    assert "\n" not in str(caught.value)


def test_a_study_of_photo_runs_is_trained_tested_and_resumed(tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "study.toml", tmp_path / "out"
    path.write_text(STUDY)
    arguments = ["sweep", str(path), "--trust", "--device", "cpu", "--out", str(out)]
    hand_out, calls = PhotoBatches.__call__, []

    def failing(self, order, batch, draws=(0, 0)):
        calls.append(self.split)
        if calls.count("test") == 3:
            raise KeyboardInterrupt  # while the second run is tested
        return hand_out(self, order, batch, draws)

    monkeypatch.setattr(PhotoBatches, "__call__", failing)
    assert run(arguments) == 130
    monkeypatch.setattr(PhotoBatches, "__call__", hand_out)
    assert len(read_records(out)) == 2
    before = (out / "fovavg_recipe.base=32-s0" / "weights.safetensors").stat().st_mtime_ns
    assert run(arguments) == 0
    assert "2 runs: 1 finished, 1 remaining" in capsys.readouterr().out
    assert (out / "fovavg_recipe.base=32-s0" / "weights.safetensors").stat().st_mtime_ns == before
    records = read_records(out)
    assert [(r.row, r.scale) for r in records] == [
        (f"fovavg_recipe.base={base}", scale) for base in (32, 48) for scale in (0.5, 1.0)
    ]
    for record in records:
        folder = RunFolder(out / f"{record.row}-s0")
        tested = open_test_set(folder, load_source).measure(folder.net(trust=True), [record.scale])
        assert record.accuracy == tested[0].accuracy and tested[0].count == 9
    assert run(arguments) == 0
    assert "2 runs: 2 finished, 0 remaining" in capsys.readouterr().out
    outcome = json.loads((out / "fovavg_recipe.base=48-s0" / "outcome.json").read_text())
    assert outcome["validation"] == RunFolder(out / "fovavg_recipe.base=48-s0").validation()


def test_pictures_without_a_test_split_are_refused_before_training(tmp_path):
    shutil.copytree(PHOTOGRAPHS, tmp_path / "pictures")
    shutil.rmtree(tmp_path / "pictures" / "test")
    with pytest.raises(ConfigError, match=r"defaults\.source"):
        read(tmp_path, plain(STUDY).replace(SOURCE, f"folder:{tmp_path / 'pictures'}"))
