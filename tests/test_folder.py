"""Folders of pictures: splits, formats, and what goes wrong."""

import hashlib
import shutil

import numpy as np
import pytest
from made_sources import error_of
from PIL import Image

from foveate.data.pictures import PictureFolder, list_pictures, split_fraction
from foveate.data.sources import load_source
from foveate.errors import DataError


def save(path, pixels, **options):
    """Save an array, or a number as a grey picture of that value."""
    if isinstance(pixels, int):
        pixels = np.full((4, 6), pixels, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)


def share(text):
    """The documented rule: the first 48 bits of the sha256 of class/file, as a fraction."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 2**48


def values(split):
    return split.images[:, 0, 0, 0].tolist()


def test_a_hash_of_the_name_decides_the_split_and_classes_take_turns(tmp_path):
    expected = {"train": [], "val": [], "test": []}
    for label, (name, count) in enumerate([("ant", 10), ("cat", 30)]):
        for value in range(count):
            save(tmp_path / name / f"{value:02}.png", 100 * label + value)
            at = share(f"{name}/{value:02}.png")
            split = "test" if at < 0.2 else "val" if at < 0.3 else "train"
            expected[split].append(100 * label + value)
    source = load_source(f"folder:{tmp_path}")
    assert source.classes == ("ant", "cat")
    for split, found in expected.items():
        assert sorted(values(getattr(source, split))) == found
        assert [v >= 100 for v in values(getattr(source, split))] == getattr(
            source, split
        ).labels.tolist()
    ants = [v for v in expected["train"] if v < 100]
    turns = [v for pair in zip(ants, expected["train"][len(ants) :], strict=False) for v in pair]
    assert len(ants) > 3 and values(source.train)[: len(turns)] == turns


def near(label, bound):
    """Two file names whose fractions lie just below and just above a bound."""
    names = sorted((f"{n}.png" for n in range(3000)), key=lambda name: share(f"{label}/{name}"))
    above = next(k for k, name in enumerate(names) if share(f"{label}/{name}") >= bound)
    return names[above - 1], names[above]


def test_the_bounds_are_a_fifth_and_a_tenth_or_a_sixth_of_train(tmp_path):
    for value, name in enumerate((*near("cat", 0.2), *near("cat", 0.3))):
        save(tmp_path / "one" / "cat" / name, value)
    source = load_source(f"folder:{tmp_path / 'one'}")
    assert [set(values(s)) for s in (source.train, source.val, source.test)] == [{3}, {1, 2}, {0}]
    for value, name in enumerate(near("cat", 1 / 6)):
        save(tmp_path / "two" / "train" / "cat" / name, value)
    save(tmp_path / "two" / "test" / "cat" / "0.png", 0)
    source = load_source(f"folder:{tmp_path / 'two'}")
    assert (values(source.val), values(source.train)) == ([0], [1])


def test_adding_and_removing_files_moves_no_other(tmp_path):
    for value in range(60):
        save(tmp_path / "cat" / f"{value:02}.png", value)
    before = load_source(f"folder:{tmp_path}")
    gone = {0, 7, 30, 59}
    for value in gone:
        (tmp_path / "cat" / f"{value:02}.png").unlink()
    for value in range(60, 90):
        save(tmp_path / "cat" / f"0{value}.png", value)
    after = load_source(f"folder:{tmp_path}")
    for split in ("train", "val", "test"):
        kept = set(values(getattr(before, split))) - gone
        assert kept == {v for v in values(getattr(after, split)) if v < 60}


def test_composed_and_decomposed_names_fall_into_the_same_split():
    assert split_fraction("caf\u00e9", "\u00fc.png") == split_fraction("cafe\u0301", "u\u0308.png")
    assert split_fraction("caf\u00e9", "\u00fc.png") == share("caf\u00e9/\u00fc.png")
    assert 0 <= split_fraction("a", "\udcff.png") < 1  # a name that is not UTF-8


def write_splits(folder, counts):
    for split, count in counts.items():
        for label, name in enumerate("ab"):
            for value in range(count):
                save(folder / split / name / f"{value:02}.png", 100 * label + value)


def test_folder_with_train_and_test_takes_val_from_train_by_the_hash(tmp_path):
    write_splits(tmp_path, {"train": 24, "test": 2})
    source = load_source(f"folder:{tmp_path}")
    names = {100 * label + v: f"{c}/{v:02}.png" for label, c in enumerate("ab") for v in range(24)}
    assert {v for v, name in names.items() if share(name) < 1 / 6} == set(values(source.val))
    assert set(values(source.train)) == names.keys() - set(values(source.val))
    assert values(source.test) == [0, 100, 1, 101]


@pytest.mark.parametrize(("name", "other"), [("val", "validation"), ("validation", "val")])
def test_folder_with_all_three_splits(tmp_path, name, other):
    write_splits(tmp_path, {"train": 3, name: 2, "test": 1})
    source = load_source(f"folder:{tmp_path}")
    assert [len(split) for split in (source.train, source.val, source.test)] == [6, 4, 2]
    write_splits(tmp_path, {other: 2})
    assert "test and train and val and validation; its splits" in error_of(f"folder:{tmp_path}")


def test_an_unknown_folder_beside_train_and_test_is_named(tmp_path):
    write_splits(tmp_path, {"train": 12, "test": 1, "vlaidation": 1})
    assert "has test and train and vlaidation; its splits must be" in error_of(f"folder:{tmp_path}")


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_class_that_train_lacks_is_refused_with_the_remedy(tmp_path, split):
    write_splits(tmp_path, {"train": 2, "val": 2, "test": 2})
    save(tmp_path / split / "0zebra" / "0.png", 0)
    message = error_of(f"folder:{tmp_path}")
    assert f"{split} has the class '0zebra', which train does not have; add training" in message


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_may_lack_a_class_of_train(tmp_path, split):
    write_splits(tmp_path, {"train": 2, "val": 2, "test": 2})
    shutil.rmtree(tmp_path / split / "a")  # the first class: the labels of b stay 1
    source = load_source(f"folder:{tmp_path}")
    assert source.classes == ("a", "b")
    assert source.labels(split).tolist() == [1, 1] and len(source.train) == 4
    assert list_pictures(tmp_path, split)[1] == ("a", "b")


def test_train_without_test_is_not_taken_for_a_class(tmp_path):
    write_splits(tmp_path, {"train": 2, "val": 2})
    assert "has train and val; its splits must be train, test" in error_of(f"folder:{tmp_path}")


def one_class(folder, *pictures):
    """A folder with splits that hold exactly these pictures as train, in this order."""
    for index, picture in enumerate(pictures):
        shutil.copytree(picture.parent, folder / "train" / f"c{index}")
        for split in ("val", "test"):
            shutil.copytree(picture.parent, folder / split / f"c{index}")
    return load_source(f"folder:{folder}").train.images


GREY = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], axis=2)


def decoded(tmp_path, extension, pixels, **options):
    """Save a picture, and read it as the only one of a folder: (C, H, W)."""
    path = tmp_path / "raw" / f"x.{extension}"
    save(path, pixels, **options)
    return one_class(tmp_path / "data", path)[0].numpy()


@pytest.mark.parametrize("extension", ["png", "bmp", "gif", "tif", "tiff", "pgm", "PNG"])
def test_grey_pictures_have_one_channel(tmp_path, extension):
    image = Image.fromarray(GREY)
    options = {"format": "PPM"} if extension == "pgm" else {}
    assert np.array_equal(decoded(tmp_path, extension, image, **options), GREY[None])


@pytest.mark.parametrize("extension", ["png", "bmp", "tif", "ppm"])
def test_colour_pictures_have_three_channels_in_the_order_rgb(tmp_path, extension):
    assert np.array_equal(decoded(tmp_path, extension, COLOUR), COLOUR.transpose(2, 0, 1))


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "webp"])
def test_lossy_formats(tmp_path, extension):
    flat = np.broadcast_to(np.array([200, 100, 50], dtype=np.uint8), (4, 6, 3))
    found = decoded(tmp_path, extension, Image.fromarray(flat.copy()), quality=100)
    assert found.shape == (3, 4, 6)
    assert np.abs(found.astype(int) - flat.transpose(2, 0, 1)).max() <= 4  # rounding of YCbCr


def test_one_colour_picture_makes_all_of_them_rgb(tmp_path):
    save(tmp_path / "grey" / "x.png", GREY)
    save(tmp_path / "colour" / "x.png", COLOUR)
    images = one_class(tmp_path / "d", tmp_path / "grey" / "x.png", tmp_path / "colour" / "x.png")
    assert np.array_equal(images[0], np.stack([GREY] * 3))
    assert np.array_equal(images[1], COLOUR.transpose(2, 0, 1))


@pytest.mark.parametrize("extension", ["png", "tif", "pgm"])
def test_16_bit_grey_keeps_its_upper_byte(tmp_path, extension):
    values = np.linspace(0, 65535, 24).astype(np.uint16).reshape(4, 6)
    image = Image.fromarray(values)
    if extension == "pgm":
        path = tmp_path / "raw" / "x.pgm"
        path.parent.mkdir()
        path.write_bytes(b"P5 6 4 65535\n" + values.astype(">u2").tobytes())
        found = one_class(tmp_path / "data", path)[0]
    else:
        found = decoded(tmp_path, extension, image)
    assert np.array_equal(found, (values >> 8)[None])


def test_alpha_is_flattened_over_black(tmp_path):
    alpha = np.array([[0, 51, 102, 153, 204, 255]] * 4, dtype=np.uint8)
    expected = np.round(COLOUR / 255.0 * alpha[..., None]).transpose(2, 0, 1)
    found = decoded(tmp_path, "png", np.dstack([COLOUR, alpha]))
    assert found.shape == (3, 4, 6)
    assert np.abs(found - expected).max() <= 1  # Pillow rounds alpha in steps of its own
    assert found[:, :, 0].max() == 0
    assert np.array_equal(found[:, :, 5], COLOUR.transpose(2, 0, 1)[:, :, 5])


def test_grey_with_alpha_stays_grey(tmp_path):
    alpha = np.array([[0, 0, 0, 255, 255, 255]] * 4, dtype=np.uint8)
    image = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(alpha)])
    assert np.array_equal(decoded(tmp_path, "png", image), np.where(alpha, GREY, 0)[None])


def test_palette_and_its_transparency(tmp_path):
    indices = np.arange(24, dtype=np.uint8).reshape(4, 6) % 3
    image = Image.fromarray(indices)
    image.putpalette([200, 10, 20, 30, 210, 40, 50, 60, 220])
    colours = np.array([[200, 10, 20], [30, 210, 40], [50, 60, 220]])
    expected = colours[indices].transpose(2, 0, 1)
    assert np.array_equal(decoded(tmp_path / "plain", "png", image), expected)
    found = decoded(tmp_path / "clear", "png", image, transparency=b"\x00\xff\xff")
    assert np.array_equal(found, np.where(indices == 0, 0, expected))


def test_cmyk_and_bilevel(tmp_path):
    cmyk = Image.new("CMYK", (6, 4), (0, 255, 255, 0))
    assert (decoded(tmp_path / "cmyk", "tif", cmyk)[:, 0, 0] == (255, 0, 0)).all()
    bits = Image.fromarray(GREY > 100)
    assert np.array_equal(decoded(tmp_path / "bits", "png", bits)[0], (GREY > 100) * 255)


@pytest.mark.parametrize("values", [GREY, GREY.astype(np.uint16) << 8])
def test_exif_orientation_is_applied(tmp_path, values):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    found = decoded(tmp_path, "png", Image.fromarray(values), exif=exif)
    assert np.array_equal(found[0], np.rot90(GREY, -1))


def test_first_frame_of_an_animation(tmp_path):
    frames = [Image.fromarray(np.full((4, 6), value, dtype=np.uint8)) for value in (10, 200)]
    found = decoded(tmp_path, "gif", frames[0], save_all=True, append_images=frames[1:])
    assert (found == 10).all()


def test_hidden_and_other_files_are_ignored(tmp_path):
    write_splits(tmp_path, {"train": 6, "test": 1})
    before = load_source(f"folder:{tmp_path}")
    for name in ("notes.txt", ".x.png", "._00.png", "Thumbs.db", "LICENSE"):
        (tmp_path / "train" / "a" / name).write_bytes(b"not a picture")
    for name in (".git", "__pycache__", "__MACOSX"):
        (tmp_path / "train" / name).mkdir()
    (tmp_path / "train" / "a" / "nested.png").mkdir()
    (tmp_path / "README.png").write_bytes(b"beside the classes")
    assert load_source(f"folder:{tmp_path}").checksum == before.checksum


def test_missing_folder_and_not_a_folder(tmp_path):
    with pytest.raises(DataError, match="nowhere: No such file or directory; check the path"):
        list_pictures(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "file: Not a directory; check the path" in error_of(f"folder:{tmp_path / 'file'}")


def test_folder_without_classes_or_images(tmp_path):
    save(tmp_path / "x.png", 0)
    assert "no class subfolders" in error_of(f"folder:{tmp_path}")
    (tmp_path / "bird").mkdir()
    message = error_of(f"folder:{tmp_path}")
    assert "'bird'" in message
    assert "no images" in message


def test_an_empty_split_or_a_class_without_training_images_is_refused(tmp_path):
    names = [f"{value}.png" for value in range(40)]
    train = [name for name in names if share(f"cat/{name}") >= 0.3]
    test = [name for name in names if share(f"cat/{name}") < 0.2]
    val = [name for name in names if 0.2 <= share(f"cat/{name}") < 0.3]
    for name in (*train[:3], test[0]):
        save(tmp_path / "cat" / name, 1)
    message = error_of(f"folder:{tmp_path}")
    assert "leaves val without images; add images, or create the subfolders" in message
    save(tmp_path / "cat" / val[0], 1)
    assert len(load_source(f"folder:{tmp_path}").val) == 1
    save(tmp_path / "dog" / next(n for n in names if share(f"dog/{n}") < 0.2), 1)
    assert "leaves class 'dog' of train without images" in error_of(f"folder:{tmp_path}")
    write_splits(tmp_path / "split", {"train": 1, "test": 1})
    assert "leaves val without images" in error_of(f"folder:{tmp_path / 'split'}")


def test_mixed_sizes_name_two_files_and_their_sizes(tmp_path):
    write_splits(tmp_path, {"train": 6, "test": 1})
    save(tmp_path / "train" / "b" / "03.png", np.zeros((5, 7), dtype=np.uint8))
    message = error_of(f"folder:{tmp_path}")
    for part in ("00.png has (1, 4, 6)", "03.png has shape (1, 5, 7)", "resize"):
        assert part in message


@pytest.mark.parametrize("extension", ["png", "jpg", "bmp", "tif"])
def test_truncated_image_is_named(tmp_path, extension):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    path = tmp_path / "raw" / f"x.{extension}"
    save(path, noise)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"cannot read image .*x\.{extension}"):
        one_class(tmp_path / "data", path)


def test_text_under_an_image_name_and_dangling_links_are_named(tmp_path):
    write_splits(tmp_path, {"train": 6, "test": 1})
    path = tmp_path / "test" / "a" / "zz.jpg"
    path.write_text("not an image")
    assert "zz.jpg" in error_of(f"folder:{tmp_path}")
    path.unlink()
    path.symlink_to(tmp_path / "gone.jpg")
    assert "zz.jpg" in error_of(f"folder:{tmp_path}")


@pytest.mark.parametrize("limit", [20, 10])  # Pillow warns above the limit, raises above twice it
def test_decompression_bomb(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=rf"x\.png has more than {limit} pixels"):
        decoded(tmp_path, "png", GREY)


def test_pixels_without_a_known_range_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"x\.tif has floating-point"):
        decoded(tmp_path / "float", "tif", GREY.astype(np.float32))
    with pytest.raises(DataError, match=r"x\.tif has pixels of more than 16 bits"):
        decoded(tmp_path / "long", "tif", GREY.astype(np.int32) << 16)


@pytest.mark.parametrize("known", ["train", "val", "test"])
def test_an_unknown_split_is_named_with_those_that_are_allowed(tmp_path, known):
    for name in (f"{known}/cat", f"{known}/dog", "dev/cat", "dev/dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    with pytest.raises(DataError) as caught:
        PictureFolder(tmp_path)
    said = str(caught.value)
    assert f"{tmp_path} has {known} and dev; its" in said
    assert "its splits must be train, test and optionally val" in said and "\n" not in said


def test_classes_may_be_called_train_and_dev(tmp_path):
    for name in ("train", "dev"):
        (tmp_path / name).mkdir()
        for number in range(20):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    assert PictureFolder(tmp_path).classes == ("dev", "train")
