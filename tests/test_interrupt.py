"""A run that is interrupted says so, goes on, and ends as if nothing had been."""

import os
import signal
import sys
import threading

import pytest
from tiny_runs import (
    AS_TINY,
    STEPS,
    assert_as_if_nothing_had_been,
    python,
    same_bits,
    tiny,
    trained,
    weights,
)

import foveate.training.session as session
from foveate.cli.app import run as command_line
from foveate.training.checkpoint import RunFolder
from foveate.training.interrupt import Terminated, deferred_signals
from foveate.training.loop import train, train_together


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_saves_says_how_to_go_on_and_goes_on(number, code, word, tmp_path, capsys):
    """The command line itself, interrupted as a terminal or a cluster does it."""
    arguments = [*AS_TINY, "--set", "epochs=40"]
    assert command_line([*arguments, "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    target = ["--out", str(tmp_path / "run")]
    process = python("-m", "foveate", *arguments, *target)
    for line in process.stdout:
        if line.startswith("epoch 3/40"):
            process.send_signal(number)
            break
    _, err = process.communicate()
    assert process.returncode == code, err
    assert err.startswith(f"{word}: saved in") and "run the same command to resume" in err
    assert err.count("\n") == 1
    folder = RunFolder(tmp_path / "run")
    assert 3 <= folder.load()[0].epoch < 40
    assert command_line([*arguments, *target]) == 0
    out = capsys.readouterr().out
    assert "epoch 3/40" not in out and "epoch 40/40" in out
    assert_as_if_nothing_had_been(tmp_path / "run", RunFolder(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("name", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_a_signal_while_torch_is_imported_ends_with_a_line(name, code, word, tmp_path):
    """Also where what is imported swallows the exception."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n"
        f"    os.kill(os.getpid(), signal.{name})\n    for _ in range(100): pass\n"
        "except BaseException: pass\n"
    )
    code_of_main = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import foveate.__main__"
    process = python("-c", code_of_main, *AS_TINY, cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out) == (code, "")
    assert err == f"{word}: run the same command again\n"


@pytest.mark.parametrize(
    ("name", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
@pytest.mark.parametrize("place", ["typer.main.get_command", "foveate.cli.app.Commands.parse_args"])
def test_a_signal_while_the_arguments_are_parsed_ends_with_a_line(place, name, code, word):
    """Before a command begins; click turns the exception into its own."""
    program = (
        "import os, signal, sys\nfrom unittest import mock\nimport foveate.cli.app\n"
        "def interrupt(*a, **b):\n"
        f"    os.kill(os.getpid(), signal.{name})\n    for _ in range(100): pass\n"
        f"with mock.patch({place!r}, interrupt): foveate.cli.main()\n"
    )
    process = python("-c", program, *AS_TINY)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (code, "", f"{word}: run the same command again\n")


# Calls `main` again and again, with the signal at a later line each time, and a command that does
# nothing, so that the lines are those before and after it. Lines count once the handlers are set.
AROUND = """
import itertools, os, signal, sys
import foveate.cli, foveate.cli.app as app
app.app = lambda *a, **b: 0
number = int(sys.argv[1])

def at(line):
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        if event == "line" and signal.getsignal(signal.SIGTERM) is foveate.cli._stop:
            seen += 1
            if seen == line:
                os.kill(os.getpid(), number)
        return trace
    sys.settrace(trace)
    try:
        foveate.cli.main()
    except SystemExit as error:
        sys.settrace(None)
        os._exit(99 if seen < line else error.code)

for line in itertools.count(1):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        at(line)
    os.close(write)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(line, code, os.read(read, 4096).decode(), flush=True)
    if code == 99:  # `main` has no such line
        break
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_at_any_line_around_a_command_ends_with_a_line(number, code, word):
    out, err = python("-c", AROUND, str(int(number))).communicate()
    lines = [line.split(maxsplit=2) for line in out.splitlines() if line]
    assert err == "" and lines.pop()[1] == "99"
    while lines[-1][1:] == ["0"]:  # the exit code was decided, and signals are ignored
        lines.pop()
    assert len(lines) > 10
    for line, ended, *said in lines:
        assert (ended, said) == (str(code), [f"{word}: run the same command again"]), line


def test_a_signal_while_data_is_prepared_ends_with_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("foveate.data.sources.load_source", interrupting(lambda *a, **b: 1 / 0, 1))
    assert command_line([*AS_TINY, "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err == "interrupted: run the same command again\n"


def test_sigterm_ends_quickstart_with_a_line(tmp_path, monkeypatch, capsys):
    def ended(*arguments, **options):
        raise Terminated

    monkeypatch.setattr("foveate.paper.quickstart.train", ended)
    assert command_line(["quickstart", "--out", str(tmp_path)]) == 143
    assert capsys.readouterr().err == "terminated: run the same command again\n"


def test_a_handler_that_exits_saves_too(tmp_path, whole, monkeypatch):
    """The usual answer to SIGTERM in a script, and that of Ray's workers."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(session, "make_step", _interrupted_between_weights(3, signal.SIGTERM))
            with pytest.raises(SystemExit):
                train(tiny(), tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert RunFolder(tmp_path).load()[0].step == 3
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def press_ctrl_c(number):
    os.kill(os.getpid(), number)
    for _ in range(100):  # Python hands a signal over between two of its own instructions
        pass


def interrupting(function, at, number=signal.SIGINT):
    """The same function, with Ctrl-C pressed in the middle of its call number `at`."""
    calls = 0

    def wrapped(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == at:
            press_ctrl_c(number)
        return function(*arguments, **options)

    return wrapped


def interrupted(monkeypatch, folder, owner, name, replacement):
    """Train with one function replaced by one that presses Ctrl-C; the folder of the run."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, replacement)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), folder)
    return RunFolder(folder)


@pytest.mark.parametrize("at", [1, STEPS, STEPS + 2])
def test_ctrl_c_inside_a_step_waits_for_its_end(tmp_path, whole, monkeypatch, at):
    """Half of the weights moved and half not: that could not be gone on from."""
    step = _interrupted_between_weights(at)
    progress = interrupted(monkeypatch, tmp_path, session, "make_step", step).load()[0]
    assert progress.epoch * STEPS + progress.step == at
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def _interrupted_between_weights(at, number=signal.SIGINT):
    make = session.make_step

    def made(net, optimiser, *arguments, **options):
        optimiser.step = interrupting(optimiser.step, at, number)
        return make(net, optimiser, *arguments, **options)

    return made


def test_a_handler_set_while_signals_wait_stays():
    """One who knows that the process ends lets nothing interrupt it any more."""
    before = signal.getsignal(signal.SIGINT)
    try:
        with deferred_signals():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with deferred_signals():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_validation_does_not_lose_the_epoch(tmp_path, whole, monkeypatch):
    validating = interrupting(session.logits, 2)
    progress = interrupted(monkeypatch, tmp_path, session, "logits", validating).load()[0]
    assert (progress.epoch, progress.step, len(progress.metrics)) == (1, STEPS, 1)
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_ctrl_c_while_images_are_prepared_stops_at_once(tmp_path, whole, monkeypatch):
    preparing = interrupting(session.open_batches, 2)
    assert not interrupted(monkeypatch, tmp_path, session, "open_batches", preparing).saved
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_ctrl_c_while_saving_keeps_one_good_state(tmp_path, whole, monkeypatch):
    interrupted(monkeypatch, tmp_path, os, "replace", interrupting(os.replace, 3))
    train(tiny(), tmp_path)
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_the_time_before_an_interruption_is_counted_too(tmp_path, monkeypatch):
    step = _interrupted_between_weights(STEPS + 2)
    before = interrupted(monkeypatch, tmp_path, session, "make_step", step).load()[0].share
    entries = train(tiny(), tmp_path).metrics()
    assert 0 < entries[0]["share"] < before < entries[1]["share"] < entries[2]["share"]


def test_interrupted_many_times(tmp_path, whole):
    """After every second step, and by a save of the first state after that."""
    for _ in range(3 * STEPS):
        count = 0

        def callback(config, progress, steps):
            nonlocal count
            count += 1
            if count == 2:
                raise KeyboardInterrupt

        try:
            train(tiny(), tmp_path, callback=callback)
            break
        except KeyboardInterrupt:
            continue
    assert_as_if_nothing_had_been(tmp_path, whole)


def test_ctrl_c_saves_all_runs_side_by_side(tmp_path, whole, monkeypatch):
    other = trained(tmp_path / "other", seed=1)
    runs = [(tiny(), tmp_path / "a"), (tiny(seed=1), tmp_path / "b")]
    with monkeypatch.context() as patch:
        patch.setattr(session, "make_step", _interrupted_between_weights(STEPS + 2))
        patch.setattr(session, "TIME_SLICE", 0.0)  # a step of each in turn
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
