"""The resampling op: other implementations, its plain twin, and its gradients."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from made_images import random_images
from resampling_cases import OPTIONS, PADDINGS, PAPER, foveate_plain

from foveate.resampling import foveate


def points(length, scale, size, centre=None):
    """Where a patch samples one axis, in units in which pixel i has its centre at i."""
    centre = length / 2 if centre is None else centre
    return (torch.arange(size).double() + 0.5 - size / 2) * scale + (centre - 0.5)


def by_grid_sample(images, scale, size, padding, centres):
    """One bilinear patch per image by torch's own sampler, in float64: (B, C, P, P)."""
    images, (H, W) = images.double(), images.shape[-2:]
    mirror = padding == "reflect"

    def normalised(length, centre):
        at = points(length, scale, size, centre)
        return 2 * at / (length - 1) - 1 if mirror else (2 * at + 1) / length - 1

    grids = [
        torch.stack(torch.meshgrid(normalised(W, x), normalised(H, y), indexing="xy"), -1)
        for y, x in centres
    ]
    mode = {"border": "border", "reflect": "reflection"}.get(padding, "zeros")
    shift = 0 if isinstance(padding, str) else padding
    grid = torch.stack(grids).double()
    sample = F.grid_sample(images - shift, grid, padding_mode=mode, align_corners=mirror)
    return sample + shift


@pytest.mark.parametrize("native", ["0", "1"])
@settings(max_examples=100)
@given(data=st.data(), padding=st.sampled_from(PADDINGS), centred=st.booleans())
def test_it_equals_grid_sample_per_scale(native, data, padding, centred):
    least = 2 if padding == "reflect" else 1
    B, C = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    H, W = (data.draw(st.integers(least, 40)) for _ in range(2))
    size = data.draw(st.integers(1, 16))
    scales = sorted(data.draw(st.sets(st.floats(0.2, 9), min_size=1, max_size=4)))
    images = random_images(B, C, H, W, seed=data.draw(st.integers(0, 99)))
    centres = None
    if not centred:
        pair = st.tuples(st.floats(-3, H + 3), st.floats(-3, W + 3))
        centres = torch.tensor([data.draw(pair) for _ in range(B)], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOVEATE_NATIVE", native)
        patches = foveate(images, scales, size, padding=padding, centres=centres)
    assert patches.shape == (B, len(scales), C, size, size)
    at = [(H / 2, W / 2)] * B if centres is None else centres.tolist()
    expected = torch.stack([by_grid_sample(images, s, size, padding, at) for s in scales], 1)
    # Values up to 1; per axis a rounded weight, a product and a sum; then the padding: 8 roundings.
    bound = 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(patches.double(), expected, atol=bound, rtol=0)


def by_direct_sum(image, scale, size, padding):
    """One antialiased patch (P, P) of an (H, W) array, pixel by pixel, on an image padded wide."""
    reach, width = int(np.ceil((size + 2) * scale)) + 2, max(scale, 1.0)
    mode = {"border": "edge", "reflect": "reflect"}.get(padding, "constant")
    fill = {} if isinstance(padding, str) else {"constant_values": padding}
    padded = np.pad(image, reach, mode=mode, **fill)

    def weights(length, p):
        at = points(length, scale, size)[p].item()
        triangle = np.maximum(0, 1 - np.abs(np.arange(-reach, length + reach) - at) / width)
        return triangle / triangle.sum()

    H, W = image.shape
    return np.array(
        [[weights(H, p) @ padded @ weights(W, q) for q in range(size)] for p in range(size)]
    )


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", [(9, 6), (4, 7), (1, 5), (1, 1)])
def test_antialias_equals_a_direct_sum(shape, padding):
    scales = [0.4, 1.0, 1.5, 3.2, 7.0]
    image = random_images(1, 1, *shape, dtype=torch.float64)
    patches = foveate(image, scales, 4, padding=padding, antialias=True)[0, :, 0]
    expected = [by_direct_sum(image[0, 0].numpy(), scale, 4, padding) for scale in scales]
    # float64 throughout; up to (2 · 7)² terms of at most 1 in each sum
    torch.testing.assert_close(patches, torch.tensor(np.array(expected)), atol=1e-13, rtol=0)


def test_antialias_equals_interpolate_away_from_the_border():
    images = random_images(2, 3, 48, 48, dtype=torch.float64)
    patches = foveate(images, [3.0], 16, antialias=True)[:, 0]
    expected = F.interpolate(images, size=16, mode="bilinear", antialias=True)
    inside = (..., slice(1, -1), slice(1, -1))  # there the kernel of ±3 pixels is not cut off
    torch.testing.assert_close(patches[inside], expected[inside], atol=1e-13, rtol=0)


def test_antialias_changes_nothing_at_scales_up_to_one():
    images = random_images(1, 2, 12, 12)
    plain = foveate(images, [0.3, 1.0], 9)
    assert torch.equal(foveate(images, [0.3, 1.0], 9, antialias=True), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("native", ["0", "1"])
def test_it_equals_the_plain_definition(native, options, dtype, monkeypatch):
    monkeypatch.setenv("FOVEATE_NATIVE", native)
    images = random_images(2, 3, 33, 50, dtype=dtype, seed=torch.seed() % 2**31)
    # 8 roundings as above, and with antialias up to 16 terms per sum instead of 2
    bound = 32 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = max(bound, torch.finfo(dtype).eps)  # one unit in the last place of the result
    for scales, size in [(PAPER, 11), ([3.0], 4), ([0.5], 1)]:
        for centres in (None, torch.tensor([[12.3, 50.0], [0.0, 7.5]])):
            patches = foveate(images, scales, size, centres=centres, **options)
            expected = foveate_plain(images, scales, size, centres=centres, **options)
            assert patches.dtype == dtype
            torch.testing.assert_close(patches, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    images = random_images(2, 1, 30, 30, dtype=dtype)
    expected = foveate(images.float(), PAPER, 9, padding=0.3, antialias=True).to(dtype)
    assert torch.equal(foveate(images, PAPER, 9, padding=0.3, antialias=True), expected)


def test_autocast_does_not_reach_the_products():
    images = random_images(2, 1, 30, 30)
    expected = foveate(images, PAPER, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(foveate(images, PAPER, 9), expected)


def test_layout_and_empty_batches_do_not_matter():
    images = random_images(2, 3, 19, 24)
    last = images.to(memory_format=torch.channels_last)
    torch.testing.assert_close(foveate(last, PAPER, 7), foveate(images, PAPER, 7))
    assert foveate(images[:0], PAPER, 7).shape == (0, 17, 3, 7, 7)
    centres = torch.zeros(0, 2)
    assert foveate(images[:0], PAPER, 7, centres=centres).shape == (0, 17, 3, 7, 7)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_to_second_order(options):
    images = random_images(2, 1, 5, 4, dtype=torch.float64).requires_grad_()

    def op(images):
        return foveate(images, [0.7, 2.6], 3, **options)

    assert torch.autograd.gradcheck(op, images)
    assert torch.autograd.gradgradcheck(op, images)


def test_the_gradient_is_the_adjoint():
    images = random_images(3, 2, 30, 26, dtype=torch.float64).requires_grad_()
    centres = torch.tensor([[15.0, 13.0]] * 3, requires_grad=True)
    for options in ({}, {"antialias": True, "padding": "reflect"}, {"centres": centres}):
        patches = foveate(images, PAPER, 7, **options)
        other = random_images(*patches.shape, dtype=torch.float64, seed=1)
        (gradient,) = torch.autograd.grad(patches, images, other)
        torch.testing.assert_close((patches * other).sum(), (images * gradient).sum())
