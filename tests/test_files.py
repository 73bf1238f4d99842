"""A file is whole and in place, or not there."""

import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import python

from foveate.files import replacing, write_text


def test_the_file_appears_whole(tmp_path):
    target = tmp_path / "new" / "note.txt"
    write_text(target, "one")
    write_text(target, "two")
    assert target.read_text() == "two"
    assert os.listdir(target.parent) == ["note.txt"]


def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path):
    target = tmp_path / "note.txt"
    target.write_text("old")

    def fail_half_way():
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


def test_what_a_killed_writer_left_is_swept_by_the_next(tmp_path):
    target = tmp_path / "note.txt"
    code = (
        "import sys, time, pathlib; from foveate.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as t: t.write_text('half'); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
    deadline = time.monotonic() + 30
    while not os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    (leftover,) = os.listdir(tmp_path)
    with replacing(target) as temporary:  # a living writer's file is left alone
        temporary.write_text("mine")
        assert leftover in os.listdir(tmp_path)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    write_text(target, "whole")
    assert os.listdir(tmp_path) == ["note.txt"]


OPENERS = """
import os, socket, sys
from pathlib import Path
import h5py
from foveate.cli.app import run
from foveate.data.idx import decode
from foveate.data.picture import read_picture
from foveate.data.shards import open_shards
from foveate.data.sources import load_source
from foveate.data.store import ScaledFile
from foveate.errors import FoveateError
from foveate.evaluation.results import read_results
from foveate.experiments.jobs import _read_outcome
from foveate.experiments.records import read_records
from foveate.experiments.toml_lines import read_toml
from foveate.training.checkpoint import RunFolder, read_tensors

root = Path(sys.argv[1])
os.mkfifo(root / "pipe")
listening = socket.socket(socket.AF_UNIX)
listening.bind(str(root / "socket"))

def command(*arguments):
    code = run([str(argument) for argument in arguments])
    raise FoveateError("not a regular file" if code == 1 else f"exit code {code}")

def evaluated(path):  # a run whose config.json is no file
    RunFolder(path.parent).config()

CASES = {
    "x.png": read_picture,
    "photos/train/a/0.png": lambda path: load_source(f"folder:{path.parents[2]}"),
    "photo.jpg": lambda path: command("predict", path),
    "train-images-idx3-ubyte": decode,
    "a.h5": ScaledFile,
    "train.tar": lambda path: open_shards(f"shards:{path}"),
    "shard.h5": lambda path: open_shards(f"shards:{path}"),
    "study.toml": read_toml,
    "run/config.json": evaluated,
    "metrics.jsonl": lambda path: RunFolder(path.parent).metrics(),
    "weights.safetensors": read_tensors,
    "results.json": read_results,
    "outcome.json": _read_outcome,
    "results.csv": lambda path: read_records(path.parent),
}
for name, action in CASES.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if "photos" in name:
        (root / "photos" / "test" / "a").mkdir(parents=True)
        (root / "photos" / "test" / "a" / "0.png").symlink_to(root / "pipe")
        (root / "photos" / "val").symlink_to(root / "photos" / "test")
    for kind in ("pipe", "link to a pipe", "device", "socket"):
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            targets = {"device": "/dev/zero", "socket": root / "socket"}
            path.symlink_to(targets.get(kind, root / "pipe"))
        print(f"{name}, {kind}: ", end="", flush=True)
        try:
            action(path)
            print("no error")
        except FoveateError as error:
            print(error)
with h5py.File(root / "linked.h5", "w") as file:  # a link that would open the pipe
    file["x_train"] = file["y_train"] = h5py.ExternalLink(root / "pipe", "/x_train")
print("link in HDF5: ", end="", flush=True)
try:
    ScaledFile(root / "linked.h5")
except FoveateError as error:
    print(str(error).replace("is a link", "not a regular file"))
"""


def test_pipes_devices_and_sockets_are_never_opened(tmp_path):
    process = python("-c", OPENERS, tmp_path)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it hangs at {process.communicate()[0].splitlines()[-1]}") from None
    lines = out.splitlines()
    assert len(lines) == 14 * 4 + 1, err
    for line in lines:
        assert "not a regular file" in line
