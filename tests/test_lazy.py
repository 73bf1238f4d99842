"""Lazy evaluation of scale channels: which channels are evaluated, and when all of them are."""

import copy
import math
from itertools import chain

import pytest
import torch
from channel_nets import one_line, small_net
from torch import nn

from foveate.errors import ConfigError, DataError
from foveate.evaluation.calibration import calibrate, choose_tolerance, required_tolerance
from foveate.execution import convnet, definition, patches, windows
from foveate.execution.plan import choose, predict, search
from foveate.models import channels, lazy
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.lazy import ROUNDS, UncutPatches, evaluate, leads
from foveate.models.pooling import pool_scales
from foveate.resampling import foveate

MANY = tuple(2 ** (k / 4) for k in range(-4, 13))
POOLS = ["max", "logsumexp"]
EPS = torch.finfo(torch.float32).eps


class Seen(nn.Module):
    """Passes patches on and keeps how many there were in each call."""

    def __init__(self, forward):
        super().__init__()
        self.forward_one, self.counts = forward, []

    def forward(self, patches):
        self.counts.append(len(patches))
        return self.forward_one(patches)


def evaluated(channels, tolerance, pool="max"):
    """Return the channels that lazy evaluation takes of known logits (S, K), round by round."""
    where = torch.arange(len(channels)).expand(1, -1)
    taken = []

    def forward(places):
        taken.append(sorted(places.tolist()))
        return channels[places]

    return evaluate(where, forward, pool, tolerance)[0], taken


def peak(at, scales=17, height=9.0, classes=3):
    """Logits (S, K) of which class 0 has a peak at a channel, and all others are 0."""
    logits = torch.zeros(scales, classes)
    logits[:, 0] = height - (torch.arange(scales) - at).abs()
    return logits


def test_a_clear_winner_needs_every_fourth_channel():
    channels, taken = evaluated(peak(8), tolerance=3.0)
    assert taken == [[2, 6, 10, 14]]
    assert torch.equal(channels[6], peak(8)[6])
    assert (channels[[0, 1, 3, 16]] == -math.inf).all()


def test_an_unclear_one_is_refined_about_the_strongest_channel():
    logits = peak(8, height=5.0)  # leads by 3 in channels 6 and 10, by 5 in channel 8
    assert evaluated(logits, tolerance=4.0)[1] == [[2, 6, 10, 14], [4, 8]]


def test_a_smaller_lead_decides_in_later_rounds():
    lead, logits = 5.25, peak(9.25, height=6.0)  # in channel 10; by 5.75 in channel 9
    every_round = [[2, 6, 10, 14], [8, 12], [0, 4, 16], [*range(1, 17, 2)]]
    for count, (share, _) in enumerate(ROUNDS, start=1):
        assert evaluated(logits, 0.99 * lead / share)[1] == every_round[:count]
        assert evaluated(logits, 1.01 * lead / share)[1] == every_round[: count + 1]


def test_a_narrow_response_between_the_coarse_channels_is_found():
    logits = torch.zeros(17, 3)
    logits[:, 1], logits[12, 2] = 1.0, 20.0
    channels, taken = evaluated(logits, tolerance=2.0)
    assert channels.max(0).values.argmax() == 2
    assert taken == [[2, 6, 10, 14], [0, 4], [8, 12, 16]]


@pytest.mark.parametrize("scales", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("pool", POOLS)
def test_no_channel_is_evaluated_twice(scales, pool):
    logits = torch.randn(scales, 4, generator=torch.Generator().manual_seed(scales))
    channels, taken = evaluated(logits, math.inf, pool)
    assert sorted(chain(*taken)) == list(range(scales))
    assert torch.equal(channels, logits)


def test_one_class_takes_all_channels():
    assert len([*chain(*evaluated(torch.randn(17, 1), 0.0)[1])]) == 17


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_the_result_of_all_channels(value):
    logits = peak(8)
    logits[6] = value
    channels, _ = evaluated(logits, tolerance=3.0)
    whole = pool_scales(logits[None], "max")
    assert torch.equal(pool_scales(channels[None], "max").isnan(), whole.isnan())
    if value < 0:  # the others still decide
        assert channels.max(0).values.argmax() == 0


def lazy_net(pool="max", tolerance=math.inf):
    torch.manual_seed(3)
    backbone = ConvNet((16, 16), 16, classes=5, hidden=8)  # the C stages take 16 filters
    net = ScaleChannels(backbone, MANY, 16, pool).eval()
    net.lazy = tolerance
    return net


def images(count=5, side=40):
    return torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(count))


