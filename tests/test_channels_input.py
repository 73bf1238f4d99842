"""Wrong input to scale channels: images, backbones and options are refused in one line."""

import math

import pytest
import torch
from channel_nets import FEW, one_line, small_net
from made_images import random_images
from torch import nn

from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels


class Reshaped(nn.Module):
    """A backbone whose output has some other form."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, patches):
        return self.form(patches)


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (torch.zeros(1, 8, 8), "images[None]"),
        (torch.zeros(8, 8), "(B, C, H, W)"),
        (torch.zeros(1, 1, 1, 8, 8), "(B, C, H, W)"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "images.float()"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.int64), "images.float()"),
        (torch.zeros(1, 1, 0, 8), "at least one pixel"),
    ],
)
def test_wrong_images_are_refused_in_one_line(images, says):
    with pytest.raises(ConfigError) as error:
        small_net().float()(images)
    assert says in one_line(error)


def test_a_backbone_for_another_size_or_other_channels_is_named():
    images = torch.zeros(2, 1, 40, 40)
    for net, wrong in (
        (ScaleChannels(ConvNet(), FEW, 32), images),
        (ScaleChannels(nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), FEW, 4), images),
        (ScaleChannels(ConvNet(channels=3), FEW, 28), images),
    ):
        with pytest.raises(ConfigError) as error:
            net(wrong)
        assert "the backbone refused patches of the shape (6, 1, " in one_line(error)


def test_an_error_without_words_is_named_too():
    def fail(_):
        raise RuntimeError

    with pytest.raises(ConfigError) as error:
        ScaleChannels(Reshaped(fail), FEW, 4)(torch.zeros(1, 1, 8, 8))
    assert "refused" in one_line(error)


@pytest.mark.parametrize(
    "form",
    [
        lambda p: p.flatten(2),
        lambda p: p.flatten(),
        lambda p: p.flatten(1)[:2],
        lambda p: p.mean(),
        lambda p: (p.flatten(1), None),
    ],
    ids=["3-D", "1-D", "wrong batch", "0-D", "tuple"],
)
def test_a_backbone_with_another_output_is_named(form):
    with pytest.raises(ConfigError) as error:
        ScaleChannels(Reshaped(form), FEW, 4)(torch.zeros(2, 1, 8, 8))
    assert "must map (6, 1, 4, 4) to (6, classes), got " in one_line(error)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scales": []}, "no scales"),
        ({"scales": [2.0, 1.0]}, "out of order"),
        ({"scales": [1.0, 1.0]}, "out of order"),
        ({"scales": [0.0, 1.0]}, "above 0"),
        ({"scales": 2.0}, "[1.0] for one"),
        ({"pool": "median"}, "max, avg, logsumexp, concat"),
        ({"pool": "concat"}, "classes="),
    ],
)
def test_wrong_options_are_refused_when_building(changes, says):
    with pytest.raises(ConfigError) as error:
        ScaleChannels(ConvNet(), **changes)
    assert says in one_line(error)


@pytest.mark.parametrize(
    ("changes", "says"), [({"size": 0}, "size"), ({"padding": "wrap"}, "wrap")]
)
def test_wrong_sizes_and_paddings_are_refused(changes, says):
    with pytest.raises(ConfigError) as error:
        ScaleChannels(ConvNet(), **changes)(torch.zeros(1, 1, 8, 8))
    assert says in one_line(error)


def test_concat_with_the_wrong_number_of_classes_is_named():
    net = ScaleChannels(ConvNet(classes=10), FEW, pool="concat", classes=7)
    with pytest.raises(ConfigError) as error:
        net(torch.zeros(1, 1, 28, 28))
    assert "classes=7" in one_line(error)
    assert "10 outputs" in one_line(error)


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "concat"])
def test_a_nan_stays_with_its_image(pool):
    net = small_net(pool=pool)
    images = random_images(3, 1, 24, 24, dtype=torch.float64)
    clean = net(images)
    images[1, 0, 5, 7] = math.nan
    spoiled = net(images)
    assert spoiled[1].isnan().all()
    torch.testing.assert_close(spoiled[[0, 2]], clean[[0, 2]], rtol=0, atol=0)
