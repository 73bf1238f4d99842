"""How an audit shows pictures: the conventions of the zoom, the frame, and what is left out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from made_images import random_images
from PIL import Image

from foveate.data.large_scale import BACKGROUND, rescale
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.audited_images import open_images
from foveate.evaluation.audit.images import GREY, Transform, reduce_resolution, zoom

BORDERS = ("replicate", "reflect", 0.25)


def bump(size, sigma, centre=0.0):
    """A Gaussian about the middle of the image, at the pixels' centres, in float64."""
    x = torch.arange(size, dtype=torch.float64) + 0.5 - size / 2 - centre
    line = torch.exp(-(x**2) / (2 * sigma**2))
    return (line[:, None] * line)[None, None]


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("shape", [(7, 8), (1, 1), (5, 2)])
def test_factor_one_is_the_identity(border, shape):
    images = random_images(2, 3, *shape)
    torch.testing.assert_close(zoom(images, 1.0, border=border), images, rtol=0, atol=1e-6)


@given(
    st.floats(0.1, 6), st.tuples(st.integers(1, 20), st.integers(1, 20)), st.sampled_from(BORDERS)
)
def test_a_constant_image_stays_what_it_is(factor, size, border):
    value = border if isinstance(border, float) else -3.0
    image = torch.full((1, 1, 9, 6), value)
    torch.testing.assert_close(
        zoom(image, factor, size, border), torch.full((1, 1, *size), value), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("factor", [0.25, 1 / 3, 0.5, 1.0, 1.5, 2.0, 3.3])
@pytest.mark.parametrize("size", [48, 49])
def test_a_zoomed_bump_is_a_larger_bump(factor, size):
    """Keys' kernel reproduces parabolas, so its error is the cubic rest of Taylor's formula.

    On an axis that is |f'''| / 6 times the sum of |weight| |distance|^3, at most 9/16 of the cube
    of the kernel's width; |f'''| of a Gaussian is below 1.4 / sigma^3. The second axis multiplies
    the error of the first by at most 5/4, the sum of |weight|.
    """
    sigma = 6.0
    found = zoom(bump(73, sigma), factor, (size, size))  # its top is a pixel, so nothing is cut
    bound = 9 / 16 / 6 * 1.4 * (max(1.0, 1 / factor) / sigma) ** 3 * (1 + 5 / 4)
    torch.testing.assert_close(found, bump(size, sigma * factor), rtol=0, atol=bound)
    half_a_pixel_off = bump(size, sigma * factor, centre=0.5)
    assert (found - half_a_pixel_off).abs().max() > 2 * bound


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0])
def test_it_is_what_torch_calls_antialiased_bicubic(factor):
    """Another hand's implementation of the same kernel, where no border comes in."""
    images = random_images(1, 2, 64, 64, dtype=torch.float64)
    theirs = F.interpolate(images, scale_factor=factor, mode="bicubic", antialias=True)
    inner = round(64 * factor) - 8
    mine = zoom(images, factor, (inner, inner))
    theirs = theirs[..., 4:-4, 4:-4].clamp(images.min(), images.max())
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


def test_what_is_too_fine_for_the_frame_is_averaged_away():
    stripes = (torch.arange(64) % 2).float().expand(1, 1, 64, 64)
    shrunk = zoom(stripes, 0.5, (24, 24))
    assert (shrunk - 0.5).abs().max() < 0.01
    assert zoom(stripes, 1.0).std() > 0.4


def test_rows_and_columns_are_not_mixed_up():
    image = torch.zeros(1, 1, 5, 7)
    image[..., 1, 5] = 1
    found = zoom(image, 2.0, (11, 15))
    assert divmod(int(found.argmax()), 15) == (
        3,
        11,
    )  # from the centre (2, 3) to (5, 7), twice as far
    image = random_images(1, 1, 6, 9)
    torch.testing.assert_close(zoom(image, 1.7).mT, zoom(image.mT.contiguous(), 1.7))


@pytest.mark.parametrize(("border", "mode"), [("replicate", "edge"), ("reflect", "reflect")])
def test_beyond_the_image_it_goes_on_as_said(border, mode):
    image = random_images(1, 1, 6, 5)
    frame = zoom(image, 1.0, (26, 31), border)
    wide = np.pad(image[0, 0].numpy(), ((10, 10), (13, 13)), mode=mode)
    np.testing.assert_allclose(frame[0, 0].numpy(), wide, atol=1e-6)


def test_beyond_the_image_there_may_be_a_number():
    image = random_images(1, 2, 6, 5)
    frame = zoom(image, 1.0, (10, 11), border=4.0)
    expected = F.pad(image, (3, 3, 2, 2), value=4.0)
    torch.testing.assert_close(frame, expected, rtol=0, atol=1e-6)


