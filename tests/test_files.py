"""A file is whole and in place, or not there."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from tiny_runs import python

from foveate.files import is_alive, replacing, write_text


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


def test_the_error_of_a_full_disk_names_the_file_alone(tmp_path):
    target = tmp_path / "note.txt"

    def fail_half_way():
        with replacing(target) as temporary:
            temporary.touch()
            raise OSError(errno.ENOSPC, "No space left on device", str(temporary))

    with pytest.raises(OSError) as caught:
        fail_half_way()
    assert str(caught.value).endswith(f"No space left on device: {str(target)!r}")


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


@pytest.mark.parametrize("name", ["a**b.txt", "[a].txt"])
def test_names_may_contain_wildcards(name, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    leftover = f".{name}.{socket.gethostname()}.{process.pid}.tmp"
    (tmp_path / leftover).touch()
    write_text(tmp_path / name, "whole")
    assert os.listdir(tmp_path) == [name]


OPENERS = """
import os, socket, sys
from pathlib import Path
import h5py
from foveate.cli.app import run
from foveate.data.idx import decode
from foveate.data.pictures import read_picture
from foveate.data.shards import open_shards
from foveate.data.sources import load_source
from foveate.data.store import ScaledFile
from foveate.errors import FoveateError
from foveate.evaluation.results import read_results
from foveate.sweeps.jobs import Outcome
from foveate.sweeps.records import read_records
from foveate.sweeps.study import read_study
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
    "study.toml": read_study,
    "run/config.json": evaluated,
    "metrics.jsonl": lambda path: RunFolder(path.parent).metrics(),
    "weights.safetensors": read_tensors,
    "results.json": read_results,
    "outcome.json": Outcome.read,
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


def test_a_process_is_alive_until_it_was_waited_for():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    process.communicate()
    assert not is_alive(process.pid)
    assert not is_alive(10**20)  # a file name can contain any number


def test_windows_is_not_asked_with_a_signal(monkeypatch):
    """There os.kill(pid, 0) ends the process."""
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("killed"))
    monkeypatch.setattr(sys, "platform", "win32")
    assert is_alive(1)


def test_folders_that_cannot_be_opened_do_not_matter(tmp_path, monkeypatch):
    """As on Windows."""

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    write_text(tmp_path / "note.txt", "one")
    assert (tmp_path / "note.txt").read_text() == "one"


# Modules that only POSIX has.
ABSENT = ("fcntl", "grp", "pwd", "resource", "termios")
WITHOUT = f"""
import sys, warnings
sys.modules.update(dict.fromkeys({ABSENT!r}))
import pkgutil, importlib, foveate
from pathlib import Path
for module in pkgutil.walk_packages(foveate.__path__, "foveate."):
    if not any(word in module.name for word in ("__main__", ".demo", ".triton_")):
        importlib.import_module(module.name)
from tiny_runs import tiny
from foveate.training.loop import train
train(tiny(epochs=1), Path(sys.argv[1])).net()
"""


def test_everything_imports_and_trains_without_the_modules_of_posix(tmp_path):
    process = python("-W", "ignore:flock not supported", "-c", WITHOUT, tmp_path / "run")
    _, err = process.communicate()
    assert process.returncode == 0, err
