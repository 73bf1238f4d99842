"""Scale channels: what each one sees, how they are pooled, and weights apart from scales."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

import math

import pytest
import torch
import torch.nn.functional as F
from channel_nets import FEW, one_line, small_net
from formulas import shake
from made_images import random_images

from foveate.errors import ConfigError
from foveate.models.pooling import pool_scales
from foveate.models.zoo import create_model
from foveate.scales import ScaleGrid

CASES = [(40, 40), (41, 40), (37, 52), (12, 9), (1, 1)]  # square, odd, wide, less than a patch


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


def test_the_pool_of_probabilities_is_the_logarithm_of_their_mean():
    outputs = random_images(4, 6, 3, dtype=torch.float64)
    pooled = pool_scales(outputs, "probabilities")
    torch.testing.assert_close(pooled.exp(), outputs.softmax(2).mean(1))
    far = pool_scales(outputs + torch.arange(6.0)[:, None] * 1000, "probabilities")
    torch.testing.assert_close(far, pooled)  # softmax forgets what is added to a channel


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
