"""One loader: every kind of reference, which of them wins, and what cannot be loaded."""

import shutil
import sys

import numpy as np
import pytest
import raised
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_runs import MODEL, tiny

import foveate
from foveate import create_model, list_models, load_model
from foveate.cli.app import run
from foveate.errors import ConfigError, DataError
from foveate.models.export import export
from foveate.models.pretrained import WEIGHTS, pretrained_names
from foveate.models.zoo import ZOO
from foveate.training.loop import train

SHIPPED = "fovmax-mnist-tr2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train(tiny(epochs=1), tmp_path_factory.mktemp("run") / "fovmax").path


def one_line(action, kind=ConfigError):
    return raised.one_line(kind, action)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_name_of_the_zoo_is_the_network_with_new_weights(name):
    torch.manual_seed(0)
    expected = create_model(name).eval()
    torch.manual_seed(0)
    model = load_model(name)
    assert not model.net.training and model.source == "" and model.native_scale == 1
    assert (model.size, model.shape[1], model.classes) == (112, 1, tuple("0123456789"))
    images = torch.rand(1, 1, 112, 112)
    with torch.no_grad():
        assert torch.equal(model.net(images), expected(images))


def test_a_trained_network_is_loaded_with_its_weights():
    model, net = load_model(SHIPPED), create_model(SHIPPED, pretrained=True)
    images = torch.rand(2, 1, 112, 112)
    with torch.no_grad():
        assert torch.equal(model.net(images), net(images))
    assert (model.source, model.native_scale, model.size) == ("mnist", 2.0, 112)
    assert model.scales == net.scales and model.trainable and model.config == ZOO["fovmax"]


def test_a_run_and_its_file_of_weights_are_the_same_network(folder):
    run, file = load_model(folder), load_model(folder / "weights.safetensors")
    images = torch.randn(2, 1, 24, 24)
    assert torch.equal(run(images), file(images)) and not run(images).requires_grad
    assert run.config == file.config == MODEL
    assert (run.source, run.size) == ("mnist-5k", 24) and file.source == ""
    shipped = load_model(WEIGHTS / f"{SHIPPED}.safetensors")
    images = torch.rand(1, 1, 112, 112)
    assert torch.equal(shipped(images), load_model(SHIPPED)(images))


def test_loading_a_file_leaves_the_random_state_alone(folder):
    before = torch.get_rng_state()
    load_model(folder / "weights.safetensors")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_file_of_weights_without_its_architecture_is_refused(tmp_path):
    save_file(MODEL.build().state_dict(), tmp_path / "net.safetensors")
    message = one_line(lambda: load_model(tmp_path / "net.safetensors"), DataError)
    assert (
        "has no valid description of its architecture" in message
        and "package.module:factory" in message
    )


def test_an_existing_path_comes_before_a_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_model("fovmax").config == ZOO["fovmax"]
    shutil.copytree(folder, tmp_path / "fovmax")
    shutil.copytree(folder, tmp_path / SHIPPED)
    for path in ("fovmax", "./fovmax", str(tmp_path / "fovmax"), SHIPPED):
        assert load_model(path).config == MODEL
    shutil.rmtree(tmp_path / "fovmax")
    assert load_model("fovmax").config == ZOO["fovmax"]
    assert "no model './fovmax'" in one_line(lambda: load_model("./fovmax"))


@pytest.mark.parametrize("ref", ["nothing", "runs/none", "net.onnx", "~nobody/net.pt", "", "a\0b"])
def test_what_is_no_model_is_answered_with_all_forms(ref):
    message = one_line(lambda: load_model(ref))
    assert f"no model {ref!r}; pass " in message
    for form in ("zoo", "trained network", "run folder", "file", "module:factory", "timm:NAME"):
        assert form in message


def test_a_name_that_is_nearly_right_brings_the_right_one():
    assert "(did you mean fovmax" in one_line(lambda: load_model("fovmx"))
    assert f"did you mean {SHIPPED}" in one_line(lambda: load_model("fovmax-mnist-tr-2"))


def test_changes_go_to_the_zoo_and_nowhere_else(folder):
    model = load_model("fovavg", num_classes=3, in_chans=3)
    assert model.classes == ("0", "1", "2") and model.shape[1] == 3
    assert model(torch.rand(1, 3, 112, 112)).shape == (1, 3)
    for ref in (SHIPPED, folder, "audited_nets:net"):
        message = one_line(lambda ref=ref: load_model(ref, num_classes=3))
        assert "num_classes cannot be set for" in message
    for ref in ("fovmax", folder):
        message = one_line(lambda ref=ref: load_model(ref, pretrained=True))
        assert "pretrained is only for timm models, got" in message and SHIPPED in message


