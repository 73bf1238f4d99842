"""The generator against an independent reference, and each of its conventions on its own."""

import math

import numpy as np
import pytest
import reference
import torch

from foveate.data.large_scale import (
    bicubic_matrices,
    rescale,
    smoothing_matrices,
    stretch_contrast,
)
from foveate.data.mirrored import rescale_mirrored
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError

BACKGROUND = 2 / math.pi * math.atan(0.02 * -128)


@pytest.fixture(scope="module")
def digits():
    return load_source("mnist-5k").test.images


@pytest.mark.parametrize("scale", [0.5, 2**-0.75, 1.0, 2**0.25, 2.0, 3.3636, 4.0, 2**2.5, 8.0])
def test_real_digits_agree_with_the_reference(digits, scale):
    for image in digits[:2]:
        expected = torch.from_numpy(reference.rescale(image[0].double().numpy(), scale))
        made = rescale(image[None], scale)[0, 0]
        torch.testing.assert_close(made.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("border", ["replicate", "reflect", "zero", "whole"])
@pytest.mark.parametrize(("size", "scale"), [(40, 2.3), (41, 1.7), (30, 0.6)])
def test_every_border_and_odd_and_even_frames(digits, border, size, scale):
    image = digits[3:4, :, 2:25, 3:23]  # 23 x 20, so the axes cannot be mixed up
    expected = reference.rescale(image[0, 0].double().numpy(), scale, size, border)
    made = rescale(image, scale, size=size, border=border)[0, 0].double()
    torch.testing.assert_close(made, torch.from_numpy(expected), atol=1e-4, rtol=0)


def test_a_scale_per_image_is_the_same_as_one_by_one(digits):
    scales = torch.tensor([0.5, 1.3, 4.0, 8.0])
    together = rescale(digits[:4], scales)
    for k in range(4):
        alone = rescale(digits[k : k + 1], float(scales[k]))
        torch.testing.assert_close(together[k : k + 1], alone, atol=1e-5, rtol=0)


def test_scale_one_in_a_frame_of_the_same_size_samples_the_pixels_themselves():
    identity = bicubic_matrices(torch.tensor([1.0]), 28, 28)[0]
    torch.testing.assert_close(identity, torch.eye(28).double())


@pytest.mark.parametrize("scale", [0.5, 0.71, 1.0, 1.9, 8.0])
@pytest.mark.parametrize(("source", "size"), [(28, 112), (27, 112), (28, 111)])
def test_the_rescaled_image_is_centred_and_keeps_its_exact_extent(source, size, scale):
    rows = bicubic_matrices(torch.tensor([scale]), source, size)[0]
    torch.testing.assert_close(rows, rows.flip(0, 1))  # mirror symmetry: no half-pixel shift
    position = (torch.arange(size) + 0.5 - size / 2).abs()
    inside = position <= scale * source / 2 + 1e-6
    torch.testing.assert_close(rows.sum(1), inside.double())


def test_shrinking_averages_instead_of_skipping():
    stripes = torch.zeros(1, 1, 28, 28)
    stripes[..., ::2] = 255  # at scale 1/2 every other column would be taken or none
    matrix = bicubic_matrices(torch.tensor([0.5]), 28, 14)[0].float()
    inner = (stripes @ matrix.mT)[..., 3:-3]
    torch.testing.assert_close(inner, torch.full_like(inner, 127.5), atol=3.0, rtol=0)


def test_enlarging_reproduces_a_ramp_at_pixel_centres():
    ramp = torch.arange(28, dtype=torch.float64) + 0.5
    matrix = bicubic_matrices(torch.tensor([4.0]), 28, 112)[0]
    expected = (torch.arange(112) + 0.5) / 4
    torch.testing.assert_close((matrix @ ramp)[8:-8], expected[8:-8].double())


def test_overshoot_is_clipped_before_smoothing():
    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    image[..., 10:18, 10:18] = 255
    matrix = bicubic_matrices(torch.tensor([4.0]), 28, 112)[0].float()
    assert (
        float((matrix @ image[0, 0].float() @ matrix.mT).min()) < -1
    )  # there is something to clip
    assert float(rescale(image, 4.0).min()) == pytest.approx(BACKGROUND, abs=1e-6)


@pytest.mark.parametrize("border", ["replicate", "reflect", "whole"])
def test_smoothing_weights_sum_to_one(border):
    rows = smoothing_matrices(torch.tensor([0.5, 8.0]), 112, border).sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-12, rtol=0)


