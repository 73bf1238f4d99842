"""A run that is killed or out of space goes on, and ends as if nothing had been."""

import resource
import signal
import time
from contextlib import contextmanager

import pytest
from tiny_runs import AS_TINY, STEPS, assert_as_if_nothing_had_been, python, tiny

from foveate.cli.app import run as command_line
from foveate.errors import DataError
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train

# What the process does to itself: `how` says where it dies, `at` how many times it passes there.
VICTIM = """
import os, signal, sys
from pathlib import Path
import foveate.files, foveate.training.session as session
from foveate.training.loop import train
from tiny_runs import tiny

folder, how, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
passed = 0

def pass_by():
    global passed
    passed += 1
    if passed == at:
        os.kill(os.getpid(), signal.SIGKILL)

def callback(config, progress, steps):
    if how in ("step", "saved step") and progress.step:
        pass_by()
    if how == "epoch" and not progress.step:
        pass_by()

replace, write_bytes = os.replace, Path.write_bytes

def dying_replace(source, target):
    name = Path(target).name
    if how == f"before {name}":
        pass_by()
    replace(source, target)
    if how == f"after {name}":
        pass_by()

def dying_write(self, data):
    if how == "half" and ".safetensors" in self.name:
        if passed + 1 == at:
            write_bytes(self, data[: len(data) // 2])
        pass_by()
    return write_bytes(self, data)

os.replace, Path.write_bytes = dying_replace, dying_write
if how == "saved step":
    session.SAVE_EVERY = 0.0
train(tiny(), folder, callback=callback)
"""

KILLS = [
    ("step", 3, None),  # in mid-epoch, before anything was saved
    ("step", STEPS + 3, (1, 0)),  # in mid-epoch, long after the last save
    ("saved step", STEPS + 3, (1, 3)),  # in mid-epoch, just after a save
    ("epoch", 2, (2, 0)),  # between epochs
    ("half", 1, None),  # in the middle of the bytes of the first checkpoint
    ("half", 2, (1, 0)),  # and of a later one: the one before must still be there
    ("before resume.safetensors", 2, (1, 0)),  # all bytes written, not yet renamed
    ("after resume.safetensors", 3, (3, 0)),  # before the last line of the metrics
    ("half", 4, (3, 0)),  # in the middle of the final weights
    ("after weights.safetensors", 1, (3, 0)),  # finished, but not yet cleared away
]


@pytest.mark.parametrize(("how", "at", "reached"), KILLS, ids=lambda value: str(value))
def test_killed_and_started_again(tmp_path, whole, how, at, reached):
    process = python("-c", VICTIM, tmp_path, how, at)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    folder = RunFolder(tmp_path)
    assert folder.finished == (how == "after weights.safetensors")
    found = folder.load()
    assert (found and (found[0].epoch, found[0].step)) == reached
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


SLOW = """
import sys, time
from pathlib import Path
import foveate.training.session as session
from foveate.training.loop import train
from tiny_runs import tiny
session.SAVE_EVERY = 0.0
train(tiny(), Path(sys.argv[1]), callback=lambda *progress: time.sleep(0.5))
"""


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_two_processes_on_one_folder_then_killed_from_outside(tmp_path, whole, capsys):
    first, folder = python("-c", SLOW, tmp_path), RunFolder(tmp_path)
    try:
        wait_for(lambda: folder.saved)
        with pytest.raises(DataError, match="another process is training in"):
            train(tiny(), tmp_path)
        assert command_line([*AS_TINY, "--out", str(tmp_path)]) == 2
        assert "another process is training" in capsys.readouterr().err
        reached = folder.load()[0].step
        wait_for(lambda: folder.load()[0].step > reached)  # the first goes on
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


# A full disk


@contextmanager
def full_disk(limit):
    """No file may grow beyond `limit` bytes; Python ignores the signal, so that writing fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_in_mid_run(tmp_path, whole):
    with full_disk(2**30):

        def callback(config, progress, steps):
            if progress.epoch == 1:
                limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))

        with pytest.raises(DataError) as caught:
            train(tiny(), tmp_path, callback=callback)
    said = str(caught.value)
    assert (
        "cannot write in" in said
        and "free some disk space and run the same command again to resume" in said
    )
    assert "\n" not in said
    progress, _ = RunFolder(tmp_path).load()  # the last good one is whole
    assert (progress.epoch, progress.step) == (1, 0)
    assert not list(tmp_path.glob(".*.tmp"))
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_a_disk_that_is_full_from_the_start(tmp_path):
    with full_disk(10), pytest.raises(DataError, match="cannot write in"):
        train(tiny(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
