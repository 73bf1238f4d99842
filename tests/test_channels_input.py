"""Wrong input to scale channels: images, backbones and options are refused in one line."""

import itertools
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
        assert "the backbone rejected patches of shape (6, 1, " in one_line(error)


class Failing(nn.Module):
    """A backbone whose error has nothing to do with the shape of its patches."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, patches):
        if float(self.weight.detach().sum() + patches.sum()) > 0:
            raise RuntimeError("device-side assert triggered")
        return patches.flatten(1)


def test_other_errors_of_a_backbone_keep_their_words():
    net, before = ScaleChannels(Failing(), FEW, 4), torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"^device-side assert triggered$") as error:
        net(torch.ones(1, 1, 8, 8))
    assert not isinstance(error.value, ConfigError)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_size_that_the_backbone_asserts_is_named():
    def sized(patches):
        assert patches.shape[-1] == 5, "made for 5 pixels"

    with pytest.raises(ConfigError) as error:
        ScaleChannels(Reshaped(sized), FEW, 4)(torch.zeros(1, 1, 8, 8))
    assert "(3, 1, 4, 4): made for 5 pixels" in one_line(error)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": -3}, "size must be a whole number of at least 1 pixel, got -3"),
        ({"size": 28.0}, "got 28.0"),
        (
            {"padding": "zeros"},
            'padding must be "border", "reflect" or a finite number, got \'zeros\'',
        ),
        ({"padding": math.nan}, "finite"),
        ({"pool": "sum"}, "max, avg, logsumexp, concat, probabilities, got 'sum'"),
        ({"pool": "concat"}, "classes="),
        ({"pool": "concat", "classes": 0}, "classes must be a whole number of at least 1, got 0"),
        ({"classes": "ten"}, "got 'ten'"),
        ({"recompute": 1.5}, "recompute must be a number of channels from 0 to 1,000, got 1.5"),
        ({"scales": []}, "no scales"),
        ({"scales": 2.0}, "such as [1.0], got 2.0"),
        ({"scales": [1.0, 1.0]}, "out of order"),
        ({"scales": [1.0, -2.0]}, "above 0"),
        ({"scales": [1.0, math.inf]}, "finite"),
        ({"scales": (1 + k / 1e6 for k in itertools.count())}, "the limit is 1,000"),
    ],
)
def test_what_cannot_work_cannot_be_constructed(changes, says):
    with pytest.raises(ConfigError) as error:
        ScaleChannels(ConvNet(), **changes)
    assert says in one_line(error)


def test_an_error_without_words_is_named_too():
    def fail(_):
        raise RuntimeError

    with pytest.raises(ConfigError) as error:
        ScaleChannels(Reshaped(fail), FEW, 4)(torch.zeros(1, 1, 8, 8))
    assert "rejected" in one_line(error)


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


def test_refused_images_do_not_disturb_other_threads():
    """While PyTorch runs the backbone a second time to explain the error, others can use it."""
    seen = []

    class Watched(nn.Linear):
        def forward(self, patches):
            seen.append(bool(net.backbone[1].weight.all()))
            return super().forward(patches)

    net = ScaleChannels(nn.Sequential(nn.Flatten(), Watched(9, 2)), FEW, 4)
    with pytest.raises(ConfigError, match="rejected"):
        net(torch.zeros(1, 1, 8, 8))
    assert seen == [True, True]


def test_a_replaced_forward_runs_once_on_refused_images():
    backbone = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(9, 2))
    original = backbone.forward
    backbone.forward = lambda patches: original(patches)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ScaleChannels(backbone, FEW, 4)(torch.zeros(1, 1, 8, 8))
    assert backbone[0].num_batches_tracked == 1
