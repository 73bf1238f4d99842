"""Random zooms in training: what a zoomed image looks like, and which zooms a run draws."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import MODEL, STEPS, assert_same_batches, same_bits, tiny, trained, weights

from foveate.data import large_scale
from foveate.data.large_scale import rescale, stretch_contrast
from foveate.data.recipes import find_recipe
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.execution import convnet, patches, windows
from foveate.execution.plan import PLANS, logits, prepare
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.training import session
from foveate.training.config import TrainConfig
from foveate.training.data import open_batches
from foveate.training.loop import train, train_together
from foveate.training.zooms import Zooms, crop_frame, draw_zooms, prepare_zoomed

ZOOMS = (0.5, 2.0)
CPU = torch.device("cpu")
DIGITS, PLAIN = Zooms(limits=ZOOMS), Zooms(limits=ZOOMS, stretch=False)


def ramp(zoom, side=48):
    """An image of constant slope that is 0 at its centre, magnified `zoom` times."""
    offset = torch.arange(side) + 0.5 - side / 2
    return ((offset[:, None] + 3 * offset) / zoom)[None, None]


@pytest.mark.parametrize("zoom", [0.5, 2**0.25, 2.0])
def test_a_zoom_shows_what_a_magnified_image_shows(zoom):
    # Windows of 12 to 24 pixels in frames of 48, which a margin of 24 fills at all zooms: no
    # padding. Interpolation between pixels of a ramp is exact up to rounding, with values below
    # 4 * 96.
    net, zooms = MODEL.build().eval(), replace(PLAIN, margin=24)
    zoomed = prepare_zoomed(net, ramp(1, side=96), torch.tensor([zoom]), "float32", zooms).inputs[0]
    magnified = prepare(net, ramp(zoom), "float32").inputs[0]
    bound = 4 * 4 * 96 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(zoomed, magnified, atol=bound, rtol=0)


@pytest.mark.parametrize("zoom", [0.5, 1.0, 2**0.25, 2.0])
def test_a_zoom_without_channels_resamples_the_frame(zoom):
    net = ConvNet(size=48).eval()
    zoomed = prepare_zoomed(net, ramp(1), torch.tensor([zoom]), "float32", PLAIN).inputs[0]
    # Interpolation needs pixels on both sides: half a pixel of the frame, two if it is reduced.
    inner = slice(1, -1)
    if zoom < 1:  # half of the frame shows what lies beyond the image, and is its border
        inner = slice(14, -14)
        assert (zoomed[0, 0, :, :11] == zoomed[0, 0, :, :1]).all()
    bound = 4 * 4 * 48 / min(zoom, 1) * torch.finfo(torch.float32).eps
    expected = ramp(zoom)[..., inner, inner]
    torch.testing.assert_close(zoomed[..., inner, inner], expected, atol=bound, rtol=0)


def test_a_zoom_divides_the_scales_and_crops_the_image_or_reduces_it():
    torch.manual_seed(0)
    net, images = (
        MODEL.build().eval(),
        rescale(load_source("mnist-5k").train.images[:6], 1, size=24),
    )
    factors = torch.tensor([2.0, 0.5, 1.0, 2.0, 1.0, 1.5], dtype=torch.float64)
    found = logits(net, prepare_zoomed(net, images, factors, "float32", DIGITS))
    for image, zoom, row in zip(images, factors.tolist(), found, strict=True):
        shown, scales = image[None], [s / zoom for s in net.scales]
        if margin := {2.0: 6, 1.5: 4}.get(zoom):  # of 24 pixels, 24 / zoom remain
            shown = stretch_contrast(shown[..., margin:-margin, margin:-margin])
        elif zoom < 1:  # a pixel lies between two along each axis; the border is repeated
            wide = F.pad(shown, (12, 12, 12, 12), mode="replicate")
            shown, scales = stretch_contrast(F.avg_pool2d(wide, 2)), net.scales
        plain = ScaleChannels(net.backbone, scales, net.size, net.pool)
        # Batch sizes can change the order of sums: allow a few roundings of values of order 1.
        torch.testing.assert_close(row, plain.eval()(shown)[0], atol=1e-5, rtol=1e-5)
    assert net.scales == MODEL.scales.values


@pytest.mark.parametrize("plan", [windows, convnet, patches], ids=lambda plan: plan.__name__[18:])
def test_zoomed_images_are_prepared_for_every_plan_as_a_network_with_these_scales(
    plan, monkeypatch
):
    monkeypatch.setitem(PLANS, "cpu", (plan,))
    net, images = MODEL.build().train(), torch.rand(7, 1, 24, 24)
    factors = torch.tensor([2.0, 1.5, 2.0, 1.0, 1.5, 1.0, 4.0], dtype=torch.float64)
    found = prepare_zoomed(net, images, factors, "float32", PLAIN)
    assert found.plan is plan
    for i, zoom in enumerate(factors.tolist()):
        zoomed = ScaleChannels(net.backbone, [s / zoom for s in net.scales], net.size, net.pool)
        alone = prepare(zoomed.train(), crop_frame(images[i : i + 1], zoom))
        assert torch.equal(found.inputs[0][i : i + 1], alone.inputs[0])
        for moments, same in zip(found.inputs[1:], alone.inputs[1:], strict=True):
            torch.testing.assert_close(moments[i : i + 1], same)


@pytest.mark.parametrize("zoom", [0.5, 0.7, 1.0, 1.3, 2.0])
def test_a_margin_shows_what_lies_beyond_the_frame(zoom):
    images = torch.rand(1, 1, 48, 48)  # a frame of 24 pixels and 12 more on each side
    shown, side = crop_frame(images, zoom, margin=12), 24 - 2 * round(12 * (1 - 1 / zoom))
    assert shown.shape[-1] == side and abs(side - 24 / zoom) <= 1
    middle = slice(24 - side // 2, 24 + side // 2)
    assert torch.equal(shown, images[..., middle, middle])


@pytest.mark.parametrize(("height", "width"), [(24, 24), (25, 30), (1, 2)])
def test_the_crop_keeps_the_centre_and_never_empties_the_image(height, width):
    images = torch.arange(float(height * width)).view(1, 1, height, width)
    for zoom in (0.25, 1.0, 1.3, 2.0, 64.0):
        seen = crop_frame(images, zoom)
        for side, whole in zip(seen.shape[2:], (height, width), strict=True):
            assert side >= 1 and (whole - side) % 2 == 0
            assert side <= whole and abs(side - min(whole, whole / zoom)) <= 2
        assert seen.mean() == images.mean()  # the mean of a ramp is its value at the centre


def test_factors_are_log_uniform_and_follow_from_seed_and_epoch():
    drawn = torch.cat([draw_zooms((0.25, 4.0), 100, (3, epoch)) for epoch in range(100)]).log2()
    assert drawn.min() >= -2 and drawn.max() <= 2
    # 100 random starts and 10,000 steps: five standard errors of a uniform variable on [-2, 2].
    deviation = 4 / math.sqrt(12)
    assert abs(drawn.mean()) < 5 * deviation / math.sqrt(10_000) + 5 * deviation / 16 / 10
    assert abs(drawn.std() - deviation) < 0.05
    one, same, other = (draw_zooms(ZOOMS, 50, seed) for seed in ((0, 1), (0, 1), (1, 0)))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_resident_images_are_zoomed_anew_in_each_epoch_and_as_streamed_ones():
    config, net, order = tiny(zooms=ZOOMS, samples=40), MODEL.build(), torch.randperm(40)
    resident = open_batches(config, "train", net, CPU, False, load_source)
    streamed = open_batches(config, "train", net, CPU, True, load_source)
    epochs = []
    for epoch in (0, 1):
        assert_same_batches(*(batches(order, 16, (0, epoch)) for batches in (resident, streamed)))
        epochs.append(resident.resident.images.inputs[0].clone())
    assert not torch.equal(*epochs)
    valid = open_batches(config, "val", net, CPU, True, load_source)
    (plain,) = open_batches(tiny(), "val", net, CPU, True, load_source)(torch.arange(8), 8)
    (batch,) = valid(torch.arange(8), 8)
    assert torch.equal(batch.images.inputs[0], plain.images.inputs[0])  # validation is not zoomed


def test_few_images_are_rescaled_in_each_epoch_with_weights_that_are_computed_once(monkeypatch):
    def counted(*args):
        calls.append(args)
        return smoothing_matrices(*args)

    calls, config, net = (
        [],
        tiny(zooms=ZOOMS, distortions=1.0, scales="1-4", samples=40),
        MODEL.build(),
    )
    smoothing_matrices = large_scale.smoothing_matrices
    monkeypatch.setattr(large_scale, "smoothing_matrices", counted)
    resident = open_batches(config, "train", net, CPU, False, load_source)
    begun = len(calls)
    batches = [next(resident(torch.arange(40), 40, (0, epoch))) for epoch in (0, 1)]
    assert len(calls) == begun + 1
    order, streamed = torch.randperm(40), open_batches(config, "train", net, CPU, True, load_source)
    (other,) = streamed(order, 40, (0, 1))  # computes weights in another order
    assert torch.equal(batches[1].images.inputs[0][order], other.images.inputs[0])


@pytest.mark.parametrize("changes", [{"zooms": ZOOMS}, {"distortions": 1.0}], ids=str)
def test_a_run_with_random_images_resumes_and_trains_beside_others_with_the_same_bits(
    changes, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "TIME_SLICE", 0.0)  # one step of each run in turn
    whole = trained(tmp_path / "whole", **changes)
    assert not same_bits(whole, trained(tmp_path / "plain"))

    def stop(config, progress, steps):
        if progress.epoch * steps + progress.step == STEPS + 2:
            raise KeyboardInterrupt

    for name in ("parts", "ahead"):
        with pytest.raises(KeyboardInterrupt):
            train(tiny(**changes), tmp_path / name, callback=stop)
    assert same_bits(weights(train(tiny(**changes), tmp_path / "parts").path), whole)
    seeds = {"seed0": 0, "seed1": 1, "ahead": 0}
    runs = [(tiny(**changes, seed=seed), tmp_path / name) for name, seed in seeds.items()]
    found = [same_bits(weights(run.path), whole) for run in train_together(runs)]
    assert found == [True, False, True]


@pytest.mark.parametrize(
    ("name", "value", "off", "text", "changed"),
    [("zooms", ZOOMS, (1.0, 1.0), "[1, 4]", (1.0, 4.0)), ("distortions", 1.5, 0.0, "2", 2.0)],
)
def test_a_configuration_keeps_random_changes_and_its_digest_without_them(
    name, value, off, text, changed
):
    config = tiny(**{name: value})
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert getattr(config.changed({name: text}), name) == changed
    assert name not in tiny().to_dict()
    assert replace(config, **{name: off}).digest() == tiny().digest() != config.digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zooms": (2.0, 1.0)}, "two factors from 1/64 to 64"),
        ({"zooms": (1.0,)}, "two factors"),
        ({"zooms": (0.001, 1.0)}, "two factors"),
        ({"zooms": ZOOMS, "model": replace(MODEL, pool="concat")}, "use cnn, fovmax or fovavg"),
        ({"zooms": ZOOMS, "model": replace(MODEL, form="sliding")}, "use cnn, fovmax or fovavg"),
        ({"zooms": ZOOMS, "recipe": find_recipe("photo")}, "recipe photo; set recipe.sizes"),
        (
            {"zooms": (1 / 64, 1.0), "recipe": find_recipe("mirrored"), "size": 64},
            r"from 0\.015625 show frames of 4,104 pixels, .*; increase the smallest factor",
        ),
    ],
)
def test_zooms_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)
