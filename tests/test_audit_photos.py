"""`foveate audit` on photographs: the recipe of a run, and any classifier on whole pictures."""

import html
import json
import shutil
from dataclasses import replace

import pytest
import torch
from photo_runs import SOURCE, photo_config
from PIL import Image
from safetensors.torch import save_file
from tiny_runs import tiny
from torch import nn

from foveate.cli.app import run
from foveate.data.recipes import Recipe
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.evaluation.audit.audited_images import open_images
from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.report import (
    IN_CHANNELS,
    ORIGINAL,
    _cropped,
    audit_with_channels,
)
from foveate.evaluation.audit.transforms import choose_transform, from_patches
from foveate.evaluation.curve import default_scales
from foveate.evaluation.models import Model, load_model
from foveate.evaluation.results import read_results
from foveate.evaluation.test_sets import open_test_set
from foveate.models.channels import ScaleChannels
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train

SCALES = (0.25, 0.5, 1.0, 2.0)


def content(out):
    return json.loads((out / "audit.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(photo_config(epochs="40"), tmp_path_factory.mktemp("photos"), workers=0).path


@pytest.fixture(scope="module")
def photos():
    return open_images(SOURCE, "test")


def test_scale_by_scale_a_run_is_right_as_often_as_evaluate_says(trained, tmp_path, capsys):
    scales = ["--scales", ",".join(map(str, SCALES))]
    command = ["audit", str(trained), "--source", SOURCE, *scales, "--batch", "4"]
    assert run([*command, "--out", str(tmp_path)]) == 0
    folder = RunFolder(trained)
    expected = open_test_set(folder, load_source).measure(folder.net(), SCALES)
    found = content(tmp_path)
    points = found["audits"][ORIGINAL]["scales"]
    assert [p["accuracy"]["value"] for p in points] == [at.accuracy for at in expected]
    per_class = [[c["right"] for c in p["per_class"].values()] for p in points]
    assert per_class == [[row[k] for k, row in enumerate(at.confusion)] for at in expected]
    assert len(set(map(str, per_class))) > 1  # a curve, not a constant
    assert set(found["audits"]) == {ORIGINAL} and found["channels"] == []
    transform = found["transform"]
    assert (transform["recipe"], transform["base"], transform["size"]) == ("photo", 48, 16)
    assert transform["windows"] == [16.0, 32.0, 64.0]
    page = (tmp_path / "audit.html").read_text()
    assert "windows that extend past the image see padding" in page and "cropped" not in page
    assert "from the whole image" in page and "short side of an image is 48 pixels" in page
    capsys.readouterr()


def test_evaluate_shows_less_resolution_as_audit_does(trained, photos, tmp_path, capsys):
    folder, net = RunFolder(trained), load_model(trained).net
    test = open_test_set(folder, load_source, view="resolution")
    transform = choose_transform(load_model(trained), photos, view="resolution")
    for scale in (0.25, 1.0):
        found = torch.cat([batch.inputs[0] for batch, _ in test.batches(net, scale)])
        torch.testing.assert_close(found, transform(photos.first(len(found)), scale))
    command = ["evaluate", str(trained), "--view", "resolution", "--out", str(tmp_path)]
    assert run([*command, "--scales", "0.25,1"]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["view"] == "resolution"
    capsys.readouterr()
    assert run([*command, "--scales", "2"]) == 2
    assert "requires scales of at most 1, got 2" in capsys.readouterr().err


def test_patches_are_those_of_the_recipe_at_the_scale(trained, photos):
    model = load_model(trained)
    transform = choose_transform(model, photos)
    picture = photos.read(0)
    for scale in (0.5, 1.5):
        resized = Recipe(name="photo", base=round(48 * scale)).transform()(picture)
        assert min(resized.shape[1:]) == round(48 * scale)
        expected = model.net.patches(resized[None])
        torch.testing.assert_close(transform([picture], scale), expected, rtol=0, atol=1e-6)


def test_a_run_in_bf16_is_audited_in_bf16(trained, photos, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"float32"', '"bf16"'))
    half, full = load_model(tmp_path / "run"), load_model(trained)
    cut = choose_transform(half, photos)(photos.first(3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = half.net.combine(half.net.forward_patches(cut)).float()
    assert torch.equal(from_patches(half)(cut), expected)
    assert not torch.equal(from_patches(full)(cut), expected)


def test_less_resolution_of_a_run(trained, photos):
    """The same windows of the same picture, without its fine stripes."""
    transform = choose_transform(load_model(trained), photos, view="resolution")
    plain = replace(transform, view="zoom")
    grey = torch.full((3, 60, 90), 77, dtype=torch.uint8)
    torch.testing.assert_close(transform([grey], 0.25), plain([grey]), rtol=0, atol=1e-5)
    stripes = 255 * (torch.arange(96) % 2).to(torch.uint8).expand(3, 48, 96)
    stripes_shown, shown = transform([stripes], 0.25), plain([stripes])
    assert stripes_shown[:, 0, 0].std() < 0.05 * shown[:, 0, 0].std()
    assert float(stripes_shown.mean()) == pytest.approx(float(shown.mean()), abs=0.05)
    torch.testing.assert_close(transform([stripes], 1.0), shown)
    with pytest.raises(
        ConfigError, match="the view resolution requires scales of at most 1, got 2"
    ):
        audit_with_channels(load_model(trained), photos, transform, [1.0, 2.0])


def test_runs_on_photographs_have_the_same_default_scales_in_all_commands(trained, tmp_path):
    """The audit reached scale 4, and evaluate the scale 8 of digits."""
    views = {"zoom": default_scales("photo").values, "resolution": (0.125, 1.0)}
    assert views["zoom"] == tuple(2 ** (k / 2) for k in range(-4, 3))
    for view, scales in views.items():
        out = ["--view", view, "--out", str(tmp_path / view)]
        assert run(["audit", str(trained), "--source", SOURCE, "--samples", "2", *out]) == 0
        assert run(["evaluate", str(trained), *out]) == 0
        (result,) = read_results(tmp_path / view)
        tested = tuple(at.scale for at in result.scales)
        found = content(tmp_path / view)["audits"]["as it is"]["scales"]
        assert tested == tuple(at["scale"] for at in found)
        assert (tested[0], tested[-1]) == (scales[0], scales[-1])


def test_scales_that_are_too_large_are_refused_before_the_first_image(trained, tmp_path, capsys):
    """All smaller scales, and all runs before, were tested first."""
    shutil.copytree(trained, large := tmp_path / "large")
    settings = (large / "config.json").read_text()
    (large / "config.json").write_text(settings.replace('"base": 48', '"base": 96'))
    test, net = open_test_set(RunFolder(large), load_source), load_model(large).net
    with pytest.raises(ConfigError, match="at scale 64 the short side is 6144 pixels"):
        test.measure(net, (1.0, 64.0), advance=lambda count: pytest.fail("an image was read"))
    command = ["evaluate", str(trained), str(large), "--scales", "64", "--out", str(tmp_path)]
    assert run(command) == 2
    assert "at scale 64 the short side is 6144 pixels" in capsys.readouterr().err


def test_runs_with_different_default_scales_need_scales(trained, tmp_path, capsys):
    train(tiny(epochs=1), tmp_path / "digits")
    command = ["evaluate", str(trained), str(tmp_path / "digits"), "--out", str(tmp_path)]
    assert run(command) == 2
    assert "different default scales; pass --scales" in capsys.readouterr().err


def test_what_lies_beyond_the_windows_of_a_run_is_said(trained, photos):
    """Windows of 64 pixels in pictures with a short side of 48 see 4/3 of it."""
    model = load_model(trained)
    transform = choose_transform(model, photos)
    assert transform.cropped_share(480, 640) == transform.cropped_share(30, 30) == pytest.approx(0)
    assert (
        transform.cropped_share(480, 1280)
        == transform.cropped_share(1280, 480)
        == pytest.approx(0.5)
    )
    narrow = replace(transform, windows=ScaleChannels(nn.Identity(), [0.75, 1.0], 24))
    assert narrow.cropped_share(480, 480) == pytest.approx(0.75)
    shown = narrow.show([photos.read(0)])
    assert shown.shape == (1, 3, 24, 24) and 0 <= shown.min() < shown.max() <= 1
    (note,) = _cropped(narrow, [(480, 480)])
    assert note == (
        "1 of 1 images extends past the largest window of 24 pixels at scale 1: it loses 75 % of "
        "its area"
    )
    (note,) = _cropped(narrow, [(480, 480)] * 2)
    assert "2 of 2 images extend past" in note and "they lose 75 % of their area in the" in note
    assert _cropped(transform, [(480, 480)]) == []


def test_a_run_keeps_its_recipe(trained, photos):
    model = load_model(trained)
    with pytest.raises(ConfigError, match=r"uses the recipe of its run; leave out --size$"):
        choose_transform(model, photos, size=32)
    with pytest.raises(ConfigError, match=r"one per class, got \(2, 3\)"):
        choose_transform(model, open_images(SOURCE, "test", classes=["hat", "pants", "shoes", "x"]))
    transform = choose_transform(model, photos)
    with pytest.raises(
        ConfigError, match="5760 pixels, above the limit of 4096; use smaller scales"
    ):
        audit_with_channels(replace(model, recipe=None), photos, replace(
            transform, recipe=replace(transform.recipe, base=90)), [64.0])  # fmt: skip


def test_a_picture_too_narrow_for_the_recipe_is_left_out(trained, tmp_path, capsys):
    for name in ("hat", "pants", "shoes"):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("RGB", (30, 40), "red").save(tmp_path / "in" / name / "1.png")
    Image.new("RGB", (1, 9000), "red").save(tmp_path / "in" / "hat" / "2.png")
    command = ["audit", str(trained), "--source", f"folder:{tmp_path / 'in'}", "--split", "all"]
    assert run([*command, "--scales", "1", "--out", str(tmp_path / "out")]) == 0
    found = content(tmp_path / "out")
    (left,) = found["unreadable"]
    assert "2.png has 1x9000 pixels: with a short side of 48" in left and found["images"] == 3
    capsys.readouterr()


# Any classifier


def by_colour(images):
    """Three classes, from the mean colour of an input of any size."""
    return 20 * images.mean((2, 3))


MODEL = Model(name="m", net=by_colour, shape=(None, 3, 24, 24))


def test_what_is_cropped_is_said(photos):
    transform = choose_transform(MODEL, photos)
    found = audit_with_channels(MODEL, photos, transform, [0.5, 1.0], pool=None)
    shapes = [photos.read(i).shape[1:] for i in range(len(photos))]
    lost = [1 - min(shape) / max(shape) for shape in shapes]
    cut = sorted(share for share in lost if share > 0.01)
    (note,) = [note for note in found.notes if "cropped" in note]
    assert note.startswith(f"{len(cut)} of {len(shapes)} images are cropped")
    assert f"at most {100 * cut[-1]:.0f} %; pass --fit inside" in note
    inside = audit_with_channels(
        MODEL, photos, replace(transform, fit="inside"), [0.5, 1.0], pool=None
    )
    assert not [note for note in inside.notes if "cropped" in note]
    small = Transform(size=(20, 20), recipe="mirrored")  # which does not support --fit
    (note,) = _cropped(small, [(28, 28)])
    assert note.endswith("it loses 49 % of its area; pass a larger --size to keep the whole images")


def test_scale_channels_without_training_are_a_wrapped_network_on_the_pictures(photos):
    """At scale 2 the network sees the picture at twice the size, not only its centre."""
    transform = choose_transform(MODEL, photos)
    scales = [0.5, 1.0, 2.0]
    found = audit_with_channels(MODEL, photos, transform, scales, patch=12, batch=5)
    net = ScaleChannels(_Colours(), [1.0, 2.0, 4.0], 12, "logsumexp", antialias=True)
    for i, scale in enumerate(scales):
        pictures = [photos.read(k) for k in range(len(photos))]
        wide = torch.cat([transform([picture], scale, 48) for picture in pictures])
        right = int((net(wide).argmax(1) == photos.labels).sum())
        assert found.audits[IN_CHANNELS].overall[i].right == right
    assert found.metadata["pool"] == "logsumexp" and found.metadata["patch"] == 12
    assert found.metadata["cost"] == {"pixels": 3 / 4}
    alone = audit_with_channels(MODEL, photos, transform, scales, pool=None)
    for one, other in zip(found.plain.overall, alone.plain.overall, strict=True):
        assert (one.right, one.agreeing) == (other.right, other.agreeing)


class _Colours(nn.Module):
    def forward(self, images):
        return by_colour(images)


def test_windows_of_the_view_resolution_hold_the_picture_at_its_own_pixels(photos):
    transform = choose_transform(MODEL, photos, view="resolution")
    found = audit_with_channels(MODEL, photos, transform, [0.25, 0.5, 1.0])
    assert found.channels == (1.0, 2.0, 4.0)


def test_windows_without_end_are_refused(photos):
    transform = choose_transform(replace(MODEL, shape=(None, 3, None, None)), photos, size=4096)
    with pytest.raises(ConfigError, match="GB are free; use a smaller --size"):
        audit_with_channels(MODEL, photos, transform, [1.0, 64.0])


def test_options_reach_the_command(tmp_path, capsys, monkeypatch):
    (tmp_path / "colours.py").write_text("def net(images):\n    return images.mean((2, 3))\n")
    monkeypatch.chdir(tmp_path)
    command = ["audit", "colours:net", "--source", SOURCE, "--size", "20", "--samples", "12"]
    options = ["--view", "resolution", "--fit", "inside", "--border", "0.5,0.25,1"]
    options += ["--patch", "10", "--pool", "probabilities"]
    assert run([*command, *options]) == 0
    found = content(tmp_path / "audit")
    known = {"view": "resolution", "fit": "inside", "border": [0.5, 0.25, 1.0], "size": [20, 20]}
    assert {key: found["transform"][key] for key in known} == known
    assert (found["patch"], found["pool"]) == (10, "probabilities")
    assert found["audits"][ORIGINAL]["scales"][0]["scale"] == 0.125
    capsys.readouterr()
    cases = {
        "the view resolution requires scales of at most 1, got 2": ["--scales", "1,2"],
        "border must be one number or one per channel (3), got 2": ["--border", "0,1"],
        "border must have values from 0 to 1, got 128,9,9; divide them by 255": [
            "--border",
            "128,9,9",
        ],
        "border must be replicate": ["--border", "1,b"],
        "fit must be one of fill, inside": ["--fit", "out"],
        "view must be one of zoom, resolution": ["--view", "near"],
        "size must be 1 to": ["--patch", "99999999"],
    }
    for words, changed in cases.items():
        assert run([*command, "--view", "resolution", *changed]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1


def test_a_run_at_chance_is_not_told_to_pass_options_that_it_refuses(trained, photos):
    model = load_model(trained)
    model.net.backbone = Constant()
    transform = choose_transform(model, photos)
    *_, doubt = audit_with_channels(model, photos, transform, [1.0]).notes
    assert "not above chance; train the network longer" in doubt and "--mean" not in doubt


class Constant(nn.Module):
    """The same logits for every patch: a third of the photographs are right."""

    def forward(self, patches):
        return patches.new_tensor([1.0, 0.0, 0.0]).expand(len(patches), 3)


def test_a_timm_model_is_audited_with_a_file_of_weights(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm", reason="pip install 'foveate[photos]'")
    net = timm.create_model("lcnet_035", num_classes=3)
    torch.nn.init.zeros_(net.classifier.weight)
    torch.nn.init.constant_(net.classifier.bias[1:], -9)  # always the first class
    monkeypatch.chdir(tmp_path)
    save_file(net.state_dict(), "net.safetensors")
    given = ["--source", SOURCE, "--scales", "1", "--size", "32", "--out", "out"]
    assert run(["audit", "timm:lcnet_035", "--weights", "net.safetensors", *given]) == 0
    found = content(tmp_path / "out")
    assert found["weights"] == "net.safetensors"
    shares = found["audits"][ORIGINAL]["scales"][0]["per_class"].values()
    assert [share["right"] == share["count"] for share in shares] == [True, False, False]
    shown = html.unescape((tmp_path / "out" / "audit.html").read_text())
    assert "load_model('timm:lcnet_035', weights='net.safetensors').net.train()" in shown


@pytest.mark.parametrize("scale", [0.25, 1.0, 2.0])
def test_backgrounds_are_those_of_the_windows_padding(trained, photos, scale):
    model = load_model(trained)
    image = photos.first(1)  # larger windows than images at 1/4: several reflections
    made = {mode: choose_transform(model, photos, border=mode) for mode in ("replicate", "reflect")}
    for mode, padding in {"replicate": "border", "reflect": "reflect"}.items():
        plain = replace(choose_transform(model, photos))
        plain.windows.padding = padding
        torch.testing.assert_close(made[mode](image, scale), plain(image, scale))
    colour = (0.2, 0.4, 1.0)
    found = choose_transform(model, photos, border=colour)(image, scale)
    mean, std = (torch.tensor(v) for v in (model.photo.mean, model.photo.std))
    filled = (torch.tensor(colour) - mean) / std
    outside = model.photo.base * scale < 64 - 4  # the short side, in the largest window
    at_corner = torch.allclose(found[0, -1, :, 0, 0], filled, atol=1e-5)
    assert at_corner == outside
    torch.testing.assert_close(found[0, 0, :, 8, 8], made["reflect"](image, scale)[0, 0, :, 8, 8])


def test_evaluate_and_audit_show_a_run_the_same_background(trained, tmp_path, capsys):
    found = {}
    shown = {"replicate": "replicate", "reflect": "reflect", "1,0,0": "(1.0, 0.0, 0.0)"}
    for border in shown:
        given = ["--border", border, "--scales", "0.25,1", "--out", str(tmp_path)]
        assert run(["evaluate", str(trained), *given]) == 0
        evaluated = json.loads((tmp_path / "results.json").read_text())
        assert evaluated["border"] == border
        assert run(["audit", str(trained), "--source", SOURCE, *given]) == 0
        assert f"Padding: {shown[border]}." in (tmp_path / "audit.html").read_text()
        audited = content(tmp_path)["audits"][ORIGINAL]["scales"]
        at = [point["accuracy"] for point in evaluated["runs"][0]["scales"]]
        assert at == [point["accuracy"]["value"] for point in audited]
        ends = [audited[0]["accuracy"][end] for end in ("low", "high")]
        assert evaluated["runs"][0]["scales"][0]["interval"] == ends
        found[border] = evaluated["runs"][0]["scales"][0]["winners"]
    assert found["replicate"] != found["1,0,0"]
    assert f"({100 * ends[0]:.1f}–{100 * ends[1]:.1f})" in capsys.readouterr().out
    assert run(["evaluate", str(trained), "--border", "mirror", "--out", str(tmp_path)]) == 2
    assert "border must be replicate, reflect, a number" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "audit"])
def test_a_source_with_classes_at_other_indices_is_refused(trained, tmp_path, capsys, command):
    first, second, *_ = classes = RunFolder(trained).classes()
    for split in ("train", "val", "test"):
        for name in classes[1:]:
            (folder := tmp_path / "other" / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 30), "red").save(folder / "0.png")
    source = f"folder:{tmp_path / 'other'}"
    arguments = [command, str(trained), "--source", source, "--scales", "1"]
    arguments += ["--out", str(tmp_path / "out")]
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert f"class {second!r} has index 0 in {source}, but 1 in {trained}" in error
    if command == "audit":
        assert run([*arguments, "--classes", ",".join(classes)]) == 0
    for split in ("train", "val", "test"):  # the missing class restores the order
        shutil.copytree(tmp_path / "other" / split / second, tmp_path / "other" / split / first)
    assert run(arguments) == 0


def test_training_is_not_resumed_with_classes_at_other_indices(tmp_path):
    folder = tmp_path / "photos"
    shutil.copytree(SOURCE.removeprefix("folder:"), folder)
    config = replace(photo_config(epochs="1"), source=f"folder:{folder}")

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", workers=0, callback=stop)
    first = RunFolder(tmp_path / "run").classes()[0]
    for path in list(folder.rglob(first)):
        path.rename(path.with_name("zebra"))
    with pytest.raises(ConfigError, match="has index 0 in"):
        train(config, tmp_path / "run", workers=0, changed_data=True)
