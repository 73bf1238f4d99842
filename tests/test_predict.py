"""Pictures of any size and mode, shown to a network as the data set shows its own."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from raised import one_line
from rich.cells import cell_len
from ship import ship
from tiny_runs import MODEL, tiny

from foveate.cli.app import run
from foveate.cli.predict import _print_table
from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation import models, runs
from foveate.evaluation import predict as module
from foveate.evaluation.audit.images import zoom
from foveate.evaluation.models import Model, load_model
from foveate.evaluation.predict import Prediction, predict, prepare
from foveate.models.pretrained import from_pretrained, pretrained_info, pretrained_names
from foveate.models.zoo import ModelConfig
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train

SIZE = 24  # of the frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train(tiny(epochs=1), tmp_path_factory.mktemp("run")).path


@pytest.fixture(scope="module")
def network(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def digit():
    """A digit of 28 pixels, (28, 28) uint8."""
    return load_source("mnist-5k").test.images[3, 0].numpy()


def other(network, **changes):
    """The network with other words about it."""
    return replace(network, **changes)


def save(path, pixels, mode=None, **options):
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path, **options)
    return path


def shown(network, path, **options):
    """What the network gets to see of a file, and whether it was inverted."""
    return prepare(module.read_picture(path, "contrast"), network, **options)


def as_source(digit, scale):
    return rescale(torch.tensor(digit)[None, None], scale, size=SIZE)


def test_a_digit_of_the_source_fills_the_frame_as_the_data_set_would_have_it(
    network, digit, tmp_path
):
    image, inverted = shown(network, save(tmp_path / "digit.png", digit))
    assert not inverted
    assert torch.equal(image, as_source(digit, SIZE / 28))


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_scale_says_how_large_a_pixel_becomes(network, digit, tmp_path, scale):
    image, _ = shown(network, save(tmp_path / "digit.png", digit), scale=scale)
    # The background of a digit is 0, so what is put around a small one is what the recipe puts.
    torch.testing.assert_close(image, as_source(digit, scale), atol=1e-6, rtol=0)


def test_dark_on_light_is_the_same_as_light_on_dark(network, digit, tmp_path):
    image, inverted = shown(network, save(tmp_path / "ink.png", 255 - digit))
    assert inverted
    assert torch.equal(image, as_source(digit, SIZE / 28))


def test_inverting_can_be_asked_for_and_forbidden(network, digit, tmp_path):
    ink = save(tmp_path / "ink.png", 255 - digit)
    left, inverted = shown(network, ink, invert=False)
    assert not inverted and torch.equal(left, as_source(255 - digit, SIZE / 28))
    turned, inverted = shown(network, save(tmp_path / "digit.png", digit), invert=True)
    assert inverted and torch.equal(turned, left)


@pytest.mark.parametrize(
    ("source", "inverts"),
    [
        ("mnist", True),
        ("fashion-mnist", True),
        ("data/mnist_large_scale_tr50000.h5", True),
        ("folder:pets", False),
        ("idx:numbers", False),
    ],
)
def test_only_networks_of_light_on_dark_images_get_them_inverted(
    network, digit, tmp_path, source, inverts
):
    ink = save(tmp_path / "ink.png", 255 - digit)
    assert shown(other(network, source=source), ink)[1] == inverts


def test_paper_that_is_dark_grey_is_still_paper(network, digit, tmp_path):
    photo = (100 - digit * (80 / 255)).astype(np.uint8)  # ink of 20 on paper of 100
    assert shown(network, save(tmp_path / "photo.png", photo))[1]


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "CMYK", "I;16", "1"])
def test_every_mode_shows_the_same(network, digit, tmp_path, mode):
    digit = np.where(digit > 127, 255, 0).astype(np.uint8) if mode == "1" else digit
    if mode == "I;16":
        path = save(tmp_path / "digit.png", digit.astype(np.uint16) * 257)
    else:
        path = save(tmp_path / f"digit.{'tif' if mode == 'CMYK' else 'png'}", digit, mode)
    with Image.open(path) as image:
        assert image.mode == mode
    assert torch.equal(shown(network, path)[0], as_source(digit, SIZE / 28))


def test_colour_becomes_grey_by_its_luma(network, digit, tmp_path):
    colour = np.stack([digit, digit // 2, digit // 3], -1)
    luma = np.asarray(Image.fromarray(colour).convert("L"))
    expected = 0.299 * colour[..., 0] + 0.587 * colour[..., 1] + 0.114 * colour[..., 2]
    assert np.abs(luma - expected).max() <= 0.51  # rounded to whole numbers
    image, _ = shown(network, save(tmp_path / "colour.png", colour))
    assert torch.equal(image, as_source(luma, SIZE / 28))


@pytest.mark.parametrize("ink", [0, 255])
def test_ink_on_a_transparent_sheet_is_seen_whatever_its_colour(network, digit, tmp_path, ink):
    hidden = 255 - ink  # the colour under what is fully transparent does not matter
    colour = np.where(digit > 0, ink, hidden).astype(np.uint8)
    drawing = save(tmp_path / "drawing.png", np.dstack([colour] * 3 + [digit]))
    image, inverted = shown(network, drawing)
    assert inverted == predict(network, drawing).inverted == (ink == 0)
    assert torch.equal(image, as_source(digit, SIZE / 28))


def test_exif_orientation_is_applied(network, digit, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 270 degrees
    turned = save(tmp_path / "turned.png", np.rot90(digit).copy(), exif=exif)
    assert torch.equal(shown(network, turned)[0], as_source(digit, SIZE / 28))


def test_a_grey_picture_fills_the_channels_of_a_colour_network(network, digit, tmp_path):
    colour = other(network, shape=(None, 3, SIZE, SIZE))
    image, _ = shown(colour, save(tmp_path / "digit.png", digit))
    assert image.shape == (1, 3, SIZE, SIZE)
    for channel in range(3):
        torch.testing.assert_close(image[:, channel], as_source(digit, SIZE / 28)[:, 0])
    two = other(network, shape=(None, 2, SIZE, SIZE))
    message = one_line(ConfigError, lambda: predict(two, tmp_path / "digit.png"))
    assert "takes 2 image channels" in message


@pytest.mark.parametrize("wide", [True, False])
def test_beside_a_picture_that_is_not_square_its_background_goes_on(network, tmp_path, wide):
    picture = np.full((10, 30), 60, np.uint8)
    picture[4:6, 12:18] = 200
    picture[3, 3] = 10  # the background is not the darkest
    square = np.full((30, 30), 60, np.uint8)
    square[10:20] = picture
    if not wide:
        picture, square = picture.T.copy(), square.T.copy()
    image, _ = shown(network, save(tmp_path / "long.png", picture))
    assert torch.equal(image, as_source(square, SIZE / 30))


def test_the_centre_stays_the_centre_for_odd_differences(network, tmp_path):
    picture = np.zeros((4, 9), np.uint8)
    picture[1:3, 4] = 255  # symmetric, up and down, left and right
    image, _ = shown(network, save(tmp_path / "odd.png", picture))
    torch.testing.assert_close(image, image.flip(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(image, image.flip(3), atol=1e-6, rtol=0)


def test_a_huge_picture_is_averaged_over_blocks_first(network, digit, tmp_path):
    huge = np.kron(digit, np.ones((30, 30), np.uint8))  # 840 pixels, above 16 frames of 24
    smaller = np.kron(digit, np.ones((10, 10), np.uint8))  # blocks of 3
    image, _ = shown(network, save(tmp_path / "huge.png", huge))
    assert torch.equal(image, as_source(smaller, SIZE / 280))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 500), (1, 4000)])
def test_odd_shapes_are_no_problem(network, tmp_path, shape):
    picture = np.zeros(shape, np.uint8)
    picture.flat[0] = 255
    image, _ = shown(network, save(tmp_path / "odd.png", picture))
    assert image.shape == (1, 1, SIZE, SIZE) and image.isfinite().all()


def by_hand(net, image):
    with torch.no_grad():
        return net.eval()(image)[0]


def test_the_answer_is_the_networks(folder, network, digit, tmp_path):
    net, image = RunFolder(folder).net().eval(), as_source(digit, SIZE / 28)
    said = predict(network, save(tmp_path / "digit.png", digit))
    shares = by_hand(net, image).softmax(0)
    with torch.no_grad():
        outputs, scale = net.channels(image)[0], float(net.select_scale(image))
    best = int(shares.argmax())
    assert said.label == str(best)
    assert said.confidence == pytest.approx(float(shares[best]), rel=1e-5)
    assert said.probabilities == pytest.approx(shares.tolist(), rel=1e-4)
    assert said.scale == pytest.approx(scale)
    assert said.channel == int(outputs[:, best].argmax())
    torch.testing.assert_close(torch.tensor(said.channels), outputs)


@pytest.mark.parametrize("form", ["plain", "sliding"])
def test_other_forms_of_network_answer_too(digit, tmp_path, form):
    size = SIZE if form == "plain" else 12
    model = ModelConfig(form=form, size=size, features=(4, 8), hidden=8, batch_norm=False)
    torch.manual_seed(0)
    net = model.build().eval()
    network = Model(name="x", net=net, shape=(None, 1, SIZE, SIZE), config=model, source="mnist")
    said = predict(network, save(tmp_path / "digit.png", digit))
    best = int(by_hand(net, as_source(digit, SIZE / 28)).argmax())
    assert said.label == str(best)
    if form == "plain":
        assert (said.scale, said.channel, said.channels) == (None, None, ())
        return
    with torch.no_grad():
        outputs = net.channels(as_source(digit, SIZE / 28))[0]
    assert said.channel == int(outputs[:, best].argmax())
    low, high = net.scales[max(said.channel - 1, 0)], net.scales[min(said.channel + 1, 16)]
    assert low <= said.scale <= high


def test_a_network_that_answers_nonsense_is_said(network, digit, tmp_path):
    broken = MODEL.build()
    torch.nn.init.constant_(broken.backbone.head.bias, float("nan"))
    path = save(tmp_path / "digit.png", digit)
    assert "returns non-finite logits" in one_line(
        DataError, lambda: predict(other(network, net=broken.eval()), path)
    )


def test_pictures_that_cannot_be_shown_are_said_in_a_line(network, digit, tmp_path, monkeypatch):
    blank = save(tmp_path / "blank.png", np.full((5, 7), 9, np.uint8))
    assert "all pixels have the same colour" in one_line(DataError, lambda: predict(network, blank))
    noise = tmp_path / "noise.png"
    noise.write_bytes(b"no picture at all")
    missing = tmp_path / "missing.png"
    for path, start in (
        (noise, f"cannot read image {noise} ("),
        (missing, f"cannot read image {missing} (No such file or directory); pass the path"),
        (tmp_path, f"cannot read image {tmp_path} (Is a directory); pass the path of a file"),
    ):
        message = one_line(DataError, lambda path=path: predict(network, path))
        assert message.startswith(start)
    path = save(tmp_path / "digit.png", digit)
    message = one_line(ConfigError, lambda: predict(network, path, scale=1000))
    assert message.startswith("scale must lie between")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)  # 28 * 28 = 784
    message = one_line(DataError, lambda: predict(network, path))
    assert message == f"image {path} has more than 700 pixels; resize it"


def test_classes_have_names_where_they_are_known(network, tmp_path):
    def names(source, classes):
        config = replace(MODEL, classes=classes)
        return other(network, source=source, config=config, class_names=()).classes

    assert names("fashion-mnist", 10)[9] == "Ankle boot"
    assert names("mnist", 3) == ("0", "1", "2")
    for name in ("cat", "ant"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "1.png", np.zeros((2, 2), np.uint8))
    assert names(f"folder:{tmp_path}", 2) == ("ant", "cat")
    assert names(f"folder:{tmp_path}/gone", 2) == ("0", "1")
    assert names("shards:x", 2) == names("", 2) == ("0", "1")
    assert other(network, config=None, class_names=()).classes == ()
    assert other(network, source="fashion-mnist").classes == tuple("0123456789")  # as recorded


def test_networks_are_found_by_folder_and_by_name(folder, network, tmp_path, monkeypatch):
    from foveate.evaluation.curve import AtScale
    from foveate.evaluation.results import RunResult

    run_folder = RunFolder(folder)
    result = RunResult(run=str(folder), config=run_folder.config(), scales=(AtScale(1.0, ((1,),)),))
    ship([result], tmp_path / "cards", tmp_path, name=lambda config: "some-name")
    for place, find in ((runs, pretrained_info), (models, pretrained_names)):
        monkeypatch.setattr(place, find.__name__, partial(find, folder=tmp_path))
    made = lambda name, pretrained: from_pretrained(name, tmp_path)  # noqa: E731
    monkeypatch.setattr(runs, "create_model", made)
    named = load_model("some-name")
    assert (named.size, named.source, named.border) == (SIZE, "mnist-5k", "replicate")
    assert named.classes == network.classes == tuple("0123456789")
    images = torch.randn(2, 1, SIZE, SIZE)
    assert torch.equal(named(images), network(images))
    assert "did you mean some-name" in one_line(ConfigError, lambda: load_model("some-nam"))


def test_other_models_get_a_resized_and_normalised_picture(digit, tmp_path):
    def net(images):
        return images.flatten(1)[:, :3]

    other_model = Model(name="x", net=net, shape=(None, 1, SIZE, SIZE), mean=(0.5,), std=(0.25,))
    path = save(tmp_path / "digit.png", digit)
    image, inverted = shown(other_model, path)
    whole = torch.tensor(digit)[None, None] / 255
    expected = (zoom(whole, SIZE / 28, (SIZE, SIZE)) - 0.5) / 0.25
    torch.testing.assert_close(image, expected)
    assert not inverted
    said = predict(other_model, path)
    assert said.label == str(int(net(image).argmax())) and said.scale is None
    unknown = Model(name="mynet:net", net=net)
    message = one_line(ConfigError, lambda: predict(unknown, path))
    assert message.startswith("mynet:net has an unknown input size")


def test_what_suits_no_image_is_said_once(digit, tmp_path, monkeypatch, capsys):
    (tmp_path / "sizeless.py").write_text("def net(images):\n    return images.flatten(1)[:, :3]\n")
    monkeypatch.syspath_prepend(tmp_path)
    paths = [str(save(tmp_path / f"{name}.png", digit)) for name in "abc"]
    for options in (["--model", "sizeless:net"], ["--scale", "1000"]):
        assert run(["predict", *paths, *options, "--json"]) == 2
        shown = capsys.readouterr()
        assert shown.err.count("\n") == 1 and not shown.out


def test_a_network_with_random_weights_is_named(folder, digit, tmp_path, capsys):
    path = save(tmp_path / "digit.png", digit)
    assert run(["predict", str(path), "--model", "cnn"]) == 0
    assert "warning: cnn has random weights; choose a trained network" in capsys.readouterr().err
    assert run(["predict", str(path), "--model", str(folder)]) == 0
    assert capsys.readouterr().err == ""


def test_the_command_answers_what_it_can(folder, digit, tmp_path, capsys):
    good = save(tmp_path / "one [x].png", digit)
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"x")
    assert run(["predict", str(bad), str(good), str(good), "--model", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith(f"error: cannot read image {bad}")
    said = predict(load_model(folder), good)
    head, line, again = out.splitlines()
    assert head.split() == ["class", "confidence", "scale", "channel", "image"]
    cells = [said.label, f"{100 * said.confidence:.1f}", "%", f"{said.scale:.2f}"]
    assert line == again and line.endswith(str(good))
    assert line.split()[:5] == [*cells, f"{MODEL.scales[said.channel]:.2f}"]
    assert run(["predict", str(good), "--model", str(folder)]) == 0


def test_the_command_prints_json(folder, digit, tmp_path, capsys):
    good, bad = save(tmp_path / "good.png", 255 - digit), tmp_path / "bad.png"
    options = ["--model", str(folder), "--json", "--device", "cpu"]
    assert run(["predict", str(good), str(bad), *options]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["scales"]) == (str(folder), [1.0, 2.0])
    first, second = found["images"]
    assert first["image"] == str(good) and first["inverted"] is True
    assert first["label"] == found["classes"][int(np.argmax(first["probabilities"]))]
    assert len(first["channels"]) == 2 and first["channel"] in (0, 1)
    assert second["image"] == str(bad) and "No such file" in second["error"]
    run(["predict", str(good), "--no-invert", "--scale", "1", *options])
    assert json.loads(capsys.readouterr().out)["images"][0]["inverted"] is False


def test_the_command_with_nothing_to_answer(folder, tmp_path, capsys):
    assert run(["predict", str(tmp_path / "no.png"), "--model", str(folder)]) == 1
    assert capsys.readouterr().out == ""
    assert run(["predict", "x.png", "--model", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_a_run_among_the_images_is_a_mistake(folder, digit, tmp_path, capsys):
    good = save(tmp_path / "good.png", digit)
    assert run(["predict", str(folder), str(good)]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: {folder} is a run, not an image; pass it as --model {folder}\n",
    )


def test_wide_characters_keep_the_columns_aligned(capsys):
    model = SimpleNamespace(scales=(1.0, 2.0))
    seen = {"confidence": 0.5, "probabilities": (0.5,), "inverted": False, "scale": 1.5}
    found = [
        (Path("a.png"), Prediction(label=label, channel=1, **seen))
        for label in ("犬と猫と鳥", "dog")
    ]
    _print_table(model, found, search=False)
    lines = capsys.readouterr().out.splitlines()
    assert len({cell_len(line.rpartition("  ")[0]) for line in lines}) == 1
