"""Riesz networks: the transforms, their symmetries, and training."""
# Shape letters: N images, C features, H W pixels.

import math

import pytest
import torch
import torch.nn.functional as F

from foveate.baselines.riesz import (
    FEATURES,
    TRANSFORMS,
    RieszLayer,
    RieszNet,
    centre_kernels,
    centre_transforms,
    from_spectra,
    network,
    riesz_multipliers,
    riesz_spectra,
)
from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels

# Multipliers are rounded to float32, a relative error of 2^-24 in every frequency; products of two
# have twice that. Images here have values of up to 1, and energies of up to 1 per pixel.
ROUNDED = 4 * 2**-24


def noise(size, batch=2):
    """Images with a mean, in float64, of values from 0 to 1."""
    generator = torch.Generator().manual_seed(size)
    return torch.rand(batch, 3, size, size, generator=generator, dtype=torch.float64)


def transforms(images):
    """The transforms (N, C, 5, H, W) of images."""
    size = images.shape[-1]
    return from_spectra(riesz_spectra(images, riesz_multipliers(size).double()), size)


def assert_near(found, expected):
    """Equal up to the rounding of the multipliers, in the norm that the transforms preserve."""
    size = math.prod(found.shape[-2:])
    error = (found - expected).pow(2).sum((-2, -1)).div(size).sqrt()
    assert float(error.max()) <= ROUNDED


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
    torch.testing.assert_close(energy, (zero_mean**2).sum((-2, -1)), rtol=ROUNDED, atol=0)


@pytest.mark.parametrize("size", [15, 16])
def test_spectra_are_those_of_real_images(size):
    """Frequencies and their negatives are conjugate; inverse transforms on GPUs rely on it."""
    spectra = torch.view_as_complex(riesz_spectra(noise(size), riesz_multipliers(size).double()))
    for column in (0, -1) if size % 2 == 0 else (0,):  # the others have no negatives in `rfft2`
        values = spectra[..., column]
        negatives = values.flip(-1).roll(1, -1)
        torch.testing.assert_close(values, negatives.conj(), atol=ROUNDED, rtol=0)


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


@pytest.mark.parametrize("size", [15, 16])
def test_a_layer_mixes_the_transforms_pixel_by_pixel(size):
    torch.manual_seed(0)
    layer, images = RieszLayer(3, 4).double(), noise(size)
    found = layer(images, riesz_multipliers(size).double())
    mixed = layer.mixing(transforms(images).flatten(1, 2).movedim(1, -1)).movedim(-1, 1)
    mean, variance = (
        mixed.mean((0, 2, 3), keepdim=True),
        mixed.var((0, 2, 3), keepdim=True, correction=0),
    )
    expected = ((mixed - mean) / (variance + layer.norm.eps).sqrt()).relu()
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("size", "pixels"), [(15, [7]), (16, [7, 8]), (2, [0, 1])])
def test_inner_products_with_the_kernels_are_the_transforms_at_the_centre(size, pixels):
    images = noise(size)
    found = centre_transforms(images, centre_kernels(riesz_multipliers(size)).double())
    expected = transforms(images)[..., pixels, :][..., pixels].flatten(1, 2)
    # The kernels are rounded too, and have energies of up to 1.
    bound = ROUNDED * float(images.square().sum((-2, -1)).max().sqrt())
    torch.testing.assert_close(found, expected.flatten(2)[..., None], atol=bound, rtol=0)


@pytest.mark.parametrize(("size", "pixels"), [(15, [7]), (16, [7, 8])])
def test_the_logits_come_from_the_centre(size, pixels):
    torch.manual_seed(0)
    net = RieszNet(channels=3, classes=4, size=size, features=(4,)).eval()
    with torch.no_grad():
        features = net.layers[0](noise(size).float(), net.multipliers)
        centre = features[:, :, pixels][..., pixels].mean((-2, -1))
        torch.testing.assert_close(net(noise(size).float()), net.head(centre))


def test_weights_are_those_of_the_authors(capsys):
    net = network(channels=1, classes=10)
    weights = sum(weight.numel() for weight in net.parameters())
    widths = (1, *FEATURES)
    layers = zip(widths, FEATURES, strict=False)
    mixing = sum(TRANSFORMS * before * after + 2 * after for before, after in layers)
    assert weights == mixing + 80 * 10 + 10 == 20_718
    assert weights + sum(FEATURES) == 20_882  # the authors' count: a bias before each batch norm
    with capsys.disabled():
        print(f"\nriesz: {weights:,} weights")
    assert not [name for name in net.state_dict() if "multipliers" in name]


def test_inside_a_single_window_of_scale_1():
    torch.manual_seed(0)
    net = RieszNet(channels=3, classes=4, size=32, features=(4, 6)).eval()
    images = noise(32).float()
    with torch.no_grad():
        wrapped = ScaleChannels(net, (1.0,), size=32)(images)
        torch.testing.assert_close(wrapped, net(images), atol=1e-5, rtol=1e-5)


def test_it_learns_a_few_digits_and_every_weight_takes_part():
    pixels, labels = load_source("mnist-5k").read_batch("train", torch.arange(10))
    images = rescale(pixels, 1.0, size=32)
    torch.manual_seed(0)
    net = RieszNet(channels=1, classes=10, size=32, features=(8, 12, 16))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(40):
        loss = F.cross_entropy(net(images), labels)
        optimiser.zero_grad()
        loss.backward()
        assert all(bool(p.grad.any()) for p in net.parameters())
        optimiser.step()
    assert float(loss.detach()) < 0.1  # guessing: 2.3


def test_compiled_in_channels_last_and_under_autocast():
    torch.manual_seed(0)
    net = RieszNet(channels=3, classes=4, size=32, features=(4, 6)).eval()
    images = noise(32).float()
    torch.compiler.reset()
    with torch.no_grad():
        plain = net(images)
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(images), plain, atol=0, rtol=0)
        net.to(memory_format=torch.channels_last)
        torch.testing.assert_close(net(images.to(memory_format=torch.channels_last)), plain)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = net(images)
            assert riesz_spectra(images.bfloat16(), net.multipliers).dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    # Three mixings, each of rounded inputs with rounded weights: six roundings of 2^-9, of terms
    # that sum to a logit with different signs.
    assert (rounded - plain).abs().max() < 6 * 2**-9 * 2 * plain.abs().max()


def test_errors_name_the_value_and_the_remedy():
    with pytest.raises(ConfigError, match="size must be at least 2 pixels, got 1"):
        RieszNet(channels=1, classes=2, size=1)
    with pytest.raises(ConfigError, match=r"must be 32 × 32 pixels, got \(28, 32\)"):
        RieszNet(channels=1, classes=2, size=32)(torch.zeros(1, 1, 28, 32))
