"""Data sets in many files: what is read, in which order, and that memory stays flat."""

import io
import os
import signal
import tarfile
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import MODEL, STEPS, python, same_bits, tiny, weights

from foveate.cli.app import run
from foveate.data.shards import open_shards
from foveate.data.sources import Split, load_source
from foveate.data.splits import SPLITS
from foveate.data.store import FileSpec, ScaledFile, write
from foveate.errors import ConfigError, DataError
from foveate.scales import ScaleRange
from foveate.training.checkpoint import RunFolder
from foveate.training.data import adapt_to_source, generated_from, open_batches
from foveate.training.loop import train

SIDE = 24


def write_h5(path, split, count, seed=0, side=SIDE):
    random = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file[f"x_{split}"] = random.random((count, side, side, 1), np.float32)
        file[f"y_{split}"] = random.integers(0, 10, count)


def png(pixels):
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "png")
    return content.getvalue()


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def digit_members(split, start, stop):
    for index in range(start, stop):
        yield f"./{index:04}.cls", b"%d\n" % int(split.labels[index])
        yield f"./{index:04}.json", b"{}"
        yield f"./{index:04}.png", png(split.images[index, 0].numpy())


@pytest.fixture
def h5_folder(tmp_path):
    folder = tmp_path / "h5"
    folder.mkdir()
    for number, count in enumerate((40, 1, 55)):
        write_h5(folder / f"train-{number}.h5", "train", count, seed=number)
    for number in range(2):
        write_h5(folder / f"val-{number}.h5", "val", 15, seed=9 + number)
    return folder


@pytest.fixture
def tar_folder(tmp_path):
    folder, digits = tmp_path / "tar", load_source("mnist-5k")
    folder.mkdir()
    for number, (start, stop) in enumerate([(0, 50), (50, 51), (51, 96)]):
        write_tar(folder / f"train-{number}.tar", digit_members(digits.train, start, stop))
    write_tar(folder / "val-0.tar", digit_members(digits.val, 0, 30))
    return folder


def test_hdf5_shards_read_as_one_set_in_any_order(h5_folder):
    shards = open_shards(f"shards:{h5_folder}")
    assert shards.counts == {"train": 96, "val": 30}
    files = [ScaledFile(path).read("train") for path in sorted(h5_folder.glob("train*"))]
    images, labels = (torch.cat(parts) for parts in zip(*files, strict=True))
    assert torch.equal(shards.labels("train"), labels)
    chosen = torch.randperm(96)[:70]
    chosen[3] = chosen[50]  # an image twice
    picked, tags = shards.read_batch("train", chosen)
    assert torch.equal(picked, images[chosen]) and torch.equal(tags, labels[chosen])


def test_tars_hold_what_was_put_in(tar_folder):
    shards, digits = open_shards(f"shards:{tar_folder}/*.tar"), load_source("mnist-5k")
    assert shards.counts == {"train": 96, "val": 30}
    chosen = torch.tensor([95, 0, 50, 49, 51])
    picked, tags = shards.read_batch("train", chosen)
    assert picked.dtype == torch.uint8
    assert torch.equal(picked, digits.train.images[chosen])
    assert torch.equal(tags, digits.train.labels[chosen])
    assert torch.equal(shards.labels("val"), digits.val.labels[:30])


def test_grey_pictures_become_rgb_where_the_first_is(tmp_path):
    grey, colour = np.full((4, 5), 7, np.uint8), np.zeros((4, 5, 3), np.uint8)
    members = [("a.png", png(colour)), ("a.cls", b"0"), ("b.png", png(grey)), ("b.cls", b"1")]
    write_tar(tmp_path / "train.tar", members)
    images, _ = open_shards(f"shards:{tmp_path}").read_batch("train", torch.tensor([1, 0]))
    assert images.shape == (2, 3, 4, 5)
    assert images[0].eq(7).all() and images[1].eq(0).all()


def test_no_file_stays_open(h5_folder):
    def opened():
        return h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)

    before, shards = opened(), open_shards(f"shards:{h5_folder}")
    shards.read_batch("train", torch.tensor([0, 95, 40]))
    assert opened() == before


