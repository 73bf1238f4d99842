"""Random distortions in training: what they do to an image, and which ones a run draws."""

import math

import pytest
import torch
from tiny_runs import MODEL, assert_same_batches, tiny

from foveate.data.recipes import Recipe
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.models.zoo import model_config
from foveate.training.data import open_batches
from foveate.training.distortions import (
    ELASTIC,
    KNOTS,
    ROTATION,
    Distortions,
    change_widths,
    distort,
    draw_distortions,
)
from foveate.training.rescaling import rescaling

CPU = torch.device("cpu")
PLAIN = model_config("cnn", features=(4, 8), size=24, hidden=8)
SIGMA, PEAK = 2.5, 200.0  # of blobs: pixels, and the largest value
STILL = Distortions(torch.eye(2)[None], torch.zeros(1, 2, KNOTS, KNOTS), torch.zeros(1))


def blobs(count, side=28):
    """Gaussian blobs at random places up to 3 pixels from the centre, values 0 to PEAK."""
    torch.manual_seed(0)
    line = torch.arange(side) + 0.5 - side / 2
    at = (torch.rand(count, 2) - 0.5) * 6
    y, x = (torch.exp(-((line - a[:, None]) ** 2) / (2 * SIGMA**2)) for a in at.T)
    return PEAK * (y[:, None, :, None] * x[:, None, None, :])


@pytest.mark.parametrize(("height", "width"), [(28, 28), (15, 20)])
def test_the_image_is_resampled_where_the_map_and_the_displacement_point(height, width):
    image = torch.randint(256, (1, 1, height, width)).float()
    margin = math.ceil(max(height, width) / 8)
    padded = torch.nn.functional.pad(image, [margin] * 4)
    # Positions are whole pixels, up to rounding of coordinates below 50 pixels; neighbouring pixels
    # differ by up to 255, and the slope of the kernel is below 2.
    bound = 8 * 50 * 2 * 255 * torch.finfo(torch.float32).eps
    same = distort(image, STILL)
    torch.testing.assert_close(same, padded, atol=bound, rtol=0)
    step = torch.tensor([3.0, -2.0]).view(1, 2, 1, 1) / max(height, width)  # x first
    moved = distort(image, STILL._replace(moves=STILL.moves + step))
    rolled = torch.roll(padded, (2, -3), (2, 3))  # pixel (x, y) shows (x + 3, y - 2)
    torch.testing.assert_close(moved, rolled, atol=bound, rtol=0)
    if height == width:  # (x, y) shows (-y, x), its place after a quarter turn from x towards y
        turned = distort(image, STILL._replace(maps=torch.tensor([[[0.0, -1.0], [1.0, 0.0]]])))
        torch.testing.assert_close(turned, padded.rot90(1, (2, 3)), atol=bound, rtol=0)


def test_strokes_become_wider_or_narrower_by_one_pixel_on_each_side():
    image = torch.zeros(1, 1, 9, 9)
    image[..., 3:6, 2:7] = 255.0
    shown = {
        width: change_widths(image, torch.tensor([width])) for width in (-1.0, -0.5, 0.0, 0.5, 1.0)
    }
    assert torch.equal(shown[0], image)
    for width, rows, columns in ((1, (2, 7), (1, 8)), (-1, (4, 5), (3, 6))):
        expected = torch.zeros_like(image)
        expected[..., slice(*rows), slice(*columns)] = 255.0
        assert torch.equal(shown[width], expected)
        assert torch.equal(shown[width / 2], (image + expected) / 2)  # exact: values 0 and 255


def test_draws_are_rotations_shears_and_stretches_that_follow_from_seed_and_epoch():
    maps, moves, widths = draw_distortions(500, (3, 1), 2.0)
    # R S D with R a rotation, S = [[1, k], [0, 1]] and D = diag(w, 1 / w): the first column is
    # w (cos, sin), and the determinant is 1.
    torch.testing.assert_close(torch.linalg.det(maps), torch.ones(500), atol=1e-6, rtol=0)
    angle, wide = torch.atan2(maps[:, 1, 0], maps[:, 0, 0]), maps[:, :, 0].norm(dim=1)
    turn = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), 1).view(-1, 2, 2)
    shear = (turn.mT @ maps)[:, 0, 1] * wide
    for found, limit in (
        (angle, 2 * ROTATION), (shear, 0.4), (wide.log(), 0.24), (widths, 0.8)
    ):  # fmt: skip
        assert found.abs().max() <= limit * (1 + 1e-5)
        # 500 uniform numbers: the largest is below 0.97 of the limit with probability 2e-7.
        assert found.abs().max() > 0.97 * limit and found.min() < 0 < found.max()
    assert 0.99 * 2 * ELASTIC < moves.abs().max() <= 2 * ELASTIC * (1 + 1e-6)
    again, fewer, most = (
        draw_distortions.__wrapped__(count, (3, 1), strength)
        for count, strength in ((500, 2.0), (20, 2.0), (500, 4.0))
    )
    for whole, same, part in zip((maps, moves, widths), again, fewer, strict=True):
        assert torch.equal(same, whole) and torch.equal(part, whole[:20])
    assert torch.equal(most.moves, 2 * moves) and most.widths.abs().max() == 1
    for other in ((3, 2), (1, 3)):
        assert not torch.equal(draw_distortions(500, other, 2.0).moves, moves)


