"""The command line: parse, call, print. Nothing heavy is imported before a command runs."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from foveate.training.interrupt import SIGNALS, stop

USUAL = (signal.default_int_handler, signal.SIG_DFL)


def main() -> None:
    """Run the command line and leave with its exit code."""
    for number in SIGNALS:
        if signal.getsignal(number) in USUAL:  # not one that the caller ignores, as nohup does
            signal.signal(number, _stop)
    os.environ["PYTHONSAFEPATH"] = "1"  # of Python processes started from here
    from foveate.cli.app import run  # Ctrl-C may come while this is imported

    code = run(sys.argv[1:])
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the exit code is decided
    sys.exit(code)


def guarded(command: Callable[[], int]) -> int:
    """Call a command: only in here does a signal raise an exception, which the caller handles."""
    return command()


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise as `stop` does inside a command; anywhere else, and while importing, end at once.

    Some packages swallow an exception that is raised while they are imported, or print it.
    """
    frame, raises = frame or sys._getframe(), False
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        raises = raises or frame.f_code is guarded.__code__
        frame = frame.f_back
    if raises and frame is None:
        stop(number, None)
    terminated = number == signal.SIGTERM
    if os.environ.get("RANK", "0") == "0":  # torchrun: the first process prints for all
        word = "terminated" if terminated else "interrupted"
        os.write(2, f"{word}: run the same command again\n".encode())
    os._exit(143 if terminated else 130)