def test_a_network_of_timm():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = load_model("timm:resnet10t", num_classes=4)
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=4).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), net(images))
    assert model.shape[1] == 3 and model.mean == tuple(net.pretrained_cfg["mean"])
    assert load_model("timm:resnet10t", in_chans=1).mean == (0.0,)
    message = one_line(lambda: load_model("timm:resnet10x"))
    assert "timm has no model 'resnet10x'; did you mean resnet10" in message
    assert "timm has no model" in one_line(lambda: load_model("timm:hf-hub:someone/net"))
    message = one_line(lambda: load_model("timm:resnet10t", colour=2))
    assert "timm:resnet10t failed with" in message


def test_the_commands_take_a_network_of_timm(tmp_path, capsys):
    pytest.importorskip("timm")
    picture, out = tmp_path / "x.png", tmp_path / "net.pt2"
    Image.fromarray(np.eye(28, dtype=np.uint8) * 255).save(picture)
    assert run(["predict", str(picture), "--model", "timm:resnet10t", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith(f"{picture}\n")
    assert run(["export", "timm:resnet10t", "--size", "32", "--out", str(out)]) == 0
    assert load_model(out, trust=True).shape == (None, 3, 32, 32)


def test_a_file_with_more_outputs_than_logits_gives_the_logits(folder, tmp_path):
    net = load_model(folder).net
    export(net, tmp_path / "net.pt2", shape=(1, 24, 24))
    images = torch.randn(2, 1, 24, 24)
    found = load_model(tmp_path / "net.pt2", trust=True)(images)
    torch.testing.assert_close(found, net(images).detach(), rtol=1e-4, atol=1e-4)


def test_weights_of_timm_are_asked_for(monkeypatch):
    timm = pytest.importorskip("timm")
    given = []

    def create(name, pretrained, **changes):
        given.append((name, pretrained))
        return net

    net = timm.create_model("resnet10t")
    monkeypatch.setattr(timm, "create_model", create)
    for pretrained in (False, True):
        load_model("timm:resnet10t", pretrained=pretrained)
    assert given == [("resnet10t", False), ("resnet10t", True)]


def test_weights_of_timm_from_a_file(folder, tmp_path):
    timm = pytest.importorskip("timm")
    net, path = timm.create_model("resnet10t", num_classes=4).eval(), tmp_path / "net.safetensors"
    save_file(net.state_dict(), path)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():  # the file determines the number of classes
        assert torch.equal(load_model("timm:resnet10t", weights=path)(images), net(images))
    message = one_line(lambda: load_model("timm:resnet10t", weights=path, num_classes=3))
    assert "'fc.weight' of shape (4, 512), but the backbone needs (3, 512)" in message
    message = one_line(lambda: load_model("timm:resnet18", weights=path))
    assert "use weights saved from this backbone" in message
    message = one_line(lambda: load_model("timm:resnet10t", weights=path, pretrained=True))
    assert "pretrained and weights exclude each other" in message
    assert "weights is only for timm" in one_line(lambda: load_model(folder, weights=path))
    Image.fromarray(np.eye(28, dtype=np.uint8) * 255).save(tmp_path / "x.png")
    given = ["--model", "timm:resnet10t", "--weights", str(path), "--device", "cpu"]
    assert run(["predict", str(tmp_path / "x.png"), *given]) == 0


def test_without_timm_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install 'foveate[photos]'" in one_line(lambda: load_model("timm:resnet10t"))


def test_the_names_are_listed():
    assert set(list_models()) == {*ZOO, *pretrained_names()}
    assert list_models(pretrained=True) == sorted(pretrained_names())
    assert list_models("fov???") == ["fovavg", "fovmax"] and list_models("resnet*") == []
    for name in foveate.__all__:
        assert name in dir(foveate)
    assert "__version__" in dir(foveate)


def test_a_trained_networks_name_without_its_weights_is_its_architecture():
    state = create_model(SHIPPED, num_classes=3).state_dict()
    assert state["backbone.head.bias"].shape == (3,)
    trained = create_model(SHIPPED, pretrained=True)
    assert not torch.equal(create_model(SHIPPED).backbone.head.bias, trained.backbone.head.bias)
    message = one_line(lambda: create_model(SHIPPED, pretrained=True, num_classes=3))
    assert "cannot change classes of a pretrained network" in message
    assert "no pretrained network 'fovmax'" in one_line(
        lambda: create_model("fovmax", pretrained=True)
    )
