"""Image pyramids: levels shift with the scale of the image, and their logits are averaged."""
# Shape letters: N images, L level, K classes.

import pytest
import torch
import torch.nn.functional as F
from baseline_checks import assert_one_graph, assert_runs_as_command, assert_trains, images

from foveate.baselines.pyramid import Pyramid, network, wide
from foveate.errors import ConfigError

EPS = torch.finfo(torch.float64).eps
EXACT = 7**2 * (16 + 1) * EPS  # two convolutions sum this many terms of the order of 1


def double(**changes):
    torch.manual_seed(0)
    return Pyramid(**{"channels": 1, "classes": 10, "size": 64} | changes).double().eval()


def weights(net):
    return sum(weight.numel() for weight in net.parameters())


def test_it_has_the_weights_of_the_authors():
    k, first, second = 7, 16, 32
    count = (k * k + 1) * first + (k * k * first + 1) * second + (second + 1) * 10
    assert count == 26_250
    assert weights(network(channels=1, classes=10)) == count
    assert weights(wide(channels=1, classes=10)) == count
    more = 2 * k * k * first + 5 * (second + 1)  # colours, and five more classes
    assert weights(network(channels=3, classes=15)) == count + more


@pytest.mark.parametrize("size", [(12, 12), (8, 14), (4, 4), (12, 11), (9, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_level_is_two_convolutions_and_a_maximum(channels, size):
    """Also its gradients; even sizes are computed in blocks."""
    net, generator = double(channels=channels), torch.Generator().manual_seed(1)
    pixels = torch.randn(2, channels, *size, dtype=torch.float64, generator=generator)
    features = net.second(net.first(pixels).relu()).relu().amax((2, 3))
    found, expected = net.classify(pixels), net.head(features)
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=EXACT)
    weights = list(net.parameters())
    gradients = [torch.autograd.grad(y.square().sum(), weights) for y in (found, expected)]
    for one, two in zip(*gradients, strict=True):
        assert (one - two).norm() < 1e3 * EPS * two.norm()


def test_halving_the_image_shifts_the_levels():
    net, pixels = double(), images(1, 1, 64).double()
    outputs, shifted = net.channels(pixels), net.channels(net.halve(pixels))
    torch.testing.assert_close(shifted[:, :-1], outputs[:, 1:], atol=EXACT, rtol=EXACT)
    assert (shifted[:, -1] - outputs[:, -1]).abs().max() > 1000 * EXACT  # a level that is new


def test_logits_are_the_mean_over_levels_with_shared_weights():
    net, pixels = double(), images(1, 1, 64).double()
    alone = [net.classify(level) for level in net.levels(pixels)]
    assert [level.shape[-1] for level in net.levels(pixels)] == [64, 32, 16, 8]
    torch.testing.assert_close(net(pixels), sum(alone) / 4, atol=EXACT, rtol=EXACT)


def test_halving_is_binomial_smoothing_and_the_mean_of_blocks():
    net, pixels = double(channels=3), images(2, 3, 20).double()
    taps = torch.tensor([1.0, 4, 6, 4, 1], dtype=torch.float64) / 16
    kernel = torch.outer(taps, taps).expand(3, 1, 5, 5)
    smooth = F.conv2d(F.pad(pixels, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)
    expected = F.interpolate(smooth, (10, 10), mode="bilinear", align_corners=False)
    torch.testing.assert_close(net.halve(pixels), expected, atol=36 * EPS, rtol=0)


def test_an_image_of_twice_the_scale_looks_the_same_one_level_later():
    """A Gaussian of 2 sigma, halved, is one of sigma, but for what the filter adds to its variance.

    The filter is binomial, of order 5: it has the variance 5/4 in pixels of the finer level, which
    is 5/16 in those of the coarser one.
    """
    sigma, added = 10.0, 5 / 16
    x = torch.arange(112, dtype=torch.float64) - 55.5
    line = torch.exp(-(x**2) / (2 * (2 * sigma) ** 2))
    halved = double().halve(torch.outer(line, line)[None, None])[0, 0]
    y = torch.arange(56, dtype=torch.float64) - 27.5
    wider = torch.exp(-(y**2) / (2 * (sigma**2 + added))) / (1 + added / sigma**2) ** 0.5
    # The next term is the fourth cumulant, -5/8, times the fourth derivative / 4!, which is at most
    # He_4(0) = 3 over std^4, along both axes. The terms after it are 1/400 of that.
    bound = 2 * 5 / 8 / 24 * 3 / (2 * sigma) ** 4 * 1.01
    inside = slice(3, -3)  # the border is mirrored
    expected = torch.outer(wider, wider)[inside, inside]
    torch.testing.assert_close(halved[inside, inside], expected, atol=bound, rtol=0)


def test_wide_starts_at_twice_the_resolution():
    net = wide(channels=1, classes=10, size=32)
    pixels = images(1, 1, 32)
    levels = net.levels(pixels)
    assert [level.shape[-1] for level in levels] == [64, 32, 16, 8, 4]
    torch.testing.assert_close(levels[0].mean(), pixels.mean(), atol=2**-20, rtol=0)


@pytest.mark.parametrize("factory", [network, wide])
def test_small_images_are_refused(factory):
    factory(channels=1, classes=2, size=32)
    with pytest.raises(ConfigError, match="size must be at least 32 pixels for a pyramid, got 31"):
        factory(channels=1, classes=2, size=31)


def test_it_learns():
    torch.manual_seed(0)
    assert_trains(network(channels=1, classes=10, size=32), 32)


@pytest.mark.parametrize("factory", [network, wide])
def test_one_graph_and_autocast(factory):
    assert_one_graph(factory(channels=1, classes=10, size=32), 32)


def test_foveate_train_runs_it(tmp_path):
    assert_runs_as_command("foveate.baselines.pyramid:network", 32, tmp_path / "run")
