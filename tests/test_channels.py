"""Scale channels: what each one sees, how they are pooled, and the invariance that follows."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from formulas import blobs, sensitivity, shake
from torch import nn

from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES, ScaleChannels, refine_scale
from foveate.models.pooling import pool_scales
from foveate.models.zoo import create_model
from foveate.scales import ScaleGrid

FEW = (0.5, 1.0, 3.0)
CASES = [(40, 40), (41, 40), (37, 52), (12, 9), (1, 1)]  # square, odd, wide, less than a patch


def random_images(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1).to(dtype)


def small_net(scales=FEW, pool="max", *, size=16, channels=1, classes=5, seed=0, **changes):
    backbone = ConvNet((4, 4), size, channels=channels, classes=classes, hidden=8)
    return shake(ScaleChannels(backbone, scales, size, pool, classes=classes, **changes), seed)


def linear_net(scales, size, classes=5):
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(size**2, classes))
    return shake(ScaleChannels(backbone, scales, size))


def one_line(error):
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


def slow_channels(net, images, centres=None):
    """Each image and each channel on its own, cut by torch's sampler: (B, S, K)."""
    H, W = images.shape[-2:]
    answers = []
    for image, (y, x) in zip(images, centres or [(H / 2, W / 2)] * len(images), strict=True):
        for scale in net.scales:
            window = net.size * scale
            theta = [[[window / W, 0, 2 * x / W - 1], [0, window / H, 2 * y / H - 1]]]
            shape = (1, len(image), net.size, net.size)
            grid = F.affine_grid(
                torch.tensor(theta, dtype=images.dtype), shape, align_corners=False
            )
            patch = F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)
            answers.append(net.backbone(patch)[0])
    return torch.stack(answers).unflatten(0, (len(images), len(net.scales)))


# What a channel is


def parameters(net):
    return sum(p.numel() for p in net.parameters())


def test_parameter_counts_are_those_of_the_paper():
    assert parameters(create_model("fovmax")) == parameters(create_model("fovavg")) == 68_870
    assert parameters(create_model("cnn")) == 92_198
    assert parameters(create_model("swmax")) == 68_870 - 2 * (16 + 16 + 32 + 32)
    assert parameters(create_model("fovconc")) == 68_870 + 3 * 10 * 10 + 10


@pytest.mark.parametrize(("H", "W"), CASES)
@pytest.mark.parametrize("place", ["middle", "anywhere"])
def test_channels_equal_a_loop_over_images_and_scales(H, W, place):
    net = small_net(channels=2)
    images = random_images(3, 2, H, W, dtype=torch.float64)
    centres = None if place == "middle" else [(H / 3, W / 2), (-2.0, W + 1.5), (H - 0.5, 0.25)]
    given = None if centres is None else torch.tensor(centres, dtype=torch.float64)
    expected = slow_channels(net, images, centres)
    torch.testing.assert_close(net.channels(images, given), expected)  # float64: 1e-7
    if centres is None:
        torch.testing.assert_close(net(images), expected.amax(1))


def test_the_paper_network_equals_the_loop_at_all_17_scales():
    net, images = shake(create_model("fovmax")), random_images(2, 1, 112, 112, dtype=torch.float64)
    assert len(net.scales) == 17
    torch.testing.assert_close(net.channels(images), slow_channels(net, images))


