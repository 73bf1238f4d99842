"""Backbones wrapped in scale channels with windows in pixels."""

import pytest
import timm
import torch
from channel_nets import one_line
from torch import nn

import foveate
from foveate import ScaleChannels, ScaleGrid, wrap
from foveate.errors import ConfigError


def plain():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def test_it_is_scale_channels_with_those_windows():
    torch.manual_seed(0)
    backbone, images = plain(), torch.rand(2, 3, 90, 70)
    net = wrap(backbone, 20, 80, size=20).eval()
    by_hand = ScaleChannels(backbone, ScaleGrid(1, 4, 2), 20, "avg", antialias=True).eval()
    assert [round(net.size * scale) for scale in net.scales] == [20, 28, 40, 57, 80]
    with torch.no_grad():
        assert torch.equal(net(images), by_hand(images))
    assert foveate.wrap is wrap


def test_the_options_reach_the_channels():
    options = {"per_octave": 1, "pool": "concat", "antialias": False, "padding": 0.5}
    net = wrap(plain(), 20, 80, size=20, **options, classes=5, recompute=2)
    assert (net.pool, net.antialias, net.padding, net.recompute) == ("concat", False, 0.5, 2)
    assert net.scales == (1.0, 2.0, 4.0)


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_050"])
def test_the_size_of_a_timm_backbone_follows_from_its_config(name):
    backbone = timm.create_model(name, num_classes=4)
    stated = backbone.pretrained_cfg["input_size"][-1]
    net = wrap(backbone, stated / 2, 2 * stated).eval()
    assert net.size == stated
    assert net.scales == ScaleGrid(0.5, 2, per_octave=2).values
    assert wrap(backbone, 32, 64, size=32).size == 32
    small = wrap(backbone, 32, 64, size=32, per_octave=1).eval()
    with torch.no_grad():
        assert small(torch.rand(2, 3, 50, 70)).shape == (2, 4)


def test_the_state_dict_stays_the_backbones():
    backbone = timm.create_model("resnet10t", num_classes=4)
    net = wrap(backbone, 56, 448)
    assert list(net.state_dict()) == [f"backbone.{key}" for key in backbone.state_dict()]
    wrap(timm.create_model("resnet10t", num_classes=4), 20, 90, size=64).load_state_dict(
        net.state_dict()
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "Sequential does not state its input size; pass size="),
        ({"size": 0}, "size must be"),
        ({"size": 2.5}, "size must be a whole number"),
        ({"size": 16, "pool": "median"}, "pool must be one of"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(change, says):
    with pytest.raises(ConfigError) as error:
        wrap(plain(), 16, 32, **change)
    assert says in one_line(error)


@pytest.mark.parametrize("backbone", ["resnet18", plain])
def test_a_name_or_a_factory_is_not_a_backbone(backbone):
    with pytest.raises(ConfigError) as error:
        wrap(backbone, 16, 32, size=16)
    assert one_line(error).startswith(f"backbone must be a module, got {backbone!r}; pass")


@pytest.mark.parametrize("config", [None, {}, {"input_size": None}, {"input_size": (3, 8, 9)}])
def test_a_config_without_a_square_input_size_needs_size(config):
    backbone = plain()
    backbone.pretrained_cfg = config
    with pytest.raises(ConfigError) as error:
        wrap(backbone, 16, 32)
    assert "pass size=" in one_line(error)
    assert wrap(backbone, 16, 32, size=16).size == 16
