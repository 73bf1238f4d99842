"""The resampling op: its conventions one by one, its mathematics, and its plain twin."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate.errors import ConfigError
from foveate.resampling import foveate, foveate_plain, sampling_matrices
from foveate.scales import ScaleGrid

PAPER = ScaleGrid(0.5, 8, per_octave=4)
FEW = [0.5, 1.0, 3.0]
PADDINGS = ["border", "reflect", 0, -0.7]
OPTIONS = [{"padding": p, "antialias": a} for p in PADDINGS for a in (False, True)]


def random_images(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1).to(dtype)


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


@settings(max_examples=100)
@given(data=st.data(), padding=st.sampled_from(PADDINGS), centred=st.booleans())
def test_it_equals_grid_sample_per_scale(data, padding, centred):
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
    matrix = sampling_matrices(16, [2.0], 4, dtype=torch.float64, device="cpu")[0]
    assert matrix.any(0).nonzero().flatten().tolist() == list(range(4, 12))


@pytest.mark.parametrize("options", OPTIONS)
def test_matrix_rows_sum_to_one(options):
    matrices = sampling_matrices(40, PAPER, 12, **options, dtype=torch.float64, device="cpu")
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_it_equals_the_plain_definition(options, dtype):
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
        assert foveate_plain(images, PAPER, 9).dtype == torch.float32


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


class Channels(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, images):
        return foveate(images, FEW, 6, **self.options)


def test_it_compiles_without_a_break():
    options = {"padding": 0.4, "antialias": True}
    compiled = torch.compile(Channels(**options), fullgraph=True, backend="aot_eager")
    for shape in ((2, 1, 20, 20), (3, 1, 31, 9)):
        images = random_images(*shape)
        torch.testing.assert_close(compiled(images), foveate(images, FEW, 6, **options))


def test_it_exports_with_any_batch():
    dynamic = {"images": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(
        Channels(), (random_images(2, 1, 20, 23),), dynamic_shapes=dynamic
    )
    for batch in (1, 5):
        images = random_images(batch, 1, 20, 23)
        torch.testing.assert_close(program.module()(images), foveate(images, FEW, 6))


PEAK = """
import torch
from foveate.resampling import foveate
def peak():  # in bytes; resource.getrusage would start from the parent's peak
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
images, centres = torch.rand({shape}).requires_grad_({grad}), {centres}
foveate(images[:4], {scales}, {size})
before = peak()
patches = foveate(images, {scales}, {size}, centres=centres)
print((peak() - before) / patches.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory")
@pytest.mark.parametrize(
    ("shape", "scales", "size", "grad", "centres"),
    [
        ((1000, 1, 112, 112), list(PAPER), 28, True, None),  # 53 MB of patches
        ((1000, 1, 112, 112), list(PAPER), 28, False, "torch.rand(1000, 2)"),
        ((20000, 1, 64, 64), [4.0], 16, False, None),  # one scale: its (P, W) rows are 4 outputs
    ],
)
def test_it_holds_at_most_one_output_more(shape, scales, size, grad, centres):
    script = PEAK.format(shape=shape, scales=scales, size=size, grad=grad, centres=centres)
    # Freed blocks go straight back to the system, so that resident memory is memory in use.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | malloc
    )
    assert float(run.stdout) < 2.1  # its output, one more, and 5 % for the libraries


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"images": torch.zeros(1, 8, 8)},
            r"got \(1, 8, 8\): add a batch axis with images\[None\]",
        ),
        ({"images": torch.zeros(8, 8)}, r"shape \(B, C, H, W\), got \(8, 8\)"),
        ({"images": torch.zeros(1, 1, 8, 8).byte()}, r"got torch\.uint8: pass images\.float\(\)"),
        ({"images": torch.zeros(1, 1, 0, 8)}, "at least one pixel"),
        ({"size": 0}, "at least 1 pixel, got 0"),
        ({"size": 2.5}, "got 2.5"),
        ({"scales": []}, "no scales given"),
        ({"padding": "zeros"}, "got 'zeros'"),
        ({"padding": None}, "got None"),
        ({"padding": float("nan")}, "must be finite, got nan"),
        ({"padding": float("-inf")}, "must be finite, got -inf"),
        ({"centres": torch.zeros(2)}, r"\(1, 2\), got \(2,\)"),
        ({"centres": torch.zeros(3, 2)}, r"got \(3, 2\)"),
    ],
)
@pytest.mark.parametrize("op", [foveate, foveate_plain])
def test_what_cannot_work_is_refused(op, change, words):
    arguments = {"images": torch.zeros(1, 1, 8, 8), "scales": [1.0], "size": 4} | change
    with pytest.raises(ConfigError, match=words):
        op(**arguments)


def test_an_axis_without_pixels_is_refused():
    with pytest.raises(ConfigError, match="got 0"):
        sampling_matrices(0, [1.0], 4, dtype=torch.float32, device="cpu")
