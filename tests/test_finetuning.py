"""Fine-tuning: schedule, weight decay, smoothing, clipping, frozen norms, and the best weights."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from photo_runs import photo_config
from PIL import Image
from safetensors.torch import save_file
from tiny_runs import AS_TINY, MODEL, same_bits, tiny, weights
from torch import nn
from torchvision import models

import foveate.training.session as session
from foveate.cli.app import run as run_command
from foveate.data.recipes import Recipe
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.evaluation.test_sets import open_test_set, with_channels
from foveate.execution.captured import Batch, plain_step
from foveate.execution.plan import prepare
from foveate.training.backbones import load_backbone, make_backbone
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig, build_net
from foveate.training.data import adapt_to_source
from foveate.training.loop import train
from foveate.training.optimiser import make_optimiser
from foveate.training.presets import preset

CPU = torch.device("cpu")


def test_the_cosine_rises_to_the_peak_and_falls_to_the_floor():
    config = TrainConfig(
        schedule="cosine", epochs=10, warmup=0.3, learning_rate=1.0, smallest_rate=0.01
    )
    rates = [config.rate(k / 10) for k in range(101)]
    assert rates[0] == pytest.approx(1 / 25)
    assert rates[30] == pytest.approx(1.0) and max(rates) == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.01)
    assert rates[:31] == sorted(rates[:31]) and rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[15] == pytest.approx((1 + 1 / 25) / 2)  # halfway up
    assert replace(config, warmup=0.0).rate(0) == pytest.approx(1.0)


def one_step(config, images, labels, net):
    """The tiny network after one step of the run's optimiser."""
    optimiser = make_optimiser(net, config, CPU)
    step = plain_step(net, optimiser, "float32", config.label_smoothing)
    loss = step(Batch(prepare(net, images), labels))
    return net, loss


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = replace(MODEL, dropout=0.0).build().double()
    return net, torch.randn(6, 1, 24, 24).double(), torch.arange(6)


def test_weight_decay_is_that_of_adamw_on_weights_alone(problem):
    net, images, labels = problem
    plain = copy.deepcopy(net)
    config = tiny(weight_decay=0.1, learning_rate=0.01)
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    decayed, _ = one_step(config, images, labels, net)
    one_step(replace(config, weight_decay=0.0), images, labels, plain)
    for (name, found), other in zip(decayed.named_parameters(), plain.parameters(), strict=True):
        shrunk = 0.01 * 0.1 * before[name] if found.ndim > 1 else torch.zeros_like(found)
        torch.testing.assert_close(found, other - shrunk, atol=1e-12, rtol=0)


def test_label_smoothing_is_that_of_pytorch(problem):
    net, images, labels = problem
    right = F.cross_entropy(copy.deepcopy(net)(images), labels, label_smoothing=0.1)
    _, loss = one_step(tiny(label_smoothing=0.1), images, labels, net)
    torch.testing.assert_close(loss, right.detach())


def test_clipping_limits_the_norm_of_the_gradient(problem):
    net, images, labels = problem
    net, _ = one_step(tiny(clip=1e-3), images, labels, net)
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    torch.testing.assert_close(norm, torch.tensor(1e-3).double(), atol=1e-6, rtol=0)


def test_frozen_norms_keep_their_statistics(tmp_path):
    assert run_command([*AS_TINY, "--freeze-norms", "--out", str(tmp_path / "run")]) == 0
    for name, value in weights(tmp_path / "run").items():
        if "running_mean" in name:
            assert not value.any()
        if "running_var" in name:
            assert (value == 1).all()


def scripted(monkeypatch, accuracies, seen, stop_at=None):
    """Let validation say these accuracies, and remember the weights it saw."""
    left = iter(accuracies)

    def accuracy(self):
        seen.append({k: v.clone() for k, v in self.net.state_dict().items()})
        if len(seen) - 1 == stop_at:
            raise KeyboardInterrupt
        yield
        return next(left)

    monkeypatch.setattr(session.Session, "_accuracy", accuracy)


