"""Console output of the commands: messages, and progress as a bar or as lines in a log."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.status import Status

from foveate.training.interrupt import Terminated, received_signals

OUTPUT = Console(highlight=False, soft_wrap=True)
ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
LOG_EVERY = 30.0  # seconds between progress lines in a log


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    ERRORS.print("[bold red]error:[/] " + escape(" ".join(message.split())))


def print_message(message: str) -> None:
    """Print a message on stderr, apart from the results on stdout."""
    ERRORS.print(message, markup=False)


def status(message: str) -> Status:
    """Show `message` while the block runs, on a terminal only."""
    return ERRORS.status(escape(message))


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress over `total` steps while the block runs, and yield a function to advance it.

    A terminal shows a bar. A log file gets a line every `LOG_EVERY` seconds, so short commands
    print none.
    """
    if not ERRORS.is_terminal:
        yield _logged(title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=ERRORS, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


def _logged(title: str, total: int) -> Callable[[int], None]:
    """Return a function that counts steps and prints a line every `LOG_EVERY` seconds."""
    start = printed = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        now = time.monotonic()
        if now - printed >= LOG_EVERY and 0 < done < total:
            printed = now
            left = math.ceil((now - start) * (total - done) / done)
            share = f"{done:,} of {total:,} ({100 * done // total} %)"
            print_message(f"{title}: {share}, about {timedelta(seconds=left)} remaining")

    return advance


@contextmanager
def interruptible(message: Callable[[], str]) -> Iterator[None]:
    """At Ctrl-C or SIGTERM print one line that ends with `message()`, and exit with 130 or 143."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise typer.Exit(interrupted(error, message())) from None


def interrupted(error: BaseException, message: str) -> int:
    """Print one line for Ctrl-C or SIGTERM that ends with `message`, and return the exit code."""
    terminated = isinstance(error, Terminated) or signal.SIGTERM in received_signals
    signal_name, code = ("terminated", 143) if terminated else ("interrupted", 130)
    if message and os.environ.get("RANK", "0") == "0":  # torchrun: the first process prints for all
        ERRORS.print(f"{signal_name}: {message}", markup=False)
    return code
