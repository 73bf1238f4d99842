"""Compiling the trunk: without a compiler, into a cache, and by two processes at once."""

import os
import stat
import subprocess
import sys

import native_trunks
import pytest
import torch
from native_trunks import assert_agrees, forgotten, made, steps_aside

from foveate.execution import convnet
from foveate.execution.native.stages import Job
from foveate.native import build
from foveate.native.calls import call

_needs_a_compiler = native_trunks._needs_a_compiler  # a fixture for every test


def assert_plain_path_works():
    net, images = made().eval(), torch.randn(2, 1, 28, 28)
    assert build.library() is None and steps_aside(net.trunk, images)
    torch.testing.assert_close(convnet.features(net, images), net.trunk(images), atol=1e-5, rtol=0)


def test_without_because_it_was_switched_off(monkeypatch):
    monkeypatch.setenv("FOVEATE_NATIVE", "0")
    assert_plain_path_works()


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with forgotten():
        assert_plain_path_works()


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        'case "$*" in *-dM*) exit 0;; esac; exit 1',  # knows the processor, cannot compile
        'while [ "$1" != -o ]; do [ $# = 0 ] && exit 0; shift; done; echo no > "$2"',
    ],
)
def test_without_a_compiler_that_works(script, monkeypatch, tmp_path):
    for name in build.COMPILERS:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path / "cache"))
    with forgotten():
        assert_plain_path_works()


def test_the_library_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    with forgotten():
        assert build.library() is not None
    (kept,) = (tmp_path / "native").iterdir()
    assert kept.suffix == ".so"
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    with forgotten():
        assert build.library() is not None


@pytest.mark.parametrize("damage", ["cut", "one bit", "empty"])
def test_a_damaged_library_in_the_cache_is_replaced(damage, monkeypatch, tmp_path):
    """A process that loads a library cut short dies of SIGBUS, so another process does it."""
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    with forgotten():
        assert build.library() is not None
    (kept,) = (tmp_path / "native").iterdir()
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    kept.write_bytes({"cut": whole[:4096], "one bit": flipped, "empty": b""}[damage])
    code = "from foveate.native import build; print(build.library().lanes())"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_does_not_matter(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path / "file"))
    with forgotten():
        assert build.library() is not None
        assert_agrees(made(), torch.randn(2, 1, 28, 28))


def test_two_processes_may_compile_at_once(tmp_path):
    code = "from foveate.native import build; print(build.library().lanes())"
    environment = {**os.environ, "FOVEATE_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert said[0] == said[1] == f"{build.library().lanes()}\n"
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]


def test_a_lack_of_memory_is_told():
    def fail(job):
        job._obj.failed = 1

    with pytest.raises(MemoryError, match="scratch"):
        call(fail, Job(parts=1))


def test_importing_compiles_nothing(tmp_path):
    code = (
        "import foveate.execution.native.trunk; from foveate.native import build; "
        "build._library.cache_info().misses and 1 / 0"
    )
    environment = {**os.environ, "FOVEATE_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not (tmp_path / "cache").exists()
