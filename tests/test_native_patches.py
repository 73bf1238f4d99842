"""The compiled gather gives the patches of the plain definition, and steps aside where it must."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

from functools import partial

import native_trunks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_images import random_images
from native_trunks import assert_same_bits, forgotten
from resampling_cases import LAYOUTS, PADDINGS, PAPER, foveate_plain
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from foveate.native import build
from foveate.resampling import c_kernel as patches
from foveate.resampling import foveate
from foveate.resampling.c_kernel import gather_patches, scatter_patches
from foveate.resampling.definition import PatchSpec

_needs_a_compiler = native_trunks._needs_a_compiler  # a fixture for every test
EPS = torch.finfo(torch.float32).eps


def assert_right(images, scales, size, padding, centres=None):
    found = gather_patches(images, PatchSpec(tuple(scales), size, padding, False, centres))
    exact = foveate_plain(images.double(), scales, size, padding=padding, centres=centres)
    assert found.is_contiguous() and found.dtype == torch.float32
    # Values up to 1, differences up to 2: per axis a rounded weight and its product, 1 each, and a
    # rounded difference and a sum, 1/2 each; then the padding, at most 1.
    torch.testing.assert_close(found.double(), exact, atol=8 * EPS, rtol=0)


@settings(max_examples=200)
@given(data=st.data(), padding=st.sampled_from(PADDINGS), layout=st.sampled_from([*LAYOUTS]))
def test_it_equals_the_definition(data, padding, layout):
    B, C = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    H, W = (data.draw(st.integers(1, 40)) for _ in range(2))
    scales = sorted(data.draw(st.sets(st.floats(0.01, 50), min_size=1, max_size=4)))
    images = LAYOUTS[layout](random_images(B, C, H, W, seed=data.draw(st.integers(0, 99))))
    centres = None
    if data.draw(st.booleans()):  # also far outside, where "reflect" folds many times
        pair = st.tuples(st.floats(-9 * H, 9 * H), st.floats(-9 * W, 9 * W))
        centres = torch.tensor([data.draw(pair) for _ in range(B)], dtype=torch.float64)
    assert_right(images, scales, data.draw(st.integers(1, 16)), padding, centres)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", [(32, 1, 112, 112), (5, 3, 57, 90), (2, 2, 5, 4), (3, 1, 1, 1)])
@pytest.mark.parametrize("size", [1, 28, 33])
def test_it_equals_the_definition_at_the_scales_of_the_paper(padding, shape, size):
    assert_right(random_images(*shape), PAPER, size, padding)


@pytest.mark.parametrize("padding", ["border", "reflect"])
def test_a_constant_image_gives_exactly_constant_patches(padding):
    colours = torch.rand(4, 3, 1, 1)  # not sums of few powers of two
    found = gather_patches(
        colours.expand(4, 3, 50, 61).contiguous(), PatchSpec(tuple(PAPER), 28, padding, False, None)
    )
    assert torch.equal(found, colours[:, None].expand_as(found))


def test_it_equals_the_definition_on_a_simple_processor(monkeypatch, tmp_path):
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "TARGETS", ("-march=x86-64", *build.TARGETS))
    with forgotten():
        assert_right(random_images(3, 2, 30, 41), PAPER, 9, "reflect")


def test_the_same_bits_for_any_number_of_threads(monkeypatch):
    images, spec = random_images(9, 2, 30, 41), PatchSpec(tuple(PAPER), 11, -0.7)
    assert_same_bits(lambda: [gather_patches(images, spec)], monkeypatch)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 0, 8, 8)])
def test_no_images_or_channels_give_none(shape, antialias):
    spec = PatchSpec((0.5, 2.0), 4, antialias=antialias)
    found = gather_patches(torch.zeros(shape), spec)
    assert found.shape == (shape[0], 2, shape[1], 4, 4)
    assert scatter_patches(found, torch.Size(shape), spec).shape == shape


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("where", [float("nan"), float("inf"), float("-inf")])
def test_centres_that_are_no_place_give_nan(where, padding, antialias):
    centres = torch.tensor([[where, 4.0], [4.0, where], [4.0, 4.0]])
    options = {"padding": padding, "centres": centres, "antialias": antialias}
    found = foveate(random_images(3, 1, 9, 9), [0.5, 2.0], 3, **options)
    assert found[:2].isnan().all() and found[2].isfinite().all()


def test_centres_of_any_kind():
    images, centres = random_images(2, 1, 20, 20), torch.tensor([[3, 17], [11, 8]])
    expected = foveate(images, PAPER, 5, centres=centres.double())
    for given_centres in (centres, centres.half(), centres.float().requires_grad_()):
        assert torch.equal(foveate(images, PAPER, 5, centres=given_centres), expected)
    assert torch.equal(foveate(images, PAPER, 5, centres=centres.mT.contiguous().mT), expected)


def test_a_nan_spoils_what_is_drawn_from_it_only():
    images = random_images(2, 1, 12, 12)
    clean = foveate(images, [1.0], 12)
    images[0, 0, 5, 7] = torch.nan
    spoiled = foveate(images, [1.0], 12)
    there = spoiled.isnan().nonzero()
    assert spoiled[0, 0, 0, 5, 7].isnan() and (there[:, 0] == 0).all()
    assert (there[:, 3] - 5).abs().max() <= 1 and (there[:, 4] - 7).abs().max() <= 1
    assert torch.equal(spoiled[~spoiled.isnan()], clean[~spoiled.isnan()])


@pytest.fixture
def gathers(monkeypatch):
    """Say whether a call of the op gathers."""
    calls = []

    def gather(*arguments):
        calls.append(1)
        return gather_patches(*arguments)

    def answer(op, *arguments):
        before = len(calls)
        op(*arguments)
        return len(calls) > before

    monkeypatch.setattr(patches, "gather_patches", gather)
    return answer


def op(images):
    return foveate(images, [0.5, 2.0], 4)


def blurred(images):
    return foveate(images, [0.5, 2.0], 4, antialias=True)


def test_it_is_taken_where_it_applies(gathers):
    images = random_images(2, 1, 9, 9)
    assert gathers(op, images) and gathers(op, images.mT)
    assert gathers(blurred, images) and gathers(blurred, images.clone().requires_grad_())
    assert gathers(op, images.clone().requires_grad_())
    assert gathers(torch.no_grad()(op), images.clone().requires_grad_())
    assert gathers(torch.inference_mode()(op), images)
    with torch.autocast("cpu", torch.bfloat16):
        assert gathers(op, images)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_products_are_taken_where_it_does_not_apply(gathers, monkeypatch):
    images = random_images(2, 1, 9, 9)
    assert not gathers(partial(foveate, antialias=True), images, [5000.0], 2)
    assert not gathers(op, images.double()) and not gathers(op, images.half())
    assert not gathers(torch.vmap(op), images[None])
    assert not gathers(torch.func.grad(lambda images: op(images).sum()), images)
    assert not gathers(partial(torch.jit.trace, op, check_trace=False), images)
    assert not gathers(torch.compile(op, backend="eager", fullgraph=True), images)
    with FlopCounterMode(display=False):
        assert not gathers(op, images)
    monkeypatch.setenv("FOVEATE_NATIVE", "0")
    assert not gathers(op, images)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("op", [op, blurred])
def test_tangents_are_not_lost(op):
    images, tangent = random_images(2, 1, 9, 9), random_images(2, 1, 9, 9, seed=1)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(op(forward_ad.make_dual(images, tangent))).tangent
    torch.testing.assert_close(found, op(tangent), atol=12 * EPS, rtol=0)


def test_without_a_compiler_products_are_taken(gathers, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with forgotten():
        assert not gathers(op, random_images(2, 1, 9, 9))