def bound(net, given):
    """Rounding of all sums, whose order depends on the plan and the number of patches."""
    terms = sum(parameter[0].numel() for parameter in net.parameters() if parameter.ndim > 1)
    return terms * EPS * float(net.channels(given).abs().max())


@pytest.mark.parametrize("pool", POOLS)
@torch.no_grad()
def test_an_infinite_tolerance_is_the_definition(pool):
    net, given = lazy_net(pool), images()
    plain = copy.deepcopy(net)
    plain.lazy = None
    torch.testing.assert_close(net(given), plain(given), atol=bound(net, given), rtol=0)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("plan", [convnet, windows, patches, definition])
@pytest.mark.parametrize("tolerance", [0.0, 0.02, math.inf])
@torch.no_grad()
def test_every_plan_evaluates_the_channels_of_the_plain_network(pool, plan, tolerance):
    net, given = lazy_net(pool, tolerance), images()
    found = plan.outputs(net, plan.prepare(net, given, torch.float32))
    assert found.channels is None
    torch.testing.assert_close(found.logits, net(given), atol=bound(net, given), rtol=0)


@torch.no_grad()
def test_an_image_does_not_depend_on_the_others():
    net, given = lazy_net(tolerance=0.02), images(7)
    alone = torch.cat([net(one) for one in given.split(1)])
    torch.testing.assert_close(net(given), alone, atol=bound(net, given), rtol=0)
    torch.testing.assert_close(net(given.flip(0)), alone.flip(0), atol=bound(net, given), rtol=0)
    torch.testing.assert_close(predict(net, given).logits, alone, atol=bound(net, given), rtol=0)


@torch.no_grad()
def test_any_backbone_runs_on_few_patches():
    seen = Seen(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)))
    net = ScaleChannels(seen, MANY, 16).eval()
    net.lazy = 0.0  # decided unless two classes are equal
    net(images(5))
    assert sum(seen.counts) == 4 * 5
    seen.counts.clear()
    predict(net, images(5))
    assert sum(seen.counts) == 4 * 5
    seen.counts.clear()
    net.lazy = math.inf
    net(images(5))
    assert sum(seen.counts) == 17 * 5


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("shape", [(7, 1, 40, 40), (5, 3, 21, 64), (1, 2, 9, 9)])
@torch.no_grad()
def test_patches_that_are_cut_when_needed_are_those_of_the_network(shape, antialias):
    draws = torch.Generator().manual_seed(shape[2])
    given = torch.rand(shape, generator=draws)
    net = ScaleChannels(nn.Flatten(), MANY, 12, padding="reflect", antialias=antialias)
    cut, whole = UncutPatches(net, given), net.patches(given)
    assert cut.shape == whole.shape[:2]
    coarse = torch.zeros(cut.shape, dtype=torch.bool)
    coarse[:, 2::4] = True
    few, many = (torch.rand(cut.shape, generator=draws) < share for share in (0.02, 0.5))
    few[0, :1] = many[0, :1] = True  # a mask is never empty
    for mask in (coarse, few, few & many, many, few):
        # Values up to 1; per axis a rounded weight, a product and a sum of up to 2 * 8 taps.
        torch.testing.assert_close(cut[mask], whole[mask], atol=36 * EPS, rtol=0)


