"""Lazy evaluation in the commands: evaluate, predict and audit, for digits and photographs."""

import json
import math
from dataclasses import replace

import pytest
import torch
from photo_runs import PHOTOGRAPHS, SOURCE, photo_config
from tiny_runs import MODEL, tiny
from torch import nn

from foveate.cli.app import run
from foveate.data.pictures import PictureFolder, read_picture
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.evaluation.calibration import calibrate
from foveate.evaluation.models import load_model
from foveate.evaluation.predict import predict, prepare
from foveate.evaluation.test_sets import lazy_channels, open_test_set
from foveate.models.backbone import ConvNet
from foveate.models.lazy import evaluate
from foveate.models.pooling import pool_scales
from foveate.scales import ScaleGrid
from foveate.training.loop import train

PATHS = [path for path, _ in PictureFolder(PHOTOGRAPHS).items["test"]]
SCALES = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on photographs with nine windows of 16 to 64 pixels."""
    config = photo_config(epochs="1", model__pool="logsumexp", model__scales="1:4:4")
    return train(config, tmp_path_factory.mktemp("photos") / "run", workers=0)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    model = replace(MODEL, pool="max", scales=ScaleGrid(1, 2, per_octave=4))
    return train(tiny(model=model, epochs=1), tmp_path_factory.mktemp("digits") / "run")


def measured(folder, out, *options):
    """The tolerance and the scales in the results of evaluate."""
    assert run(["evaluate", str(folder.path), "--out", str(out), *options]) == 0
    content = json.loads((out / "results.json").read_text())
    return content.get("lazy"), content["runs"][0]["scales"]


def test_evaluate_measures_a_lazy_run(digits, tmp_path):
    at = ("--scales", "2")
    (_, (plain,)), (_, (infinite,)) = (
        measured(digits, tmp_path / "all", *at),
        measured(digits, tmp_path / "infinite", *at, "--lazy", "inf"),
    )
    assert infinite == {**plain, "winners": []}
    tolerance, (lazy,) = measured(digits, tmp_path / "lazy", *at, "--lazy", "0")
    assert tolerance == 0
    assert lazy["confusion"] != plain["confusion"]
    assert [*map(sum, lazy["confusion"])] == [*map(sum, plain["confusion"])]


@pytest.mark.parametrize("kind", ["digits", "photos"])
def test_evaluate_calibrates_on_validation_images(kind, request, tmp_path, capsys):
    folder = request.getfixturevalue(kind)
    at = ("--scales", ",".join(map(str, SCALES)))
    (tolerance,), found = measured(folder, tmp_path, *at, "--lazy", "auto")
    net = folder.net()
    chosen = open_test_set(folder, load_source, split="val").calibrate(net, SCALES)
    assert chosen.tolerance <= tolerance <= chosen.tolerance + 0.001
    assert kind == "photos" or tolerance > 0  # a photograph can need few channels after one epoch
    assert net.lazy is None
    assert chosen.disagreement == 0  # of fewer than 1 / 0.0002 images
    assert 2 <= chosen.channels < len(net.scales)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"tolerance {tolerance:.3f}: {chosen.channels:.1f} of {len(net.scales)}")
    net.lazy = tolerance
    expected = open_test_set(folder, load_source).measure(net, SCALES)
    assert [at["accuracy"] for at in found] == [at.accuracy for at in expected]


def test_a_run_on_photographs_is_calibrated_as_its_images_are(photos):
    model = load_model(photos.path)
    draws = torch.Generator().manual_seed(5)
    for weights in model.net.parameters():  # of which the class depends on the channel
        nn.init.normal_(weights, generator=draws)
    pictures = [read_picture(path, "black") for path in PATHS]
    images = [prepare(pixels, model, None, scale)[0] for scale in SCALES for pixels in pictures]
    expected = calibrate(model.net, images, 0.1)
    chosen = open_test_set(photos, load_source).calibrate(model.net, SCALES, 0.1)
    assert expected > 0 and chosen.disagreement > 0
    assert chosen.tolerance == pytest.approx(expected, rel=1e-4)  # patches of one or of many images


def test_evaluate_refuses_other_words(photos, capsys):
    assert run(["evaluate", str(photos.path), "--lazy", "always"]) == 2
    assert "lazy must be a tolerance in logits or auto, got 'always'" in capsys.readouterr().err


@pytest.mark.parametrize("tolerance", [0.0, math.inf])
def test_predictions_of_photographs_are_those_of_the_evaluated_channels(photos, tolerance):
    model, complete = load_model(photos.path), load_model(photos.path)
    lazy_channels(model.net).lazy = tolerance
    for path in PATHS[:4]:
        channels = torch.tensor(predict(complete, path).channels)[None]
        taken = evaluate(channels, lambda values: values, "logsumexp", tolerance)
        found = predict(model, path)
        expected = pool_scales(taken, "logsumexp")[0].log_softmax(0)
        torch.testing.assert_close(
            torch.tensor(found.probabilities).log(), expected, atol=1e-5, rtol=1e-5
        )
        assert found.scale is None and found.window is None and not found.channels


def test_predict_prints_a_class_without_a_scale(photos, capsys):
    command = ["predict", str(PATHS[0]), "--model", str(photos.path)]
    assert run([*command, "--lazy", "0", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["images"]
    assert entry["scale"] is None and entry["label"]
    for option in (["--search"], ["--picture", "found.png"]):
        assert run([*command, "--lazy", "0", *option]) == 2
        assert f"{option[0]} requires all channels" in capsys.readouterr().err


def test_audit_evaluates_the_channels_of_evaluate(photos, tmp_path):
    scales = ["--scales", ",".join(map(str, SCALES))]
    command = ["audit", str(photos.path), "--source", SOURCE, *scales, "--lazy", "0"]
    assert run([*command, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "audit.json").read_text())
    (audit,) = content["audits"].values()
    net = photos.net()
    net.lazy = 0.0
    expected = open_test_set(photos, load_source).measure(net, SCALES)
    found = [point["accuracy"]["value"] for point in audit["scales"]]
    assert found == [at.accuracy for at in expected]
    assert content["lazy"] == 0
    assert any("those of the evaluated channels" in note for note in content["notes"])


@pytest.mark.parametrize("net", [ConvNet((16, 16), 16), nn.Identity(), print])
def test_lazy_evaluation_requires_scale_channels(net):
    with pytest.raises(ConfigError, match=f"requires ScaleChannels, got {type(net).__name__}"):
        lazy_channels(net)
