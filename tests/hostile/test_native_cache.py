"""Another user plants a library in the cache of compiled code, or the compiler hangs."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from native_trunks import forgotten
from tiny_runs import AS_TINY

from foveate.native import build

FLAGS = ("-std=c11", "-O0", "-fPIC", "-shared")  # compiles in a moment
NOBODY = 65534
LANES = (
    f"from foveate.native import build; build.FLAGS = {FLAGS!r}; "
    "lib = build.library(); print(lib.lanes())"
)
pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("cc") is None, reason="no C compiler"
)


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """A library that leaves a file when it is loaded, with the digest that foveate looks for."""
    folder = tmp_path_factory.mktemp("bomb")
    canary = folder / "canary"
    source = f"""
    #include <stdio.h>
    __attribute__((constructor)) static void run(void) {{ fclose(fopen("{canary}", "w")); }}
    void cut(void *a) {{}} void work(void *a) {{}} void finish(void *a) {{}}
    long long lanes(void) {{ return -1; }}
    """
    (folder / "bomb.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "bomb.so", folder / "bomb.c"]
    subprocess.run(command, check=True)
    data = (folder / "bomb.so").read_bytes()
    (folder / "bomb.so").write_bytes(data + hashlib.sha256(data).digest())
    return folder


def name_of(flags, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", flags)
    return build._identify(time.monotonic() + 20)[2]


def plant(bomb, cache, name):
    """Put the library where foveate looks for its own."""
    (bomb / "canary").unlink(missing_ok=True)
    cache.mkdir(mode=0o700)
    (cache / "native").mkdir(mode=0o700)
    path = cache / "native" / name
    shutil.copy(bomb / "bomb.so", path)
    path.chmod(0o644)
    return path


def victim(cache, code=LANES):
    environment = {**os.environ, "FOVEATE_CACHE": str(cache)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def to_another_group(path, mode):
    if os.geteuid() == 0:
        os.chown(path, -1, NOBODY)
    elif os.getgid() == os.geteuid():
        pytest.skip("the only group is the user's own")
    path.chmod(mode)


def owned_by_another(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, NOBODY, -1)


def linked(path):
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


HOLES = {
    "the cache is writable by all": lambda path: path.parents[1].chmod(0o777),
    "the folder is writable by all": lambda path: path.parent.chmod(0o777),
    "the folder is writable by a group": lambda path: to_another_group(path.parent, 0o770),
    "the file is writable by all": lambda path: path.chmod(0o666),
    "the folder is another's": lambda path: owned_by_another(path.parent),
    "the file is another's": lambda path: owned_by_another(path),
    "the folder is a link": lambda path: linked(path.parent),
    "the file is a link": linked,
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_planted_library_is_not_executed(hole, bomb, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    HOLES[hole](plant(bomb, cache, name_of(FLAGS, monkeypatch)))
    done = victim(cache)
    assert not (bomb / "canary").exists()
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr
    if hole != "the file is a link":  # which is replaced without a word
        assert done.stderr.count("\n") == 1 and str(cache) in done.stderr
        assert ("is a symbolic link" in done.stderr) == (hole == "the folder is a link")
    if hole.startswith("the file"):
        again = victim(cache)  # it was replaced
        assert (again.stdout, again.stderr) == (done.stdout, "")


def test_the_bomb_works(bomb, tmp_path, monkeypatch):
    """In a folder that only its owner can write it is trusted: the tests above can fail."""
    plant(bomb, tmp_path / "cache", name_of(FLAGS, monkeypatch))
    victim(tmp_path / "cache")
    assert (bomb / "canary").exists()


def test_a_command_does_not_execute_it(bomb, tmp_path, monkeypatch):
    plant(bomb, tmp_path / "cache", name_of(build.FLAGS, monkeypatch))
    (tmp_path / "cache").chmod(0o777)
    options = [*AS_TINY, "--epochs", "1", "--samples", "16", "--out", str(tmp_path / "run")]
    code = f"import sys; sys.argv[1:] = {options!r}; from foveate.cli import main; main()"
    done = victim(tmp_path / "cache", code)
    assert done.returncode == 0 and "chmod go-w" in done.stderr, done.stderr
    assert not (bomb / "canary").exists()


def test_a_pipe_in_the_cache_does_not_hang(tmp_path, monkeypatch):
    path = tmp_path / "native" / name_of(FLAGS, monkeypatch)
    path.parent.mkdir(mode=0o700)
    os.mkfifo(path)
    assert int(victim(tmp_path).stdout) > 0
    assert path.is_file()


# A compiler that never ends, and whose child keeps its pipes open.
HANGING = """#!/bin/sh
echo $$ >> {pids}
{when}
sleep 300 & echo $! >> {pids}
wait
"""


@pytest.mark.parametrize("at", ["start", "compile"])
def test_a_hanging_compiler_is_ended_with_its_children(at, tmp_path, monkeypatch, caplog):
    pids = tmp_path / "pids"
    when = 'case "$*" in *-dM*) exit 0;; esac' if at == "compile" else ""
    for name in build.COMPILERS:
        (tmp_path / name).write_text(HANGING.format(pids=pids, when=when))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path / "cache"))
    assert build.TIMEOUT == 20
    monkeypatch.setattr(build, "TIMEOUT", 1.0)
    begun = time.monotonic()
    with forgotten(), caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert time.monotonic() - begun < 5
    (line,) = caplog.messages
    assert "did not finish within 1 s" in line and "FOVEATE_NATIVE=0" in line
    for pid in map(int, pids.read_text().split()):
        assert not is_running(pid)


def is_running(pid):
    """Whether a process is there and no zombie; one that was killed may take a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True
