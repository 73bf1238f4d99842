"""The command line. Commands import torch and other large packages only when they run."""

import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from foveate.training.interrupt import SIGNALS, raise_interrupt

USUAL = (signal.default_int_handler, signal.SIG_DFL)  # the handlers that Python starts with


def main() -> None:
    """Run the command line and exit with its exit code."""
    for number in SIGNALS:
        if signal.getsignal(number) in USUAL:  # keep handlers of the caller, such as those of nohup
            signal.signal(number, _stop)
    os.environ["PYTHONSAFEPATH"] = "1"  # for Python processes started by the commands
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # its encoding may lack a character, such as ±
    from foveate.cli.app import run  # needs the handlers: Ctrl-C can arrive during it

    code = run(sys.argv[1:])
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a signal must not change the exit code now
    if "triton" in sys.modules:
        gc.unfreeze()  # Triton 3.9 prints the objects that are left at the exit
    else:
        gc.freeze()  # Python would search all objects for cycles: 1 s if torch is imported
    sys.exit(code)


def guarded(command: Callable[[], int]) -> int:
    """Call a command; a signal raises an exception only inside this call, see `_stop`."""
    return command()


def _stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal: call `raise_interrupt` inside a command, and exit at once anywhere else.

    A signal during an import inside a command exits at once too: some packages catch or print an
    exception that is raised while they are imported.
    """
    frame, raises = frame or sys._getframe(), False
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        raises = raises or frame.f_code is guarded.__code__
        frame = frame.f_back
    if raises and frame is None:
        raise_interrupt(number, None)
    terminated = number == signal.SIGTERM
    if os.environ.get("RANK", "0") == "0":  # torchrun: the first process prints for all
        word = "terminated" if terminated else "interrupted"
        os.write(2, f"{word}: run the same command again\n".encode())
    os._exit(143 if terminated else 130)
