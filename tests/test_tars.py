"""Tars made by someone hostile: nothing is followed, unpacked or allocated."""

import io
import tarfile

import numpy as np
import pytest
from made_sources import within
from PIL import Image
from test_shards import png, read_all, write_tar

from foveate.data.shards import open_shards
from foveate.errors import DataError


def tar_error(path):
    with within(20), pytest.raises(DataError) as caught:
        read_all(f"shards:{path}")
    said = str(caught.value)
    assert "\n" not in said and str(path) in said
    return said


ONE = ("a.png", png(np.zeros((4, 4), np.uint8)))


@pytest.mark.parametrize(
    "label",
    [
        *(b"%d" % number for number in (2**31, 2**63, 2**64)),
        b"-1",
        b"1.5",
        b"nan",
        b"1e3",
        b"1_0",
        b"",
        b"1 2",
        b"100000",
        b"9" * 32,
        b"0" * 40,
    ],
)
def test_labels_of_tars_that_are_no_classes_are_refused(tmp_path, label):
    first = [(name.replace("a.", "0."), content) for name, content in (ONE, ("a.cls", b"7"))]
    write_tar(tmp_path / "train.tar", [*first, ONE, ("a.cls", label)])
    said = tar_error(tmp_path / "train.tar")
    named = "a.cls of" in said and "must be a class index such as 7, got b'" in said
    assert named or f"label 1 is {float(label)}, not a whole number from 0 to 99999" in said


def test_names_that_lead_elsewhere_are_only_names(tmp_path):
    members = [
        (name.replace("a.", "../../x."), content) for name, content in (ONE, ("a.cls", b"3"))
    ]
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "train.tar", members)
    assert read_all(f"shards:{tmp_path / 'in'}")[1].tolist() == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_are_not_followed(tmp_path, kind):
    Image.new("L", (4, 4)).save(tmp_path / "secret.png")
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        member = tarfile.TarInfo("a.png")
        member.type, member.linkname = kind, str(tmp_path / "secret.png")
        tar.addfile(member)
        label = tarfile.TarInfo("a.cls")
        label.size = 1
        tar.addfile(label, io.BytesIO(b"0"))
    assert "has no image" in tar_error(tmp_path / "train.tar")


def header(name, size, kind=tarfile.REGTYPE, sparse=None):
    """The header of a member, with a size that need not be true."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    if sparse is not None:
        block[386:410] = b"%011o\0%011o\0" % (0, 1)  # one piece: one byte at 0
        block[483:495] = b"%011o\0" % sparse
        block[148:156] = b"        "
        block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (header("a.png", 10**6), "declares 1000000 bytes"),
        (header("a.png", 8 * 10**18), "declares 8000000000000000000 bytes"),
        (
            header("b", 0) + header("a.png", -512),
            "declares -512 bytes",
        ),  # its own header comes next
        (header("a.png", 1, tarfile.GNUTYPE_SPARSE, sparse=5) + bytes(512), "declares 5 bytes"),
        (header("x", 10**17, tarfile.XHDTYPE), "cannot read"),
        (header("x", -(10**6), tarfile.GNUTYPE_LONGNAME), "cannot read"),
    ],
    ids=["beyond the end", "huge", "negative", "sparse", "huge header", "negative header"],
)
def test_members_that_claim_what_is_not_there_are_refused(tmp_path, first, words):
    (tmp_path / "train.tar").write_bytes(first + bytes(1024))
    assert words in tar_error(tmp_path / "train.tar")


def test_a_tar_that_ends_after_a_whole_sample_is_refused(tmp_path):
    path = tmp_path / "train.tar"
    write_tar(path, [("0.png", ONE[1]), ("0.cls", b"0"), ("1.png", ONE[1]), ("1.cls", b"1")])
    whole, half = path.read_bytes(), 4 * 512  # two headers, an image and a label
    for damaged in (whole[:half], whole[: half + 100], whole[:half] + b"?" + whole[half + 1 :]):
        path.write_bytes(damaged)
        assert "is damaged or incomplete after the sample '0'" in tar_error(path)
    path.write_bytes(whole[: 9 * 512])  # one block of zeros marks the end
    assert open_shards(f"shards:{path}").counts == {"train": 2}
