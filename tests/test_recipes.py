"""Recipes: how a picture becomes what a network sees, and how a run keeps that."""

import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from photo_runs import PHOTOGRAPHS
from PIL import Image

from foveate.data.decoding import is_colour, read_picture, read_size
from foveate.data.recipes import MAX_PIXELS, Recipe
from foveate.errors import ConfigError, DataError
from foveate.training.config import TrainConfig

PHOTO = Recipe(name="photo", base=48)


def pixels(path):
    return torch.from_numpy(np.array(read_picture(path))).permute(2, 0, 1)


def undone(image):
    """The values from 0 to 1 before normalisation."""
    mean, std = (torch.tensor(v)[:, None, None] for v in (PHOTO.mean, PHOTO.std))
    return image * std + mean


@pytest.mark.parametrize(
    "path", sorted(PHOTOGRAPHS.glob("test/*/*.jpg")), ids=lambda p: p.parts[-2]
)
def test_photo_resizes_the_short_side_and_normalises(path):
    picture = pixels(path)
    height, width = picture.shape[1:]
    scale = PHOTO.base / min(height, width)
    size = [int(side * scale + 1e-6) for side in (height, width)]
    expected = F.interpolate(picture[None].float(), size, mode="bilinear", antialias=True)[0] / 255
    found = PHOTO.transform()(picture)
    assert found.shape == (3, *size) and found.dtype == torch.float32
    # 8-bit resampling rounds to a whole grey value after each axis: 1/2 and 1/2; a quarter is for
    # the rounding of its weights to 16 bits.
    torch.testing.assert_close(undone(found), expected, atol=1.25 / 255, rtol=0)


def test_values_are_normalised_by_channel():
    recipe = Recipe(name="photo", base=4, mean=(0.0, 0.5, 1.0), std=(1.0, 2.0, 4.0))
    found = recipe.transform()(torch.full((3, 4, 6), 51, dtype=torch.uint8))
    expected = torch.tensor([0.2, (0.2 - 0.5) / 2, (0.2 - 1) / 4])[:, None, None].expand(3, 4, 6)
    torch.testing.assert_close(found, expected)


def test_the_memory_layout_of_an_image_changes_no_bits():
    mean, std = PHOTO.mean, PHOTO.std
    decoded = torch.randint(256, (33, 57, 3), dtype=torch.uint8).permute(2, 0, 1)
    planes = decoded.contiguous()
    factor = 1 / (255 * torch.tensor(std))[:, None, None]
    expected = planes.float() * factor - (torch.tensor(mean) / torch.tensor(std))[:, None, None]
    for picture in (decoded, planes, planes[None]):
        found = PHOTO.normalise(picture)
        assert found.is_contiguous() and found.dtype == torch.float32
        assert torch.equal(found, expected.expand_as(found))


