"""The recipe `mirrored`: its geometry, its values, and its random flips and shifts."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foveate.data.large_scale import keys_kernel
from foveate.data.mirrored import crop_and_flip, draw_augmentation, rescale_mirrored
from foveate.data.recipes import Recipe, find_recipe
from foveate.errors import ConfigError, DataError

FACTORS = [2 ** (k / 4) for k in range(-4, 5)]
# A pixel is a sum of at most 64 x 64 products in float32, and the weights of a cubic sum to 1.25 in
# absolute value on each axis.
ROUNDING = 128 * torch.finfo(torch.float32).eps * 255 * 1.25**2


def noise(count=2, height=32, width=32):
    generator = torch.Generator().manual_seed(height + width)
    shape = (count, 3, height, width)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def extended(images, width):
    """The images with `width` pixels of their mirror images on each side, by NumPy."""
    sides = [(0, 0), (0, 0), (width, width), (width, width)]
    return torch.from_numpy(np.pad(images.numpy(), sides, mode="symmetric"))


# Geometry


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 64), (31, 17, 63), (20, 32, 64)])
def test_factor_1_keeps_the_image_in_the_middle_and_extends_it(height, width, size):
    images = noise(height=height, width=width)
    frames = rescale_mirrored(images, 1.0, size=size)
    top, left = (size - height) // 2, (size - width) // 2
    assert torch.equal(frames[:, :, top : top + height, left : left + width], images.float())
    cut = 64 - top, 64 - left
    expected = extended(images, 64)[:, :, cut[0] : cut[0] + size, cut[1] : cut[1] + size]
    assert torch.equal(frames, expected.float())


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.0, 1.5])
def test_seams_are_mirrors(factor):
    """At these factors, the edges of the image are edges of frame pixels."""
    frames = rescale_mirrored(noise(), factor, size=64)
    edge = 32 - round(16 * factor)
    for lines in (frames, frames.mT):
        for side in (lines, lines.flip(-1)):  # both edges
            outside, inside = side[..., :edge].flip(-1), side[..., edge : 2 * edge]
            torch.testing.assert_close(outside, inside, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("factor", [0.5, 0.625, 0.75, 1.25, 1.5, 2.0])
def test_frames_are_those_of_torch_where_its_grid_is_the_same(factor):
    """`F.interpolate` keeps the centre only if the result has a whole, even number of pixels."""
    images = extended(noise(), 80).float()  # 192 pixels: reaches beyond any frame of 64
    resized = F.interpolate(images, scale_factor=factor, mode="bicubic", antialias=True)
    cut = (round(192 * factor) - 64) // 2
    assert resized.shape[-1] == round(192 * factor) == 64 + 2 * cut
    expected = resized[:, :, cut : cut + 64, cut : cut + 64].clamp(0, 255)
    found = rescale_mirrored(noise(), factor, size=64)
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("factor", [2**0.5, 2.0, 3.0])
def test_enlarged_wave_is_the_enlarged_function(factor):
    """A cosine about the edge is its own mirror image, so its value is known in all the frame."""
    rate, height = math.pi * 2 / 32, 100.0

    def wave(y, x):
        return 128 + height * (rate * y).cos()[:, None] * (rate * 2 * x).cos()

    pixels, frame = torch.arange(32.0) + 0.5, torch.arange(64.0) + 0.5
    place = (frame - 32) / factor + 16
    found = rescale_mirrored(wave(pixels, pixels).expand(1, 3, -1, -1), factor, size=64)
    # The kernel reproduces quadratic functions, so Taylor's third-order term bounds the error of
    # an axis: max|f'''| / 6 * sum |K(t - n)| |t - n|^3. Errors of the first axis pass the second.
    t, n = torch.linspace(0, 1, 101)[:, None], torch.arange(-1, 3)
    weights = keys_kernel(t - n).abs()
    axis = height / 6 * float((weights * (t - n).abs() ** 3).sum(1).max())
    bound = axis * ((2 * rate) ** 3 + rate**3 * float(weights.sum(1).max())) + ROUNDING
    assert bound < 1  # of 200: a shift by half a pixel would cost ten times as much
    torch.testing.assert_close(found[0, 0], wave(place, place), atol=bound, rtol=0)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("side", "size"), [(32, 64), (31, 64), (32, 63)])
def test_image_and_frame_have_one_centre(factor, side, size):
    images = noise(height=side, width=side)
    frames = rescale_mirrored(images, factor, size=size)
    for axis in (-1, -2):
        turned = rescale_mirrored(images.flip(axis), factor, size=size)
        torch.testing.assert_close(turned, frames.flip(axis), atol=ROUNDING, rtol=0)
    turned = rescale_mirrored(images.mT.contiguous(), factor, size=size)
    torch.testing.assert_close(turned, frames.mT, atol=ROUNDING, rtol=0)


def test_one_scale_per_image_is_the_same_as_one_by_one():
    images, scales = noise(9), torch.tensor(FACTORS, dtype=torch.float64)
    found = rescale_mirrored(images, scales, size=64)
    for image, factor, frame in zip(images, FACTORS, found, strict=True):
        expected = rescale_mirrored(image[None], factor, size=64)[0]
        torch.testing.assert_close(frame, expected, atol=ROUNDING, rtol=0)


# Values


@pytest.mark.parametrize("factor", FACTORS)
def test_values_stay_in_their_range_and_a_colour_stays_itself(factor):
    checks = (torch.arange(32)[:, None] + torch.arange(32)) % 8 < 4
    frames = rescale_mirrored((255 * checks).expand(1, 3, -1, -1), factor, size=64)
    assert frames.min() >= 0 and frames.max() <= 255
    flat = rescale_mirrored(torch.full((1, 3, 32, 32), 200), factor, size=64)
    torch.testing.assert_close(flat, torch.full_like(flat, 200), atol=ROUNDING, rtol=0)


def test_recipe_normalises_by_channel():
    recipe = Recipe(name="mirrored", mean=(0.1, 0.5, 0.9), std=(1.0, 2.0, 0.5), shift=0.0)
    images = noise()
    found = recipe.rescale(images, 1.0, size=64)[:, :, 16:48, 16:48]
    mean, std = (torch.tensor(v)[:, None, None] for v in (recipe.mean, recipe.std))
    torch.testing.assert_close(found, (images / 255 - mean) / std)


def test_recipe_by_name_is_that_of_cifar10():
    recipe = find_recipe("mirrored")
    assert (recipe.shift, recipe.flip) == (4, True)
    assert recipe.mean == pytest.approx((0.4914, 0.4822, 0.4465))
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_what_the_recipe_cannot_use():
    with pytest.raises(DataError, match="needs colour images, got 1 channels"):
        find_recipe("mirrored").rescale(torch.zeros(1, 1, 8, 8), 1.0, size=8)
    with pytest.raises(DataError, match=r"\(N, C, h, w\)"):
        find_recipe("mirrored").rescale(torch.zeros(3, 8, 8), 1.0, size=8)
    with pytest.raises(ConfigError, match="photo does not rescale"):
        find_recipe("photo").rescale(torch.zeros(1, 3, 8, 8), 1.0, size=8)
    with pytest.raises(ConfigError, match=r"whole number .* got 1\.5"):
        Recipe(name="mirrored", shift=1.5)
    with pytest.raises(ConfigError, match="scale"):
        rescale_mirrored(torch.zeros(1, 3, 8, 8), 0.0, size=8)


# Augmentation


def test_crops_and_flips_are_those_of_slices():
    frames = noise(4, 12, 12)
    flips, offsets = (
        torch.tensor([0, 1, 0, 1]).bool(),
        torch.tensor([[0, 4], [4, 0], [1, 2], [2, 3]]),
    )
    found = crop_and_flip(frames, flips, offsets, 8)
    for image, (y, x), flip, frame in zip(frames, offsets.tolist(), flips, found, strict=True):
        crop = image[:, y : y + 8, x : x + 8]
        assert torch.equal(frame, crop.flip(-1) if flip else crop)


def test_draws_depend_on_seed_epoch_and_index_alone():
    flips, offsets = draw_augmentation(1000, 3, 5, True, 4)
    again = draw_augmentation(100, 3, 5, True, 4)  # of fewer images
    assert torch.equal(flips[:100], again[0]) and torch.equal(offsets[:100], again[1])
    for other in ((4, 5), (3, 6)):
        assert not torch.equal(offsets, draw_augmentation(1000, *other, True, 4)[1])
    # Five standard deviations of a fair coin, and all nine offsets along each axis.
    assert abs(int(flips.sum()) - 500) < 5 * math.sqrt(250)
    for axis in offsets.T:
        assert axis.unique().tolist() == list(range(9))
    still = draw_augmentation(1000, 3, 5, False, 0)
    assert not still[0].any() and not still[1].any()
