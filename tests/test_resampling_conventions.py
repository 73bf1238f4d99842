"""The conventions of the resampling op one by one: centre, half pixel, window, padding."""
# Shape letters: H W pixels.

import pytest
import torch
from made_images import random_images
from resampling_cases import OPTIONS, PAPER

from foveate.resampling import foveate
from foveate.resampling.definition import PatchSpec, axis_matrices


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("length", [1, 2, 7, 28])
def test_scale_one_at_full_size_is_the_identity(length, options):
    images = random_images(2, 3, length, length)
    assert torch.equal(foveate(images, [1.0], length, **options)[:, 0], images)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("H", "W"), [(64, 50), (51, 64), (47, 63)])
def test_a_ramp_returns_the_coordinates(H, W, antialias):
    """Pins the centre, the half pixel, the direction of scale and the order of axes at once."""
    y, x = torch.meshgrid(torch.arange(H).double(), torch.arange(W).double(), indexing="ij")
    # Windows of up to 35 pixels: all inside. A triangle keeps ramps if its half-width is whole.
    scales = [0.3, 1.0, 2.0, 3.0] if antialias else [0.3, 1.0, 2**0.5, 3.5]
    patches = foveate(torch.stack([y, x])[None], scales, 10, antialias=antialias)[0]
    centre_y, centre_x = H / 2, W / 2
    for patch, scale in zip(patches, scales, strict=True):
        steps = (torch.arange(10).double() + 0.5 - 5) * scale
        rows, columns = (centre_y + steps - 0.5)[:, None], (centre_x + steps - 0.5)[None, :]
        expected = torch.stack([rows.expand(10, 10), columns.expand(10, 10)])
        torch.testing.assert_close(patch, expected, atol=1e-12, rtol=0)  # 64 · 2⁻⁵³, summed


def test_a_patch_sees_a_window_of_size_times_scale():
    matrix = axis_matrices(16, PatchSpec((2.0,), 4), None, "cpu")[0]
    assert matrix.any(0).nonzero().flatten().tolist() == list(range(4, 12))


@pytest.mark.parametrize("options", OPTIONS)
def test_matrix_rows_sum_to_one(options):
    matrices = axis_matrices(40, PatchSpec(PAPER.values, 12, **options), None, "cpu")
    assert matrices.shape == (17, 12, 40)
    sums = matrices.sum(-1)
    if not isinstance(options["padding"], str):
        assert (sums[-1, [0, -1]] == 0).all()  # a window of 96 pixels ends far outside
        sums = sums[:6]  # windows of up to 14 pixels: all inside
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-15, rtol=1e-15)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_constant_image_stays_constant(options):
    value = 0.3 if isinstance(options["padding"], str) else options["padding"]
    images = torch.full((1, 1, 20, 23), value, dtype=torch.float64)
    patches = foveate(images, PAPER, 8, **options)
    torch.testing.assert_close(patches, torch.full_like(patches, value), atol=1e-14, rtol=0)


def test_each_padding_shows_its_own_outside():
    image = torch.tensor([[1.0, 2.0, 4.0]])[None, None]  # one row; x samples at -4, -3, ..., 6
    for padding, left, right in [
        ("border", [1, 1, 1, 1], [4, 4, 4, 4]),
        ("reflect", [1, 2, 4, 2], [2, 1, 2, 4]),
        (9.0, [9, 9, 9, 9], [9, 9, 9, 9]),
    ]:
        row = foveate(image, [1.0], 11, padding=padding)[0, 0, 0, 5]
        assert row.tolist() == [*left, 1, 2, 4, *right]


def test_a_far_constant_does_not_leak_inside():
    images = random_images(1, 1, 40, 40)
    inside = foveate(images, [0.7, 1.3], 12)
    # float64 leaves 2⁻⁵² of the constant at most
    torch.testing.assert_close(
        foveate(images, [0.7, 1.3], 12, padding=1e6), inside, atol=1e6 * 2**-52 + 2**-23, rtol=0
    )


def test_channels_that_reach_outside_are_no_copies():
    patches = foveate(random_images(1, 1, 28, 28), PAPER, 28)[0].flatten(1)
    distances = torch.cdist(patches, patches) + torch.eye(17) * 1e3
    assert distances.min() > 1


def test_the_image_centre_is_the_default_centre():
    images = random_images(3, 2, 21, 34)
    centres = torch.tensor([10.5, 17.0]).expand(3, 2)
    for options in OPTIONS:
        given_centres = foveate(images, PAPER, 6, centres=centres, **options)
        torch.testing.assert_close(given_centres, foveate(images, PAPER, 6, **options))


def test_moving_the_centre_moves_the_image():
    images = random_images(2, 1, 40, 40, dtype=torch.float64)
    centres = torch.tensor([[23, 14], [18, 20]])
    patches = foveate(images, [0.6, 1.7], 8, centres=centres)  # at most 7 pixels each way
    for image, patch, (y, x) in zip(images, patches, (centres - 20).tolist(), strict=True):
        moved = torch.roll(image, (-y, -x), dims=(-2, -1))[None]
        torch.testing.assert_close(patch, foveate(moved, [0.6, 1.7], 8)[0], atol=1e-14, rtol=0)


@pytest.mark.parametrize("factor", [2**0.5, 2.0])
@pytest.mark.parametrize("scale", [0.5, 1.3])
def test_rescaling_the_image_shifts_the_scale_channel(scale, factor):
    def blob(sigma):
        at = torch.arange(97).double() - 48
        profile = torch.exp(-(at**2) / (2 * sigma**2))
        return (profile[:, None] * profile)[None, None]

    sigma = 6.0
    # linear interpolation: h²/8 · max|f''| = 1/(8 sigma²) on each axis, for either image
    bound = 1 / (4 * sigma**2) + 1 / (4 * (sigma * factor) ** 2)
    shifted = foveate(blob(sigma * factor), [scale * factor], 24)
    torch.testing.assert_close(shifted, foveate(blob(sigma), [scale], 24), atol=bound, rtol=0)
