"""The sources by name, and the embedded digits."""

import hashlib
import struct
from dataclasses import replace

import pytest
import torch
from made_sources import error_of

from foveate.data.fetch import cache_dir
from foveate.data.idx import FILES
from foveate.data.sources import DIGITS, SOURCES, Split, load_source
from foveate.errors import DataError


def test_embedded_splits_have_their_sizes_and_are_balanced():
    source = load_source("mnist-5k")
    for split, count in ((source.train, 3500), (source.val, 500), (source.test, 1000)):
        assert split.images.shape == (count, 1, 28, 28)
        assert split.images.dtype == torch.uint8
        assert len(split) == count
        assert torch.equal(split.labels, torch.arange(count) % 10)
        assert split.labels.dtype == torch.int64
    assert source.classes == DIGITS
    assert source.name == "mnist-5k"


def test_embedded_digits_are_upright_digits():
    images = load_source("mnist-5k").train.images.double()[:, 0]
    zeros, ones = images[0::10].mean(0), images[1::10].mean(0)
    assert zeros[14, 14] < 25 < zeros[6:22, 14].max()  # the middle of a 0 is a hole
    assert ones[14, 14] > 150  # the middle of a 1 is its stroke
    # A 1 is taller than wide, and a 7 has its bar on top: both fail for a transposed image.
    assert (ones.sum(1) > 200).sum() > (ones.sum(0) > 200).sum() + 5
    assert images[7::10].sum((0, 2)).argmax() < 10


def test_embedded_digits_load_alike_each_time_and_checksum_covers_all_content():
    source, again = load_source("mnist-5k"), load_source("mnist-5k")
    assert source.checksum == again.checksum
    digest = hashlib.sha256()
    for split in (source.train, source.val, source.test):
        digest.update(str(tuple(split.images.shape)).encode())
        digest.update(split.images.numpy().tobytes())
        digest.update(struct.pack(f"<{len(split)}q", *split.labels.tolist()))
    assert source.checksum == digest.hexdigest()
    assert source.checksum.startswith("3f7d2d4234528eaba0c093b6878ca5cd")


def test_embedded_digits_are_the_first_500_of_each_class_of_mnist():
    folder = cache_dir() / "mnist"
    if not all((folder / name).is_file() for name in FILES):
        pytest.skip("MNIST is not in the cache; `load_source('mnist')` puts it there")
    full, small = load_source("mnist"), load_source("mnist-5k")
    assert [len(split) for split in (full.train, full.val, full.test)] == [50000, 10000, 10000]
    parts = (small.train, small.val, small.test)
    digits = torch.cat([part.images for part in parts]).view(500, 10, 1, 28, 28)
    for label in range(10):
        first = full.train.images[full.train.labels == label][:500]
        assert torch.equal(digits[:, label], first)


@pytest.mark.parametrize("name", ["", "cifar", "MNIST", "mnist:x", "idx", "folder", "zip:x"])
def test_unknown_name_lists_what_exists(name):
    message = error_of(name)
    assert repr(name) in message
    assert all(kind in message for kind in SOURCES)


@pytest.mark.parametrize("kind", ["idx", "cifar10", "folder"])
def test_name_without_folder_and_missing_folder(tmp_path, kind):
    assert f"use {kind}:DIR" in error_of(f"{kind}:")
    missing = tmp_path / "nowhere"
    assert error_of(f"{kind}:{missing}") == f"folder {missing} does not exist; check the path"


def test_split_refuses_what_it_cannot_hold():
    images, labels = torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    assert len(Split(images, labels)) == 3
    for bad in ((images[:, 0], labels), (images.float(), labels), (images, labels[:2])):
        with pytest.raises(DataError, match="must be"):
            Split(*bad)
    with pytest.raises(DataError, match="int32"):
        Split(images, labels.int())


def test_labels_beyond_the_classes_are_refused():
    digits = load_source("mnist-5k")
    for wrong in (10, -1, 2**62):
        labels = digits.val.labels.clone()
        labels[7] = wrong
        with pytest.raises(DataError, match=f"the val labels of mnist-5k: label 7 is {wrong}, not"):
            replace(digits, val=Split(digits.val.images, labels))
