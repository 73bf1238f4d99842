"""Rescaling an image shifts what the channels see: random weights, images by formula."""
# Shape letters: B batch, C image channel, H W pixels.

import pytest
import torch
from formulas import blobs, sensitivity, shake
from torch import nn

from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.zoo import create_model
from foveate.scales import ScaleGrid

FINE = ScaleGrid(1, 8, per_octave=4)
H, W = 256, 240  # the window of scale 8 is 224 pixels: no padding


def linear_net(scales, size):
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(size**2, 5))
    return shake(ScaleChannels(backbone, scales, size))


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
    answers = [net.forward_patches(p).detach() for p in patches]
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