@pytest.mark.parametrize("plan", [convnet, patches, definition])
@torch.no_grad()
def test_decided_images_are_cut_into_every_fourth_patch(plan, monkeypatch):
    net, given, counts = lazy_net(tolerance=0.0), images(6), []

    def counted(images, scales, *arguments, **options):
        counts.append(len(images) * len(scales))
        return foveate(images, scales, *arguments, **options)

    for module in (lazy, channels):
        monkeypatch.setattr(module, "foveate", counted)
    plan.outputs(net, plan.prepare(net, given, torch.float32))
    assert counts == [6 * 4]
    counts.clear()
    net.lazy = math.inf
    plan.outputs(net, plan.prepare(net, given, torch.float32))
    assert counts == [6 * 4, 6 * 5, 6 * 5, 6 * 8]  # coarse, neighbours, every other, all others


@torch.no_grad()
def test_a_network_with_its_own_patches_uses_them():
    class Doubled(ScaleChannels):
        def patches(self, images, centres=None):
            return 2 * super().patches(images, centres)

    net = Doubled(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), MANY, 16).eval()
    net.lazy = 0.0
    given = images(3)
    torch.testing.assert_close(net(given), evaluated_on(net, net.patches(given)))


class Pooling(ScaleChannels):
    def combine(self, outputs):
        return outputs.mean(1)


class Normalising(ScaleChannels):
    def channels(self, images, centres=None):
        return super().channels(2 * images - 1, centres)


class Weighted(ScaleChannels):
    def forward_patches(self, patches):
        return super().forward_patches(patches) * torch.arange(1, len(MANY) + 1)[:, None]


@pytest.mark.parametrize("kind", [Pooling, Normalising, Weighted])
@torch.no_grad()
def test_subclasses_that_compute_or_pool_channels_otherwise_use_all(kind):
    net = kind(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), MANY, 16).eval()
    given = images(3)
    expected = net(given)
    net.lazy = 0.0
    for found in (net(given), predict(net, given).logits):
        torch.testing.assert_close(found, expected)


def evaluated_on(net, patches):
    """The logits of lazy evaluation of patches that are all cut."""
    found = evaluate(patches, net.backbone, net.pool, net.lazy)
    return pool_scales(found, net.pool)


@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.05, math.inf])
@pytest.mark.parametrize("side", [13, 40])
@torch.no_grad()
def test_cutting_patches_when_needed_does_not_change_the_result(tolerance, side):
    net, given = lazy_net("logsumexp", tolerance), images(9, side)
    expected = evaluated_on(net, net.patches(given))
    torch.testing.assert_close(net(given), expected, atol=bound(net, given), rtol=0)
    torch.testing.assert_close(predict(net, given).logits, expected, atol=bound(net, given), rtol=0)


@torch.no_grad()
def test_channels_scale_selection_and_search_are_complete():
    net, given = lazy_net(tolerance=0.0), images(2)
    plain = copy.deepcopy(net)
    plain.lazy = None
    assert torch.equal(net.channels(given), plain.channels(given))
    assert torch.equal(net.select_scale(given), plain.select_scale(given))
    for found in (net.search, lambda given, step: search(net, given, step)):
        torch.testing.assert_close(found(given, 30.0), search(plain, given, 30.0))


def test_gradients_training_and_tracing_use_all_channels():
    seen = Seen(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)))
    net, given = ScaleChannels(seen, MANY, 16).eval(), images(2)
    net.lazy = 0.0

    def patches_of(run):
        seen.counts.clear()
        run()
        return sum(seen.counts)

    assert patches_of(lambda: net(given)) == 2 * 17  # a gradient for the weights
    with torch.no_grad():
        assert patches_of(lambda: net.train()(given)) == 2 * 17
        assert patches_of(lambda: net.eval()(given)) < 2 * 17
        assert patches_of(lambda: torch.func.vmap(lambda one: net(one[None]))(given)) >= 17


@torch.no_grad()
def test_an_exported_program_has_all_channels():
    net = ScaleChannels(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), MANY, 8).eval()
    net.lazy = 0.0
    batch = ({0: torch.export.Dim("batch", min=1)},)
    exported = torch.export.export(net, (images(2),), dynamic_shapes=batch).module()
    net.lazy = None
    torch.testing.assert_close(exported(images(3)), net(images(3)))


@torch.no_grad()
def test_batch_statistics_use_all_channels():
    backbone = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten())
    seen = Seen(backbone)
    net = ScaleChannels(seen, MANY, 16).eval()
    net.lazy = 0.0
    net(images(2))
    assert seen.counts == [2 * 17]


