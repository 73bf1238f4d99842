"""IDX files: read back what was written, and name what is wrong."""

import gzip

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from made_sources import error_of, idx_bytes, write_idx_folder

from foveate.data.idx import FILES, MAX_RANK, decode, gunzip, read_idx
from foveate.data.sources import load_source
from foveate.errors import DataError


@settings(max_examples=50, deadline=None)
@given(st_numpy.arrays(np.uint8, st_numpy.array_shapes(min_dims=1, max_dims=5, max_side=5)))
def test_idx_round_trip(array):
    tensor = read_idx(idx_bytes(array), "file")
    assert tensor.dtype == torch.uint8
    assert np.array_equal(tensor.numpy(), array)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 3))
def test_any_bytes_give_a_tensor_or_one_line(data, zeros):
    try:
        read_idx(b"\0\0\x08"[:zeros] + data, "file")
    except DataError as error:
        assert str(error).startswith("file ")  # noqa: PT017


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\0\0\x08", "truncated"),
        (b"\0\0\x08\x02\0\0\0\1", "truncated"),
        (b"\0\0\x0d\x01\0\0\0\1" + bytes(4), "00 00 0d 01"),
        (b"\0\1\x08\x01\0\0\0\1\0", "not an IDX file"),
        (b"\0\0\x08\x00\7", "not an IDX file"),
        (b"\0\0\x08" + bytes([MAX_RANK + 1]) + b"\0\0\0\1" * (MAX_RANK + 1) + b"\0", "not an IDX"),
        (b"\0\0\x08\x02" + b"\xff" * 8 + b"\0", "truncated"),
        (b"\0\0\x08\x01\0\0\0\0", "empty"),
        (b"\0\0\x08\x01\0\0\0\2\0", "truncated.* has 9 bytes, .* takes 10"),
        (b"\0\0\x08\x01\0\0\0\1\0\0", "too long: it has 10 bytes, .* takes 9"),
    ],
)
def test_bad_idx_bytes(data, reason):
    with pytest.raises(DataError, match=f"^some-file .*{reason}"):
        read_idx(data, "some-file")


def test_gzip_bomb_is_stopped():
    with pytest.raises(DataError, match="unpacks to more"):
        gunzip(gzip.compress(bytes(5_000_000)), "bomb", limit=1_000_000)
    assert len(gunzip(gzip.compress(bytes(1_000_000)), "fine", limit=1_000_000)) == 1_000_000


def test_decode_names_an_unreadable_path(tmp_path):
    with pytest.raises(DataError, match=r"missing\.gz"):
        decode(tmp_path / "missing.gz")


def dotted(name):
    return name.replace("-idx", ".idx")


@pytest.mark.parametrize(
    ("spell", "pack"),
    [
        (lambda name: name, lambda data: data),
        (lambda name: f"{name}.gz", gzip.compress),
        (dotted, lambda data: data),
        (lambda name: f"{dotted(name)}.gz", gzip.compress),
        (lambda name: name, gzip.compress),  # packed, though the name does not say so
    ],
)
def test_idx_folder_in_all_spellings(tmp_path, spell, pack):
    images, labels, test_images, test_labels = write_idx_folder(tmp_path, spell=spell, pack=pack)
    source = load_source(f"idx:{tmp_path}")
    assert np.array_equal(source.train.images[:, 0], images[:25])
    assert np.array_equal(source.val.images[:, 0], images[25:])  # the last sixth of 30
    assert np.array_equal(source.test.images[:, 0], test_images)
    assert source.train.labels.tolist() + source.val.labels.tolist() == labels.tolist()
    assert source.test.labels.tolist() == test_labels.tolist()
    assert source.classes == ("0", "1", "2")
    assert source.train.images.shape == (25, 1, 3, 4)


def test_checksum_tells_content_apart(tmp_path):
    write_idx_folder(tmp_path)
    before = load_source(f"idx:{tmp_path}").checksum
    for name in FILES:
        path = tmp_path / name
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert load_source(f"idx:{tmp_path}").checksum != before
        path.write_bytes(data)
    assert load_source(f"idx:{tmp_path}").checksum == before


def test_missing_idx_file(tmp_path):
    write_idx_folder(tmp_path)
    for name in FILES:
        (tmp_path / name).rename(tmp_path / "away")
        assert f"has no {name}" in error_of(f"idx:{tmp_path}")
        (tmp_path / "away").rename(tmp_path / name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"x", "too long"),
        (lambda data: b"\0\0\x0b" + data[3:], "not an IDX file"),
        (lambda data: gzip.compress(data)[:-9], "damaged gzip"),
        (lambda data: gzip.compress(data)[:-6] + b"xx" + gzip.compress(data)[-4:], "damaged gzip"),
        (lambda data: b"\x1f\x8bnothing", "damaged gzip"),
        (lambda data: b"", "truncated"),
    ],
)
def test_damaged_idx_file(tmp_path, name, damage, reason):
    write_idx_folder(tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    message = error_of(f"idx:{tmp_path}")
    assert reason in message
    assert name in message


def test_idx_files_that_do_not_fit_together(tmp_path):
    write_idx_folder(tmp_path)
    name = f"idx:{tmp_path}"
    (tmp_path / FILES[1]).write_bytes(idx_bytes(np.zeros(29)))
    assert "got (30, 3, 4) uint8 and (29,) uint8; check" in error_of(name)
    (tmp_path / FILES[1]).write_bytes(idx_bytes(np.zeros((30, 3, 4))))
    assert "swapped" in error_of(name)
    write_idx_folder(tmp_path)
    (tmp_path / FILES[0]).write_bytes(idx_bytes(np.zeros(30)))
    assert "swapped" in error_of(name)
    write_idx_folder(tmp_path)
    (tmp_path / FILES[2]).write_bytes(idx_bytes(np.zeros((5, 4, 3))))
    assert "differ in shape" in error_of(name)
    write_idx_folder(tmp_path, train=5)
    assert "at least 6" in error_of(name)
