"""HDF5 files with wrong labels, pixels, shapes or manifests, or that lead to other files."""

import json
import resource

import h5py
import numpy as np
import pytest
import torch

from foveate.data.shards import open_shards
from foveate.data.splits import MAX_CLASSES
from foveate.data.store import ScaledFile
from foveate.errors import DataError

IMAGES = np.zeros((3, 4, 4, 1), np.float32)
LABELS = np.arange(3)


def made(path, images=IMAGES, labels=LABELS, **more):
    with h5py.File(path, "w") as file:
        file["x_train"], file["y_train"] = images, labels
        for name, values in more.items():
            file[name] = values
    return path


def error_of(path, action=ScaledFile):
    """What is said of a file: always one line that names it."""
    with pytest.raises(DataError) as caught:
        action(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 1.5, 2], "label 1 is 1.5"),
        ([0, 1, -1], "label 2 is -1"),
        ([0, np.nan, 1], "label 1 is nan"),
        ([np.inf, 0, 1], "label 0 is inf"),
        ([0, 1, MAX_CLASSES], f"label 2 is {MAX_CLASSES}"),
        (np.array([0, 2**63, 1], np.uint64), f"label 1 is {2**63}"),
        ([1j, 0, 0], "label 0 is 1j"),
        (np.array([b"a", b"b", b"c"]), "label 0 is b'a'"),
        (np.array(["x" * 1000] * 3, dtype=object), "label 0 is b'xxx"),
        (np.array([(1, 2)] * 3, dtype="i4,i4"), "label 0 is (1, 2)"),
    ],
)
def test_labels_that_are_no_classes_are_refused_on_opening(tmp_path, labels, words):
    said = error_of(made(tmp_path / "a.h5", labels=np.asarray(labels)))
    assert f"y_train of {tmp_path / 'a.h5'}: {words}" in said
    assert f"not a whole number from 0 to {MAX_CLASSES - 1}" in said and len(said) < 300


def test_every_real_dtype_of_whole_labels_is_taken(tmp_path):
    for number, dtype in enumerate(("f2", "f4", "f8", "i1", "u8", "i8")):
        path = made(tmp_path / f"{number}.h5", labels=LABELS.astype(dtype))
        assert ScaledFile(path).read("train")[1].tolist() == [0, 1, 2]
    path = made(tmp_path / "column.h5", labels=LABELS[:, None])
    assert open_shards(str(path)).read_batch("train", torch.tensor([2, 0]))[1].tolist() == [2, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_pixels_that_are_not_finite_are_refused_when_read(tmp_path, value):
    images = IMAGES.astype(np.float64)
    images[2, 1, 3, 0] = value
    path = made(tmp_path / "a.h5", images=images)
    words = f"x_train of {path}: image 2 has a pixel of {value}"
    chosen = torch.tensor([2, 0])
    assert words in error_of(path, lambda path: ScaledFile(path).read("train"))
    assert words in error_of(path, lambda path: ScaledFile(path).read("train", slice(1, 3)))
    assert words in error_of(path, lambda path: open_shards(str(path)).read_batch("train", chosen))
    assert words in error_of(
        path, lambda path: open_shards(f"shards:{path}").read_batch("train", chosen)
    )
    assert ScaledFile(path).read("train", slice(2))[0].shape == (2, 1, 4, 4)


@pytest.mark.parametrize("dtype", ["c8", "S3", h5py.string_dtype(), h5py.vlen_dtype("f4")])
def test_pixels_that_are_no_numbers_are_refused_on_opening(tmp_path, dtype):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x_train", (3, 4, 4, 1), dtype)
        file["y_train"] = LABELS
    assert "not real numbers" in error_of(path)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ((3, 4), (3,)),
        ((3, 4, 4, 1, 1), (3,)),
        ((0, 4, 4, 1), (0,)),
        ((3, 0, 0, 1), (3,)),
        ((3, 4, 4, 0), (3,)),
        ((3, 4, 5, 1), (3,)),
        ((3, 4, 4, 1), (2,)),
        ((6, 4, 4, 1), (2, 3)),
        ((3, 4, 4, 1), ()),
    ],
)
def test_shapes_that_do_not_fit_are_refused_on_opening(tmp_path, images, labels):
    path = made(tmp_path / "a.h5", np.zeros(images, np.float32), np.zeros(labels))
    assert f"x_train has shape {images} and y_train has {labels}" in error_of(path)


