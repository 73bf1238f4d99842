"""A run that is killed, interrupted or out of space goes on, and ends as if nothing had been."""

import json
import os
import resource
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from tiny_runs import STEPS, python, same_bits, tiny, trained, weights

import foveate.training.session as session
from foveate.cli.app import run as command_line
from foveate.errors import DataError
from foveate.training.checkpoint import RunFolder
from foveate.training.interrupt import held_back
from foveate.training.loop import train, train_together

TIMES = ("seconds", "share")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    return train(tiny(), tmp_path_factory.mktemp("whole") / "run")


def timeless(folder):
    """The metrics, but for times: also they must not tell that a run was interrupted."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def assert_as_if_nothing_had_been(folder, whole):
    assert same_bits(weights(folder), weights(whole.path))
    assert timeless(folder) == timeless(whole.path)
    names = {path.name for path in folder.iterdir()}
    assert names == {".lock", "config.json", "metrics.jsonl", "weights.safetensors"}


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

def watch(config, progress, steps):
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
    if how == "half" and passed + 1 == at:
        write_bytes(self, data[: len(data) // 2])
    if how == "half":
        pass_by()
    return write_bytes(self, data)

os.replace, Path.write_bytes = dying_replace, dying_write
if how == "saved step":
    session.SAVE_EVERY = 0.0
train(tiny(), folder, watch=watch)
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
train(tiny(), Path(sys.argv[1]), watch=lambda *progress: time.sleep(0.5))
"""


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
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


AS_TINY = ["train", "fovavg", "--source", "mnist-5k", "--scales", "1", "--samples", "96"]
AS_TINY += ["--batch", "16", "--epochs", "3", "--set", "size=24", "--set", "model.size=12"]
AS_TINY += ["--set", "model.features=[4,8]", "--set", "model.scales=1,2,1"]
AS_TINY += ["--set", "model.hidden=8", "--device", "cpu"]


def test_ctrl_c_saves_says_how_to_go_on_and_goes_on(tmp_path, capsys):
    """The command line itself, interrupted as a terminal does it."""
    arguments = [*AS_TINY, "--set", "epochs=40"]
    assert command_line([*arguments, "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    target = ["--out", str(tmp_path / "run")]
    process = python("-m", "foveate", *arguments, *target)
    for line in process.stdout:
        if line.startswith("epoch 3/40"):
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert err.startswith("interrupted: saved in") and "run the same command to go on" in err
    assert err.count("\n") == 1
    folder = RunFolder(tmp_path / "run")
    assert 3 <= folder.load()[0].epoch < 40
    assert command_line([*arguments, *target]) == 0
    out = capsys.readouterr().out
    assert "epoch 3/40" not in out and "epoch 40/40" in out
    assert_as_if_nothing_had_been(tmp_path / "run", RunFolder(tmp_path / "whole"))


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):  # Python hands a signal over between two of its own instructions
        pass


def interrupting(function, at):
    """The same function, with Ctrl-C pressed in the middle of its call number `at`."""
    calls = 0

    def wrapped(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == at:
            press_ctrl_c()
        return function(*arguments, **options)

    return wrapped


@pytest.mark.parametrize("at", [1, STEPS, STEPS + 2])
def test_ctrl_c_inside_a_step_waits_for_its_end(tmp_path, whole, monkeypatch, at):
    """Half of the weights moved and half not: that could not be gone on from."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "make_step", _interrupted_between_weights(at))
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path)
    progress = RunFolder(tmp_path).load()[0]
    assert progress.epoch * STEPS + progress.step == at
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def _interrupted_between_weights(at):
    make = session.make_step

    def made(net, optimiser, *arguments, **options):
        optimiser.step = interrupting(optimiser.step, at)
        return make(net, optimiser, *arguments, **options)

    return made


def test_a_handler_set_while_signals_wait_stays():
    """One who knows that the process ends lets nothing interrupt it any more."""
    before = signal.getsignal(signal.SIGINT)
    try:
        with held_back():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with held_back():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_validation_does_not_lose_the_epoch(tmp_path, whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(session, "answer", interrupting(session.answer, 2))
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path)
    progress = RunFolder(tmp_path).load()[0]
    assert (progress.epoch, progress.step, len(progress.metrics)) == (1, STEPS, 1)
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_ctrl_c_while_images_are_prepared_stops_at_once(tmp_path, whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(session, "open_batches", interrupting(session.open_batches, 2))
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path)
    assert not RunFolder(tmp_path).saved
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_ctrl_c_while_saving_keeps_one_good_state(tmp_path, whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupting(os.replace, 3))
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path)
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_the_time_before_an_interruption_is_counted_too(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(session, "make_step", _interrupted_between_weights(STEPS + 2))
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path)
    before = RunFolder(tmp_path).load()[0].share
    entries = train(tiny(), tmp_path).metrics()
    assert 0 < entries[0]["share"] < before < entries[1]["share"] < entries[2]["share"]


def test_interrupted_many_times(tmp_path, whole):
    """After every second step, and by a save of the first state after that."""
    for _ in range(3 * STEPS):
        count = 0

        def watch(config, progress, steps):
            nonlocal count
            count += 1
            if count == 2:
                raise KeyboardInterrupt

        try:
            train(tiny(), tmp_path, watch=watch)
            break
        except KeyboardInterrupt:
            continue
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_ctrl_c_saves_all_runs_side_by_side(tmp_path, whole, monkeypatch):
    other = trained(tmp_path / "other", seed=1)
    runs = [(tiny(), tmp_path / "a"), (tiny(seed=1), tmp_path / "b")]
    with monkeypatch.context() as patch:
        patch.setattr(session, "make_step", _interrupted_between_weights(STEPS + 2))
        patch.setattr(session, "TURN", 0.0)  # a step of each in turn
        with pytest.raises(KeyboardInterrupt):
            train_together(runs)
    reached = [RunFolder(path).load()[0] for _, path in runs]
    assert [(p.epoch, p.step) for p in reached] == [(1, 2), (1, 1)]
    train_together(runs)
    assert_as_if_nothing_had_been(tmp_path / "a", whole)
    assert same_bits(weights(tmp_path / "b"), other)


def test_training_in_a_thread_needs_no_signals(tmp_path, whole):
    thread = threading.Thread(target=train, args=(tiny(), tmp_path))
    thread.start()
    thread.join()
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_the_callers_ctrl_c_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    train(tiny(epochs=1), tmp_path)
    assert signal.getsignal(signal.SIGINT) is before


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

        def watch(config, progress, steps):
            if progress.epoch == 1:
                limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))

        with pytest.raises(DataError) as caught:
            train(tiny(), tmp_path, watch=watch)
    said = str(caught.value)
    assert "cannot write in" in said and "free some space and run again to go on" in said
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
