"""Gaussian derivative networks: the kernels, covariance under scaling and shifts, and training."""
# Shape letters: N images, S scale channel, C features, P grid points per axis, K classes.

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from baseline_checks import assert_one_graph, assert_trains
from formulas import blobs, sensitivity

from foveate.baselines import gaussian_derivatives as baseline
from foveate.baselines.gaussian_derivatives import (
    DERIVATIVES,
    GaussianDerivativeNet,
    jet_matrices,
    pixel_jets,
    sampling_grids,
)
from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels
from foveate.scale_space import discrete_gaussian

ORDERS = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2)]  # along y and x: L, Ly, Lyy, Lx, Lxy, Lxx
ROUNDING = 2**-22  # float32 matrices, each entry rounded, applied along two axes
GRID = torch.arange(-3, 4, dtype=torch.float64)
SIZE = 96


def kernels(sigma, size=SIZE, grid=GRID):
    """Matrices (3 P, size) in float64, without the rounding of the network's buffers."""
    edges = torch.arange(1, size, dtype=torch.float64)
    return jet_matrices(size / 2 + sigma * grid, edges, sigma, 1.0)


def apply_jets(images, matrices):
    """The derivatives (..., C, 6, P, P) of images (..., C, H, H), by matrices (..., 3 P, H)."""
    orders = matrices.unflatten(-2, (3, -1))
    parts = [orders[..., y, :, :] @ images @ orders[..., x, :, :].mT for y, x in ORDERS]
    return torch.stack(parts, -3)


def largest(order):
    """A bound on |He_n(z)| exp(-z² / 2), Cramér's inequality: derivatives of a unit Gaussian."""
    return 1.09 * math.sqrt(math.factorial(order))


def small_net(size=SIZE, seed=0):
    torch.manual_seed(seed)
    sigmas = (2, 2 * 2**0.5, 4)
    return GaussianDerivativeNet(sigmas, channels=1, classes=3, size=size, features=(4, 5))


def layer_jets(grids, layer):
    """The matrices (3 P, H) between two grids, which the network stores in float32."""
    before, after = grids[layer - 1 : layer + 1]
    edges, step = (before[1:] + before[:-1]) / 2, float(before[1] - before[0])
    return jet_matrices(after, edges, baseline.RATIO**layer, step).float().double()


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0, 40.0])
def test_constant_images_are_kept_and_have_no_derivatives(sigma):
    sums = kernels(sigma).sum(-1).view(3, -1)  # also where the kernel reaches far beyond the frame
    expected = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)[:, None].expand_as(sums)
    torch.testing.assert_close(sums, expected, atol=1e-14 * SIZE, rtol=0)


@pytest.mark.parametrize("sigma", [1.0, 2.0, 5.0])
def test_polynomials_have_their_exact_derivatives_and_the_smoothing_its_exact_variance(sigma):
    x = torch.arange(SIZE, dtype=torch.float64) + 0.5 - SIZE / 2
    at = sigma * GRID
    # Steps instead of a ramp are a sawtooth of period 1 more, which smoothing reduces by
    # exp(-2 pi² spread²); two derivatives and the slope 2 x multiply it by (2 pi sigma)² SIZE. The
    # kernel ends with the frame, at least 6.6 sigma from the positions.
    spread = sigma**2 - 1 / 12
    ripple = (2 * math.pi * sigma) ** 2 * SIZE * math.exp(-2 * math.pi**2 * spread)
    bound = ripple + 1e-9 * SIZE**2
    for values, expected in (
        (x, [at, sigma * torch.ones_like(at), 0 * at]),
        (x**2, [at**2 + sigma**2, 2 * sigma * at, 2 * sigma**2 * torch.ones_like(at)]),
    ):
        found = (kernels(sigma) @ values).view(3, -1)
        torch.testing.assert_close(found, torch.stack(expected), atol=bound, rtol=0)


def test_derivatives_are_in_their_order_and_along_their_axes():
    y = (torch.arange(SIZE, dtype=torch.float64) + 0.5 - SIZE / 2)[:, None]
    x = y.mT
    found = apply_jets((x + 3 * y + 0.5 * x**2 + x * y - 2 * y**2)[None], kernels(2.0))[0, :, 3, 3]
    # at the centre: L = 0.5 sigma² - 2 sigma², then sigma y, sigma² yy, sigma x, sigma² xy and xx
    expected = torch.tensor([-1.5 * 4, 3 * 2, -4 * 4, 2, 4, 4], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-9 * SIZE**2, rtol=0)