GOOD = {
    "source": {"name": "mnist", "checksum": "abc"},
    "train": {"low": 1, "high": 2},
    "test": {"low": 1, "high": 1},
    "size": 4,
    "seed": 0,
    "border": "replicate",
}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        '"text"',
        "[" * 100_000,
        *(json.dumps({k: v for k, v in GOOD.items() if k != key}) for key in GOOD),
        *(json.dumps({**GOOD, key: [1]}) for key in GOOD if key != "seed"),  # which is not used
        json.dumps({**GOOD, "source": {"name": 1, "checksum": "abc"}}),
        json.dumps({**GOOD, "train": {"low": 2, "high": 1}}),
        json.dumps({**GOOD, "test": {"low": 1, "high": float("nan")}}),
        json.dumps({**GOOD, "border": "zzz"}),
        np.arange(3),
        np.void(b"bytes"),
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    path = made(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file.attrs["foveate"] = text
    assert "its manifest is damaged" in error_of(path)


def test_a_good_manifest_is_read(tmp_path):
    path = made(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file.attrs["foveate"] = json.dumps({**GOOD, "train": None})
    assert ScaledFile(path).manifest == {**GOOD, "train": None}


# Other files


@pytest.mark.parametrize("name", ["x_train", "y_train"])
@pytest.mark.parametrize("way", ["external link", "soft link", "virtual", "external storage"])
def test_nothing_outside_the_file_is_read(tmp_path, name, way):
    other = made(tmp_path / "secret.h5")
    (tmp_path / "secret.raw").write_bytes(bytes(48 * 8))
    path = made(tmp_path / "a.h5", ext=h5py.ExternalLink(other, "/"))
    with h5py.File(path, "a") as file:
        shape, dtype = file[name].shape, file[name].dtype
        del file[name]
        if way == "external link":
            file[name] = h5py.ExternalLink(other, f"/{name}")
        elif way == "soft link":
            file[name] = h5py.SoftLink(f"/ext/{name}")
        elif way == "virtual":
            layout = h5py.VirtualLayout(shape, dtype)
            layout[:] = h5py.VirtualSource(other, name, shape)
            file.create_virtual_dataset(name, layout)
        else:
            kept = [(tmp_path / "secret.raw", 0, h5py.h5f.UNLIMITED)]
            file.create_dataset(name, shape, dtype, external=kept)
    said = error_of(path)
    assert f"{name} is a link" in said or f"{name} stores its values in other files" in said


def test_a_group_in_the_place_of_an_array_is_refused(tmp_path):
    path = made(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        del file["y_train"]
        file.create_group("y_train")
    assert "y_train is not an array" in error_of(path)
    with h5py.File(path, "a") as file:
        del file["y_train"]
        file["y_train"] = h5py.Empty("f4")
    assert "y_train is not an array" in error_of(path)
    with h5py.File(path, "a") as file:
        del file["y_train"]
    assert "it has no y_train" in error_of(path)


def test_a_gigantic_shape_allocates_nothing(tmp_path):
    path, before = tmp_path / "a.h5", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 10**15  # more bytes than a process can address: a regression fails at once
    with h5py.File(path, "w") as file:
        file.create_dataset("x_train", (count, 1, 1, 1), "u1", chunks=(10, 1, 1, 1))
        file.create_dataset("y_train", (count,), "i8", chunks=(10,))
    assert "bytes in a file of" in error_of(path)
    with h5py.File(path, "w") as file:
        file.create_dataset("x_train", (3, count, count, 1), "u1", chunks=(1, 4, 4, 1))
        file["y_train"] = LABELS
    assert "x_train declares" in error_of(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