def test_beyond_the_image_there_may_be_a_colour():
    image = random_images(1, 3, 6, 5)
    frame = zoom(image, 1.0, (10, 11), border=(0.0, 0.5, 4.0))
    expected = [F.pad(image[:, c], (3, 3, 2, 2), value=v) for c, v in enumerate((0.0, 0.5, 4.0))]
    torch.testing.assert_close(frame, torch.stack(expected, 1), rtol=0, atol=1e-6)


# Less resolution


def wave(period, size=64):
    """Stripes of this period about 1/2, the same in every row, with no pixel at a zero."""
    x = torch.arange(size, dtype=torch.float64) + 0.5 - size / 2
    return (0.5 + 0.4 * torch.cos(2 * torch.pi * x / period + 0.8)).expand(1, 1, size, size)


@given(st.floats(0.0625, 1), st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_less_resolution_leaves_a_constant_image_and_its_size(scale, size):
    image = torch.full((1, 2, *size), 0.3)
    torch.testing.assert_close(reduce_resolution(image, scale), image, rtol=0, atol=1e-5)


def test_all_the_resolution_is_the_identity():
    images = random_images(2, 3, 7, 8)
    torch.testing.assert_close(reduce_resolution(images, 1.0), images, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 0.25])
def test_less_resolution_keeps_what_is_coarse_in_its_place_and_removes_what_is_fine(scale):
    """Nyquist's period is 2 / scale: half of it is gone, eight times it stays; the mean stays.

    Keys' kernel of width w changes a wave of period p w by at most the cubic rest of Taylor's
    formula, 9/16/6 (2 pi / p)^3 of its amplitude; the second of two steps multiplies the first
    error by up to 5/4. Here p = 16. A crest between two of the fewer pixels, at most half a
    pixel from one, is clamped to it.
    """
    nyquist = 2 / scale
    coarse, fine = wave(8 * nyquist), wave(nyquist / 2)
    rest = 9 / 16 / 6 * (2 * torch.pi / 16) ** 3
    bound = 0.4 * ((1 + 5 / 4) * rest + 1 - math.cos(torch.pi / 16))
    inner = slice(16, -16)  # away from the border, which repeats
    found = reduce_resolution(coarse, scale)
    torch.testing.assert_close(found[..., inner], coarse[..., inner], rtol=0, atol=bound)
    assert (reduce_resolution(fine, scale)[..., inner] - 0.5).abs().max() < 0.004
    assert fine[..., inner].std() > 0.2
    for image in (coarse, fine):
        kept = reduce_resolution(image, scale)[..., inner].mean()
        assert kept == pytest.approx(float(image[..., inner].mean()), abs=0.004)


def test_there_is_no_more_resolution_than_there_is():
    with pytest.raises(ConfigError, match=r"at most 1, got 1.5; use scales such as 0.125:1:2"):
        reduce_resolution(random_images(1, 1, 4, 4), 1.5)


def test_no_value_leaves_the_range_of_the_image():
    image = torch.zeros(2, 1, 8, 8)
    image[0, :, :, 4:] = 1  # an edge, at which a cubic kernel overshoots
    image[1, :, :, 4:] = 9
    found = zoom(image, 3.0)
    assert found.amin() == 0
    assert found[0].amax() == 1 and found[1].amax() == 9


# The transform


