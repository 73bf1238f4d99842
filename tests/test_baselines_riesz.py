"""Riesz networks: the transforms, their symmetries, and training."""
# Shape letters: N images, C features, H W pixels, M frequencies along y.

import math

import pytest
import torch
import torch.nn.functional as F
from baseline_checks import assert_one_graph, assert_trains

from foveate.baselines.convolutions import FourierTransforms
from foveate.baselines.riesz import (
    FEATURES,
    TRANSFORMS,
    RieszLayer,
    RieszNet,
    centre_kernels,
    centre_transforms,
    mix_transforms,
    network,
    riesz_multipliers,
)
from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels

# Rounding in float64, relative errors of 2^-53. Transforms are sums of up to 48² pixels with values
# of up to 1, along one axis after the other: 2 * 48 roundings of sums of up to 48².
EXACT = 2 * 48 * 48**2 * 2**-53  # 2.5e-11


def noise(size, batch=2):
    """Images with a mean, in float64, of values from 0 to 1."""
    generator = torch.Generator().manual_seed(size)
    return torch.rand(batch, 3, size, size, generator=generator, dtype=torch.float64)


def tables(size):
    """The multipliers and the Fourier transforms of a size, in float64."""
    return riesz_multipliers(size), FourierTransforms(size, periodic=True)


def transforms(images):
    """The transforms (N, C, 5, H, W) of images."""
    each = torch.eye(TRANSFORMS, dtype=images.dtype)  # one transform per feature
    found = mix_transforms(images.flatten(0, 1)[:, None], each, *tables(images.shape[-1]))
    return found.permute(2, 3, 0, 1).unflatten(0, images.shape[:2])


def reference_transforms(images):
    """The transforms (N, C, 5, H, W) of images, by complex fast Fourier transforms."""
    frequency = torch.fft.fftfreq(images.shape[-1], dtype=images.dtype)
    length = torch.hypot(frequency, frequency[:, None])
    length[0, 0] = math.inf  # the mean has no direction
    xx, yy = (part**2 / length**2 for part in (frequency, frequency[:, None]))
    signed = frequency.masked_fill(frequency.abs() == 0.5, 0)  # 0.5 is also -0.5
    x, y = signed / length, signed[:, None] / length
    factors = torch.stack([-1j * x, -1j * y, xx, x * y, yy])
    return torch.fft.ifft2(torch.fft.fft2(images)[:, :, None] * factors).real


def reference_layer(layer, features):
    """A layer of `RieszNet`: transforms, mixing pixel by pixel, batch norm and ReLU."""
    found = reference_transforms(features).flatten(1, 2)
    mixed = torch.einsum("fc,nchw->nfhw", layer.mixing.weight, found)
    norm = layer.norm
    mean, variance = norm.running_mean, norm.running_var
    if norm.training:
        mean, variance = mixed.mean((0, 2, 3)), mixed.var((0, 2, 3), correction=0)
    scale = norm.weight / (variance + norm.eps).sqrt()
    mixed = (mixed - mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]
    return mixed.relu()


def reference_net(net, images):
    """The logits of `RieszNet`, from whole frames in all layers."""
    for layer in net.layers:
        images = reference_layer(layer, images)
    size = images.shape[-1]
    centre = images[..., (size - 1) // 2 : size // 2 + 1, :][..., (size - 1) // 2 : size // 2 + 1]
    return net.head(centre.mean((-2, -1)))


def in_float64(net):
    """The network in float64, with buffers that were not rounded to float32 before."""
    size = net.size
    multipliers, fourier = tables(size)
    for name, values in (("multipliers", multipliers), ("centre", centre_kernels(size))):
        torch.testing.assert_close(getattr(net, name), values.float(), atol=0, rtol=0)
        setattr(net, name, values)
    stored = dict(net.fourier.named_buffers())
    for name, values in fourier.named_buffers():
        torch.testing.assert_close(stored[name], values.float(), atol=0, rtol=0)
    net.fourier = fourier
    return net.double()


def randomize(module):
    """Give batch norm weights and statistics other than 0 and 1."""
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            for values in (norm.weight, norm.running_var):
                torch.nn.init.uniform_(values, 0.5, 1.5)
            for values in (norm.bias, norm.running_mean):
                torch.nn.init.normal_(values)


def assert_same(found, expected, inputs):
    """Equal values, and equal gradients with respect to all inputs."""
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=EXACT)
    slopes = torch.randn_like(found)
    gradients = [torch.autograd.grad(value, inputs, slopes) for value in (found, expected)]
    for one, two in zip(*gradients, strict=True):
        bound = 100 * EXACT * float(two.abs().max())  # batch norm divides by deviations below 1
        torch.testing.assert_close(one, two, atol=bound, rtol=0)


def assert_near(found, expected):
    """Equal up to rounding in float64."""
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("size", [2, 3, 15, 16, 18])
def test_mixed_transforms_equal_those_of_fast_fourier_transforms(size):
    torch.manual_seed(0)
    images = noise(size).requires_grad_()
    weights = torch.randn(4, 3 * TRANSFORMS, dtype=torch.float64, requires_grad=True)
    found = mix_transforms(images, weights, *tables(size))
    expected = reference_transforms(images).flatten(1, 2)
    expected = torch.einsum("fc,nchw->hwnf", weights, expected)
    assert_same(found, expected, (images, weights))


