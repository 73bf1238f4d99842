"""Runs that take a second, for the tests of training and evaluation."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleGrid
from foveate.training.config import TrainConfig
from foveate.training.loop import train
from foveate.training.tensors import read_tensors

torch.set_num_threads(1)  # on shared cores two threads wait for each other more than they work
MODEL = ModelConfig(
    pool="avg", features=(4, 8), size=12, scales=ScaleGrid(1, 2, per_octave=1), hidden=8
)
STEPS = 6  # of an epoch: 96 samples in batches of 16
TIMES = ("seconds", "share")

# `tiny` as a command.
AS_TINY = ["train", "fovavg", "--source", "mnist-5k", "--scales", "1", "--samples", "96"]
AS_TINY += ["--batch", "16", "--epochs", "3", "--set", "size=24", "--set", "model.size=12"]
AS_TINY += ["--set", "model.features=[4,8]", "--set", "model.scales=1:2:1"]
AS_TINY += ["--set", "model.hidden=8", "--device", "cpu"]


def tiny(**changes):
    """Two channels of 12 pixels on real digits of 24: three epochs of six steps."""
    usual = {"model": MODEL, "source": "mnist-5k", "scales": "1", "samples": 96, "size": 24}
    return TrainConfig(**{**usual, "batch": 16, "epochs": 3, **changes})


def weights(folder):
    """All tensors of a finished run."""
    return read_tensors(Path(folder) / "weights.safetensors")[0]


def trained(folder, **changes):
    """Train a tiny run and give its weights."""
    return weights(train(tiny(**changes), folder).path)


def stopped_at_once(folder):
    """Start a tiny run that is interrupted after its first step."""

    def callback(config, progress, steps):
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        train(tiny(), folder, callback=callback)


def same_bits(one, other):
    """Whether two sets of tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(
        one[key].numpy().tobytes() == other[key].numpy().tobytes() for key in one
    )


def timeless(folder):
    """The metrics, but for times: also they must not tell that a run was interrupted."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def assert_as_if_nothing_had_been(folder, whole):
    """Whether an interrupted run has left what the run `whole` has, to the last bit."""
    assert same_bits(weights(folder), weights(whole.path))
    assert timeless(folder) == timeless(whole.path)
    names = {path.name for path in folder.iterdir()}
    assert names == {".lock", "config.json", "metrics.jsonl", "weights.safetensors"}


def threads_left(patience=1.0):
    """The threads of this process besides the main one, by the names that Linux has for them.

    A thread that takes the GIL while Python finalizes can abort the process. Linux lists a thread
    for a moment after it was joined.
    """
    until = time.monotonic() + patience
    while True:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                names += [(task / "comm").read_text().strip()] * (task.name != str(os.getpid()))
        if not names or time.monotonic() > until:
            return names
        time.sleep(0.01)


def python(*arguments, **options):
    """Start a Python process that can import foveate and the tests, on one thread."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **pipes, **options)


STUDY = """\
name = "small"
seeds = 2
test_scales = [1, 2]
[resources]
cpus = 1
[defaults]
source = "mnist-5k"
scales = 1
samples = 96
size = 24
batch = 16
epochs = 2
model.features = [4, 8]
model.size = 12
model.hidden = 8
model.scales = "1:2:1"
[[runs]]
preset = "fovavg"
[[runs]]
preset = "fovmax"
learning_rate = 0.001
[grid]
model.dropout = [0, 0.15]
"""
"""A study of four small runs with two seeds each."""


def assert_same_batches(resident, streamed):
    """Compare batches held in memory with those prepared on demand, whose sums differ in order."""
    for one, other in zip(resident, streamed, strict=True):
        (images, labels), (same, tags) = one.select(), other.select()
        assert torch.equal(labels, tags)
        torch.testing.assert_close(images.inputs[0], same.inputs[0], atol=5e-5, rtol=0)
