"""Searching over centres and scales: against a plain loop, and with objects of known place."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

from itertools import pairwise

import pytest
import timm
import torch
from channel_nets import one_line, small_net
from torch import nn

from foveate import ScaleChannels, ScaleGrid, local_maps, wrap
from foveate.errors import ConfigError
from foveate.execution import plan
from foveate.models import search as module
from foveate.models.backbone import ConvNet

SIZE = 16
SCALES = ScaleGrid(0.5, 4, per_octave=2)
SHAPES = ((0.16, 0.16), (0.22, 0.1), (0.1, 0.22))  # of the classes: widths in y and x, of a window


def shape(y, x, label):
    """The object of a class about (0, 0); y and x in windows."""
    down, across = SHAPES[label]
    return torch.exp(-(y**2) / (2 * down**2) - x**2 / (2 * across**2))


class Templates(nn.Module):
    """Logits (N, K): minus the squared distance of a patch to the object of each class."""

    def __init__(self):
        super().__init__()
        at = (torch.arange(SIZE) + 0.5) / SIZE - 0.5
        shapes = [shape(at[:, None], at, label) for label in range(len(SHAPES))]
        self.register_buffer("templates", torch.stack(shapes))

    def forward(self, patches):
        return -(patches - self.templates).square().sum((2, 3))


def image(y, x, window, label, size=(96, 120)):
    """One object, centred on (y, x) pixels, in a window of that many pixels."""
    rows, columns = (torch.arange(length) + 0.5 for length in size)
    return shape((rows[:, None] - y) / window, (columns - x) / window, label)[None, None]


def detector(pool="max", **options):
    return ScaleChannels(Templates(), SCALES, SIZE, pool, **options).eval()


def noise(*size, dtype=torch.float64):
    return torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=dtype)


def brute_force(net, one, step):
    """The best (value, class, centre, window, confidence) of an image, centre by centre."""
    H, W = one.shape[2:]
    best = (-torch.inf,)
    for i in range(-int(H // 2 // step) - 1, int(H // 2 // step) + 2):
        for j in range(-int(W // 2 // step) - 1, int(W // 2 // step) + 2):
            y, x = H / 2 + i * step, W / 2 + j * step
            if not (0 <= y <= H and 0 <= x <= W):
                continue
            channels = net.channels(one, torch.tensor([[y, x]]))
            pooled = net.combine(channels)[0]
            label = int(pooled.argmax())
            if pooled[label] > best[0]:
                channel = int(channels[0, :, label].argmax())
                window = net.size * net.scales[channel]
                confidence = channels[0, channel].softmax(0)[label]
                best = (float(pooled[label]), label, (y, x), window, float(confidence))
    return best


def assert_brute_force(net, images, step):
    found = net.search(images, step, refine=0, maps=True)
    with torch.no_grad():
        for b in range(len(images)):
            value, label, centre, window, confidence = brute_force(net, images[b : b + 1], step)
            assert int(found.classes[b]) == label
            assert tuple(found.centres[b].tolist()) == centre
            assert float(found.windows[b]) == pytest.approx(window)
            assert float(found.confidence[b]) == pytest.approx(confidence, rel=1e-4)
            assert float(found.logits[b].max()) == pytest.approx(value, rel=1e-4)
    return found


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "concat"])
@pytest.mark.parametrize(("size", "step"), [((37, 52), 5), ((24, 9), 4.5), ((3, 40), 8)])
def test_without_refinement_it_is_a_loop_over_centres_and_scales(pool, size, step):
    net = small_net(pool=pool, channels=2).eval()
    assert_brute_force(net, noise(2, 2, *size), step)


def test_max_is_the_maximum_over_centres_scales_and_classes():
    net, images = small_net().eval(), noise(1, 1, 30, 20)
    found = net.search(images, 5, refine=0, maps=True)
    centres = torch.cartesian_prod(torch.arange(0, 31, 5.0), torch.arange(0, 21, 5.0))
    with torch.no_grad():
        channels = net.channels(images.expand(len(centres), -1, -1, -1), centres)
    n = int(channels.argmax())
    S, K = channels.shape[1:]
    assert int(found.classes) == n % K
    assert float(found.windows) == net.size * net.scales[n // K % S]
    assert torch.equal(found.centres[0], centres[n // (K * S)])
    expected = channels.max(1).values.T.view(K, 7, 5)  # the map: rows are y, columns x
    torch.testing.assert_close(found.logits[0], expected)


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "resnet10t"])
def test_any_backbone_can_be_searched_with(name):
    torch.manual_seed(0)
    backbone = timm.create_model(name, num_classes=5)
    net = wrap(backbone, 16, 48, size=32, per_octave=1, pool="logsumexp").eval()
    assert_brute_force(net, noise(2, 3, 50, 70, dtype=torch.float32), 25)


@pytest.mark.parametrize("label", range(len(SHAPES)))
@pytest.mark.parametrize("window", [8.0, 16 * 2**0.5, 64.0])
def test_it_finds_the_class_place_and_window_of_an_object(label, window):
    found = detector().search(image(37.3, 70.8, window, label), step=8, refine=4)
    assert int(found.classes) == label
    assert float(found.windows) == pytest.approx(window)
    # Half of the finest step, and what interpolation may move the minimum of a smooth distance.
    assert (found.centres - torch.tensor([[37.3, 70.8]])).abs().max() <= 8 / 2**4 / 2 + 0.2


@pytest.mark.parametrize("refine", [0, 2])
@pytest.mark.parametrize("shift", [(8, 0), (-16, 24), (0, -8)])
def test_moving_the_image_by_whole_steps_moves_the_centre_by_exactly_that(refine, shift):
    net, start = detector(), image(45, 66, 16, 1)
    start = torch.where(start < 1e-6, 0.0, start)  # the background is constant up to the edge
    moved = torch.roll(start, shift, (2, 3))
    before, after = (net.search(one, step=8, refine=refine) for one in (start, moved))
    assert torch.equal(after.centres, before.centres + torch.tensor(shift))
    assert torch.equal(after.windows, before.windows)
    torch.testing.assert_close(after.confidence, before.confidence)


@pytest.mark.parametrize("factor", [2**0.5, 2.0, 4.0])
def test_scaling_the_image_about_the_object_scales_the_window(factor):
    net = detector()
    before, after = (
        net.search(image(40, 68, window, 2), step=4, refine=2) for window in (16, 16 * factor)
    )
    assert torch.equal(after.centres, before.centres)
    torch.testing.assert_close(after.windows, factor * before.windows)
    assert int(before.classes) == int(after.classes) == 2


@pytest.mark.parametrize("pool", ["max", "logsumexp"])
@pytest.mark.parametrize("label", range(len(SHAPES)))
def test_a_centred_object_has_the_class_of_the_network(pool, label):
    net, centred = detector(pool), image(48, 60, 24, label)
    found = net.search(centred, step=6, refine=1)
    assert int(found.classes) == int(net(centred).argmax(1)) == label
    assert torch.equal(found.centres, torch.tensor([[48.0, 60.0]]))


def test_the_middle_of_the_image_is_one_of_the_places():
    net, images = small_net().eval(), noise(2, 1, 33, 50)
    with torch.no_grad():
        whole = net(images)
    alone = net.search(images, step=1000, refine=0, maps=True)
    assert torch.equal(alone.classes, whole.argmax(1))
    torch.testing.assert_close(alone.logits[..., 0, 0], whole)
    found = net.search(images, step=4, maps=True)
    assert found.logits.shape == (2, 5, 9, 13)
    torch.testing.assert_close(found.logits[..., 4, 6], whole)


def test_the_winner_of_local_maps_is_found_to_within_a_step():
    step = 4
    for seed in range(6):
        net = small_net((0.5, 1.0, 2.0), seed=seed).eval()
        images = image(30, 25, 20, seed % 3, (52, 44)).double() * (1 + seed)
        with torch.no_grad():
            maps = local_maps(net, images, step)  # an odd number of steps: the same places
        value, place = maps.logits[0].flatten(1).max(1)
        label = int(value.argmax())
        y, x = divmod(int(place[label]), 44 // step)
        found = net.search(images, step, refine=0)
        assert int(found.classes) == label
        centre = torch.tensor([(y + 0.5) * step, (x + 0.5) * step])
        assert (found.centres[0] - centre).abs().max() <= step


def test_refinement_only_improves_and_stays_in_the_image():
    net, images = small_net().eval(), noise(3, 1, 31, 45)
    with torch.no_grad():
        values = []
        for refine in range(4):
            found = net.search(images, step=9, refine=refine)
            assert (found.centres >= 0).all()
            assert (found.centres <= torch.tensor([31.0, 45.0])).all()
            values.append(net.combine(net.channels(images, found.centres)).max(1).values)
    for before, after in pairwise(values):
        assert (after >= before - 1e-5).all()


def test_few_patches_are_held_at_a_time(monkeypatch):
    net, images = small_net().eval(), noise(1, 1, 40, 40)
    whole = net.search(images, 5)
    counts, forward = [], net.forward_patches

    def counted(patches):
        counts.append(len(patches))
        return forward(patches)

    monkeypatch.setattr(net, "forward_patches", counted)
    few = net.search(images, 5, batch_size=7)
    assert max(counts) == 7 and torch.equal(few.centres, whole.centres)
    counts.clear()
    monkeypatch.setattr(module, "AT_ONCE", 3 * (3 * 16**2 + 40**2) + 1)
    assert torch.equal(net.search(images, 5).centres, whole.centres)
    assert max(counts) == 3 and sum(counts) > 81


def test_the_fast_form_equals_the_method():
    net, images = small_net().float().eval(), noise(2, 1, 45, 60, dtype=torch.float32)
    plain, fast = net.search(images, 6), plan.search(net, images, 6)
    assert torch.equal(fast.centres, plain.centres) and torch.equal(fast.classes, plain.classes)
    torch.testing.assert_close(fast.confidence, plain.confidence, atol=1e-5, rtol=1e-4)
    other = detector()
    assert torch.equal(plan.search(other, images, 6).centres, other.search(images, 6).centres)


def test_half_precision_and_gradients_are_no_problem():
    images = image(40, 68, 16, 1)
    half = detector().bfloat16().search(images.bfloat16(), step=8)
    assert (int(half.classes), float(half.windows)) == (1, 16.0)
    assert not detector().search(images.requires_grad_(), step=8).confidence.requires_grad


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step": 0}, "step must be a positive number of pixels, got 0"),
        ({"step": float("nan")}, "step must be a positive number of pixels, got nan"),
        ({"step": "4"}, "step must be a positive number of pixels, got '4'"),
        ({"step": 0.01}, "use a larger step"),
        ({"refine": -1}, "refine must be a whole number from 0 to 20, got -1"),
        ({"beam": 0}, "beam must be a whole number from 1"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options, says):
    with pytest.raises(ConfigError) as error:
        small_net().eval().search(noise(1, 1, 20, 20), **options)
    assert says in one_line(error)


def test_the_network_must_be_in_evaluation_and_get_images():
    with pytest.raises(ConfigError) as error:
        small_net().train().search(noise(1, 1, 20, 20))
    assert "call net.eval()" in one_line(error)
    for wrong, says in (
        (noise(0, 1, 20, 20), "got an empty batch"),
        (noise(1, 20, 20), "images[None]"),
    ):
        with pytest.raises(ConfigError) as error:
            small_net().eval().search(wrong)
        assert says in one_line(error)


@torch.no_grad()
def test_a_network_with_its_own_channels_is_searched_with_them():
    class Normalising(ScaleChannels):
        def channels(self, images, centres=None):
            return super().channels(2 * images - 1, centres)

    net = Normalising(small_net().float().backbone, (0.5, 1.0), 16).eval()
    images = torch.rand(2, 1, 40, 40)
    found = net.search(images, 100, refine=0, maps=True).logits[..., 0, 0]
    torch.testing.assert_close(found, net(images))


@torch.no_grad()
def test_local_maps_call_the_dense_of_a_subclass():
    class Doubled(ConvNet):
        def dense(self, images, mask=None):
            return 2 * super().dense(images, mask)

    net, images = small_net().float().eval(), torch.rand(1, 1, 40, 40)
    expected = 2 * local_maps(net, images, 20).logits
    net.backbone.__class__ = Doubled
    for maps in (local_maps, plan.local_maps):
        torch.testing.assert_close(maps(net, images, 20).logits, expected)


def test_images_without_a_batch_are_refused_by_the_fast_search():
    with pytest.raises(ConfigError, match="shape"):
        plan.search(small_net().eval(), torch.zeros(40))


def test_positions_are_precise_whatever_the_default_dtype_is():
    net, images = detector(), image(150.5, 301.5, 24, 1, (301, 603))
    expected = net.search(images)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = net.search(images)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.centres, expected.centres) and found.centres.dtype == torch.float32
    assert torch.equal(found.windows, expected.windows)
