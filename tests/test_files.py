"""A file is whole and in place, or not there."""

import os
import signal
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


def test_a_process_is_alive_until_it_was_waited_for():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    process.communicate()
    assert not is_alive(process.pid)


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
    if not any(word in module.name for word in ("__main__", ".demo", ".kernels")):
        importlib.import_module(module.name)
from tiny_runs import tiny
from foveate.training.loop import train
train(tiny(epochs=1), Path(sys.argv[1])).net()
"""


def test_everything_imports_and_trains_without_the_modules_of_posix(tmp_path):
    process = python("-W", "ignore:flock not supported", "-c", WITHOUT, tmp_path / "run")
    _, err = process.communicate()
    assert process.returncode == 0, err