def test_scale_one_at_the_size_of_the_image_is_the_backbone():
    net, images = small_net([1.0]), random_images(2, 1, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(net(images), net.backbone(images))


def test_gradients_equal_those_of_the_loop():
    net = small_net()
    images = random_images(2, 1, 20, 23, dtype=torch.float64).requires_grad_()
    inputs = [images, *net.parameters()]
    ours = torch.autograd.grad(net(images).square().sum(), inputs)
    theirs = torch.autograd.grad(slow_channels(net, images).amax(1).square().sum(), inputs)
    torch.testing.assert_close(ours, theirs)
    assert ours[0].abs().sum() > 0


def test_padding_and_antialias_reach_the_op():
    images = random_images(1, 1, 20, 20, dtype=torch.float64)
    plain = small_net()
    for change in ({"padding": "reflect"}, {"padding": -0.7}, {"antialias": True}):
        net = small_net(**change)
        assert not torch.allclose(net.patches(images), plain.patches(images))
    torch.testing.assert_close(small_net(padding=-0.7).patches(images)[0, 2, 0, 0, 0].item(), -0.7)


# Pooling


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp"])
def test_pools_are_what_they_say_and_do_not_ask_which_scale_is_which(pool):
    outputs = random_images(4, 6, 3, dtype=torch.float64)
    slow = {
        "max": lambda values: max(values),
        "avg": lambda values: sum(values) / len(values),
        "logsumexp": lambda values: math.log(sum(math.exp(v) for v in values)),
    }[pool]
    expected = [[slow(outputs[b, :, k].tolist()) for k in range(3)] for b in range(4)]
    pooled = pool_scales(outputs, pool)
    torch.testing.assert_close(pooled, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(pool_scales(outputs[:, torch.randperm(6)], pool), pooled)
    net, images = small_net(pool=pool), random_images(2, 1, 20, 20, dtype=torch.float64)
    torch.testing.assert_close(net(images), pool_scales(net.channels(images), pool))


def test_concat_is_one_linear_layer_on_all_outputs():
    net, images = small_net(pool="concat"), random_images(2, 1, 20, 20, dtype=torch.float64)
    outputs, weight = net.channels(images), net.mixing.weight.unflatten(1, (len(FEW), 5))
    expected = torch.einsum("jsk,bsk->bj", weight, outputs) + net.mixing.bias
    torch.testing.assert_close(net(images), expected)


# Weights and scales are apart


def test_the_state_dict_is_the_backbone_and_the_mixing():
    backbone = {f"backbone.{name}" for name in small_net().backbone.state_dict()}
    assert set(small_net().state_dict()) == backbone
    mixed = set(small_net(pool="concat").state_dict())
    assert mixed == backbone | {"mixing.weight", "mixing.bias"}


def test_weights_load_into_a_network_with_other_scales():
    images = random_images(2, 1, 24, 24, dtype=torch.float64)
    trained, other = small_net(FEW, seed=1), small_net([0.7, 1.0, 1.4, 2.0], seed=2)
    other.load_state_dict(trained.state_dict())
    torch.testing.assert_close(other.channels(images)[:, 1], trained.channels(images)[:, 1])


@pytest.mark.parametrize(
    "scales", [[0.5, 1.0, 3.0, 9.0], ScaleGrid(0.5, 2, per_octave=8), [0.25, 0.5, 1.0, 3.0, 12.0]]
)
def test_scales_can_be_set_after_training(scales):
    images = random_images(2, 1, 24, 24, dtype=torch.float64)
    net = small_net()
    net.scales = scales
    assert net.scales == tuple(scales)
    torch.testing.assert_close(net.channels(images), slow_channels(net, images))
    with pytest.raises(ConfigError, match="order"):
        net.scales = [2.0, 1.0]
    assert net.scales == tuple(scales)


def test_concat_refuses_other_scales():
    with pytest.raises(ConfigError) as error:
        small_net(pool="concat").scales = [1.0, 2.0]
    assert "concat" in one_line(error)


# Scale selection


@pytest.mark.parametrize("top", [-0.4, 0.0, 0.3, 1.1])
@pytest.mark.parametrize("octaves", [[-1, 0, 1, 2], [-1, -0.3, 0.5, 2], [-2, 0, 0.1, 1.2, 2]])
def test_the_top_of_a_parabola_over_log_scale_is_found(top, octaves):
    x = torch.tensor(octaves, dtype=torch.float64)
    answers = 3 - 0.7 * (x - top) ** 2
    if answers.argmax() in (0, len(x) - 1):
        pytest.skip("the top is beyond the last but one channel")
    found = refine_scale(answers[None], x.exp2().tolist())
    torch.testing.assert_close(found, torch.tensor([2.0**top], dtype=torch.float64))


def test_edges_flats_and_few_scales_name_a_channel():
    scales = [0.5, 1.0, 2.0, 4.0]
    rising = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    assert refine_scale(rising, scales).tolist() == [4.0, 0.5]
    flat = refine_scale(torch.zeros(3, 4), scales)
    assert all(scale in scales for scale in flat.tolist())
    assert refine_scale(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), [1.0, 3.0]).tolist() == [3.0, 1.0]
    assert refine_scale(torch.ones(2, 1), [1.5]).tolist() == [1.5, 1.5]


def test_the_refined_scale_lies_between_the_neighbours_of_the_best_channel():
    generator = torch.Generator().manual_seed(0)
    octaves = torch.rand(9, generator=generator, dtype=torch.float64).cumsum(0)
    answers = torch.rand(500, 9, generator=generator, dtype=torch.float64)
    found, best = refine_scale(answers, octaves.exp2().tolist()).log2(), answers.argmax(1)
    slack = 1e-9
    assert (found >= octaves[(best - 1).clamp_min(0)] - slack).all()
    assert (found <= octaves[(best + 1).clamp_max(8)] + slack).all()


# Covariance and invariance: random weights, images by formula

FINE = ScaleGrid(1, 8, per_octave=4)
H, W = 256, 240  # the window of scale 8 is 224 pixels: no padding


def shifted(outputs, again, steps):
    """The channels of two runs that should be equal when the second image is 2^(steps/4) larger."""
    if steps < 0:
        return outputs[:, -steps:], again[:, :steps]
    return outputs[:, : outputs.shape[1] - steps], again[:, steps:]


@pytest.mark.parametrize("steps", [-3, 1, 4])
def test_rescaling_the_image_shifts_what_the_channels_see(steps):
    factor, f = 2 ** (steps / 4), blobs(16, 24, batch=2)
    net = create_model("fovmax", scales=FINE)
    before, after = shifted(*(net.patches(f.image(H, W, t)) for t in (1, factor)), steps)
    bound = f.interpolation_error() + f.interpolation_error(factor)
    assert ((after - before).abs().amax((1, 2, 3, 4)) <= bound).all()
    exact = torch.stack([f.patch(s, 28) for s in net.scales], 1)
    for t, scaled in ((1, 1), (factor, factor)):
        seen = net.patches(f.image(H, W, t))
        at = torch.stack([f.patch(s / scaled, 28) for s in net.scales], 1)
        assert ((seen - at).abs().amax((1, 2, 3, 4)) <= f.interpolation_error(t)).all()
    # The bound says something: pictures of neighbouring scales differ by far more.
    assert ((exact[:, 1:] - exact[:, :-1]).abs().amax((2, 3, 4)) > 3 * bound[:, None]).all()


@pytest.mark.parametrize("steps", [-3, 1, 4])
def test_a_random_network_is_invariant_up_to_interpolation(steps):
    """The bar: FovMax with any weights, on images scaled by 2^(k/4).

    Patches that should be equal differ by no more than two interpolation errors, so logits by no
    more than that times the sup-norm Lipschitz constant of the network between them.
    """
    factor, f = 2 ** (steps / 4), blobs(16, 24, batch=2)
    net = shake(create_model("fovmax", scales=FINE))
    patches = [net.patches(f.image(H, W, t)) for t in (1.0, factor)]
    before, after = shifted(*patches, steps)
    constant = sensitivity(net.backbone, before.flatten(0, 1), after.flatten(0, 1))
    error = f.interpolation_error() + f.interpolation_error(factor)
    bound = constant.unflatten(0, before.shape[:2]) * error[:, None, None]
    answers = [net.answer(p).detach() for p in patches]
    first, second = shifted(*answers, steps)
    assert bound.max() < first.std() / 10  # the bound is small against what the network says
    assert ((second - first).abs() <= bound).all()
    assert ((second.amax(1) - first.amax(1)).abs() <= bound.amax(1)).all()

    # The whole network, for the images and classes that the ends of the range do not win.
    lowest, highest = max(steps, 0), len(FINE) - 1 + min(steps, 0)
    best = [a.argmax(1) for a in answers]
    inside = (best[0] <= highest - lowest) if steps > 0 else (best[0] >= -steps)
    inside &= (best[1] >= lowest) if steps > 0 else (best[1] <= highest)
    logits = [net(f.image(H, W, t)).detach() for t in (1.0, factor)]
    assert inside.sum() >= 3
    assert ((logits[1] - logits[0]).abs() <= bound.amax(1))[inside].all()


@pytest.mark.parametrize("steps", [2, 4])
def test_a_linear_backbone_keeps_to_the_exact_bound(steps):
    """One layer: the Lipschitz constant is the largest row sum of |w|, with nothing sampled."""
    factor, f = 2 ** (steps / 4), blobs(16, 24, batch=2)
    net = linear_net(FINE, 28)
    constant = net.backbone[1].weight.abs().sum(1)
    error = f.interpolation_error() + f.interpolation_error(factor)
    first, second = shifted(*(net.channels(f.image(H, W, t)) for t in (1, factor)), steps)
    assert ((second - first).abs() <= constant * error[:, None, None]).all()
    assert (constant.max() * error).max() < first.std()


def test_the_error_falls_with_the_square_of_the_pixel():
    """Four times the pixels per shape divide the error by 16: nothing but interpolation is left.

    A shift by part of a pixel would leave an error of first order (4), so order 2 is told from
    orders 1 and 3 by the geometric means 8 and 32.
    """
    errors = []
    for fine in (1, 4):
        f = blobs(8 * fine, 12 * fine)
        scales = [fine * s for s in (0.53, 1.06, 2.12, 4.24)]
        net = shake(ScaleChannels(ConvNet(), scales))
        images = [f.image(128 * fine, 128 * fine, t) for t in (1, 2)]
        first, second = (net.channels(i).detach() for i in images)
        errors.append((second[:, 1:] - first[:, :-1]).abs().mean().item())
    assert 8 < errors[0] / errors[1] < 32


@pytest.mark.parametrize("steps", [1, 2])
def test_the_selected_scale_moves_with_the_image(steps):
    factor, f = 2 ** (steps / 4), blobs(16, 24, batch=24)
    net = shake(create_model("fovmax", scales=FINE))
    images = [f.image(H, W, t) for t in (1.0, factor)]
    answers = [net.channels(i).detach() for i in images]
    first, second = shifted(*answers, steps)
    label, rows = first.amax(1).argmax(1), torch.arange(24)
    chosen = first[rows, :, label]
    best = chosen.argmax(1)
    change = (second - first).abs().amax((1, 2))
    middle = best.clamp(1, chosen.shape[1] - 2)
    near = [chosen[rows, middle + k] for k in (-1, 0, 1)]
    curvature = 2 * near[1] - near[0] - near[2]
    steady = (best == middle) & (curvature > 20 * change)
    for i, a in enumerate(answers):  # neither the ends of the range nor a near tie decide
        everything = a.amax(1)
        steady &= everything.argmax(1) == label
        steady &= a[rows, :, label].argmax(1) == best + i * steps
    assert steady.sum() >= 3
    # The top is at step (y0 - y2) / (2 (y0 - 2 y1 + y2)) of the middle, at most ½ away: values
    # wrong by `change` move it by up to 3 change / curvature steps of ¼ octave, and (for the
    # curvature in the denominator, wrong by 4 change < curvature / 5) a fifth of that more.
    bound = 0.25 * 3 * change / curvature / (1 - 1 / 5)
    moved = (net.select_scale(images[1]) / net.select_scale(images[0])).log2() - steps / 4
    assert (moved.abs() <= bound)[steady].all()


# Wrong input


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


# The ways a network is used


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "concat"])
def test_training_moves_weights_and_shares_batch_norm(pool):
    net = small_net(pool=pool).train()
    images = random_images(4, 1, 24, 24, dtype=torch.float64).requires_grad_()
    first = net.backbone.trunk[1]
    first.momentum = 1.0  # the running mean becomes that of the last batch
    F.cross_entropy(net(images), torch.tensor([0, 1, 2, 3])).backward()
    assert images.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert net.backbone.head.weight.grad.abs().sum() > 0
    maps = net.backbone.trunk[0](net.patches(images).flatten(0, 1))
    torch.testing.assert_close(first.running_mean, maps.mean((0, 2, 3)))


