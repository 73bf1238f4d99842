"""Networks as files for other programs: the same answers, for any batch, or no file at all."""

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from photo_runs import PHOTOGRAPHS, photo_config
from PIL import ExifTags, Image
from raised import one_line
from tiny_runs import MODEL, tiny
from torchvision.transforms import v2

import foveate
from foveate import ScaleGrid, create_model
from foveate.cli.app import run
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.exported import read_metadata
from foveate.evaluation.models import load_model
from foveate.evaluation.predict import predict
from foveate.models import export as module
from foveate.models.channels import ScaleChannels
from foveate.models.export import NOTE, export
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train

onnxruntime = pytest.importorskip("onnxruntime")
SHAPE = (1, 112, 112)
# The published networks; those with 17 channels have two here, since every scale is traced anew.
FEWER = {"scales": ScaleGrid(1, 2, per_octave=1)}
ZOO = {"cnn": {}, "fovmax": FEWER, "fovavg": FEWER, "fovconc": {}, "swmax": FEWER}


def named(name):
    """A network whose batch norm has seen images: its statistics are not those it is born with."""
    torch.manual_seed(0)
    net = create_model(name, **ZOO[name])
    with torch.no_grad():
        net.train()(torch.randn(8, *SHAPE) + 0.5)
    return net.eval()