def test_changed_files_are_read_anew(h5_folder):
    assert open_shards(f"shards:{h5_folder}") is open_shards(f"shards:{h5_folder}")
    write_h5(h5_folder / "train-1.h5", "train", 7)
    os.utime(h5_folder / "train-1.h5", ns=(0, 0))  # clocks can be coarse
    assert open_shards(f"shards:{h5_folder}").counts["train"] == 40 + 7 + 55
    (h5_folder / "train-2.h5").unlink()
    assert open_shards(f"shards:{h5_folder}").counts["train"] == 40 + 7


# Training on them


def config_for(folder, **changes):
    return tiny(source=f"shards:{folder}", samples=0, **changes)


def test_a_run_on_shards_ends_with_the_bits_of_one_on_a_single_file(tmp_path):
    digits, one = load_source("mnist-5k"), ScaleRange(1.5, 1.5)
    few = {s: Split(getattr(digits, s).images[:96], getattr(digits, s).labels[:96]) for s in SPLITS}
    whole = write(FileSpec(train=one, test=one, size=SIDE), replace(digits, **few), tmp_path)
    folder = tmp_path / "shards"
    folder.mkdir()
    images, labels = ScaledFile(whole).read("train", slice(96))
    for number, part in enumerate((slice(0, 50), slice(50, 96))):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["x_train"] = images[part].movedim(1, -1).numpy()
            file["y_train"] = labels[part].numpy()
    images, labels = ScaledFile(whole).read("val")
    with h5py.File(folder / "val.h5", "w") as file:
        file["x_val"], file["y_val"] = images.movedim(1, -1).numpy(), labels.numpy()
    single = train(tiny(source=str(whole), scales="1.5"), tmp_path / "a").path
    sharded = train(config_for(folder, scales="1.5"), tmp_path / "b").path
    assert same_bits(weights(single), weights(sharded))


@pytest.mark.parametrize("scales", ["1", "1-2", "1,2"])
def test_tars_are_shown_as_the_same_pictures_from_memory(tar_folder, scales):
    digits = load_source("mnist-5k")
    few = replace(digits, train=Split(digits.train.images[:96], digits.train.labels[:96]))
    config, order = config_for(tar_folder, scales=scales), torch.randperm(96)
    rest = ("train", MODEL.build(), torch.device("cpu"), False, lambda name: few)
    streamed = open_batches(config, *rest)(order, 16)
    resident = open_batches(replace(config, source="mnist-5k"), *rest)(order, 16)
    for one, other in zip(streamed, resident, strict=True):
        (some, tags), (same, labels) = one.select(), other.select()
        # Values of 0 to 255 pass four products of at most 28 or 24 terms; 0.02 (2 / pi) scales
        # them down: 4 · 28 · 255 · 2^-24 · 0.013 is the largest error of rounding in either.
        torch.testing.assert_close(some.inputs[0], same.inputs[0], atol=5e-5, rtol=0)
        assert torch.equal(tags, labels)


VICTIM = """
import os, signal, sys
from pathlib import Path
import foveate.training.session as session
from foveate.training.loop import train
from test_shards import config_for

session.SAVE_EVERY = 0.0

def callback(config, progress, steps):
    if (progress.epoch, progress.step) == (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)

train(config_for(sys.argv[1]), Path(sys.argv[2]), callback=callback)
"""


@pytest.mark.parametrize("kind", ["h5", "tar"])
def test_killed_in_mid_epoch_and_gone_on_with_the_same_bits(tmp_path, request, kind):
    folder = request.getfixturevalue(f"{kind}_folder")
    process = python("-c", VICTIM, folder, tmp_path / "run")
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    reached = RunFolder(tmp_path / "run").load()[0]
    assert (reached.epoch, reached.step) == (1, 3) and STEPS == 6
    train(config_for(folder), tmp_path / "run")
    train(config_for(folder), tmp_path / "whole")
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "whole"))


MEASURED = """
import sys
from pathlib import Path
from streaming import peak_memory
from foveate.training.loop import train
from test_shards import config_for
train(config_for(sys.argv[1], epochs=1, size=448), Path(sys.argv[2]))
print(peak_memory())
"""