def test_answering_patches_that_were_cut_before_is_the_same():
    net, images = small_net(), random_images(3, 1, 24, 30, dtype=torch.float64)
    torch.testing.assert_close(net.combine(net.answer(net.patches(images))), net(images))


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "concat"])
def test_batches_of_one_and_of_none(pool):
    net, images = small_net(pool=pool), random_images(3, 1, 24, 24, dtype=torch.float64)
    torch.testing.assert_close(net(images[:1]), net(images)[:1])
    assert net(images[:0]).shape == (0, 5)
    assert net.channels(images[:0]).shape == (0, 3, 5)
    assert net.select_scale(images[:0]).shape == (0,)
    assert net.select_scale(images).shape == (3,)


def test_float32_equals_float64_to_rounding():
    net, images = small_net(), random_images(2, 1, 24, 24)
    exact = net(images.double())
    rounded = net.float()(images)
    assert (exact.dtype, rounded.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(rounded.double(), exact, atol=1e-5, rtol=1e-5)


def test_autocast_to_bfloat16_stays_near():
    net, images = small_net().float(), random_images(2, 1, 24, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net.patches(images).dtype == torch.float32
        half = net(images)
    assert half.dtype == torch.bfloat16
    # Four layers, each rounding its input and its output to 8 bits of values of size 1.
    torch.testing.assert_close(half.float(), net(images), atol=8 * 2**-8, rtol=0)


def test_compiled_equals_eager():
    net = small_net()
    images = random_images(2, 1, 24, 24, dtype=torch.float64).requires_grad_()
    inputs = [images, *net.parameters()]
    eager, compiled = net(images), torch.compile(net, fullgraph=True, backend="aot_eager")(images)
    torch.testing.assert_close(compiled, eager)
    gradients = [torch.autograd.grad(logits.sum(), inputs) for logits in (compiled, eager)]
    torch.testing.assert_close(*gradients)


def test_exported_equals_eager_for_every_batch_size():
    net, images = small_net(), random_images(7, 1, 24, 24, dtype=torch.float64)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (images[:2],), dynamic_shapes=({0: batch},))
    for size in (1, 2, 7):
        torch.testing.assert_close(program.module()(images[:size]), net(images[:size]))


def test_a_copy_is_its_own_network():
    net, images = small_net(), random_images(2, 1, 24, 24, dtype=torch.float64)
    twin, before = copy.deepcopy(net), net(images)
    twin.scales = [1.0]
    nn.init.zeros_(twin.backbone.head.weight)
    torch.testing.assert_close(net(images), before, rtol=0, atol=0)
    assert net.scales == FEW


def test_print_says_what_the_network_is():
    assert "17 scales 0.5 to 8, size=28, pool=max" in repr(ScaleChannels(ConvNet()))
    assert ScaleChannels(ConvNet()).scales == tuple(PAPER_SCALES)
