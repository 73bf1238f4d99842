"""A file is whole and in place, or not there."""

import os
import signal
import subprocess
import sys
import time

import pytest

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