def answers(path, images):
    """Ask the file, by means that the package has no part in."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        outputs = session.run(names, {"images": images.numpy()})
        return dict(zip(names, map(torch.from_numpy, outputs), strict=True))
    outputs = torch.export.load(str(path)).module()(images)
    return dict(zip(("logits", "channels"), outputs, strict=False))


def about(path):
    if (path := Path(path)).suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return json.loads(session.get_modelmeta().custom_metadata_map[NOTE])
    found = {NOTE: ""}
    torch.export.load(io.BytesIO(path.read_bytes()), extra_files=found)
    return json.loads(found[NOTE])


def tiny_net():
    torch.manual_seed(1)
    return MODEL.build().eval()


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
@pytest.mark.parametrize("name", ZOO)
def test_every_network_answers_the_same_from_its_file(name, suffix, tmp_path):
    net, path = named(name), tmp_path / f"{name}.{suffix}"
    made = export(net, path, shape=SHAPE)
    assert made.path == path and 0 <= made.difference <= made.allowed
    # A wrong graph is off by parts of the answers themselves, not by some roundings of them.
    images = torch.randn(5, *SHAPE)
    with torch.no_grad():
        logits = net(images)
        channels = net.channels(images) if name != "cnn" else None
    assert made.allowed < 1e-3 * float(logits.abs().max())
    found = answers(path, images)
    assert tuple(found) == made.outputs
    torch.testing.assert_close(found["logits"], logits, atol=made.allowed, rtol=0)
    if name == "cnn":
        assert made.outputs == ("logits",)
    else:
        torch.testing.assert_close(found["channels"], channels, atol=made.allowed, rtol=0)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_file_says_what_it_is(suffix, tmp_path):
    path = tmp_path / f"net.{suffix}"
    export(tiny_net(), path, shape=(1, 24, 24), about={"classes": ["a", "b"]})
    note = about(path)
    assert note["scales"] == [1.0, 2.0] and note["classes"] == ["a", "b"]
    assert note["version"] == foveate.__version__
    if suffix == "onnx":
        session = onnxruntime.InferenceSession(str(path))
        (taken,) = session.get_inputs()
        given = {output.name: output.shape for output in session.get_outputs()}
        assert (taken.name, taken.shape) == ("images", ["batch", 1, 24, 24])
        assert given == {"logits": ["batch", 10], "channels": ["batch", 2, 10]}


def test_a_network_in_training_is_written_for_use_and_left_as_it_was(tmp_path):
    net = tiny_net().double().train()
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    export(net, tmp_path / "net.pt2", shape=(1, 24, 24))
    assert net.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    images = torch.randn(2, 1, 24, 24)
    with torch.no_grad():
        right = net.eval()(images.double()).float()
    torch.testing.assert_close(answers(tmp_path / "net.pt2", images)["logits"], right)


def test_a_backbone_of_ones_own_is_written_too(tmp_path):
    layers = (torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.GELU(), torch.nn.Flatten())
    backbone = torch.nn.Sequential(*layers, torch.nn.LazyLinear(5))
    net = ScaleChannels(backbone, [1.0, 2.0], 12, "logsumexp").eval()
    images = torch.randn(4, 3, 20, 30)
    with torch.no_grad():
        right = net(images)
    made = export(net, tmp_path / "own.pt2", shape=(3, 20, 30))
    found = answers(tmp_path / "own.pt2", images)["logits"]
    torch.testing.assert_close(found, right, atol=made.allowed, rtol=0)


class Doubled(ScaleChannels):
    """Scale channels with a `forward` of their own."""

    def forward(self, images):
        return 2 * super().forward(images)


def test_a_forward_of_ones_own_is_written(tmp_path):
    net = Doubled(tiny_net().backbone, [1.0, 2.0], 12).eval()
    images = torch.randn(4, 1, 24, 24)
    made = export(net, tmp_path / "own.pt2", shape=(1, 24, 24))
    assert made.outputs == ("logits",)
    with torch.no_grad():
        right = net(images)
    found = answers(tmp_path / "own.pt2", images)["logits"]
    torch.testing.assert_close(found, right, atol=made.allowed, rtol=0)


def test_a_lazy_network_is_written_with_all_channels(tmp_path):
    torch.manual_seed(0)
    lazy = ScaleChannels(tiny_net().backbone, ScaleGrid(0.5, 2, per_octave=2), 12).eval()
    lazy.lazy = 0.0
    images = torch.randn(4, 1, 24, 24)
    made = export(lazy, tmp_path / "lazy.pt2", shape=(1, 24, 24))
    assert lazy.lazy == 0.0
    found = answers(tmp_path / "lazy.pt2", images)["channels"]
    torch.testing.assert_close(found, lazy.channels(images), atol=made.allowed, rtol=0)


class Weighted(torch.nn.Module):
    """A network that uses the name of the scales for something else."""

    def __init__(self):
        super().__init__()
        self.scales, self.head = torch.nn.Parameter(torch.rand(3)), torch.nn.Linear(3, 2)

    def forward(self, images):
        return self.head(images.mean((2, 3)) * self.scales)


class Pair(torch.nn.Flatten):
    """The same as a tuple."""

    scales = (torch.ones(3), "each")


@pytest.mark.parametrize("net", [Weighted(), Pair()])
def test_only_scales_of_channels_are_noted(tmp_path, net):
    export(net, tmp_path / "net.pt2", shape=(3, 8, 8))
    assert about(tmp_path / "net.pt2") == {"version": foveate.__version__}


class Wide(torch.nn.LayerNorm):
    """A norm in float32 for any input, which some libraries use."""

    def forward(self, values):
        return super().forward(values.float())


class Bessel(torch.nn.Module):
    """An operator that ONNX does not have."""

    def forward(self, values):
        return torch.special.bessel_j0(values)


@pytest.mark.parametrize(
    ("layer", "suffix", "says"),
    [(Wide(10), "pt2", "runs in float64"), (Bessel(), "onnx", "bessel_j0.*or export to .pt2")],
)
def test_backbones_that_cannot_be_written_or_checked_are_named(tmp_path, layer, suffix, says):
    net = tiny_net()
    net.backbone = torch.nn.Sequential(net.backbone, layer)
    message = one_line(ConfigError, lambda: export(net, tmp_path / f"a.{suffix}", shape=SHAPE))
    assert re.search(f"cannot export this network for images of .*{says}", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("padding", ["border", "reflect", 0.5])
@pytest.mark.parametrize("antialias", [False, True])
def test_a_file_for_images_of_any_size_pads_as_the_network(tmp_path, padding, antialias):
    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    net = ScaleChannels(backbone, [0.3, 1, 7], 8, padding=padding, antialias=antialias).eval()
    made = export(net, tmp_path / "net.onnx", shape=(1, None, None))
    for shape in ((1, 1, 1, 1), (2, 1, 1, 9), (5, 1, 30, 2)):
        images = torch.rand(shape)
        found = answers(tmp_path / "net.onnx", images)["logits"]
        torch.testing.assert_close(found, net(images).detach(), atol=made.allowed, rtol=0)


def shifted(amount):
    """A runtime that gets the last class wrong by `amount`."""

    def load(data):
        ask = torch.export.load(io.BytesIO(data)).module()

        def wrong(images):
            logits, channels = ask(images)
            return logits + amount * (torch.arange(10) == 9), channels

        return wrong

    return load


@pytest.mark.parametrize("amount", [1e-3, np.nan])
def test_a_file_that_answers_otherwise_is_not_kept(tmp_path, monkeypatch, amount):
    monkeypatch.setattr(module, "_load_torch", shifted(amount))
    path = tmp_path / "net.pt2"
    path.write_text("what was there before")
    message = one_line(DataError, lambda: export(tiny_net(), path, shape=(1, 24, 24)))
    assert "the file differs from the network by" in message
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_gives_other_shapes_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_load_torch", lambda data: lambda images: images[:2, 0, :2, :2])
    message = one_line(
        DataError, lambda: export(tiny_net(), tmp_path / "net.pt2", shape=(1, 24, 24))
    )
    assert "the file returns" in message and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_missing_packages_are_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    message = one_line(
        ConfigError, lambda: export(tiny_net(), tmp_path / "net.onnx", shape=(1, 24, 24))
    )
    assert "pip install 'foveate[onnx]'" in message and list(tmp_path.iterdir()) == []


def test_formats_and_shapes_that_cannot_work(tmp_path):
    def made(name, net=None, shape=(1, 24, 24), **options):
        return lambda: export(net or tiny_net(), tmp_path / name, shape=shape, **options)

    assert "must end in .onnx or .pt2" in one_line(ConfigError, made("net.bin"))
    assert "format must be one of onnx, torch" in one_line(ConfigError, made("x", format="h5"))
    mixed = one_line(ConfigError, made("net.onnx", format="torch"))
    assert "'net.onnx' ends in .onnx, but the format is torch" in mixed
    assert "cannot export this network for images of shape (1, 64, 64)" in one_line(
        ConfigError, made("cnn.pt2", net=create_model("cnn"), shape=(1, 64, 64))
    )
    assert "rejected patches" in one_line(ConfigError, made("net.pt2", shape=(3, 24, 24)))
    (tmp_path / "file").write_text("")
    assert "cannot write" in one_line(DataError, made("file/net.pt2"))
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in one_line(DataError, made("pipe", format="torch"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(("name", "format"), [("net.onnx", None), ("net.bin", "torch")])
def test_the_command_writes_and_checks(tmp_path, capsys, name, format):
    folder = train(tiny(epochs=1), tmp_path / "run")
    options = ["--format", format] if format else []
    path = tmp_path / name
    assert run(["export", str(folder.path), "--out", str(path), *options]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{path} maps images to logits and channels"
    assert second.startswith("largest difference from the network: ")
    images = torch.randn(3, 1, 24, 24)
    loaded = path if format is None else path.rename(tmp_path / "net.pt2")
    with torch.no_grad():
        right = folder.net().eval()(images)
    torch.testing.assert_close(answers(loaded, images)["logits"], right, atol=1e-4, rtol=0)
    assert about(loaded)["classes"] == list("0123456789")


def test_the_command_fails_in_one_line(tmp_path, capsys):
    assert run(["export", "nothing-like-it", "--out", str(tmp_path / "x.onnx")]) == 2
    err = capsys.readouterr().err
    assert "no model 'nothing-like-it'; pass" in err and err.count("\n") == 1
    out = ["--size", "40", "--out", str(tmp_path / "x.onnx")]
    assert run(["export", "audited_nets:net", *out]) == 2
    assert "cannot export audited_nets:net" in capsys.readouterr().err


def agree(model, file, path, **options):
    """A network and its file predict the same class with the same probabilities."""
    ours, theirs = (predict(load_model(m, trust=True), path, **options) for m in (model, file))
    assert (theirs.label, theirs.inverted) == (ours.label, ours.inverted)
    assert max(ours.probabilities) < 0.999  # other images have other probabilities
    assert theirs.probabilities == pytest.approx(ours.probabilities, abs=1e-4)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_an_exported_network_of_digits_prepares_images_as_in_training(tmp_path, suffix):
    """The metadata had no recipe, and no command read them: a clear 0 was a 2."""
    folder = train(tiny(epochs=1, border="zero"), tmp_path / "run").path
    digit = load_source("mnist-5k").test.images[0, 0].numpy()
    Image.fromarray(255 - digit).resize((40, 50)).save(tmp_path / "digit.png")
    file = str(tmp_path / f"net.{suffix}")
    assert run(["export", str(folder), "--out", file]) == 0
    loaded = load_model(file, trust=True)
    assert (loaded.source, loaded.border, loaded.shape) == ("mnist-5k", "zero", (None, 1, 24, 24))
    assert loaded.classes == load_model(folder).classes
    agree(folder, file, tmp_path / "digit.png")


def test_an_exported_network_for_squares_sees_the_centre_of_a_photograph(tmp_path):
    config = photo_config(epochs="1", model__size="32", model__scales="0.5:2:1")
    folder = train(config, tmp_path / "run", workers=0).path
    file = f"{tmp_path}/net.onnx"
    for size in ("64", "96"):  # windows of up to 64 pixels in photographs of 48 by 64
        assert run(["export", str(folder), "--out", file, "--size", size]) == 0
        agree(folder, file, PHOTOGRAPHS / "test" / "hat/0.jpg")


def test_classes_in_a_file_are_those_of_an_audit(tmp_path):
    """Class folders can be missing, so that an index means another class."""
    folder = train(photo_config(epochs="40"), tmp_path / "run", workers=0).path
    file = f"{tmp_path}/net.onnx"
    assert run(["export", str(folder), "--out", file]) == 0
    for name in ("pants", "shoes"):
        shutil.copytree(PHOTOGRAPHS / "test" / name, tmp_path / "fewer" / name)
    source = ["--source", f"folder:{tmp_path}/fewer", "--scales", "1", "--pool", "none"]
    assert run(["audit", file, *source, "--out", str(tmp_path / "audit")]) == 0
    found = json.loads((tmp_path / "audit" / "audit.json").read_text())
    (at,) = found["audits"]["as it is"]["scales"]
    assert list(at["per_class"]) == ["hat", "pants", "shoes"]
    assert found["transform"]["size"] == [48, 48]
    assert found["transform"]["mean"] == list(RunFolder(folder).config().recipe.mean)


@pytest.mark.parametrize(
    "note",
    ["[]", "{", '{"classes": [1]}', '{"recipe": {"base": 0}}', '{"std": [0]}', '{"mean": 1}'],
)
def test_damaged_metadata_are_named(note):
    message = one_line(DataError, lambda: read_metadata(note, Path("net.onnx")))
    assert message.startswith("the metadata of net.onnx is damaged") and read_metadata("", "") == {}


@pytest.mark.parametrize("backbone", ["timm:mobilenetv3_small_050", ""])
def test_a_photo_run_is_exported_with_its_recipe(tmp_path, monkeypatch, backbone):
    changes = {"backbone": backbone, "model__size": "32", "model__scales": "0.5:2:1"}
    config = photo_config(epochs="1", **changes)
    folder = train(config, tmp_path / "run", workers=0)
    monkeypatch.chdir(tmp_path)
    assert run(["export", "run", "--out", "clothes.onnx"]) == 0
    said = about(tmp_path / "clothes.onnx")
    recipe = {"name": "photo", "base": 48, "mean": list(config.recipe.mean)}
    assert said["recipe"] == {**recipe, "std": list(config.recipe.std)}
    assert said["classes"] == ["hat", "pants", "shoes"] and said["padding"] == "border"
    names = {"np": np, "torch": torch, "json": json, "v2": v2, "onnxruntime": onnxruntime}
    for name, odd in (("hat/0.jpg", 64), ("shoes/0.jpg", 64), ("pants/0.jpg", 63)):
        path = PHOTOGRAPHS / "test" / name
        shutil.copy(path, "shoe.jpg")
        exec(documented_input(), found := dict(names))  # noqa: S102
        assert max(found["image"].shape) == odd
        expected = torch.tensor(predict(load_model(folder.path), path).channels)
        error = (torch.from_numpy(found["channels"][0]) - expected).abs().max()
        assert error < 1e-4 * expected.abs().max()
        agree(folder.path, "clothes.onnx", path, scale=1.5)
    upright = found["picture"]
    turned = Image.open(path).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # rotated by 90 degrees clockwise for display
    turned.save("shoe.jpg", exif=exif)
    exec(documented_input(), found := dict(names))  # noqa: S102
    assert found["picture"].shape == upright.shape


def documented_input():
    """The lines of docs/photographs.md that make the input of an exported run."""
    text = (Path(__file__).parent.parent / "docs" / "photographs.md").read_text()
    return text.partition("```python\nimport json\n")[2].partition("```")[0]


def test_the_frame_of_a_photo_run_holds_all_it_sees(tmp_path):
    folder = train(photo_config(epochs="1"), tmp_path / "run", workers=0)
    model = load_model(folder.path)
    seen = torch.rand(1, 3, 101, 124)
    frame = model.size
    top, left = (101 - frame) // 2 + 1, (124 - frame) // 2
    inside = torch.zeros_like(seen)
    inside[..., top - 1 : top + frame, left : left + frame] = 1  # 101 is odd: a row more
    torch.testing.assert_close(model.net(seen * inside), model.net(seen))
    narrow = inside[..., :, :].clone()
    narrow[..., left + 1] = narrow[..., left + frame - 2] = 0
    assert (model.net(seen * narrow) - model.net(seen)).abs().max() > 0
    assert run(["export", str(folder.path), "--out", str(tmp_path / "a.onnx"), "--size", "80"]) == 0


@pytest.mark.parametrize(
    "shape", [(1, 0, 28), (1, -1, 28), (None, 28, 28), (28, 28), (1, 28.0, 28)]
)
def test_shapes_that_images_cannot_have_are_refused(shape, tmp_path):
    with pytest.raises(ConfigError, match=r"shape must be \(C, H, W\)"):
        export(create_model("fovmax"), tmp_path / "net.pt2", shape=shape)