def test_memory_stays_flat_as_data_grows(tmp_path):
    """16 MB against 160 MB of images, which take no room on the disk."""
    peaks = []
    for copies in (1, 10):
        folder = tmp_path / f"{copies}"
        folder.mkdir()
        for number in range(copies):
            with h5py.File(folder / f"train-{number}.h5", "w") as file:
                file.create_dataset("x_train", (20, 448, 448, 1), "f4")  # never written: zeros
                file["y_train"] = np.arange(20) % 10
        write_h5(folder / "val.h5", "val", 1, side=448)
        benchmarks = Path(__file__).parents[1] / "benchmarks"
        code = f"import sys; sys.path.append({str(benchmarks)!r}){MEASURED}"
        out, err = python("-c", code, folder, tmp_path / f"run{copies}").communicate()
        assert out, err
        peaks.append(int(out))
    grown = 9 * 20 * 448**2 * 4
    assert peaks[1] - peaks[0] < grown / 5  # files that are open have buffers of their own


# The command line, and what cannot work


def test_the_command_line_takes_shards(tmp_path, tar_folder, capsys):
    options = ["--set", f"size={SIDE}", "--set", "model.size=12", "--set", "model.features=[4,8]"]
    options += ["--set", "model.scales=1:2:1", "--epochs", "1", "--device", "cpu"]
    source, out = f"shards:{tar_folder}", str(tmp_path / "run")
    assert run(["train", "fovavg", "--source", source, *options, "--out", out]) == 0
    model = RunFolder(tmp_path / "run").config().model
    assert (model.channels, model.classes) == (1, 10)
    assert run(["evaluate", out, "--source", "mnist-5k", "--scales", "1"]) == 0
    capsys.readouterr()
    assert run(["evaluate", out]) == 2
    assert "pass --source" in capsys.readouterr().err


def test_a_config_follows_its_shards(tmp_path):
    source = load_source("mnist-5k")
    source = replace(source, train=Split(source.train.images[:20], source.train.labels[:20]))
    for low, high in ((1, 1), (2, 4)):
        spec = FileSpec(train=ScaleRange(low, high), test=ScaleRange(1, 1), size=16)
        write(spec, source, tmp_path)
    config = adapt_to_source(tiny(source=f"shards:{tmp_path}"), load_source)
    assert (config.size, config.scales, config.border) == (16, "1,2-4", "replicate")
    assert generated_from(config.source) == "mnist-5k"
    with pytest.raises(ConfigError, match="has images of 16 pixels, not 24; set size=16"):
        train(tiny(source=f"shards:{tmp_path}"), tmp_path / "run")


def read_all(source):
    shards = open_shards(source)
    return shards.read_batch("train", torch.arange(shards.counts["train"]))


def test_what_cannot_be_read_is_said_in_one_line(tmp_path, h5_folder):
    def error(source):
        with pytest.raises(DataError) as caught:
            read_all(source)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def tar_of(*members, name="train.tar"):
        write_tar(tmp_path / name, members)
        return error(f"shards:{tmp_path / name}")

    one, label = ("a.png", png(np.zeros((4, 4), np.uint8))), ("a.cls", b"0")
    other = [("b.png", png(np.zeros((5, 4), np.uint8))), ("b.cls", b"0")]
    assert "check the path" in error(f"shards:{tmp_path}/none")
    assert "sample 'a' of" in tar_of(one) and "has no label (.cls)" in tar_of(one)
    assert "has no image" in tar_of(label)
    assert "must be a class index such as 7, got b'seven'" in tar_of(one, ("a.cls", b"seven"))
    said = tar_of(one, label, *other)
    assert "has shape (1, 5, 4), but image 0 of" in said and "has (1, 4, 4); resize" in said
    assert "such as train-000.tar" in tar_of(one, label, name="digits.tar")
    assert "cannot read image 0 of" in tar_of(("a.png", b"no picture"), label)
    assert "have no images; check the path" in tar_of(("a.txt", b""))
    (tmp_path / "train.tar").write_bytes(b"short")
    assert "cannot read" in error(f"shards:{tmp_path}/train.tar")
    (h5_folder / "train-1.h5").write_bytes(b"short")
    assert "cannot read" in error(f"shards:{h5_folder}")
    (h5_folder / "train-1.h5").unlink()
    assert "of one kind" in error(f"shards:{tmp_path}/**/*")
    with pytest.raises(DataError, match="h5 has no test images, only train, val"):
        open_shards(f"shards:{h5_folder}").read_batch("test", torch.arange(1))


def test_shards_without_validation_images_are_refused(tmp_path):
    write_h5(tmp_path / "a.h5", "train", 20)
    with pytest.raises(DataError, match="has no val images, only train"):
        train(config_for(tmp_path), tmp_path / "run")
