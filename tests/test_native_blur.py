"""The compiled code for antialiasing and for gradients equals the plain definition."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import math

import native_trunks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_images import random_images
from native_trunks import assert_same_bits, forgotten
from resampling_cases import LAYOUTS, PADDINGS, PAPER, foveate_plain

from foveate.native import build
from foveate.resampling import c_kernel, foveate
from foveate.resampling.c_kernel import gather_patches, scatter_patches
from foveate.resampling.definition import PatchSpec, scatter_plain

_needs_a_compiler = native_trunks._needs_a_compiler  # a fixture for every test
UNIT = torch.finfo(torch.float32).eps / 2  # the most that one rounding changes
PHOTO = tuple(56 / 112 * 2 ** (i / 2) for i in range(7))  # windows of 56 to 448 pixels


def assert_patches_right(images, spec):
    found = gather_patches(images, spec)
    scales, size, *_ = spec
    options = {name: getattr(spec, name) for name in ("padding", "antialias", "centres")}
    exact = foveate_plain(images.double(), scales, size, **options)
    assert found.is_contiguous() and found.dtype == torch.float32
    # Values up to 1 with weights that sum to 1. On each axis a weight is rounded and each term
    # added; a constant costs 3 more roundings.
    terms = sum(min(2 * math.ceil(max(*spec.scales, 1)), length) for length in images.shape[2:])
    torch.testing.assert_close(found.double(), exact, atol=(terms + 5) * UNIT, rtol=0)


def assert_gradient_right(gradient, shape, spec):
    found = scatter_patches(gradient, torch.Size(shape), spec)
    exact = scatter_plain(gradient.double(), torch.Size(shape), spec)
    size = scatter_plain(gradient.double().abs(), torch.Size(shape), spec)
    # P patch columns at most add to a pixel of a patch row, then P rows of each scale to the image
    # pixel; both weights are rounded. So many roundings of the sum of absolute terms:
    terms = spec.size * (len(spec.scales) + 1) + 2
    # Positions, below 1,000 pixels, differ by some roundings of float64, and so do weights.
    moved = 1e-12 * float(gradient.double().abs().sum())
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= terms * UNIT * size + moved).all()


@st.composite
def cases(draw):
    B, C = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    H, W = (draw(st.integers(1, 40)) for _ in range(2))
    scales = sorted(draw(st.sets(st.floats(0.01, 50), min_size=1, max_size=4)))
    centres = None
    if draw(st.booleans()):  # also far outside, where "reflect" folds many times
        pair = st.tuples(st.floats(-9 * H, 9 * H), st.floats(-9 * W, 9 * W))
        centres = torch.tensor([draw(pair) for _ in range(B)], dtype=torch.float64)
    padding, size = draw(st.sampled_from(PADDINGS)), draw(st.integers(1, 20))
    return (B, C, H, W), PatchSpec(tuple(scales), size, padding, True, centres)


@settings(max_examples=200)
@given(case=cases(), layout=st.sampled_from([*LAYOUTS]), seed=st.integers(0, 99))
def test_antialiased_patches_equal_the_definition(case, layout, seed):
    shape, spec = case
    assert_patches_right(LAYOUTS[layout](random_images(*shape, seed=seed)), spec)


@settings(max_examples=200)
@given(case=cases(), antialias=st.booleans(), seed=st.integers(0, 99))
def test_gradients_equal_the_transposed_definition(case, antialias, seed):
    shape, spec = case
    gradient = random_images(shape[0], len(spec.scales), shape[1], spec.size, spec.size, seed=seed)
    assert_gradient_right(gradient, shape, spec._replace(antialias=antialias))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", [(5, 3, 448, 300), (1, 3, 91, 460), (2, 1, 5, 4), (3, 1, 1, 1)])
@pytest.mark.parametrize("size", [1, 33, 112])
def test_both_are_right_for_photographs(padding, shape, size):
    spec = PatchSpec(PHOTO, size, padding, True)
    assert_patches_right(random_images(*shape), spec)
    assert_gradient_right(random_images(*shape[:1], len(PHOTO), shape[1], size, size), shape, spec)


def test_both_are_right_on_a_simple_processor(monkeypatch, tmp_path):
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "TARGETS", ("-march=x86-64", *build.TARGETS))
    spec = PatchSpec(tuple(PAPER), 9, "reflect", True)
    with forgotten():
        assert_patches_right(random_images(3, 2, 30, 41), spec)
        assert_gradient_right(random_images(3, len(PAPER), 2, 9, 9), (3, 2, 30, 41), spec)


def test_the_same_bits_for_any_number_of_threads(monkeypatch):
    images, spec = random_images(9, 2, 30, 41), PatchSpec(tuple(PAPER), 11, -0.7, True)
    gradient = random_images(9, len(PAPER), 2, 11, 11)

    def both():
        return gather_patches(images, spec), scatter_patches(gradient, images.shape, spec)

    assert_same_bits(both, monkeypatch)


OPTIONS = [
    {"antialias": antialias, "padding": padding, "centres": centres}
    for antialias in (False, True)
    for padding in ("reflect", 0.6)
    for centres in (None, torch.tensor([[3.0, 21.5], [40.0, -2.0]]))
]


def loss(patches):
    """A function whose second derivative is not zero."""
    return (patches.square() * patches.detach().cos()).sum() + patches.sum()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", ["rows", "colours"])
def test_gradients_of_a_loss_equal_those_of_the_definition(options, layout, monkeypatch):
    images = LAYOUTS[layout](random_images(2, 3, 33, 26, seed=torch.seed() % 2**31))
    other = random_images(2, 3, 33, 26, seed=1)

    def derivatives(op, dtype):
        leaf = images.to(dtype, memory_format=torch.preserve_format).requires_grad_()
        (first,) = torch.autograd.grad(
            loss(op(leaf, [0.4, 1.0, 2.3], 7, **options)), leaf, create_graph=True
        )
        (second,) = torch.autograd.grad(first, leaf, other.to(dtype))
        return first.detach().double(), second.double()

    calls = []
    monkeypatch.setattr(
        c_kernel, "scatter_patches", lambda *given: calls.append(1) or scatter_patches(*given)
    )
    found, exact = derivatives(foveate, torch.float32), derivatives(foveate_plain, torch.float64)
    assert len(calls) == 2
    # Each of the (3 + 1) · 7 sums is over slopes of up to 3 whose patches have 2 · 6 + 5 roundings,
    # and in all 3 · 49 pixels, at most, weigh on one image pixel.
    bound = ((3 + 1) * 7 + 17) * UNIT * 3 * 3 * 49
    for result, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(result, expected, atol=bound, rtol=0)


def test_the_gradient_is_the_adjoint():
    images = random_images(3, 2, 30, 26).requires_grad_()
    patches = foveate(images, PAPER, 7, antialias=True)
    other = random_images(*patches.shape, seed=1)
    (gradient,) = torch.autograd.grad(patches, images, other)
    forward = (patches.double() * other).sum()
    # Sums of products of two values up to 1, each with the error of patches or of gradients.
    bound = (7 * (len(PAPER) + 1) + 2 * 16 + 5) * UNIT * patches.numel()
    assert abs(forward - (images.double() * gradient).sum()) <= bound


def test_gradients_do_not_see_later_changes_of_centres():
    images = random_images(1, 1, 20, 20).requires_grad_()
    centres = torch.tensor([[10.0, 10.0]], dtype=torch.float64)
    patches = foveate(images, [1.0], 2, centres=centres)
    centres.zero_()
    (gradient,) = torch.autograd.grad(patches.sum(), images)
    assert gradient[..., 9:11, 9:11].sum() == 4


def test_batched_gradients_take_the_definition():
    images = random_images(1, 1, 6, 5)

    def op(images):
        return foveate(images, [0.5, 2.0], 2, antialias=True)

    one_by_one = torch.autograd.functional.jacobian(op, images)
    at_once = torch.autograd.functional.jacobian(op, images, vectorize=True)
    torch.testing.assert_close(at_once, one_by_one, atol=10 * UNIT, rtol=0)


@pytest.mark.parametrize("antialias", [False, True])
def test_a_constant_gives_gradients_to_the_image_alone(antialias):
    """Each patch pixel inside passes all of its gradient on, whatever the kernel."""
    images = random_images(1, 1, 40, 40).requires_grad_()
    foveate(images, [0.7, 2.0], 12, padding=0.4, antialias=antialias).sum().backward()
    # 2 · 144 patch pixels with windows of up to 24 + 4 pixels; all terms are positive
    assert abs(float(images.grad.double().sum()) - 288) <= 288 * (12 * 3 + 2) * UNIT