def test_the_best_weights_are_kept_across_an_interruption(tmp_path, monkeypatch):
    config = tiny(keep="best", epochs=4)
    seen = []
    with monkeypatch.context() as patch:
        scripted(patch, [0.2, 0.9, 0.5, 0.7], seen)
        whole = train(config, tmp_path / "whole")
    assert len(seen) == 4
    assert same_bits(weights(whole.path), seen[1])
    assert whole.validation() == 0.9
    assert not same_bits(seen[1], seen[3])
    again = []
    with monkeypatch.context() as patch:
        scripted(patch, [0.2, 0.9], again, stop_at=2)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run")
    with monkeypatch.context() as patch:
        scripted(patch, [0.5, 0.7], [])
        resumed = train(config, tmp_path / "run")
    assert same_bits(weights(resumed.path), seen[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup": 1.0}, "warmup must be"),
        ({"label_smoothing": -0.1}, "label_smoothing must be"),
        ({"clip": -1.0}, "clip must be"),
        ({"weight_decay": 2.0}, "weight_decay must be"),
        ({"schedule": "linear"}, "schedule"),
        ({"keep": "first"}, "keep"),
        ({"pretrained": True}, "need a backbone; set backbone"),
        (
            {"backbone": "timm:resnet18", "pretrained": True, "weights": "a"},
            "exclude each other; set only one",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        TrainConfig(**changes)
    assert "\n" not in str(error.value)


# Backbones

SMALL = {"channels": 3, "classes": 5, "size": 32, "pretrained": False, "trust": False}


@pytest.mark.parametrize(
    "spec",
    [
        "timm:resnet18",
        "timm:vit_tiny_patch16_224",
        "torchvision:mobilenet_v3_small",
        "torchvision:resnet18",
    ],
)
def test_registered_backbones_give_the_classes_at_hand(spec):
    net = make_backbone(spec, **SMALL).eval()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_weights_of_another_number_of_classes_load_without_the_classifier(tmp_path):
    donor, net = timm.create_model("resnet18"), make_backbone("timm:resnet18", **SMALL)
    trained = make_backbone("timm:resnet18", **SMALL)
    load_backbone(net, donor.state_dict(), tmp_path / "file")
    assert torch.equal(net.conv1.weight, donor.conv1.weight)
    assert not net.fc.weight.any() and not net.fc.bias.any()  # new, and in favour of no class
    load_backbone(net, trained.state_dict(), tmp_path / "file")
    assert torch.equal(net.fc.weight, trained.fc.weight) and net.fc.weight.any()


def test_weights_of_another_backbone_are_refused(tmp_path):
    net, other = make_backbone("timm:resnet18", **SMALL), models.resnet34().state_dict()
    with pytest.raises(ConfigError, match="saved from this backbone"):
        load_backbone(net, other, tmp_path / "file")
    spoiled = {**net.state_dict(), "conv1.weight": torch.full_like(net.conv1.weight, torch.nan)}
    with pytest.raises(ConfigError, match="non-finite"):
        load_backbone(net, spoiled, tmp_path / "file")
    wide = {**net.state_dict(), "conv1.weight": torch.zeros(64, 1, 7, 7)}
    with pytest.raises(ConfigError, match="of shape"):
        load_backbone(net, wide, tmp_path / "file")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("timm:resnet1", "did you mean"),
        ("torchvision:resnet19", "did you mean"),
        ("nowhere.nets:factory", "pass --trust"),
    ],
)
def test_unknown_backbones_are_refused_in_one_line(spec, words):
    with pytest.raises(ConfigError, match=words) as error:
        make_backbone(spec, **SMALL)
    assert "\n" not in str(error.value)


def test_weights_that_cannot_be_downloaded_can_be_passed_as_a_file(monkeypatch):
    timm = pytest.importorskip("timm", reason="pip install 'foveate[photos]'")

    def offline(name, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ConfigError, match="pass a file of weights with --weights"):
        make_backbone("timm:resnet18", **SMALL | {"pretrained": True})
    with pytest.raises(ConfigError, match="a backbone factory must accept these arguments"):
        make_backbone("timm:resnet18", **SMALL)


def test_factories_receive_the_size_only_if_they_have_such_a_parameter(tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text(
        "from torch import nn\n"
        "def plain(channels, classes): return nn.Linear(channels, classes)\n"
        "def sized(channels, classes, *, size=1): return nn.Linear(channels * size, classes)\n"
        "def loose(**given): return nn.Linear(*given.values())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trusted = SMALL | {"trust": True}
    assert make_backbone("asking:plain", **trusted).in_features == 3
    assert make_backbone("asking:sized", **trusted).in_features == 3 * 32
    assert make_backbone("asking:loose", **trusted).in_features == 3


def test_a_run_fine_tunes_a_backbone_from_a_file_and_loads_without_trust(tmp_path):
    donor = timm.create_model("resnet10t", num_classes=7, in_chans=1)
    nn.init.constant_(donor.fc.bias, 3.0)
    save_file(donor.state_dict(), tmp_path / "donor.safetensors")
    config = tiny(
        backbone="timm:resnet10t",
        weights=str(tmp_path / "donor.safetensors"),
        epochs=1,
        samples=32,
        model=replace(MODEL, size=32),
    )
    start = build_net(config, start=True)
    assert torch.equal(start.backbone.conv1[0].weight, donor.conv1[0].weight)
    run = train(config, tmp_path / "run")
    (tmp_path / "donor.safetensors").unlink()  # the run has its own weights now
    net = RunFolder(run.path).net()
    assert not torch.equal(net.backbone.conv1[0].weight, donor.conv1[0].weight)
    change = (net.backbone.conv1[0].weight - donor.conv1[0].weight).detach()
    assert float(change.abs().max()) < 0.1  # Adam moves a weight by about its rate a step


def windows_of(config):
    return [round(config.model.size * scale) for scale in config.model.scales]


def test_windows_follow_the_pictures_unless_they_are_given(tmp_path):
    """From a quarter of the base size to twice the long side of the median picture."""
    for number, shape in enumerate([(30, 30), (60, 30), (30, 60), (90, 30)] * 2):
        path = tmp_path / ("train" if number < 4 else "test") / "a" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", shape, (number, 0, 9)).save(path)
    plain = replace(preset("finetune"), source=f"folder:{tmp_path}")
    assert windows_of(plain) == [56, 79, 112, 158, 224, 317, 448]
    found = adapt_to_source(plain, load_source)
    assert windows_of(found) == [56, 79, 112, 158, 224, 317, 448, 634, 896]  # 2 x 2 x 224
    half = adapt_to_source(plain.changed({"recipe.base": "112"}), load_source, {"recipe.base"})
    assert windows_of(half) == [28, 40, 56, 79, 112, 158, 224, 317, 448]
    assert adapt_to_source(plain, load_source, {"model.scales"}).model.scales == plain.model.scales
    assert (
        adapt_to_source(replace(plain, backbone=""), load_source).model.scales == plain.model.scales
    )


def test_the_preset_has_the_normalisation_of_its_backbone(tmp_path):
    source = f"folder:{Path(__file__).parent / 'data' / 'photographs'}"
    config = adapt_to_source(replace(preset("finetune"), source=source), load_source)
    assert config.model.classes == 3 and config.model.antialias
    assert config.recipe.mean == config.recipe.std == (0.5, 0.5, 0.5)
    own = adapt_to_source(replace(config, backbone=""), load_source, {"recipe.mean": ""})
    assert own.recipe == config.recipe
    resnet = adapt_to_source(replace(config, backbone="timm:resnet10t"), load_source)
    assert resnet.recipe.mean == tuple(timm.get_pretrained_cfg("resnet10t").mean)


def test_a_fine_tuned_run_is_tested_at_sizes_of_its_pictures(tmp_path):
    """At scale s the short side of a picture has s times the base size of the recipe."""
    source = f"folder:{Path(__file__).parent / 'data' / 'photographs'}"
    model = replace(MODEL, size=32, channels=3, classes=3, antialias=True)
    recipe = Recipe(name="photo", base=48)
    config = TrainConfig(
        source=source, scales="1", model=model, recipe=recipe, backbone="timm:resnet10t",
        epochs=1, batch=8,
    )  # fmt: skip
    run = train(config, tmp_path / "run")
    net, test = run.net(), open_test_set(run, load_source)
    assert len(test) == 9
    (at,) = test.measure(net, [0.5])
    right = 0
    for index in range(9):
        picture = torch.from_numpy(np.array(test.images.read("test", index)))
        image = replace(recipe, base=24).transform()(picture)[None]
        with torch.no_grad():
            right += int(net.eval()(image).argmax()) == int(test.images.labels("test")[index])
    assert at.count == 9 and at.accuracy == pytest.approx(right / 9)


def test_a_run_is_tested_with_other_windows_and_another_pool(tmp_path, capsys):
    run = train(photo_config(epochs="1"), tmp_path / "run")
    net, config = with_channels(run.net(), run.config(), "20-80", "max")
    assert [round(16 * scale) for scale in net.scales] == [20, 28, 40, 57, 80]
    assert net.pool == config.model.pool == "max"
    test = open_test_set(run, load_source)
    (found,) = test.measure(net, [0.5])
    arguments = ["evaluate", str(run.path), "--scales", "0.5", "--windows", "20-80"]
    assert run_command([*arguments, "--pool", "max", "--out", str(tmp_path / "out")]) == 0
    (line,) = (tmp_path / "out" / "accuracy.csv").read_text().splitlines()[1:]
    assert f"{found.accuracy}" in line
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["windows"], results["pool"]) == ("20-80", "max")  # not those of training
    assert "trained on" not in capsys.readouterr().out  # photographs have no training scale
    assert run_command([*arguments, "--pool", "concat"]) == 2
    assert "windows and pool can be changed" in capsys.readouterr().err


def test_windows_in_pixels_are_those_of_the_network(tmp_path, capsys):
    at = AS_TINY.index("model.scales=1:2:1")
    arguments = [*AS_TINY[: at - 1], *AS_TINY[at + 1 :], "--out", str(tmp_path / "run")]
    assert run_command([*arguments, "--windows", "12-24"]) == 0
    config = RunFolder(tmp_path / "run").config()
    assert [round(12 * scale) for scale in config.model.scales] == [12, 17, 24]
    capsys.readouterr()
    assert run_command([*AS_TINY, "--windows", "12-24"]) == 2
    assert "not both" in capsys.readouterr().err
    assert run_command([*arguments, "--windows", "wide"]) == 2
    assert "windows must look like" in capsys.readouterr().err