@pytest.mark.parametrize("size", [15, 16, 18])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_layer_equals_its_reference(size, training, channels_last):
    torch.manual_seed(0)
    layer = RieszLayer(3, 9).double().train(training)
    randomize(layer)
    images = noise(size)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    images.requires_grad_()
    expected = reference_layer(layer, images)
    found = layer(images, *tables(size))
    assert_same(found, expected, (images, *layer.parameters()))


@pytest.mark.parametrize("size", [15, 16, 18])
@pytest.mark.parametrize("training", [True, False])
def test_a_network_equals_its_reference(size, training):
    torch.manual_seed(0)
    net = in_float64(RieszNet(channels=3, classes=4, size=size, features=(4, 8, 10)))
    randomize(net.train(training))
    images = noise(size).requires_grad_()
    assert_same(net(images), reference_net(net, images), (images, *net.parameters()))


def test_running_statistics_are_those_of_all_pixels_of_all_images():
    torch.manual_seed(0)
    layer, images = RieszLayer(3, 9).double(), noise(16, batch=5)
    layer.norm.momentum = 1.0
    layer(images, *tables(16))
    mixed = mix_transforms(images, layer.mixing.weight, *tables(16)).flatten(0, 2)
    torch.testing.assert_close(layer.norm.running_mean, mixed.mean(0))
    torch.testing.assert_close(layer.norm.running_var, mixed.var(0))


@pytest.mark.parametrize("size", [2, 15, 16, 31])
def test_second_order_transforms_sum_to_the_image_without_its_mean(size):
    images = noise(size)
    _, _, xx, _, yy = transforms(images).unbind(2)
    assert_near(xx + yy, images - images.mean((-2, -1), keepdim=True))


@pytest.mark.parametrize("size", [15, 31])
def test_first_order_transforms_applied_twice(size):
    images = noise(size)
    x, y, xx, xy, yy = transforms(images).unbind(2)
    twice = [transforms(part) for part in (x, y)]
    # the squares sum to minus the identity, and each product is minus one of second order
    zero_mean = images - images.mean((-2, -1), keepdim=True)
    assert_near(twice[0][:, :, 0] + twice[1][:, :, 1], -zero_mean)
    for found, expected in ((twice[0][:, :, 0], xx), (twice[1][:, :, 1], yy)):
        assert_near(found, -expected)
    for found in (twice[0][:, :, 1], twice[1][:, :, 0]):
        assert_near(found, -xy)
    energy = (x**2 + y**2).sum((-2, -1))
    torch.testing.assert_close(energy, (zero_mean**2).sum((-2, -1)), rtol=EXACT, atol=0)