def picture(channels, height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (channels, height, width)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def test_a_picture_fills_the_frame_from_its_own_pixels_and_its_excess_is_cut_off():
    tall = picture(3, 40, 20)
    shown = Transform(size=(10, 10))([tall], 1.0)
    torch.testing.assert_close(shown, zoom(tall[None] / 255, 0.5, (10, 10)))
    torch.testing.assert_close(
        shown, zoom(tall[None, :, 5:-5] / 255, 0.5, (10, 10)), atol=0.1, rtol=0
    )
    larger = Transform(size=(10, 10))([tall], 2.0)
    torch.testing.assert_close(larger, (tall[None, :, 15:-15, 5:-5] / 255))


def test_a_whole_picture_lies_inside_of_the_frame():
    tall = picture(3, 40, 20)
    shown = Transform(size=(10, 10), fit="inside", border=(0.0, 0.5, 1.0))([tall])
    torch.testing.assert_close(shown, zoom(tall[None] / 255, 0.25, (10, 10), (0.0, 0.5, 1.0)))
    colour = torch.tensor([0.0, 0.5, 1.0])
    torch.testing.assert_close(shown[0, :, 5, 0], colour)
    torch.testing.assert_close(shown[0, :, 5, 9], colour)
    assert (shown[0, 0, :, 5] > 0.1).all()  # from its top to its bottom


def test_what_is_cropped_is_known():
    fill, inside = (Transform(size=(10, 10), fit=fit) for fit in ("fill", "inside"))
    assert fill.cropped_share(40, 20) == fill.cropped_share(20, 40) == pytest.approx(0.5)
    assert fill.cropped_share(7, 7) == inside.cropped_share(40, 20) == pytest.approx(0)
    assert Transform(size=(10, 20)).cropped_share(20, 40) == pytest.approx(0)
    assert Transform(size=(10, 20)).cropped_share(40, 40) == pytest.approx(0.5)


def test_the_view_resolution_is_less_of_what_is_shown_at_scale_one():
    one = picture(3, 30, 20)
    usual = {"size": (12, 12), "mean": (0.1, 0.2, 0.3)}
    shown = Transform(**usual, view="resolution")([one], 0.5)
    full = Transform(size=(12, 12))([one], 1.0)
    means = torch.tensor(usual["mean"])[:, None, None]
    torch.testing.assert_close(shown, reduce_resolution(full, 0.5) - means)


def test_people_see_pixels_without_normalisation():
    one = picture(3, 12, 12)
    transform = Transform(size=(12, 12), mean=(0.1, 0.2, 0.3), std=(0.5,))
    torch.testing.assert_close(transform.show([one]), one[None] / 255)


def test_pictures_of_several_sizes_are_each_shown_as_alone():
    pictures = [picture(3, 12, 16, 1), picture(3, 30, 20, 2), picture(3, 12, 16, 3)]
    transform = Transform(size=(8, 9))
    together = transform(pictures, 0.8)
    alone = torch.cat([transform([one], 0.8) for one in pictures])
    assert together.shape == (3, 3, 8, 9)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    same = transform([pictures[0], pictures[2]], 0.8)
    torch.testing.assert_close(same, alone[[0, 2]], rtol=0, atol=1e-6)


def test_values_are_normalised_after_the_zoom():
    one = picture(3, 8, 8)
    transform = Transform(size=(8, 8), mean=(0.1, 0.2, 0.3), std=(0.5,), border=0.0)
    shown, plain = transform([one], 0.25), Transform(size=(8, 8), border=0.0)([one], 0.25)
    means = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    torch.testing.assert_close(shown, (plain - means) / 0.5)
    assert plain[0, 0, 0, 0] == 0  # the border is in pixels of 0 to 1, not in normalised ones


def test_grey_and_colour_become_what_the_model_takes():
    grey, colour = picture(1, 6, 6), picture(3, 6, 6)
    wide = Transform(size=(6, 6), channels=3)([grey], 1.0)
    torch.testing.assert_close(wide, (grey / 255).expand(1, 3, 6, 6))
    narrow = Transform(size=(6, 6), channels=1)([colour], 1.0)
    theirs = np.asarray(Image.fromarray(colour.movedim(0, -1).numpy()).convert("L"))
    np.testing.assert_allclose(255 * narrow[0, 0].numpy(), theirs, atol=1)  # PIL rounds
    assert sum(GREY) == pytest.approx(1)


def test_the_recipe_large_scale_is_the_data_sets():
    digit = picture(1, 28, 28)
    transform = Transform(size=(40, 40), channels=1, recipe="mnist-large-scale", border="zero")
    torch.testing.assert_close(
        transform([digit], 2.0), rescale(digit[None], 2.0, size=40, border="zero")
    )
    shown = transform.show([digit], 2.0)  # the values of all images, and not of each, become 0 to 1
    torch.testing.assert_close(BACKGROUND * (1 - 2 * shown), transform([digit], 2.0))


def test_transforms_that_cannot_be_are_refused():
    usual = Transform(size=(8, 8))
    cases = {
        "size must be at least 1": {"size": (0, 8)},
        "the model must take 1 or 3 image channels, got 4": {"channels": 4},
        "mean must be one number or one per channel \\(3\\), got 2": {"mean": (0.0, 1.0)},
        "std must be above 0": {"std": (0.0,)},
        "border must be replicate, reflect, a number or .*, got 'zero'": {"border": "zero"},
        "one number per channel, got nan": {"border": float("nan")},
        "recipe must be one of frame, mirrored, mnist-large-scale, got 'other'": {
            "recipe": "other"
        },
        "border must be one of replicate": {"recipe": "mnist-large-scale", "border": "around"},
        "border must be one number or one per channel \\(3\\), got 2": {"border": (0.1, 0.2)},
        "fit must be one of fill, inside, got 'in'": {"fit": "in"},
        "view must be one of zoom, resolution, got 'far'": {"view": "far"},
        "fit and view require the recipe frame": {"recipe": "mnist-large-scale", "fit": "inside"},
        "requires a square size": {"recipe": "mnist-large-scale", "size": (8, 9)},
        "the recipe mirrored has no border": {"recipe": "mirrored", "border": "reflect"},
    }
    for words, changes in cases.items():
        with pytest.raises(ConfigError, match=words):
            replace(usual, **changes)


# The pictures


def save(path, value, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(size, value, dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Three cats, two dogs, and in between files that are no pictures."""
    for index in range(3):
        save(tmp_path / "cat" / f"{index}.png", 10 * index)
    for index in range(2):
        save(tmp_path / "dog" / f"{index}.png", 100 + index, (6, 9))
    (tmp_path / "cat" / "0b.png").write_bytes(b"not a picture")
    (tmp_path / "dog" / "9.jpg").write_bytes(b"")
    return tmp_path


TRANSFORM = Transform(size=(4, 4), channels=1)


def seen(pictures, batch=2):
    """The grey values and labels of all pictures, in their order."""
    batches = list(pictures.batches(TRANSFORM, batch))
    values = [round(255 * v) for show, _ in batches for v in show(1.0)[:, 0, 0, 0].tolist()]
    return values, [label for _, labels in batches for label in labels.tolist()]


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(folder):
    pictures = open_images(f"folder:{folder}", "all")
    assert len(pictures) == 7 and pictures.classes == ("cat", "dog")
    assert seen(pictures) == ([0, 100, 101, 10, 20], [0, 1, 1, 0, 0])
    assert seen(pictures, batch=1) == seen(pictures, batch=50)
    named = sorted(pictures.unreadable.values())
    assert len(named) == 2
    assert "cannot read image" in named[0] and "0b.png" in named[0] and "9.jpg" in named[1]


def test_nothing_to_read_is_an_error(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(b"not a picture")
    pictures = open_images(f"folder:{tmp_path}", "all")
    with pytest.raises(DataError, match=r"none of the 1 images of folder:.* can be read"):
        pictures.first(1)


def test_some_are_the_first_that_can_be_read(folder):
    pictures = open_images(f"folder:{folder}", "all")
    assert [p[0, 0, 0].item() for p in pictures.first(3)] == [0, 100, 101]
    assert len(pictures.first(50)) == 5


def test_a_limit_takes_the_first(folder):
    assert seen(open_images(f"folder:{folder}", "all", limit=2)) == ([0, 100], [0, 1])


def test_the_checksum_is_of_what_was_shown(folder):
    pictures = open_images(f"folder:{folder}", "all")
    seen(pictures)
    first = pictures.checksum
    assert len(first) == 64
    seen(pictures, batch=5)
    assert pictures.checksum == first
    save(folder / "cat" / "0.png", 1)
    seen(pictures)
    assert pictures.checksum != first


def test_the_splits_are_those_of_the_source(tmp_path):
    for index in range(20):
        save(tmp_path / "cat" / f"{index:02}.png", index)
    source, name = load_source(f"folder:{tmp_path}"), f"folder:{tmp_path}"
    for split in ("train", "val", "test"):
        own = getattr(source, split)
        assert seen(open_images(name, split))[0] == own.images[:, 0, 0, 0].tolist()
    assert seen(open_images(name, "all"))[0] == list(range(20))
    digits = load_source("mnist-5k")
    found = open_images("mnist-5k", "val", limit=7)
    assert torch.equal(torch.stack(found.first(7)), digits.val.images[:7])
    assert torch.equal(found.labels, digits.val.labels[:7]) and found.classes == digits.classes
    assert len(open_images("mnist-5k", "all")) == 5000


def test_all_of_a_folder_with_splits_is_all_of_them(tmp_path):
    for split, value in (("train", 1), ("val", 2), ("test", 3)):
        save(tmp_path / split / "cat" / "a.png", value)
    assert seen(open_images(f"folder:{tmp_path}", "all"))[0] == [1, 2, 3]
    assert open_images(f"folder:{tmp_path}").split == "test" == open_images("mnist-5k").split


def test_the_usual_split_of_a_plain_folder_is_all(folder):
    assert open_images(f"folder:{folder}").split == "all"


def test_classes_may_be_named_in_the_order_of_the_model(folder):
    pictures = open_images(f"folder:{folder}", "all", classes=["emu", "dog", "cat"])
    assert pictures.classes == ("emu", "dog", "cat")
    assert seen(pictures) == ([0, 100, 101, 10, 20], [2, 1, 1, 2, 2])


def test_pictures_that_cannot_be_opened_are_said(folder):
    cases = {
        "split must be one of train, val, test, all": {"split": "some"},
        "limit must be at least 1": {"limit": 0},
        "class 'dog', which is not among the 2": {"classes": ["cat", "emu"]},
        "classes must be unique, got 'cat' twice": {"classes": ["cat", "dog", "cat"]},
    }
    for words, options in cases.items():
        with pytest.raises(ConfigError, match=words):
            open_images(f"folder:{folder}", **{"split": "all", **options})
    with pytest.raises(DataError, match="No such file or directory"):
        open_images(f"folder:{folder / 'none'}", "all")
    with pytest.raises(DataError, match="unknown data source"):
        open_images("nothing")
