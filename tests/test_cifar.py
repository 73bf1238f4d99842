"""CIFAR-10: its binary batches from a folder, an archive or a mirror, and a run on them."""

import gzip
import hashlib
import io
import tarfile
from dataclasses import replace

import fake_mirrors
import numpy as np
import pytest
import torch
from fake_mirrors import LARGEST, names_in
from made_sources import error_of, write_cifar_folder

from foveate.data.cifar import ARCHIVE, BATCHES, CLASSES, FOLDER, RECORD, read_records, unpack
from foveate.data.fetch import DATASETS, fetch
from foveate.data.sources import load_source
from foveate.errors import DataError

cache, serve = fake_mirrors.cache, fake_mirrors.serve  # fixtures


def packed(files, kind=tarfile.REGTYPE):
    """A tar.gz archive of the files, by path."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.type, member.size, member.linkname = kind, len(data), "/etc/passwd"
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def official(batches):
    """An archive with the layout of the official one."""
    files = {f"{FOLDER}/{name}": batch.tobytes() for name, batch in batches.items()}
    return packed({f"{FOLDER}/readme.html": b"<html>", **files})


# Records


def test_record_is_a_label_and_the_red_green_and_blue_planes_row_by_row():
    plane = np.arange(1024) % 251
    record = bytes([7, *plane, *(plane + 1), *(plane + 2)])
    images, labels = read_records(record + bytes(RECORD), "a.bin")
    assert images.shape == (2, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.tolist() == [7, 0] and labels.dtype == torch.int64
    for channel in range(3):
        for y, x in ((0, 0), (0, 31), (31, 0), (5, 17)):
            assert images[0, channel, y, x] == (32 * y + x) % 251 + channel


@pytest.mark.parametrize("size", [0, 1, RECORD - 1, RECORD + 1, 3072])
def test_truncated_batch(size):
    with pytest.raises(DataError, match=r"a\.bin .* multiple of 3,073.*download it again") as error:
        read_records(bytes(size), "a.bin")
    assert "\n" not in str(error.value)


def test_label_beyond_the_classes():
    data = bytes(RECORD) + bytes([10]) + bytes(RECORD - 1)
    with pytest.raises(DataError, match=r"label 1 is 10, not 0 to 9; download"):
        read_records(data, "a.bin")


# A folder


def test_folder_has_the_first_five_sixths_for_training(tmp_path):
    batches = write_cifar_folder(tmp_path, count=6)
    source = load_source(f"cifar10:{tmp_path}")
    assert source.counts == {"train": 25, "val": 5, "test": 6}
    assert (source.shape, source.classes) == ((3, 32, 32), CLASSES)
    records = np.concatenate([batches[name] for name in BATCHES])
    labels = torch.cat([source.labels(split) for split in ("train", "val", "test")])
    images = torch.cat([split.images for split in (source.train, source.val, source.test)])
    assert labels.tolist() == records[:, 0].tolist()
    assert np.array_equal(images.flatten(1).numpy(), records[:, 1:])


@pytest.mark.parametrize("place", ["", FOLDER])
def test_batches_and_archive_give_the_same_source(tmp_path, place):
    (tmp_path / "plain" / place).mkdir(parents=True)
    (tmp_path / "packed").mkdir()
    batches = write_cifar_folder(tmp_path / "plain" / place)
    (tmp_path / "packed" / ARCHIVE).write_bytes(official(batches))
    plain, archived = (load_source(f"cifar10:{tmp_path / n}") for n in ("plain", "packed"))
    assert plain.checksum == archived.checksum


@pytest.mark.parametrize("missing", [BATCHES[2], BATCHES[5]])
def test_missing_batch_is_named(tmp_path, missing):
    write_cifar_folder(tmp_path)
    (tmp_path / missing).unlink()
    assert f"has no {missing} and no {ARCHIVE}; add" in error_of(f"cifar10:{tmp_path}")


def test_batch_of_another_length_is_named(tmp_path):
    write_cifar_folder(tmp_path)
    with (tmp_path / BATCHES[1]).open("ab") as file:
        file.write(b"x")
    message = error_of(f"cifar10:{tmp_path}")
    assert BATCHES[1] in message and "download it again" in message


# An archive


def test_only_the_expected_paths_of_an_archive_are_read(tmp_path, monkeypatch):
    """Nothing is written, whatever the paths in the archive are."""
    monkeypatch.chdir(tmp_path)
    data = bytes(RECORD)
    for path in (f"../{BATCHES[0]}", f"/{BATCHES[0]}", f"x/{BATCHES[0]}", f"{BATCHES[0]}/x"):
        tar = gzip.decompress(packed({path: data}))
        with pytest.raises(DataError, match=f"a.tar has no {BATCHES[0]}; download"):
            unpack(tar, "a.tar", BATCHES)
    assert names_in(tmp_path) == []
    top = gzip.decompress(packed({"../evil.bin": b"x", BATCHES[0]: data}))
    assert unpack(top, "a.tar", BATCHES[:1]) == {BATCHES[0]: data}
    assert names_in(tmp_path) == [] and not (tmp_path.parent / "evil.bin").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_an_archive_are_ignored(kind):
    tar = gzip.decompress(packed({f"{FOLDER}/{BATCHES[0]}": b""}, kind))
    with pytest.raises(DataError, match=r"has no data_batch_1\.bin"):
        unpack(tar, "a.tar", BATCHES)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_truncated_archive(tmp_path, share):
    made = tmp_path / "made"
    made.mkdir()
    archive = official(write_cifar_folder(made))
    (tmp_path / ARCHIVE).write_bytes(archive[: int(share * len(archive))])
    message = error_of(f"cifar10:{tmp_path}")
    assert ARCHIVE in message and "download" in message
    tar = gzip.decompress(archive)
    with pytest.raises(DataError, match=r"(damaged tar archive|has no).*; download"):
        unpack(tar[: int(share * len(tar))], "a.tar", BATCHES)


# A mirror


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Make `cifar10` a data set of a few images, with these mirrors; returns its content."""
    folder = tmp_path / "made"
    folder.mkdir()
    batches = write_cifar_folder(folder, count=2)
    sums = {name: hashlib.sha256(batch.tobytes()).hexdigest() for name, batch in batches.items()}

    def change(*mirrors):
        entry = replace(DATASETS["cifar10"], checksums=sums, mirrors=mirrors)
        monkeypatch.setitem(DATASETS, "cifar10", entry)
        return batches

    return change


