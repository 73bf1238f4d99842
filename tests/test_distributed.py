"""One run on several processes: the numbers of one, and its end when one of them dies."""

import gc
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import AS_TINY, MODEL, STEPS, python, same_bits, tiny, weights
from torch import nn

import foveate.training.distributed as distributed
import foveate.training.session as session
from foveate.cli.app import run as command_line
from foveate.errors import ConfigError
from foveate.execution.convnet import features
from foveate.models.backbone import ConvNet
from foveate.training.checkpoint import RunFolder
from foveate.training.distributed import Team, join_processes
from foveate.training.loop import train

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without processes"
)
EPOCHS = 4  # of 6 steps
CONFIG = tiny(model=replace(MODEL, dropout=0.0), batch=15, samples=86, epochs=EPOCHS)
COMMAND = [*AS_TINY, "--batch", "15", "--samples", "86", "--epochs", str(EPOCHS)]
COMMAND += ["--set", "model.dropout=0"]


def torchrun(*arguments, processes=2, restarts=0):
    """Start what comes after `torchrun` on processes of this machine."""
    options = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}", "--standalone"]
    return python("-m", "torch.distributed.run", *options, *arguments)


def done(process):
    """Wait for a process that must succeed; give what it printed."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def said(err):
    """The lines that are ours, not torchrun's."""
    words = ("error:", "interrupted:", "terminated:")
    return [line for line in err.splitlines() if line.startswith(words)]