def test_smoothing_with_zeros_outside_loses_weight_only_near_the_border():
    rows = smoothing_matrices(torch.tensor([1.0]), 112, "zero")[0].sum(-1)
    assert float(rows[0]) < 0.9
    torch.testing.assert_close(rows[30:-30], torch.ones(52).double(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_border_does_not_matter_while_the_digit_fits(digits, scale):
    margin = torch.ones(28, 28, dtype=torch.bool)
    margin[4:-4, 4:-4] = False
    clear = digits[(digits[:, 0] * margin).amax((1, 2)) == 0]  # 4 pixels are 4.6 sigma
    made = [rescale(clear[:50], scale, border=b) for b in ("replicate", "reflect", "zero", "whole")]
    for other in made[1:]:
        # beyond 4.6 sigma lies 4e-6 of the kernel: 255 * 4e-6 * 0.02 * 2 / pi per axis
        torch.testing.assert_close(other, made[0], atol=3e-5, rtol=0)


def test_range_background_and_type(digits):
    made = rescale(digits[:10], 2.0)
    assert made.dtype == torch.float32
    assert made.shape == (10, 1, 112, 112)
    torch.testing.assert_close(made[:, 0, 0, 0], torch.full((10,), BACKGROUND))
    peak = 2 / math.pi * math.atan(0.02 * (255 - 128))
    torch.testing.assert_close(made.amax((1, 2, 3)), torch.full((10,), peak))


def test_stretching_a_part_is_the_same_as_cutting_it_before_the_values_are_stretched():
    """Steps 5 and 6 of a part, from linear values whose extremes lie outside of the part."""

    def finished(values):
        low, high = values.amin((1, 2, 3), True), values.amax((1, 2, 3), True)
        return 2 / math.pi * torch.atan(0.02 * (255 * (values - low) / (high - low) - 128))

    torch.manual_seed(0)
    smooth = 200 * torch.rand(3, 1, 12, 12, dtype=torch.float64)
    smooth[:, :, 0, :2] = torch.tensor([-20.0, 260.0], dtype=torch.float64)
    part = finished(smooth).float()[..., 3:9, 3:9]
    # An arctangent of up to 2.56 divides slopes by up to 7.6, so a rounding of 6e-8 grows to
    # 5e-7, and the stretch, by up to 280 / 150, doubles it.
    right = finished(smooth[..., 3:9, 3:9]).float()
    torch.testing.assert_close(stretch_contrast(part), right, atol=4e-6, rtol=0)
    assert (right - part).abs().max() > 0.1


def test_whole_images_are_stretched_already(digits):
    images = rescale(digits, 2.0)
    torch.testing.assert_close(stretch_contrast(images), images, atol=4e-6, rtol=0)


def test_a_blank_image_is_all_background():
    made = rescale(torch.zeros(1, 1, 28, 28), 2.0)
    torch.testing.assert_close(made, torch.full_like(made, BACKGROUND))


def test_colour_channels_share_their_range():
    image = torch.zeros(1, 3, 28, 28)
    image[0, 0, 10:18, 10:18], image[0, 1, 10:18, 10:18] = 255, 128
    peaks = rescale(image, 2.0).amax((0, 2, 3))
    assert float(peaks[0]) > float(peaks[1]) > float(peaks[2])


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_impossible_scales_are_named(digits, scale):
    with pytest.raises(ConfigError, match="scale must lie between"):
        rescale(digits[:1], scale)


def test_other_bad_input(digits):
    with pytest.raises(DataError, match=r"must be \(N, C, h, w\)"):
        rescale(digits[0], 1.0)
    with pytest.raises(ConfigError, match="one per image, got 2"):
        rescale(digits[:3], torch.ones(2))
    with pytest.raises(ConfigError, match="size must be 1 to 4,096 pixels"):
        rescale(digits[:1], 1.0, size=0)
    with pytest.raises(ConfigError, match="border must be one of"):
        rescale(digits[:1], 1.0, border="mirror")


def test_no_images_give_no_images(digits):
    for scales in (1.0, torch.ones(0)):
        assert rescale(digits[:0], scales).shape == (0, 1, 112, 112)
        assert rescale_mirrored(digits[:0], scales, size=64).shape == (0, 1, 64, 64)


@pytest.mark.gpu
def test_the_gpu_makes_the_same_images(digits):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for scales in (2.0, torch.from_numpy(np.geomspace(0.5, 8, 64))):
        here, there = rescale(digits[:64], scales), rescale(digits[:64].cuda(), scales)
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=0)
