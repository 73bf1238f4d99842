"""Data set files: the official layout, the same bytes always, and no half file ever."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import torch

from foveate.data.large_scale import rescale
from foveate.data.sources import Source, Split
from foveate.data.store import FileSpec, ScaledFile, draw_scales, write
from foveate.errors import DataError
from foveate.scales import ScaleRange

ONE, MANY = ScaleRange(1, 1), ScaleRange(1, 4)


def tiny(counts=(300, 140, 10), name="mnist", checksum="abc"):
    random = torch.Generator().manual_seed(3)
    splits = [
        Split(
            torch.randint(0, 256, (n, 1, 12, 12), generator=random, dtype=torch.uint8),
            torch.randint(0, 10, (n,), generator=random),
        )
        for n in counts
    ]
    return Source(name, *splits, classes=tuple("0123456789"), checksum=checksum)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (
            FileSpec(train=ONE, test=ONE),
            "mnist_large_scale_tr50000_vl10000_te10000_outsize112-112_sctr1p000_scte1p000.h5",
        ),
        (
            FileSpec(train=MANY, test=MANY),
            "mnist_large_scale_tr50000_vl10000_te10000_outsize112-112"
            "_sctr1p000-4p000_scte1p000-4p000.h5",
        ),
        (
            FileSpec(test=ScaleRange(2**-0.75, 2**-0.75)),
            "mnist_large_scale_te10000_outsize112-112_scte0p595.h5",
        ),
        (
            FileSpec(test=ScaleRange(2**2.75, 2**2.75)),
            "mnist_large_scale_te10000_outsize112-112_scte6p727.h5",
        ),
    ],
)
def test_official_names(spec, name):
    images = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    splits = [
        Split(images.expand(n, 1, 1, 1), torch.zeros(n, dtype=torch.int64))
        for n in (50000, 10000, 10000)
    ]
    assert spec.name(Source("mnist", *splits, classes=("0",), checksum="")) == name


def test_training_file_has_the_official_layout(tmp_path):
    source = tiny()
    path = write(FileSpec(train=ONE, test=ONE, size=16), source, tmp_path)
    with h5py.File(path) as file:
        assert set(file) == {
            f"{kind}_{split}" for kind in "xy" for split in ("train", "val", "test")
        }
        assert file["x_train"].shape == (300, 16, 16, 1)
        assert file["x_train"].dtype == np.float32
        assert file["y_val"].shape == (140,)
        manifest = json.loads(file.attrs["foveate"])
    assert manifest["source"] == {"name": "mnist", "checksum": "abc"}
    assert {"recipe", "seed", "size", "border", "train", "test", "version"} <= set(manifest)
    images, labels = ScaledFile(path).read("train")
    torch.testing.assert_close(images, rescale(source.train.images, 1.0, size=16))
    assert torch.equal(labels, source.train.labels)


def test_multi_scale_files_store_the_scale_of_each_image(tmp_path):
    source = tiny()
    path = write(FileSpec(train=MANY, test=MANY, size=16), source, tmp_path)
    file = ScaledFile(path)
    with h5py.File(path) as stored:
        scales, tested = (torch.from_numpy(stored[f"scale_{s}"][()]) for s in ("train", "test"))
    assert scales.shape == (300,)
    assert 1 <= float(scales.min()) < 1.1 < 3.7 < float(scales.max()) <= 4
    # log-uniform: log2 has mean 1 and standard deviation 2 / sqrt(12), so the mean of 300 lies
    # within 4 of its own standard deviations, 0.133
    assert abs(float(scales.log2().mean()) - 1) < 4 * 2 / 12**0.5 / 300**0.5
    assert not torch.equal(scales[:10], tested)
    images, _ = file.read("train", slice(7, 9))
    torch.testing.assert_close(images, rescale(source.train.images[7:9], scales[7:9], size=16))


@pytest.mark.parametrize("scales", [ONE, MANY])
def test_the_same_bytes_for_any_number_of_workers(tmp_path, scales):
    spec = FileSpec(train=scales, test=scales, size=40)
    made = []
    for workers in (1, 2, 5):
        torch.set_num_threads(workers)
        path = write(spec, tiny(), tmp_path / str(workers), workers=workers)
        torch.set_num_threads(1)
        with h5py.File(path) as file:
            made.append({key: file[key][()].tobytes() for key in file})
    assert made[0] == made[1] == made[2]


def test_seeds_differ_and_repeat():
    assert torch.equal(draw_scales(MANY, 50, 1, "train"), draw_scales(MANY, 50, 1, "train"))
    assert not torch.equal(draw_scales(MANY, 50, 1, "train"), draw_scales(MANY, 50, 2, "train"))


def test_a_finished_file_is_not_made_again_and_another_is_refused(tmp_path):
    spec, done = FileSpec(test=ONE, size=16), []
    path = write(spec, tiny(), tmp_path)
    before = path.stat().st_mtime_ns
    write(spec, tiny(), tmp_path, advance=done.append)
    assert path.stat().st_mtime_ns == before
    assert sum(done) == 10
    with pytest.raises(DataError, match="made with other options"):
        write(spec, tiny(checksum="other"), tmp_path)
    with pytest.raises(DataError, match="made with other options"):
        write(FileSpec(test=ONE, size=16, border="zero"), tiny(), tmp_path)


def test_our_test_only_file_has_dummies_that_are_not_data(tmp_path):
    path = write(FileSpec(test=ScaleRange(2, 2), size=16), tiny(), tmp_path)
    with h5py.File(path) as file:
        assert file["x_train"].shape == (1, 16, 16, 1)
    file = ScaledFile(path)
    assert file.counts == {"test": 10}
    with pytest.raises(DataError, match="has no train images, only test"):
        file.read("train")


def test_official_files_with_a_dummy_without_its_batch_axis_are_read(tmp_path):
    path = tmp_path / "mnist_large_scale_te10000_outsize112-112_scte0p595.h5"
    images = np.random.default_rng(0).random((5, 112, 112, 1)).astype(np.float32)
    with h5py.File(path, "w") as file:
        for split in ("train", "val"):
            file[f"x_{split}"] = np.zeros((112, 112, 1), np.float32)
            file[f"y_{split}"] = np.int64(0)
        file["x_test"], file["y_test"] = images, np.arange(5, dtype=np.float64)
    data = ScaledFile(path)
    pixels, labels = data.read("test", slice(1, 4))
    assert np.array_equal(pixels.numpy(), images[1:4].transpose(0, 3, 1, 2))
    assert labels.tolist() == [1, 2, 3]
    assert labels.dtype == torch.int64
    assert data.manifest is None
    assert data.counts == {"test": 5}


def test_damaged_files_are_named(tmp_path):
    whole = write(FileSpec(test=ONE, size=16), tiny(), tmp_path)
    short = tmp_path / "short.h5"
    short.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(DataError, match=r"cannot read .*short\.h5"):
        ScaledFile(short)
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(DataError, match=r"cannot read .*text\.h5"):
        ScaledFile(tmp_path / "text.h5")
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    with pytest.raises(DataError, match=r"cannot read .*empty\.h5"):
        ScaledFile(tmp_path / "empty.h5")
    with pytest.raises(DataError, match="no such file"):
        ScaledFile(tmp_path / "none.h5")


def test_a_truncated_file_under_the_final_name_is_not_taken_for_finished(tmp_path):
    spec = FileSpec(test=ONE, size=16)
    path = write(spec, tiny(), tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="cannot read"):
        write(spec, tiny(), tmp_path)


WRITER = """
import resource, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_store import FileSpec, ONE, tiny, write
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
spec = FileSpec(train=ONE, test=ONE, size=112)
print(write(spec, tiny((3000, 500, 500)), Path(sys.argv[1])))
"""


def writer(folder, limit=0):
    code = WRITER.format(tests=os.path.dirname(__file__))
    command = [sys.executable, "-c", code, str(folder), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_in_mid_write_and_started_again(tmp_path):
    process = writer(tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # wait until some of the images are on the disk
        sizes = [p.stat().st_size for p in tmp_path.glob(".*.tmp")]
        if sizes and max(sizes) > 5_000_000:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(tmp_path.glob("*.h5"))
    again = writer(tmp_path)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert [p.name for p in tmp_path.iterdir()] == [os.path.basename(out.strip())]


def test_a_disk_that_refuses_more_is_told_in_one_line_and_leaves_nothing(tmp_path):
    process = writer(tmp_path, limit=20_000_000)
    _, err = process.communicate()
    assert "cannot write" in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        write(FileSpec(test=ONE, size=16), tiny(), tmp_path / "file" / "below")


def test_peak_memory_does_not_grow_with_the_file(tmp_path):
    """Writing 160 MB of images needs less than 160 MB more than was needed before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write(FileSpec(test=ONE), tiny((1, 1, 6000)), tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 160 * 1024