# What the team is, without processes


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 15, 29, 32, 47])
def test_each_batch_is_dealt_in_even_parts(length, count):
    order, batch = torch.randperm(length), 5
    hands = [
        [part for some, size in Team(rank=r, count=count).split_batches(order, batch) if len(some)
         for part in some.split(size)]
        for r in range(count)
    ]  # fmt: skip
    batches = order.split(batch) if length else ()
    assert [len(hand) for hand in hands] == [len(batches)] * count
    for whole, *parts in zip(batches, *hands, strict=True):
        if len(whole) < count:
            assert all(torch.equal(part, whole) for part in parts)
        else:
            assert torch.equal(torch.cat(parts), whole)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alone_nothing_changes():
    order, team = torch.arange(7), Team()
    assert team.is_main and team.may_print() and team.may_print()
    ((same, batch),) = team.split_batches(order, 3)
    assert same is order and batch == 3
    assert (
        team.device("cuda") == "cuda"
        and team.broadcast_int(5) == 5
        and team.broadcast_bytes(b"x") == b"x"
    )
    before = torch.get_rng_state()
    team.seed(1, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert team.description == ""
    with join_processes("cpu") as other:
        assert (other.count, other.is_main) == (1, True)


def test_a_batch_norm_of_another_kind_is_not_left_out():
    """The fast forms fold batch norm into the weights, which fits the usual kind alone."""

    class Other(nn.BatchNorm2d):
        def forward(self, values):
            return super().forward(values) + 1

    net, images = ConvNet((4, 8), 12).eval(), torch.randn(3, 1, 12, 12)
    net.trunk[1].__class__ = Other
    torch.testing.assert_close(features(net, images), net.trunk(images))


def test_usage_errors_are_said_by_the_first_process(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert command_line([*COMMAND, "--nonsense"]) == 2
        assert capsys.readouterr().err.count("\n") == lines


def test_norms_are_shared_or_local(tmp_path, capsys):
    assert command_line([*COMMAND, "--norms", "none", "--out", str(tmp_path)]) == 2
    assert "norms must be one of shared, local, got 'none'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"batch must be at least 4, .* got 3; start fewer"):
        Team(count=4).prepare(nn.Identity(), 3)


def test_the_watching_thread_ends_with_the_team(monkeypatch):
    ended = []

    def watch(reader, over, team):
        with open(reader, "rb") as told:
            told.read()
        time.sleep(0.2)
        ended.append(over.is_set())

    monkeypatch.setattr(distributed, "_end_in_time", watch)
    with distributed._ending(Team()):
        pass
    assert ended == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_keep_the_group_from_being_destroyed(monkeypatch, number):
    """With Ctrl-C torchrun's SIGTERM comes a moment after SIGINT."""
    destroyed = []
    monkeypatch.setattr(gc, "collect", lambda: signal.raise_signal(number))
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: destroyed.append(1))
    with suppress(KeyboardInterrupt), distributed._ending(Team()), distributed._group_destroyed():
        pass
    assert destroyed == [1]


HELD = """
import torch
import torch.distributed as dist
from foveate.training.distributed import _group_destroyed
from tiny_runs import threads_left

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    with _group_destroyed():
        try:
            dist.broadcast(torch.zeros(1), src=5)  # there is no such rank
        except Exception as error:
            raise KeyError from error
except KeyError as error:
    assert threads_left() == [], threads_left()
else:
    raise AssertionError
"""


def test_an_error_that_is_kept_does_not_keep_the_group():
    """Python keeps the last uncaught error, with its frames, until it finalizes."""
    done(python("-c", HELD))


# Two processes


def test_facts_between_processes(tmp_path):
    done(torchrun(Path(__file__).with_name("team_facts.py"), tmp_path))


RECORD = """
import json, sys
from pathlib import Path
import torch
from foveate.training.distributed import join_processes
from test_distributed import CONFIG, recorded
from tiny_runs import threads_left

with join_processes("cpu") as team:
    losses = recorded(Path(sys.argv[1]), team)
    if team.is_main:
        print(json.dumps(losses))
    cycle = [torch.distributed.group.WORLD]
    cycle.append(cycle)
    del cycle
assert threads_left() == [], threads_left()
"""


def recorded(folder, team=session.ALONE):
    """Train, and give the loss of every step."""
    losses, total = [], 0.0

    def callback(config, progress, steps):
        nonlocal total
        if progress.step:
            losses.append(progress.loss - (total if progress.step > 1 else 0.0))
            total = progress.loss

    before, session.READ_LOSSES_EVERY = session.READ_LOSSES_EVERY, -1.0
    train(CONFIG, folder, callback=callback, team=team)
    session.READ_LOSSES_EVERY = before
    return losses


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run on one process, and its losses."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return folder, recorded(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same run on two processes."""
    folder = tmp_path_factory.mktemp("two") / "run"
    out, _ = done(torchrun("--no-python", sys.executable, "-c", RECORD, folder))
    return folder, json.loads(out)


@pytest.fixture(scope="module")
def rounding(tmp_path_factory, one):
    """How far rounding alone takes the losses: the same batches, images in another order."""

    class Shuffled(Team):
        def split_batches(self, order, batch):
            return [(torch.cat([b[torch.randperm(len(b))] for b in order.split(batch)]), batch)]

    runs = [recorded(tmp_path_factory.mktemp("shuffled"), Shuffled()) for _ in range(3)]
    return max(abs(a - b) for run in runs for a, b in zip(run, one[1], strict=True))


def test_losses_are_those_of_one_process(one, two, rounding):
    assert len(one[1]) == len(two[1]) == EPOCHS * 6 >= 20
    farthest = max(abs(a - b) for a, b in zip(one[1], two[1], strict=True))
    assert farthest < 4 * rounding < 1e-3
    assert rounding > 0


def test_the_run_folder_is_that_of_one_process(one, two):
    names = {path.name for path in two[0].iterdir()}
    assert names == {".lock", "config.json", "metrics.jsonl", "weights.safetensors"}
    about = [json.loads((folder / "config.json").read_text()) for folder in (one[0], two[0])]
    assert about[0]["config"] == about[1]["config"] and about[0]["digest"] == about[1]["digest"]
    assert about[1]["hardware"] == about[0]["hardware"] + ", 2 processes, shared batch norm"
    assert weights(one[0]).keys() == weights(two[0]).keys()
    last = [RunFolder(folder).metrics()[-1] for folder in (one[0], two[0])]
    assert abs(last[0]["validation"] - last[1]["validation"]) <= 2 / 500  # images on the edge


# Death. `at` is the number of the step in which the process of rank 1 dies, or stops.
VICTIM = """
import os, signal, sys, time
import foveate.training.distributed as distributed, foveate.training.session as session
from foveate.cli.app import run
from tiny_runs import threads_left

at, how, lag, arguments = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
session.SAVE_EVERY = 0.0
if how == "SIGSTOP":
    distributed.GRACE = 0.5
first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
make, steps = session.team_step, 0

def making(*options):
    step = make(*options)

    def dying(*batch):
        global steps
        steps += 1
        if steps == at and first_life:
            print("at", os.environ["RANK"], os.getpid(), flush=True)
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), getattr(signal, how))
        loss = step(*batch)
        if steps == at - 1 and first_life and os.environ["RANK"] == "0":
            time.sleep(lag)
        return loss

    return dying

session.team_step = making
code = run(arguments)
print("threads left:", threads_left(), flush=True)
sys.exit(code)
"""


def victim(at, how, *arguments, lag=0, **options):
    """Two processes: the second dies in a step, and the first comes to it `lag` seconds late."""
    command = ["--no-python", sys.executable, "-c", VICTIM, at, how, lag]
    return torchrun(*command, *arguments, **options)


def test_a_process_that_is_killed_ends_the_run_with_one_line(tmp_path, one, two, rounding):
    folder = tmp_path / "run"
    process = victim(STEPS + 4, "SIGKILL", *COMMAND, "--out", folder)
    out, err = process.communicate()
    assert process.returncode != 0
    assert "threads left: []" in out
    assert said(err) == [
        "error: a process of this run died; the last checkpoint is at epoch 2, step 3 in "
        f"{folder}; run the same command to resume"
    ], err
    reached = RunFolder(folder).load()[0]
    assert (reached.epoch, reached.step) == (1, 3)
    shutil.copytree(folder, tmp_path / "copy")
    out, _ = done(torchrun("-m", "foveate", *COMMAND, "--out", folder))
    assert out.count("training ") == 1 and out.count("epoch 4/4") == 1  # by the first process
    assert same_bits(weights(folder), weights(two[0]))
    train(CONFIG, tmp_path / "copy")
    expected = RunFolder(one[0]).metrics()
    for was, now in zip(expected, RunFolder(tmp_path / "copy").metrics(), strict=True):
        assert abs(was["loss"] - now["loss"]) < 4 * rounding


def farthest(first, second):
    """The largest difference of weights; biases before a norm have no gradient but rounding."""
    names = [name for name in first if name.endswith("weight")]
    return max(float((first[name] - second[name]).abs().max()) for name in names)


def test_the_average_of_a_killed_run_is_that_of_one_process(tmp_path, one, two):
    """An average of weights differs no more than they do, up to the rounding of its own steps."""
    options = [*COMMAND, "--set", "ema=0.9", "--out", tmp_path / "run"]
    victim(STEPS + 4, "SIGKILL", *options).communicate()
    assert RunFolder(tmp_path / "run").load()[0].epoch == 1
    done(torchrun("-m", "foveate", *options))
    average = weights(train(replace(CONFIG, ema=0.9), tmp_path / "alone").path)
    last = weights(one[0])
    rounding = max(farthest(last, weights(two[0])), torch.finfo(torch.float32).eps)
    assert farthest(average, weights(tmp_path / "run")) < 4 * rounding
    assert farthest(average, last) > 100 * rounding  # the last weights would be found out


@pytest.mark.parametrize("lag", [0, 3])
def test_torchrun_starts_it_again_by_itself(tmp_path, two, lag):
    """Whether the first process meets the dead one, or torchrun asks it to end before."""
    out = ["--out", tmp_path / "run"]
    process = victim(STEPS + 4, "SIGKILL", *COMMAND, *out, lag=lag, restarts=1)
    _, err = done(process)
    (line,) = said(err)
    died = "error: a process of this run died; the last checkpoint is at epoch 2, step 3 in"
    assert line.startswith(died)
    assert line.endswith("torchrun restarts it")
    assert same_bits(weights(tmp_path / "run"), weights(two[0]))


def test_a_process_that_hangs_does_not_keep_the_others(tmp_path):
    """It is stopped, not dead: the other waits for it, and learns from torchrun that it ends."""
    process = victim(3, "SIGSTOP", *COMMAND, "--out", tmp_path / "run")
    there = [next(line for line in process.stdout if line.startswith("at ")) for _ in range(2)]
    (stopped,) = [int(line.split()[2]) for line in there if line.startswith("at 1")]
    process.send_signal(signal.SIGTERM)
    line = next((line for line in process.stderr if line.startswith("error:")), "nothing")
    os.kill(stopped, signal.SIGKILL)
    process.communicate()
    assert "a process of this run does not respond; saved files are unaffected" in line


def test_a_request_to_end_saves_the_last_step(tmp_path, two):
    folder, long = tmp_path / "run", ["--set", "epochs=300"]
    process = torchrun("-m", "foveate", *COMMAND, *long, "--out", folder)
    for line in process.stdout:
        if line.startswith("epoch 2/300"):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate()
    (line,) = said(err)
    reached = RunFolder(folder).load()[0]
    assert (
        f"terminated: saved in {folder} at epoch {reached.epoch + 1}, step {reached.step}" in line
    )
    assert 2 <= reached.epoch < 300


def test_what_concerns_all_is_said_once(tmp_path):
    process = torchrun("-m", "foveate", *COMMAND, "--samples", "9999", "--out", tmp_path / "run")
    _, err = process.communicate()
    assert process.returncode != 0
    assert said(err) == [
        "error: samples must be at most 3500, the size of the training set, got 9999"
    ]
