"""The measures of covariance and invariance, on networks and images whose errors are known."""

import math

import pytest
import torch
from formulas import Blobs, blobs, shake
from invariance import (
    CovarianceError,
    InvarianceError,
    covariance_error,
    invariance_error,
)
from torch import nn

from foveate.errors import ConfigError
from foveate.evaluation.audit.images import zoom
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.scales import ScaleGrid

GRID = ScaleGrid(0.5, 4, per_octave=2)


def small_net(scales=GRID, pool="max"):
    backbone = ConvNet((4, 4), 16, classes=4, hidden=8)
    return shake(ScaleChannels(backbone, scales, 16, pool))


def formula(**changes):
    f = blobs(8, 12, **changes)
    return lambda scale: f.image(96, 90, scale)


@pytest.mark.parametrize(("factor", "pairs"), [(2.0, 5), (2**-0.5, 6), (1.0, 7)])
def test_covariance_is_the_error_of_the_channels_that_both_have(factor, pairs):
    net, rescale = small_net(), formula()
    found = covariance_error(net, rescale, factor)
    first, second = net.channels(rescale(1.0)), net.channels(rescale(factor))
    steps = round(2 * math.log2(factor))
    pieces = [(first[:, i], second[:, i + steps]) for i in range(7) if 0 <= i + steps < 7]
    before, after = (torch.stack(side, 1) for side in zip(*pieces, strict=True))
    expected = (after - before).abs() / before.std(correction=0)
    assert found.channels == pairs == len(pieces)
    assert found.mean == pytest.approx(expected.mean().item(), abs=1e-12)
    assert found.max == pytest.approx(expected.max().item(), abs=1e-12)
    assert found.mean <= found.max < 0.05


def test_covariance_is_broken_by_a_wrong_factor_or_a_shifted_centre():
    net, f = small_net(), blobs(8, 12)
    right = covariance_error(net, lambda t: f.image(96, 90, t), 2.0).mean
    wrong = covariance_error(net, lambda t: f.image(96, 90, 1 / t), 2.0).mean
    beside = covariance_error(net, lambda t: f.image(96, 90, t, about=(48 + 6 * t, 45)), 2.0).mean
    aside = covariance_error(net, lambda t: f.image(96, 90, t, about=(54, 45)), 2.0).mean
    assert min(wrong, aside) > 10 * right
    assert beside < 10 * right  # scaled about the middle, the blobs being beside it


def test_invariance_of_a_model_that_reads_one_number():
    """The logits are m and 2 - m for the mean m of the image, so everything is known."""

    def model(images):
        mean = images.mean((1, 2, 3))
        return torch.stack([mean, 2 - mean], 1)

    def rescale(scale):
        return torch.full((3, 1, 4, 4), 0.25 * scale, dtype=torch.float64)

    found = invariance_error(model, rescale, [0.5, 1.0, 2.0, 8.0])
    spread = (2 - 2 * 0.25) / 2  # two logits this far apart have half of it as their deviation
    assert [error.scale for error in found] == [0.5, 1.0, 2.0, 8.0]
    for error in found:
        assert error.difference == pytest.approx(0.25 * abs(error.scale - 1) / spread)
    assert [error.agreement for error in found] == [1.0, 1.0, 1.0, 0.0]


def spot_net(scales):
    """A bright and a dark spot of one size, each the template of a class."""
    at = torch.arange(16, dtype=torch.float64) - 7.5
    square = (at[:, None] ** 2 + at**2) / (2 * 2.5**2)
    spot = ((1 - square) * torch.exp(-square)).flatten()
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(256, 2, bias=False)).double()
    backbone[1].weight.data.copy_(torch.stack([spot, -spot]))
    return ScaleChannels(backbone, scales, 16)


def test_a_max_over_scales_is_more_invariant_than_one_scale():
    centre, signs = torch.zeros(2, 1, 1), torch.tensor([1.0, -1.0]).view(2, 1, 1)
    f = Blobs(signs.double(), centre, centre, torch.full((2, 1, 1), 12.0, dtype=torch.float64))
    many, one = (
        invariance_error(spot_net(scales), lambda t: f.image(200, 180, t), [0.6, 0.7, 1.5])
        for scales in (ScaleGrid(0.5, 8, per_octave=4), [4.8])
    )
    for ours, theirs in zip(many, one, strict=True):
        assert isinstance(ours, InvarianceError)
        assert ours.agreement == 1.0
        assert ours.difference < theirs.difference / 2


def test_measuring_changes_nothing_in_the_network():
    net = small_net().train()
    net.backbone.dropout.eval()
    modes = [m.training for m in net.modules()]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    first = covariance_error(net, formula(), 2.0)
    invariance_error(net, formula(), [2.0])
    assert first == covariance_error(net.eval(), formula(), 2.0)  # measured in eval mode
    net.train()
    net.backbone.dropout.eval()
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())

    def fail(scale):
        raise KeyError(scale)

    with pytest.raises(KeyError):
        invariance_error(net, fail, [2.0])
    assert [m.training for m in net.modules()] == modes


def test_constant_answers_give_finite_errors():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    nn.init.zeros_(backbone[1].weight)
    nn.init.zeros_(backbone[1].bias)
    net = ScaleChannels(backbone, GRID, 16).double()
    assert covariance_error(net, formula(), 2.0) == CovarianceError(mean=0.0, max=0.0, channels=5)
    assert invariance_error(net, formula(), [2.0])[0].difference == 0.0


def test_zoomed_images_make_a_covariance_measure():
    f = blobs(8, 12)
    exact = covariance_error(small_net(), lambda t: f.image(96, 90, t), 2.0)
    from_images = covariance_error(small_net(), lambda t: zoom(f.image(96, 90), t), 2.0)
    assert from_images.mean < 3 * exact.mean + 0.005


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: covariance_error(small_net(), formula(), 1.3), "factor of 1.3"),
        (lambda: covariance_error(small_net(), formula(), 100.0), "factor of 100"),
        (lambda: invariance_error(small_net(), formula(), []), "no scales"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(make, says):
    with pytest.raises(ConfigError) as error:
        make()
    assert says in str(error.value)
    assert "\n" not in str(error.value)
