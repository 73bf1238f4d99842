"""Run command lines in processes of their own: forked from a warm one, bounded, and judged."""

import contextlib
import gc
import io
import json
import os
import re
import resource
import select
import shlex
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from hostile.cases import COMMANDS, command_case
from hostile.damaged import file_case, good_cases
from hostile.files import CALLS, damage, make_materials

SECONDS = 10.0  # of computing, or of waiting without any, after which a case hangs
MEMORY = 3 << 30  # bytes of address space beyond what the warm process has
LARGEST = 64 << 20  # bytes of a file that a case may write
INTERNAL = (
    "for the traceback)"  # ends the line that the command line prints for an error of its own
)
FAULT = 70  # exit code of a child whose command line raised


class Result(NamedTuple):
    """How a case ended: `code` is None if it was killed, `seconds` are those of computing."""

    code: int | None
    out: str
    err: str
    seconds: float


class Sandbox:
    """A folder with one good file of every kind, and a warm process to fork cases from."""

    def __init__(self, folder):
        self.materials, self.place = folder / "materials", folder / "case"
        _set_up(folder / "cache")
        made = _forked(lambda: make_materials(self.materials), folder, None)
        assert made.code == 0, made.err
        _warm_up(self.materials)
        gc.freeze()

    def problem(self, case):
        """Run a case; say what is wrong with how it ended, or nothing."""
        return judge(case, self.run(case))

    def run(self, case):
        """Run a case in a fresh folder with copies of what it needs, damaged as it says."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        for name in case.needs:
            _copy(self.materials / name, self.place / name)
        for path, how, number in case.damage:
            damage(self.place / path, how, number, self.materials)
        return _forked(lambda: _run(case.argv), self.place, case.room)


def case_of(group, number):
    """Case `number` of a command or of a kind of file."""
    if group == "good":
        return good_cases()[number]
    return (command_case if group in COMMANDS else file_case)(group, number)


def serve(folder):
    """Run the cases that each line of the input names; answer with a list of what went wrong."""
    answers = os.fdopen(os.dup(1), "w")
    sandbox = Sandbox(folder)
    for line in sys.stdin:
        group, numbers = json.loads(line)
        found = [_line(sandbox, group, number) for number in numbers]
        print(json.dumps([text for text in found if text]), file=answers, flush=True)


def _line(sandbox, group, number):
    case = case_of(group, number)
    if not (problem := sandbox.problem(case)):
        return None
    again = f"python tests/hostile/again.py {shlex.quote(group)} {number}"
    return f"{problem}: {again}  # foveate {shlex.join(case.argv)[:300]}"


def judge(case, result):
    """Say what is wrong with how a case ended, or nothing."""
    if result.code is None:
        return f"no end after {SECONDS:g} s"
    errors = [line for line in result.err.splitlines() if line.startswith("error:")]
    if "Traceback (most recent call last)" in result.err + result.out or result.code == FAULT:
        return "a traceback"
    if INTERNAL in result.err:
        return "an internal line"
    if result.code not in (0, 1, 2):
        return f"exit code {result.code}"
    if case.kind == "good" and result.code:
        return f"a good command failed: {result.err[-200:]}"
    if result.code == 0 and case.bad:
        return "success of what is known to be bad"
    if result.code == 0 and errors:
        return "an error, but exit code 0"
    if result.code == 2 and len(errors) != 1:
        return f"{len(errors)} lines that begin with 'error:', not 1"
    if result.code == 1 and not (errors or " failed" in result.err):
        return "exit code 1 and no reason"
    return None


def _run(argv):
    from foveate.cli.app import run

    if argv[0] in CALLS:
        return CALLS[argv[0]](*argv[1:])
    return run(list(argv))


def _set_up(cache):
    """Import what commands import, on one thread, with no way to the network."""
    os.environ |= {"OMP_NUM_THREADS": "1", "FOVEATE_NATIVE": "0", "FOVEATE_CACHE": str(cache)}
    os.environ |= {"MPLBACKEND": "agg", "COLUMNS": "200", "FOVEATE_COMMIT": "hostile"}
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg  # noqa: F401
    import torch

    from foveate.data import fetch

    for name in WARM:
        __import__(name)
    torch.set_num_threads(1)
    for name, entry in list(fetch.DATASETS.items()):
        fetch.DATASETS[name] = fetch.Dataset(checksums=entry.checksums)


def _warm_up(folder):
    """Run good and bad commands here, so that all they import and cache is there in every fork."""
    before = os.getcwd()
    os.chdir(folder)
    silent = [contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())]
    with silent[0], silent[1]:
        for line in FIRST:
            _run(line.split())
    os.chdir(before)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"


FIRST = (
    "verify --seed x",
    "predict digit.png --model run --device cpu",
    "evaluate run --scales 1 --device cpu --out warm",
    "sweep study.toml --dry-run --device cpu",
    "reproduce table1 --dry-run --device cpu --precision bf16 --out paper",
)
WARM = str.split(
    "foveate.cli.app foveate.data.store foveate.evaluation.audit.report "
    "foveate.evaluation.results foveate.evaluation.predict foveate.sweeps.runner "
    "foveate.sweeps.study foveate.paper.quickstart foveate.report.audit_page "
    "foveate.report.plots foveate.report.reproduction "
    "foveate.training.distributed foveate.training.loop foveate.cli.console foveate.models.export "
    "rich.table rich.progress PIL.PngImagePlugin torch._dynamo"
)


def _copy(source, target):
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    elif source.is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy(source, target, follow_symlinks=False)


def _forked(work, folder, room):
    """Call `work` in a forked process in `folder`; its result is the exit code."""
    out, err = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        _child(work, folder, room, out[1], err[1])
    os.close(out[1])
    os.close(err[1])
    texts, whole = _drained(out[0], err[0], child)
    if not whole:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it may have left running
    code = os.waitstatus_to_exitcode(status) if whole else None
    return Result(code, *texts, used.ru_utime + used.ru_stime)


def _child(work, folder, room, out, err):
    code = FAULT
    try:
        os.setsid()
        os.chdir(folder)
        for target, handle in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
            os.dup2(handle, target)
        os.closerange(3, 64)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        mapped = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = LARGEST if room is None else room
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _drained(out, err, child):
    """All that comes out of two pipes, and whether they came to an end in time.

    On a busy machine a process gets little of each second: the clock runs while it does nothing.
    """
    texts = {out: b"", err: b""}
    left, moved, used = {out, err}, time.monotonic(), 0.0
    while left:
        for handle in select.select(list(left), [], [], 0.5)[0]:
            if part := os.read(handle, 1 << 16):
                texts[handle] += part
            else:
                left.discard(handle)
        if (now := _cpu(child)) > used + 0.02:
            moved, used = time.monotonic(), now
        if used > SECONDS or time.monotonic() > moved + SECONDS:
            break
    for handle in texts:
        os.close(handle)
    return [_plain(text.decode("utf-8", "replace")) for text in texts.values()], not left


def _cpu(child):
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
