"""`foveate audit` of networks of this package: runs, pretrained ones, and what they have seen."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tiny_runs import MODEL, tiny

import foveate.evaluation.models as models
from foveate.cli.app import run
from foveate.data.sources import load_source
from foveate.evaluation import runs as by_name
from foveate.evaluation.audit.report import IN_CHANNELS, ORIGINAL
from foveate.evaluation.curve import accuracy_over_scale
from foveate.models.pretrained import PretrainedInfo
from foveate.models.zoo import ModelConfig
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train

SCALES = ["--scales", "0.5:2:1"]


def content(out):
    return json.loads((out / "audit.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small CNN trained on scale 2 and a small FovMax trained on several scales."""
    folder = tmp_path_factory.mktemp("runs")
    cnn = ModelConfig(form="plain", size=24, features=(4, 8), hidden=8)
    train(tiny(model=cnn, scales="2"), folder / "cnn")
    train(tiny(model=replace(MODEL, pool="max"), scales="1-2"), folder / "fovmax")
    return folder


@pytest.mark.parametrize(("name", "native"), [("cnn", 2.0), ("fovmax", 1.0)])
def test_a_run_gets_the_curve_that_evaluate_gives(runs, tmp_path, capsys, name, native):
    """On the same images made by the same recipe: the same answers, one by one."""
    command = ["audit", str(runs / name), "--source", "mnist-5k", *SCALES, "--samples", "200"]
    assert run([*command, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    net, test = RunFolder(runs / name).net(), load_source("mnist-5k").test
    test = replace(test, images=test.images[:200], labels=test.labels[:200])
    expected = accuracy_over_scale(net, test, [0.5, 1.0, 2.0], size=24)
    found = content(tmp_path)
    points = found["audits"][ORIGINAL]["scales"]
    assert found["transform"]["recipe"] == "mnist-large-scale"
    assert found["transform"]["size"] == [24, 24]
    assert [p["accuracy"]["value"] for p in points] == [at.accuracy for at in expected]
    assert found["audits"][ORIGINAL]["native"] == native
    beside = {ORIGINAL, IN_CHANNELS} if name == "cnn" else {ORIGINAL}
    assert set(found["audits"]) == beside
    if name == "cnn":
        assert found["channels"] == [0.25, 0.5, 1.0]  # relative to the training scale


@pytest.mark.parametrize(
    ("trained_on", "source", "split", "seen"),
    [
        ("mnist-5k", "mnist-5k", "test", False),
        ("mnist-5k", "mnist-5k", "train", True),
        ("mnist-5k", "mnist-5k", "val", False),
        ("mnist", "mnist-5k", "val", True),
        ("mnist-5k", "mnist-5k", "all", True),
        ("mnist", "mnist", "test", False),
        ("mnist", "mnist-5k", "test", True),
        ("mnist", "fashion-mnist", "train", False),
        ("mnist-5k", "mnist", "val", False),
        ("mnist-5k", "mnist", "test", False),
        ("mnist-5k", "mnist", "train", True),
        ("mnist-5k", "mnist", "all", True),
        ("mnist", "folder:photos", "train", False),
    ],
)
def test_a_run_knows_what_it_has_seen(runs, tmp_path, trained_on, source, split, seen):
    shutil.copytree(runs / "cnn", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"mnist-5k"', f'"{trained_on}"'))
    assert models.load_model(tmp_path / "run").was_trained_on(source, split) == seen


def test_images_that_a_run_was_trained_on_are_warned_of(runs, tmp_path, capsys):
    command = ["audit", str(runs / "fovmax"), "--source", "mnist-5k", "--split", "train", *SCALES]
    assert run([*command, "--samples", "20", "--out", str(tmp_path)]) == 0
    warning = "was trained on mnist-5k, which includes images of mnist-5k (train)"
    err = capsys.readouterr().err
    assert warning in err and err.startswith("warning: ")
    assert warning in (tmp_path / "audit.html").read_text()
    assert warning in content(tmp_path)["notes"][0]


def test_validation_images_of_a_run_are_named_as_such(runs, tmp_path, capsys):
    command = ["audit", str(runs / "fovmax"), "--source", "mnist-5k", "--split", "val", *SCALES]
    assert run([*command, "--samples", "20", "--out", str(tmp_path)]) == 0
    expected = f"the images are the validation images of {runs / 'fovmax'}, which was not trained"
    assert content(tmp_path)["notes"][0].startswith(expected)
    assert "includes images of" not in capsys.readouterr().err


def test_a_pretrained_network_by_its_name(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    model = ModelConfig(size=12, features=(4, 8), hidden=8, scales=MODEL.scales)
    made = {"version": "1", "commit": "", "hardware": "", "file": "", "sha256": ""}
    info = PretrainedInfo(
        name="small", model=model, source="mnist", scales="2", samples=0, size=24, seed=0, seeds=1,
        recipe={"border": "zero"}, validation=0.9, accuracy={}, tested=0, **made,
    )  # fmt: skip
    monkeypatch.setattr(models, "pretrained_names", lambda: ["small"])
    monkeypatch.setattr(by_name, "pretrained_info", lambda name: info)
    monkeypatch.setattr(by_name, "create_model", lambda name, pretrained: model.build().eval())
    command = ["audit", "small", "--source", "mnist-5k", *SCALES, "--samples", "20"]
    assert run([*command, "--split", "all", "--out", str(tmp_path)]) == 0
    warning = (
        "warning: the model small was trained on mnist, which includes images of mnist-5k (all)\n"
    )
    assert warning in capsys.readouterr().err
    found = content(tmp_path)
    assert found["audits"][ORIGINAL]["native"] == 2
    assert found["transform"]["recipe"] == "mnist-large-scale"
    assert (found["transform"]["size"], found["transform"]["border"]) == ([24, 24], "zero")


def write_digits(folder, count):
    """Training digits as files, a subfolder per class, without splits."""
    digits = load_source("mnist-5k").train
    for index, label in enumerate(digits.labels[:count].tolist()):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(digits.images[index, 0].numpy())
        image.save(folder / str(label) / f"{index:03}.png")
    return f"folder:{folder}"


@pytest.mark.parametrize("name", ["a pretrained network", "a run on another folder"])
def test_all_images_of_a_folder_are_audited_if_the_model_was_not_trained_on_it(
    tmp_path, capsys, name
):
    """Twenty images in ten classes, too few to be split."""
    source, model = write_digits(tmp_path / "few", 20), "fovmax-mnist-tr2"
    if name != "a pretrained network":
        own = write_digits(tmp_path / "own", 200)
        model = str(train(tiny(source=own, epochs=1), tmp_path / "run").path)
    command = ["audit", model, "--source", source, "--scales", "1,2"]
    assert run([*command, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    found = content(tmp_path / "out")
    assert (found["split"], found["images"]) == ("all", 20)


def test_test_images_are_audited_of_the_folder_that_a_run_was_trained_on(tmp_path, capsys):
    """Also if the folder has moved."""
    own = write_digits(tmp_path / "own", 200)
    made = train(tiny(source=own, epochs=1), tmp_path / "run").path
    shutil.copytree(tmp_path / "own", tmp_path / "moved")
    for source in (own, f"folder:{tmp_path / 'moved'}"):
        command = ["audit", str(made), "--source", source, "--scales", "1"]
        assert run([*command, "--out", str(tmp_path / "out")]) == 0
        found = content(tmp_path / "out")
        assert found["split"] == "test" and found["images"] == len(load_source(own).test)
    capsys.readouterr()