def test_archive_is_downloaded_once_and_its_batches_are_cached(serve, tiny, cache):
    server, address = serve(lambda handler, name: handler.reply(200, official(tiny())))
    batches, said = tiny(address), []
    source = load_source("cifar10", said.append)
    assert said == [f"downloading {address}{ARCHIVE}"]
    assert source.counts == {"train": 9, "val": 1, "test": 2}
    assert names_in(cache.with_name("cifar10")) == sorted(BATCHES)
    assert load_source("cifar10").checksum == source.checksum
    assert server.requests == [f"/tiny/{ARCHIVE}"]
    assert fetch("cifar10") == {name: batch.tobytes() for name, batch in batches.items()}


def test_damaged_batch_in_the_cache_is_reported_once(serve, tiny, cache):
    _, address = serve(lambda handler, name: handler.reply(200, official(tiny())))
    batches, said = tiny(address), []
    path = cache.with_name("cifar10") / BATCHES[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    assert fetch("cifar10", said.append)[BATCHES[0]] == batches[BATCHES[0]].tobytes()
    assert [str(path) in line for line in said] == [True, False] and "damaged" in said[0]


def test_archive_with_another_checksum_is_refused(serve, tiny, cache):
    changed = {name: batch.copy() for name, batch in tiny().items()}
    changed[BATCHES[3]][1, 700] ^= 1  # one bit of one pixel
    _, address = serve(lambda handler, name: handler.reply(200, official(changed)))
    tiny(address)
    message = error_of("cifar10")
    assert f"{BATCHES[3]} in {address}{ARCHIVE} is not the published file" in message
    for remedy in ("Connect to the network", "cifar10:DIR"):
        assert remedy in message
    assert BATCHES[3] not in names_in(cache.with_name("cifar10"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (bytes(LARGEST + 1), f"more than {LARGEST} bytes"),
        (gzip.compress(bytes(LARGEST + 1)), "unpacks to more bytes than allowed"),
        (b"\x1f\x8b<html>please log in</html>", "damaged gzip"),
        (b"<html>please log in</html>", "damaged tar"),
        (packed({"x": b""}), "has no data_batch_1.bin"),
    ],
    ids=["large", "bomb", "gzip", "tar", "other"],  # the bytes of a gzip file contain the time
)
def test_bad_answers_of_a_mirror(serve, tiny, body, reason):
    tiny(serve(lambda handler, name: handler.reply(200, body))[1])
    assert reason in error_of("cifar10")


def test_table_names_the_six_batches_with_full_checksums_and_https():
    entry = DATASETS["cifar10"]
    assert tuple(entry.checksums) == BATCHES
    assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in entry.checksums.values())
    assert [m + entry.archive for m in entry.mirrors] == [
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    ]