@pytest.mark.parametrize("size", [15, 16])
def test_spectra_stay_those_of_real_images(size):
    """Factors of frequencies and their negatives are conjugate, so that nothing is left out."""
    factors = riesz_multipliers(size)
    assert not factors[:, TRANSFORMS:].any()
    factors = factors.view(-1, size, factors.shape[1])
    assert not factors[size // 2 + 1 :].any()
    factors = factors[: size // 2 + 1, :, :TRANSFORMS]
    for row in (0, -1) if size % 2 == 0 else (0,):  # negatives of the others are not stored
        values = factors[row]
        negatives = values.flip(0).roll(1, 0)
        assert_near(values[:, :2], -negatives[:, :2])  # these are imaginary
        assert_near(values[:, 2:], negatives[:, 2:])


@pytest.mark.parametrize("size", [24, 25])
@pytest.mark.parametrize("wave", [(3, 4), (5, 0), (-2, 7), (0, 1)])
def test_a_wave_is_weighted_by_its_direction(size, wave):
    """Pins the axes, the signs and the phase: the cosine becomes a sine in the first order."""
    x, y = wave
    at = torch.arange(size, dtype=torch.float64) * 2 * math.pi / size
    phase = x * at + y * at[:, None]
    found = transforms(phase.cos()[None, None])[0, 0]
    x, y = x / math.hypot(*wave), y / math.hypot(*wave)
    odd, even = phase.sin(), phase.cos()
    assert_near(found, torch.stack([x * odd, y * odd, x * x * even, x * y * even, y * y * even]))


@pytest.mark.parametrize("size", [16, 17])
def test_they_turn_and_shift_with_the_image(size):
    images = noise(size)
    x, y, xx, xy, yy = transforms(images).unbind(2)
    turned = transforms(images.rot90(1, (-2, -1)))  # x becomes -y, y becomes x
    expected = [part.rot90(1, (-2, -1)) for part in (y, -x, yy, -xy, xx)]
    if size % 2 == 0:  # turning swaps the pixels about the centre; the spectrum has its origin at 0
        expected = [part.roll(0, -1) for part in expected]
    assert_near(turned, torch.stack(expected, 2))
    shifted = transforms(images.roll((3, -5), (-2, -1)))
    assert_near(shifted, transforms(images).roll((3, -5), (-2, -1)))


@pytest.mark.parametrize(("size", "factor"), [(15, 3), (16, 2), (16, 3)])
def test_they_commute_with_exact_rescaling(size, factor):
    """Trigonometric interpolation is the exact rescaling of a band-limited periodic image."""
    images = noise(size)
    spectrum = torch.fft.fftshift(torch.fft.fft2(images), (-2, -1))
    if size % 2 == 0:  # leave out the highest frequency, which has no direction
        spectrum[..., 0, :], spectrum[..., 0] = 0, 0
    small = torch.fft.ifft2(torch.fft.ifftshift(spectrum, (-2, -1))).real
    large = size * factor
    before = large // 2 - size // 2
    after = large - size - before
    padded = F.pad(spectrum, (before, after, before, after)) * factor**2
    enlarged = torch.fft.ifft2(torch.fft.ifftshift(padded, (-2, -1))).real
    torch.testing.assert_close(enlarged[..., ::factor, ::factor], small, atol=1e-12, rtol=0)
    assert_near(transforms(enlarged)[..., ::factor, ::factor], transforms(small))


@pytest.mark.parametrize(("size", "pixels"), [(15, [7]), (16, [7, 8]), (2, [0, 1])])
def test_inner_products_with_the_kernels_are_the_transforms_at_the_centre(size, pixels):
    images = noise(size)
    found = centre_transforms(images, centre_kernels(size))
    expected = transforms(images)[..., pixels, :][..., pixels].flatten(1, 2)
    assert_near(found, expected.flatten(2).mT)


@pytest.mark.parametrize(("size", "pixels"), [(15, [7]), (16, [7, 8])])
def test_the_logits_come_from_the_centre(size, pixels):
    torch.manual_seed(0)
    net = in_float64(RieszNet(channels=3, classes=4, size=size, features=(4,))).eval()
    with torch.no_grad():
        features = net.layers[0](noise(size), *tables(size))
        centre = features[:, :, pixels][..., pixels].mean((-2, -1))
        assert_near(net(noise(size)), net.head(centre))


def test_weights_are_those_of_the_authors():
    net = network(channels=1, classes=10)
    weights = sum(weight.numel() for weight in net.parameters())
    widths = (1, *FEATURES)
    layers = zip(widths, FEATURES, strict=False)
    mixing = sum(TRANSFORMS * before * after + 2 * after for before, after in layers)
    assert weights == mixing + 80 * 10 + 10 == 20_718
    assert weights + sum(FEATURES) == 20_882  # the authors' count: a bias before each batch norm
    parts = {name.split(".")[0] for name in net.state_dict()}
    assert parts == {"layers", "head"}  # no buffers of the transforms
    assert {buffer.dtype for buffer in net.buffers()} == {torch.float32, torch.int64}


def test_inside_a_single_window_of_scale_1():
    torch.manual_seed(0)
    net = RieszNet(channels=3, classes=4, size=32, features=(4, 6)).eval()
    images = noise(32).float()
    with torch.no_grad():
        wrapped = ScaleChannels(net, (1.0,), size=32)(images)
        torch.testing.assert_close(wrapped, net(images), atol=1e-5, rtol=1e-5)


def test_it_learns():
    torch.manual_seed(0)
    net = RieszNet(channels=1, classes=10, size=32, features=(8, 12, 16))
    assert_trains(net, 32, steps=40, least=0.04)


def test_one_graph_and_autocast():
    torch.manual_seed(0)
    net = RieszNet(channels=3, classes=4, size=32, features=(4, 6))
    # Ten roundings of terms that sum to a logit with different signs: the mixed features and batch
    # norm in the first layer; transforms, weights, mixed features and batch norm in the last; the
    # mean over the centre, weights, bias and logits in the head.
    assert_one_graph(net, 32, roundings=20, channels=3)


def test_mixed_transforms_have_half_precision_under_autocast():
    """There are 5 roundings of results and 6 of factors, by 2^-9 / sqrt(3) on average."""
    torch.manual_seed(0)
    weights, images = torch.randn(9, 3 * TRANSFORMS, dtype=torch.float64), noise(16)
    exact = mix_transforms(images, weights, *tables(16))
    multipliers, fourier = tables(16)
    with torch.autocast("cpu", torch.bfloat16):
        found = mix_transforms(
            images.float(), weights.float(), multipliers.float(), fourier.float()
        )
    assert found.dtype == torch.bfloat16
    # The images have a mean, which the transforms remove; its rounding errors remain.
    assert (found - exact).norm() < 11**0.5 * 2**-9 * (exact.norm() + images.mean() * 16)


def test_errors_name_the_value_and_the_remedy():
    with pytest.raises(ConfigError, match="size must be at least 2 pixels, got 1"):
        RieszNet(channels=1, classes=2, size=1)
    with pytest.raises(ConfigError, match=r"must be 32 × 32 pixels, got \(28, 32\)"):
        RieszNet(channels=1, classes=2, size=32)(torch.zeros(1, 1, 28, 32))