@pytest.mark.parametrize("sigma", [1.0, 2.0**0.5, 2.0, 4.0])
def test_a_gaussian_at_matched_scale_has_the_same_responses_at_every_scale(sigma):
    ratio = 1.5  # standard deviation of the blob in sigmas
    image = torch.exp(-((torch.arange(SIZE, dtype=torch.float64) + 0.5 - SIZE / 2) ** 2))
    image = image ** (1 / (2 * (ratio * sigma) ** 2))
    found = apply_jets((image[:, None] * image)[None], kernels(sigma))[0]
    width = math.sqrt(1 + ratio**2)  # of the smoothed blob in sigmas; no pixel, no sigma in it
    z = GRID / width
    factors = [torch.ones_like(z), -z / width, (z**2 - 1) / width**2]
    profile = ratio / width * torch.exp(-(z**2) / 2)
    expected = torch.stack(
        [torch.outer(factors[a] * profile, factors[b] * profile) for a, b in ORDERS]
    )
    # The fourth cumulant of a cell, -1/120 in pixels, is all in which its kernel differs from a
    # Gaussian: 1/2880 of the fourth derivative along each axis. Twice that, for higher terms.
    bound = 2 * 2 * largest(6) / 2880 / width**4 / sigma**4
    torch.testing.assert_close(found, expected, atol=bound, rtol=0)


def test_the_kernels_agree_with_central_differences_of_the_discrete_gaussian():
    sigma, width = 4.0, 8.0
    x = torch.arange(SIZE, dtype=torch.float64) + 0.5 - SIZE / 2
    signal = torch.exp(-(x**2) / (2 * width**2))
    smooth = F.conv1d(signal[None], discrete_gaussian(sigma**2, 40)[None, None], padding=40)[0]
    slope = (smooth[2:] - smooth[:-2]) / 2
    bend = smooth[2:] - 2 * smooth[1:-1] + smooth[:-2]
    discrete = torch.stack([smooth[1:-1], sigma * slope, sigma**2 * bend])[:, 20:-20]
    found = (kernels(sigma, grid=x[21:-21] / sigma) @ signal).view(3, -1)
    # Leading terms of the discrete scheme: sigma² / 24 of two more pairs of derivatives for the
    # kernel, 1/6 of one more pair for the differences; twice, for higher terms.
    wide = math.hypot(sigma, width)
    bounds = [
        2 * (largest(n + 4) * sigma**2 / 24 / wide**2 + largest(n + 2) / 6) / wide**2
        for n in range(3)
    ]
    for order, bound in enumerate(bounds):
        expected, scaled = discrete[order], bound * (sigma / wide) ** order
        torch.testing.assert_close(found[order], expected, atol=scaled, rtol=0)


def test_shifting_the_image_shifts_the_derivatives():
    image = blobs(3.0, 10.0, batch=2).image(SIZE, SIZE)
    grid = torch.arange(-8, 9, dtype=torch.float64)
    before = apply_jets(image, kernels(2.0, grid=grid))
    after = apply_jets(image.roll((2, -4), (-2, -1)), kernels(2.0, grid=grid))  # 1 and -2 steps
    centred = (slice(None),) * 3 + (slice(5, 12),) * 2  # 7 sigmas away from it
    moved = (slice(None),) * 3 + (slice(4, 11), slice(7, 14))
    torch.testing.assert_close(after[centred], before[moved], atol=1e-9, rtol=0)


def tail(net, derivatives):
    """The rest of the network: logits (N, S, K) from the image's derivatives (N, S, C, 6, P, P).

    This is the definition: all derivatives of a layer at each point, then their mixture.
    """
    grids = sampling_grids(len(net.layers) + 1)
    values = derivatives.flatten(0, 1)
    for number, layer in enumerate(net.layers, start=1):
        mixed = layer.mixing(values.flatten(1, 2).movedim(1, -1)).movedim(-1, 1)
        values = apply_jets(F.relu(layer.norm(mixed)), layer_jets(grids, number))
    return net.head(values.flatten(1)).unflatten(0, derivatives.shape[:2])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 33)])
def test_mixing_between_the_axes_is_mixing_all_derivatives(channels, size, training):
    torch.manual_seed(0)
    net = GaussianDerivativeNet((1, 1.5), channels=channels, classes=3, size=size, features=(4, 5))
    net, images = net.double().train(training), torch.rand(4, channels, size, size).double()
    results = []
    for compute in (
        net.scale_channels,
        lambda images: tail(net, apply_jets(images[:, None], net.first[:, None])),
    ):
        logits = compute(images)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), net.parameters())))
    for found, expected in zip(*results, strict=True):
        # Sums of a few thousand terms in each layer; batch norm divides by standard deviations
        # down to 1/100 of the values.
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_rescaling_the_image_by_sqrt_2_shifts_the_scale_channels():
    picture = blobs(4.0, 6.0)
    net = small_net().double().eval()
    images = [picture.image(SIZE, SIZE, scale) for scale in (1.0, 2**0.5)]
    first, second = (apply_jets(image[:, None], net.first[:, None]) for image in images)
    # As for the matched Gaussian: blobs of sigma_0 = 2 or more and standard deviation 2 sigma_0 or
    # more, at both scales. Heights sum to less than 4.
    bound = 4 * 2 * (2 * 2 * largest(6) / 2880 / 5**2 / 2**4) + ROUNDING * 4
    torch.testing.assert_close(second[:, 1:], first[:, :-1], atol=bound, rtol=0)
    for channel in (0, 1):
        pair = [part[:, at : at + 1] for part, at in ((first, channel), (second, channel + 1))]
        reach = sensitivity(lambda d: tail(net, d)[:, 0], *pair) * bound
        logits = [net.scale_channels(image) for image in images]
        difference = logits[1][:, channel + 1] - logits[0][:, channel]
        assert (difference.abs() <= reach).all()
        # unrelated channels are far apart, so that the statement says something
        others = logits[1][:, channel] - logits[0][:, channel]
        assert others.abs().mean() > 30 * difference.abs().mean()