def moments(frames):
    """Centroid (N, 2) and covariance (N, 2, 2) of frames, about the centre of the frame."""
    values = (torch.tan(frames[:, 0].double() * (math.pi / 2)) / 0.02).flatten(1)
    mass = values - values.amin(1, keepdim=True)
    mass = mass / mass.sum(1, keepdim=True)
    line = torch.arange(frames.shape[-1]) + 0.5 - frames.shape[-1] / 2
    places = torch.cartesian_prod(line, line).double()
    centroid = mass @ places
    spread = torch.einsum("np,pi,pj->nij", mass, places, places)
    return centroid, spread - centroid[:, :, None] * centroid[:, None]


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_distortion_commutes_with_scale(factor):
    # Rescaling by a whole factor keeps the centroid and the covariance of an image, in units of the
    # scale: the first and second moments of Keys' kernel are 0, and the variance of the smoothing
    # is (7/8 scale)^2. So an object of scale 2 must move twice as many pixels as one of scale 1.
    images, indices = blobs(20), torch.arange(20)
    undistorted, *shown = (
        rescaling(tiny(distortions=strength, size=120), torch.full((20,), scale))
        for strength, scale in ((0.0, 1.0), (1.0, 1.0), (1.0, factor))
    )
    (one, spread), (other, wider) = (moments(f(images, indices, (0, 4))) for f in shown)
    # Blobs end at the edge of the image, 11 pixels or more from their centre, where the overshoot
    # of the kernel, 1/8 of the value, is clipped: at most 112 pixels, 18 pixels from the centre.
    clipped = math.exp(-((11 / SIGMA) ** 2) / 2) / 8 * 112 / (2 * math.pi * SIGMA**2)
    torch.testing.assert_close(other / factor, one, atol=18 * clipped, rtol=0)
    torch.testing.assert_close(wider / factor**2, spread, atol=18**2 * clipped, rtol=0)
    start, _ = moments(undistorted(images, indices, (0, 4)))
    assert (one - start).norm(dim=1).median() > 100 * 18 * clipped  # the blobs have moved


@pytest.mark.parametrize("model", [MODEL, PLAIN], ids=["channels", "cnn"])
def test_resident_images_are_distorted_anew_in_each_epoch_and_as_streamed_ones(model):
    changes = {"zooms": (0.5, 2.0)} if model is MODEL else {}
    config, order = tiny(distortions=1.0, samples=40, model=model, **changes), torch.randperm(40)
    resident, streamed = (
        open_batches(config, "train", model.build(), CPU, stream, load_source)
        for stream in (False, True)
    )
    epochs = []
    for epoch in (0, 1, 0):
        assert_same_batches(*(batches(order, 16, (0, epoch)) for batches in (resident, streamed)))
        epochs.append(resident.resident.images.inputs[0].clone())
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])


@pytest.mark.parametrize("split", ["train", "val"])
def test_strength_0_and_validation_leave_every_bit_of_the_images(split):
    strength = 0.0 if split == "train" else 1.0
    shown = [
        next(open_batches(config, split, PLAIN.build(), CPU, True, load_source)(torch.arange(8), 8))
        for config in (tiny(model=PLAIN), tiny(model=PLAIN, distortions=strength))
    ]
    assert torch.equal(*(batch.images.inputs[0] for batch in shown))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distortions": -0.5}, "must be 0 to 4, got -0.5"),
        ({"distortions": 4.5}, "must be 0 to 4, got 4.5"),
        ({"distortions": math.nan}, "distortions must be"),
        ({"distortions": 1.0, "recipe": Recipe(name="photo")}, "not apply to the recipe photo"),
        ({"distortions": 1.0, "recipe": Recipe(name="mirrored")}, "not apply to the recipe mirr"),
    ],
)
def test_distortions_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)
