"""Dropout in scale channels: an average shares one draw, a maximum lets every channel draw."""

import pytest
import torch
from torch import nn

from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels

SIZE, SCALES, IMAGES = 16, (0.5, 1.0, 2.0), 40
# The same pixels in every patch: outputs differ by what dropout leaves out, and by nothing else.
PATCHES = torch.ones(IMAGES, len(SCALES), 1, SIZE, SIZE, dtype=torch.float64)


def net(pool="avg", dropout=0.5, backbone=None):
    torch.manual_seed(0)
    if backbone is None:
        backbone = ConvNet((4, 4), SIZE, hidden=20, batch_norm=False, dropout=dropout)
    return ScaleChannels(backbone, SCALES, SIZE, pool, classes=10).double().train()


def draws(outputs):
    """How many different answers there are among the images, and the most within one image."""
    rounded = outputs.detach().mul(1e9).round()
    return len(rounded[:, 0].unique(dim=0)), max(len(image.unique(dim=0)) for image in rounded)


@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_an_average_leaves_out_the_same_units_in_all_channels_of_an_image(recompute):
    averaging = net()
    averaging.recompute = recompute
    among, within = draws(averaging.forward_patches(PATCHES))
    assert among > IMAGES / 2
    assert within == 1


@pytest.mark.parametrize("pool", ["max", "logsumexp", "concat"])
def test_with_other_pools_every_channel_draws(pool):
    assert draws(net(pool).forward_patches(PATCHES))[1] == len(SCALES)


def test_a_backbone_of_ones_own_draws_as_it_will():
    own = nn.Sequential(nn.Flatten(), nn.Linear(SIZE**2, 20), nn.Dropout(0.5), nn.Linear(20, 10))
    assert draws(net(backbone=own).forward_patches(PATCHES))[1] == len(SCALES)


def test_nothing_is_left_out_in_evaluation_or_where_dropout_is_off():
    plain = net(dropout=0.0).forward_patches(PATCHES)
    assert draws(plain)[0] == 1
    torch.testing.assert_close(net().eval().forward_patches(PATCHES), plain, atol=1e-12, rtol=0)
    frozen = net()
    frozen.backbone.dropout.eval()
    torch.testing.assert_close(frozen.forward_patches(PATCHES), plain, atol=1e-12, rtol=0)
