"""Predictions of a run on photographs: by its recipe, as in evaluate, with its class names."""

import json
import shutil

import numpy as np
import pytest
import torch
from photo_runs import PHOTOGRAPHS, photo_config
from PIL import Image

from foveate.cli.app import run
from foveate.data.pictures import PictureFolder
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import load_model
from foveate.evaluation.predict import predict, prepare, prepare_search
from foveate.evaluation.test_sets import open_test_set
from foveate.execution.plan import outputs
from foveate.training.loop import train

PATHS = [path for path, _ in PictureFolder(PHOTOGRAPHS).items["test"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(photo_config(epochs="1"), tmp_path_factory.mktemp("photos") / "run", workers=0)


@pytest.fixture(scope="module")
def model(trained):
    return load_model(trained.path)


@pytest.mark.parametrize("scale", [None, 1.0, 0.5, 2.0])
def test_predictions_are_those_of_evaluate(trained, model, scale):
    tests = open_test_set(trained, load_source)
    batches = tests.batches(model.net, scale or 1.0)
    with torch.no_grad():
        found = [outputs(model.net, images) for images, _ in batches]
    logits, channels = (torch.cat(part) for part in zip(*found, strict=True))
    assert len(PATHS) == len(logits)
    for index, path in enumerate(PATHS):
        prediction = predict(model, path, scale=scale)
        expected = torch.tensor(prediction.channels)
        torch.testing.assert_close(expected, channels[index], atol=1e-5, rtol=1e-5)
        shares = torch.tensor(prediction.probabilities).log()
        torch.testing.assert_close(shares, logits[index].log_softmax(0), atol=1e-5, rtol=1e-5)
        assert not prediction.inverted


def test_transparency_is_over_black_as_in_training(model, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 60, (50, 70, 4)).astype(np.uint8)
    path, flat = tmp_path / "clear.png", tmp_path / "flat.png"
    Image.fromarray(pixels).save(path)
    over_black = Image.alpha_composite(
        Image.new("RGBA", (70, 50), (0, 0, 0, 255)), Image.fromarray(pixels)
    )
    over_black.convert("RGB").save(flat)
    assert predict(model, path).channels == predict(model, flat).channels


@pytest.mark.parametrize("shape", [(96, 300), (300, 96), (48, 48), (31, 67)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_inputs_keep_their_aspect_ratio(model, shape, scale):
    pixels = np.full((*shape, 1), 7, np.uint8)  # of one colour, which a photograph may be
    short, long = round(48 * (scale or 1)), max(shape) * round(48 * (scale or 1)) // min(shape)
    for make in (prepare, prepare_search):
        image, inverted = make(pixels, model, None, scale)
        assert sorted(image.shape[2:]) == [short, long] and not inverted
        assert (image.shape[2] > image.shape[3]) == (shape[0] > shape[1])
        expected = (7 / 255 - torch.tensor(model.recipe.mean)) / torch.tensor(model.recipe.std)
        torch.testing.assert_close(image[0].mean((1, 2)), expected)


def test_search_finds_the_strongest_centre_in_pixels_of_the_picture(model, tmp_path):
    path = tmp_path / "wide.png"
    pixels = np.random.default_rng(3).integers(0, 256, (200, 653, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    image, _ = prepare_search(pixels, model)
    found = model.net.search(image, 12)
    prediction = predict(model, path, search=True, step=12)
    assert image.shape[2:] == (48, 156)  # 653 * 48 / 200, rounded down
    y, x = (found.centres[0] * torch.tensor([200 / 48, 653 / 156])).tolist()
    assert prediction.centre == pytest.approx((y, x), abs=1e-3)
    assert prediction.window == pytest.approx(float(found.windows[0]) * 200 / 48)
    plain = predict(model, path)
    assert plain.centre == (100, 326.5)
    assert plain.window == pytest.approx(16 * model.scales[plain.channel] * 200 / 48)
    half = predict(model, path, scale=0.5)
    assert half.window == pytest.approx(16 * model.scales[half.channel] * 200 / 24)


def test_what_does_not_apply_is_refused_in_a_line(model, trained, tmp_path, capsys):
    with pytest.raises(ConfigError, match="leave out --invert"):
        predict(model, PATHS[0], invert=True)
    assert predict(model, PATHS[0], invert=False).label in model.classes
    with pytest.raises(ConfigError, match="scale must lie between 1/16 and 64"):
        predict(model, PATHS[0], scale=1000)
    Image.new("RGB", (1, 200)).save(tmp_path / "thin.png")
    with pytest.raises(DataError, match="size must be 1 to 4,096 pixels, got 9600"):
        predict(model, tmp_path / "thin.png", search=True)
    assert run(["predict", str(PATHS[0]), "--model", str(trained.path), "--invert"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_prints_class_names_and_draws(trained, tmp_path, capsys):
    drawn = tmp_path / "drawn.png"
    arguments = ["predict", str(PATHS[0]), "--model", str(trained.path), "--json"]
    assert run([*arguments, "--search", "--picture", str(drawn)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["classes"] == ["hat", "pants", "shoes"]
    assert content["images"][0]["label"] in content["classes"]
    with Image.open(drawn) as picture, Image.open(PATHS[0]) as original:
        assert picture.width >= original.width


def test_class_names_and_recipe_belong_to_the_run(tmp_path):
    source = tmp_path / "pictures"
    shutil.copytree(PHOTOGRAPHS, source)
    config = photo_config(epochs="1", source=f"folder:{source}")
    folder = train(config, tmp_path / "run", workers=0)
    shutil.rmtree(source)
    record = json.loads((folder.path / "config.json").read_text())
    assert record["data"]["classes"] == ["hat", "pants", "shoes"]
    for ref in (folder.path, folder.weights):  # the file of weights alone is enough
        found = load_model(ref)
        assert found.classes == ("hat", "pants", "shoes")
        assert found.recipe == config.recipe
        assert (
            predict(found, PATHS[0]).channels == predict(load_model(folder.path), PATHS[0]).channels
        )
    del record["data"]["classes"]
    (folder.path / "config.json").write_text(json.dumps(record))  # as older versions wrote it
    assert load_model(folder.path).classes == ("0", "1", "2")
    shutil.copytree(PHOTOGRAPHS, source)
    assert load_model(folder.path).classes == ("hat", "pants", "shoes")


@pytest.mark.parametrize("classes", [7, [7], {"hat": 1}])
def test_class_names_that_are_none_are_refused(trained, tmp_path, classes):
    shutil.copytree(trained.path, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"data": record["data"] | {"classes": classes}}))
    with pytest.raises(DataError, match=r"config\.json is damaged \(classes\)"):
        load_model(tmp_path / "run")