@pytest.mark.parametrize("shape", [(48, 240), (240, 48), (30, 31), (96, 500)])
def test_nothing_is_cropped(shape):
    picture = torch.full((3, *shape), 128, dtype=torch.uint8)
    corners = [(0, 0), (0, -1), (-1, 0), (-1, -1)]
    for value, (y, x) in enumerate(corners):  # a sixth of the picture, to outlast the filter
        high, wide = shape[0] // 6, shape[1] // 6
        rows = slice(0, high) if y == 0 else slice(-high, None)
        columns = slice(0, wide) if x == 0 else slice(-wide, None)
        picture[:, rows, columns] = 60 * value
    found = undone(PHOTO.transform()(picture)) * 255
    assert min(found.shape[1:]) == 48
    assert max(found.shape[1:]) == int(48 * max(shape) / min(shape))
    for value, (y, x) in enumerate(corners):
        assert float(found[0, y, x]) == pytest.approx(60 * value, abs=1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    ways = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180)
    ways += (Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.TRANSPOSE)
    ways += (Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_270)
    upright = Image.open(next(PHOTOGRAPHS.glob("train/shoes/*.jpg"))).convert("RGB")
    stored = upright if orientation == 1 else upright.transpose(ways[orientation - 2])
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "turned.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    found, expected = (pixels(tmp_path / f"{name}.png") for name in ("turned", "upright"))
    assert torch.equal(PHOTO.transform()(found), PHOTO.transform()(expected))
    for kind in ("png", "jpg", "tif", "webp"):
        stored.save(tmp_path / f"turned.{kind}", exif=exif)
        assert read_size(tmp_path / f"turned.{kind}") == (upright.height, upright.width)
    for mode in ("L", "RGBA", "CMYK"):
        stored.convert(mode).save(tmp_path / "turned.tif", exif=exif)
        upright.convert(mode).save(tmp_path / "upright.tif")
        found, expected = (pixels(tmp_path / f"{name}.tif") for name in ("turned", "upright"))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16", "P", "PA", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    colour = Image.open(next(PHOTOGRAPHS.glob("train/hat/*.jpg"))).convert("RGB")
    suffix = "tif" if mode in ("CMYK", "PA") else "png"
    path = tmp_path / f"picture.{suffix}"
    if mode == "I;16":
        Image.fromarray(np.asarray(colour.convert("L")).astype(np.uint16) << 8).save(path)
    else:
        colour.convert(mode).save(path)
    found = PHOTO.transform()(pixels(path))
    assert found.shape[0] == 3
    grey = mode in ("1", "L", "LA", "I;16")
    values = undone(found)
    same = torch.allclose(values[0], values[1], atol=1e-6)
    assert same == grey
    assert is_colour(path) != grey
    if mode in ("RGBA", "CMYK"):  # nothing is lost
        assert torch.equal(pixels(path), torch.from_numpy(np.array(colour)).permute(2, 0, 1))


@pytest.mark.parametrize(("base", "share"), [(1, 1.0), (2, 1 / 8)])
def test_an_image_can_become_one_pixel(base, share):
    """Torch failed with an internal assertion for images whose colour planes are contiguous."""
    colour = torch.tensor([10, 100, 200], dtype=torch.uint8)[:, None, None]
    for planes in (colour.repeat(1, 8, 7), colour[:1].expand(1, 8, 7)):
        shown = Recipe(name="photo", base=base).resize(share=share)(planes)
        assert torch.equal(shown, planes[:, :1, :1].expand(3, base, base))


def test_flips_are_exact_and_as_frequent_as_said():
    picture = pixels(next(PHOTOGRAPHS.glob("train/pants/*.jpg")))
    plain, mirrored = PHOTO.resize()(picture), PHOTO.resize()(picture).flip(-1)
    torch.manual_seed(0)
    augment, flipped = PHOTO.resize(training=True), 0
    for _ in range(400):
        found = augment(picture)
        flipped += torch.equal(found, mirrored)
        assert torch.equal(found, mirrored) or torch.equal(found, plain)
    assert abs(flipped - 200) < 40  # four standard deviations of 400 fair coins
    never = Recipe(name="photo", base=48, flip=False).resize(training=True)
    assert all(torch.equal(never(picture), plain) for _ in range(20))


def test_sizes_are_drawn_log_uniformly():
    resize = Recipe(name="photo", base=32, flip=False, sizes=(0.25, 4)).resize(training=True)
    picture = pixels(next(PHOTOGRAPHS.glob("train/pants/*.jpg")))
    torch.manual_seed(0)
    octaves = torch.tensor([min(resize(picture).shape[1:]) / 32 for _ in range(400)]).log2()
    # Uniform over 4 octaves: a standard deviation of 4 / sqrt(12), and sides in whole pixels.
    assert -2 <= octaves.min() < -1.8 and 1.9 < octaves.max() <= 2
    assert abs(float(octaves.mean())) < 4 * (4 / 12**0.5) / 20
    assert abs(float(octaves.std()) - 4 / 12**0.5) < 0.1
    assert min(Recipe(name="photo", base=32, sizes=(0.25, 4)).transform()(picture).shape[1:]) == 32


def test_every_other_picture_loses_resolution():
    """What is left of a checkerboard of single pixels tells how far a picture was reduced."""
    board = (torch.arange(64)[:, None] + torch.arange(64)) % 2 * 255
    picture = board.expand(3, -1, -1).to(torch.uint8)
    recipe = Recipe(name="photo", base=64, flip=False, resolution=0.25)
    torch.manual_seed(0)
    spread = torch.tensor([float(recipe.resize(True)(picture).float().std()) for _ in range(400)])
    untouched = spread > 127
    assert abs(int(untouched.sum()) - 200) < 40  # four standard deviations of 400 fair coins
    assert (spread[~untouched] < 100).float().mean() > 0.9
    assert torch.equal(recipe.resize()(picture), picture)


def test_colours_change_in_training_alone():
    picture = pixels(next(PHOTOGRAPHS.glob("train/pants/*.jpg")))
    recipe = Recipe(name="photo", base=48, flip=False, colour=0.4)
    torch.manual_seed(0)
    means = torch.stack([recipe.resize(True)(picture).float().mean((1, 2)) for _ in range(20)])
    assert means.std(0).min() > 5
    assert torch.equal(recipe.resize()(picture), PHOTO.resize()(picture))


def test_shifts_are_uniform_on_both_axes():
    torch.manual_seed(0)
    drawn = torch.stack([Recipe(name="photo", shift=5.0).draw_shift() for _ in range(2000)])
    assert float(drawn.abs().max()) <= 5
    assert drawn.abs().max(0).values.min() > 4.9
    # The mean of 2000 draws of variance 25/3 has a standard deviation of 0.065.
    assert float(drawn.mean(0).abs().max()) < 4 * 0.065
    assert abs(float((drawn[:, 0] * drawn[:, 1]).mean())) < 4 * 25 / 3 / 2000**0.5


def test_a_picture_too_narrow_for_its_base_is_refused():
    narrow = torch.zeros(3, 1, 5000, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"has 5000x1 pixels: with a short side of 224 .* 1120000"):
        Recipe(name="photo").transform()(narrow)
    limit = MAX_PIXELS // 64**2
    fits = torch.zeros(1, 2, 2 * limit, dtype=torch.uint8)
    assert Recipe(name="photo", base=64).transform()(fits).shape == (3, 64, 64 * limit)


def test_torchvision_is_needed_only_for_photographs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    with pytest.raises(ConfigError, match=r"needs torchvision .*pip install 'foveate\[photos\]'"):
        PHOTO.transform()
    with pytest.raises(ConfigError, match="has no transform"):
        Recipe().transform()


def test_a_config_keeps_its_recipe_and_old_ones_load():
    old = TrainConfig()
    assert "recipe" not in old.to_dict()  # so that digests of earlier runs stay as they are
    assert TrainConfig.from_dict(old.to_dict()) == old
    changes = {"recipe": "photo", "recipe.base": "64", "recipe.mean": "[0, 0.5, 1]"}
    config = old.changed({**changes, "recipe.flip": "false", "recipe.shift": "4"})
    expected = Recipe(name="photo", base=64, mean=(0.0, 0.5, 1.0), flip=False, shift=4.0)
    assert config.recipe == expected
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.digest() != old.digest()
    assert old.changed({"recipe.base": "64"}).recipe == Recipe(name="photo", base=64)
    explicit = old.changed({"recipe": "mnist-large-scale"})
    assert TrainConfig.from_dict(explicit.to_dict()) == explicit


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("recipe", "photos", "unknown recipe 'photos'; use one of mnist-large-scale, photo"),
        ("recipe.base", "0", "recipe.base must be 1 to 4096"),
        ("recipe.base", "5000", "recipe.base must be 1 to 4096"),
        ("recipe.base", "2.5", "base must be a value such as 224"),
        ("recipe.mean", "[1, 2]", "recipe.mean must have 3 values"),
        ("recipe.mean", "[1, 2, true]", "mean must be a value such as"),
        ("recipe.std", "[0, 1, 1]", "recipe.std must be above 0"),
        ("recipe.std", "[NaN, 1, 1]", "std must be a value such as"),
        ("recipe.shift", "-1", "recipe.shift must be 0 to 4096"),
        ("recipe.crop", "1", "cannot set 'crop'; use one of base, colour"),
    ],
)
def test_bad_settings_are_one_line(key, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        TrainConfig().changed({"recipe": "photo", key: text})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [None, [], {"name": "photo", "x": 1}, {"mean": "a"}, {"base": "4"}])
def test_a_config_file_with_a_bad_recipe_is_refused(bad):
    with pytest.raises(ConfigError):
        TrainConfig.from_dict({"recipe": bad})
