"""Runs that are killed at random moments, and started again, end with the weights of one that ran.

As a test it kills each network a few times. The full count, with its own seed:
python tests/hostile/test_kills.py 50 20 0  (SIGKILLs, SIGTERMs, seed)
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script
from tiny_runs import python, same_bits, timeless, weights

from foveate.training.checkpoint import RunFolder

SMALL = ["--set", "model.features=[4,8]", "--set", "model.hidden=8", "--set", "model.scales=1:2:1"]
NETWORKS = {
    "cnn": ["--set", "model.size=24", *SMALL[:4], "--samples", "512"],
    "fovmax": ["--set", "model.size=12", *SMALL, "--samples", "512"],
    "swmax": ["--set", "model.size=12", *SMALL, "--samples", "128"],
}
COMMON = ["--source", "mnist-5k", "--scales", "1", "--set", "size=24", "--batch", "16"]
COMMON += ["--epochs", "8", "--device", "cpu"]
FILES = {".lock", "config.json", "metrics.jsonl", "weights.safetensors"}

# Starts commands in processes that need not import torch again: a line of JSON says which.
SERVER = """
import json, os, sys
from foveate.cli import main
import foveate.cli.app, foveate.training.loop, foveate.training.distributed
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(order["files"]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.argv[1:] = order["arguments"]
        try:
            main()
        except SystemExit as error:
            sys.stdout.flush()
            os._exit(error.code)
        os._exit(99)
    print(child, flush=True)
    sys.stdin.readline()  # until then the number of the process is not given to another
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forked:
    """Starts processes by forking a server that has already imported everything."""

    def __init__(self):
        begun = time.monotonic()
        self.server = python("-c", SERVER, stdin=subprocess.PIPE)
        self.server.stdout.readline()
        self.importing = time.monotonic() - begun

    def start(self, arguments, errors):
        files = [os.devnull, os.devnull, str(errors)]
        pid = self.ask(json.dumps({"arguments": arguments, "files": files}))
        return pid, lambda: self.ask("wait")

    def ask(self, line):
        self.server.stdin.write(f"{line}\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def close(self):
        self.server.communicate()


def start_real(arguments, errors):
    """`python -m foveate` as a user starts it."""
    command = [sys.executable, "-m", "foveate", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(errors, "w") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)
    return process.pid, process.wait


class Victim:
    """One network: how it is started, how long it takes, and what it ends with."""

    def __init__(self, name, place, forked, rng):
        self.name, self.place, self.forked, self.rng = name, place, forked, rng
        self.errors, self.kills, self.count = place / "errors", Counter(), 0
        self.folder = self.whole = place / "whole"
        begun = time.monotonic()
        assert self.run() == 0, self.errors.read_text()
        self.seconds = time.monotonic() - begun
        self.fresh()

    def fresh(self):
        self.count += 1
        self.folder = self.place / f"{self.name}-{self.count}"

    def start(self, real):
        self.errors.write_text("")  # a process that ends at once leaves no words of its own
        self.begun = self.folder.exists()
        arguments = ["train", self.name, *COMMON, *NETWORKS[self.name], "--out", str(self.folder)]
        return (start_real if real else self.forked.start)(arguments, self.errors)

    def run(self):
        return self.start(real=False)[1]()

    def kill(self, number, real, saving):
        """Start or resume the run and send the signal, at any moment or while it saves."""
        pid, wait = self.start(real)
        moment = self.rng.uniform(0, self.seconds + real * self.forked.importing)
        if saving:
            until = time.monotonic() + moment
            while time.monotonic() < until and not list(self.folder.glob(".*.tmp")):
                time.sleep(0.0002)
        else:
            time.sleep(moment)
        os.kill(pid, number)
        code = wait()
        if code == 0:  # it had ended, or was about to
            self.finish()
        elif number == signal.SIGTERM:
            self.check_words(code)
        else:
            assert code == -signal.SIGKILL, self.errors.read_text()
        self.kills[number] += code != 0
        if RunFolder(self.folder).load() is None:
            assert not RunFolder(self.folder).metrics() or RunFolder(self.folder).finished

    def check_words(self, code):
        said = self.errors.read_text()
        if code == -signal.SIGTERM:  # Python itself was still starting
            assert said == "" and self.folder.exists() == self.begun
            return
        assert code == 143, said
        assert said.startswith("terminated: ") and said.count("\n") == 1, said
        assert "run the same command" in said

    def finish(self):
        """Let the run end, and compare all that it leaves with the run that nothing disturbed."""
        assert self.run() == 0, self.errors.read_text()
        assert same_bits(weights(self.folder), weights(self.whole)), self.folder
        assert timeless(self.folder) == timeless(self.whole)
        assert {path.name for path in self.folder.iterdir()} == FILES
        shutil.rmtree(self.folder)
        self.fresh()


def disturb(name, kills, terms, seed, place, forked):
    """Kill a network that often, and compare what it ends with now and then."""
    rng = random.Random(f"{seed} {name}")
    victim = Victim(name, place, forked, rng)
    wanted = {signal.SIGKILL: kills, signal.SIGTERM: terms}
    for number in wanted:
        while (done := victim.kills[number]) < wanted[number]:
            # Of five signals one meets a process as users start it, and two a save.
            victim.kill(number, real=done % 5 == 2, saving=done % 5 in (1, 4))
            if rng.random() < 0.2:
                victim.finish()
    victim.finish()
    return victim


@pytest.fixture(scope="module")
def forked():
    forked = Forked()
    yield forked
    forked.close()


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("name", NETWORKS)
def test_killed_runs_end_with_the_same_bits(name, tmp_path, forked):
    victim = disturb(name, 3, 2, 0, tmp_path, forked)
    assert victim.kills == {signal.SIGKILL: 3, signal.SIGTERM: 2}


if __name__ == "__main__":
    kills, terms, seed = map(int, sys.argv[1:])
    server = Forked()
    for rank, network in enumerate(NETWORKS):
        share = [(total + rank) // len(NETWORKS) for total in (kills, terms)]
        with tempfile.TemporaryDirectory() as folder:
            done = disturb(network, *share, seed, Path(folder), server)
            words = ", ".join(f"{count} {number.name}" for number, count in done.kills.items())
            print(f"{network}: {words}, {done.count - 1} runs equal to the bit", flush=True)
    server.close()