@torch.no_grad()
def test_images_of_a_wrong_shape_are_an_error():
    with pytest.raises(ConfigError, match=r"shape \(B, C, H, W\)"):
        lazy_net(tolerance=0.0)(images(2)[0])


@torch.no_grad()
def test_an_empty_batch():
    assert lazy_net(tolerance=0.0)(images(1)[:0]).shape == (0, 5)


@pytest.mark.parametrize("pool", ["avg", "concat", "probabilities"])
def test_other_pools_need_all_channels(pool):
    net = small_net(pool=pool)
    net.lazy = None
    with pytest.raises(ConfigError, match=f"pool='{pool}' depends on all channels") as error:
        net.lazy = 1.0
    one_line(error)
    assert net.lazy is None


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, "1", True, [1.0]])
def test_a_tolerance_is_a_number_from_0(tolerance):
    with pytest.raises(ConfigError, match="tolerance of at least 0"):
        small_net().lazy = tolerance


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("disagreement", [0.0, 0.01, 0.1])
def test_the_calibrated_tolerance_is_the_smallest_that_suffices(pool, disagreement):
    logits = 3 * torch.randn(400, 17, 4, generator=torch.Generator().manual_seed(1))
    label = pool_scales(logits, pool).argmax(1)

    def result(tolerance):
        found = evaluate(logits, lambda values: values, pool, tolerance)
        other = pool_scales(found, pool).argmax(1) != label
        return float((found[..., 0] > -math.inf).sum(1).double().mean()), int(other.sum())

    net = ScaleChannels(_Known(logits), MANY, 1, pool).eval()
    allowed = math.floor(disagreement * len(logits))
    tolerance = calibrate(net, torch.arange(400.0).reshape(-1, 1, 1, 1).split(100), disagreement)
    assert result(tolerance)[1] <= allowed
    found, lead, _ = map(torch.stack, zip(*leads(logits, pool), strict=True))
    needed = required_tolerance(found != label, lead)
    chosen = choose_tolerance(net, logits.split(90), disagreement)
    assert chosen.tolerance == tolerance
    assert (chosen.channels, chosen.disagreement * 400) == pytest.approx(result(tolerance))
    assert (needed > tolerance).sum() <= allowed < (needed >= tolerance).sum()
    for one in torch.randperm(400, generator=torch.Generator().manual_seed(2))[:40]:
        label_of, own = label[one], logits[one][None]
        for at in (needed[one], needed[one] + 1):
            found = evaluate(own, lambda values: values, pool, max(0.0, float(at)))
            assert pool_scales(found, pool).argmax() == label_of
        if needed[one] > 0:
            below = math.nextafter(float(needed[one]) * (1 - 1e-6), 0)
            found = evaluate(own, lambda values: values, pool, below)
            assert pool_scales(found, pool).argmax() != label_of


class _Known(nn.Module):
    """Looks up the logits of the image that a constant patch names, channel after channel."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, patches):
        rows = patches.flatten().round().long().reshape(-1, 17)
        return self.logits[rows[:, 0]].flatten(0, 1)


def test_calibration_refuses_what_it_cannot_use():
    net = small_net(MANY)
    with pytest.raises(ConfigError, match=r"call net.eval\(\)"):
        calibrate(net.train(), [images()])
    with pytest.raises(ConfigError, match="share from 0 to 1, got 2"):
        calibrate(net.eval(), [images()], 2)
    with pytest.raises(DataError, match="no images"):
        calibrate(net, [])
    with pytest.raises(ConfigError, match="depends on all channels"):
        calibrate(small_net(pool="avg").eval(), [images()])
    with pytest.raises(ConfigError, match="requires ScaleChannels, got ConvNet"):
        calibrate(net.backbone, [images()])


def test_calibration_keeps_the_setting_of_the_network():
    net = lazy_net(tolerance=0.5)
    assert calibrate(net, [images()]) >= 0
    assert net.lazy == 0.5
    assert choose(net, images()) is not definition