def test_the_logits_are_the_maxima_of_the_channels():
    net, image = small_net().eval(), blobs(4.0, 6.0).image(SIZE, SIZE).float()
    channels = net.scale_channels(image)
    assert channels.shape == (3, 3, 3)
    torch.testing.assert_close(net(image), channels.amax(1), atol=0, rtol=0)


def test_grids_are_centred_grow_with_sigma_and_reach_far_enough():
    grids = sampling_grids(6)
    assert [len(grid) for grid in grids] == [41, 31, 25, 19, 11, 1]
    for layer, grid in enumerate(grids[:-1]):
        torch.testing.assert_close(grid, -grid.flip(0), atol=0, rtol=0)
        assert float(grid[1] - grid[0]) == pytest.approx(1.25**layer, rel=1e-12)
    # Linear responses at the centre: what lies beyond the grids has less than 4 e-4 of the mass.
    row = torch.ones(1, dtype=torch.float64)
    for layer in range(5, 0, -1):
        row = row @ layer_jets(grids, layer)[: len(grids[layer])]
        assert float(row[0] + row[-1]) < 4e-4
    variance = float((row * grids[0] ** 2).sum())
    expected = sum(1.25 ** (2 * layer) for layer in range(1, 6))
    assert variance == pytest.approx(expected, rel=5e-3)  # 4 e-4 of the mass at 4 sigma or beyond


def test_layers_that_only_smooth_add_their_variances():
    sigma, width = 1.5, 8.0
    net = GaussianDerivativeNet(
        (sigma,), channels=1, classes=1, size=SIZE, features=(1, 1, 1, 1, 1)
    )
    with torch.no_grad():
        for mix in (*(layer.mixing for layer in net.layers), net.head):
            mix.weight.zero_().view(-1)[0] = 1  # of L alone; ReLU keeps positive images
        net.head.bias.zero_()
        x = torch.arange(SIZE) + 0.5 - SIZE / 2
        image = torch.exp(-(x**2 + x[:, None] ** 2) / (2 * width**2))
        found = float(net.eval()(image[None, None]))
    total = width**2 + sigma**2 * sum(baseline.RATIO ** (2 * layer) for layer in range(6))
    # 4 e-4 of the mass beyond the grid of each of five layers and two axes, as tested above. The
    # sigmas of the previous layers would change the result by 0.1.
    assert found == pytest.approx(width**2 / total, abs=5 * 2 * 4e-4)


@pytest.mark.parametrize(("name", "channels"), [("network", 8), ("wide", 11)])
def test_factories(name, channels):
    net = getattr(baseline, name)(channels=3, classes=7, size=64).eval()
    weights = sum(weight.numel() for weight in net.parameters())
    widths = (3, *baseline.FEATURES, 7)
    mixing = sum(DERIVATIVES * a * b for a, b in pairwise(widths))
    assert weights == mixing + 2 * sum(baseline.FEATURES) + 7  # batch norm, and the last bias
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert net.scale_channels(images).shape == (2, channels, 7)
        wrapped = ScaleChannels(net, (1.0,), size=64)
        torch.testing.assert_close(wrapped(images), net(images), atol=1e-5, rtol=1e-5)


def test_weights_do_not_depend_on_the_frame():
    small, large = small_net(size=48, seed=1), small_net(size=SIZE)
    small.load_state_dict(large.state_dict())
    image = blobs(1.0, 2.0).image(SIZE, SIZE).float()
    cropped = image[..., 24:-24, 24:-24]  # the background is 0 in both
    with torch.no_grad():
        difference = (small.eval()(cropped) - large.eval()(image)).abs().max()
    assert difference < 1e-4


def test_it_learns():
    torch.manual_seed(0)
    net = GaussianDerivativeNet((1, 2**0.5), channels=1, classes=10, size=32, features=(8, 12))
    assert_trains(net, 32, steps=40, least=0.04)


def test_one_graph_and_autocast():
    # Three layers of mixing and two of derivatives, two products each.
    assert_one_graph(small_net(size=32), 32, roundings=8)


def test_errors_name_the_value_and_the_remedy():
    with pytest.raises(ConfigError, match=r"at least 0\.3 pixels, got 0\.2"):
        pixel_jets((0.2,), GRID, 32)
    with pytest.raises(ConfigError, match=r"must be 96 × 96 pixels, got \(96, 80\)"):
        small_net()(torch.zeros(1, 1, 96, 80))
