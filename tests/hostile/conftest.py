"""The warm process of the hostile cases, one for all tests of a worker, and bait for servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bait import Bait
from served_page import written
from traps import forget

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def problems(tmp_path_factory):
    """A function that runs cases `numbers` of a group: the lines about those that went wrong."""
    if sys.platform != "linux":
        pytest.skip("cases are forked and bounded as Linux does it")
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    command = [sys.executable, "-m", "hostile.sandbox", str(tmp_path_factory.mktemp("hostile"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    warm = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)

    def ask(group, numbers):
        warm.stdin.write(json.dumps([group, list(numbers)]) + "\n")
        warm.stdin.flush()
        return json.loads(warm.stdout.readline())

    yield ask
    warm.stdin.close()
    warm.wait(60)
    warm.stdout.close()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget(tmp_path)


@pytest.fixture
def bait(tmp_path, server_folder, server):
    made = Bait(tmp_path)
    with made.listener:
        yield made
        made.untouched()
    assert written(server_folder) == []
    for path in (server_folder / "cache").rglob("*"):
        assert path.is_dir() or made.token not in path.read_bytes()
