"""Console output of the commands: messages, and progress as a bar or as lines in a log."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from foveate.training.interrupt import Terminated, received_signals


class _Console(Console):
    """A console that prints paths and messages literally, and their control characters escaped.

    The names of files and classes could otherwise rename, clear or overwrite the terminal.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(str(o) if isinstance(o, Path) else o for o in objects), **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    """Replace control characters, except line breaks and tabs, by hexadecimal escapes."""
    return text.translate(CONTROLS)


CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}
# [Brackets] and :words: in paths and messages have no special meaning.
LITERAL: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False}
OUTPUT, ERRORS = _Console(**LITERAL), _Console(stderr=True, **LITERAL)
LOG_EVERY = 30.0  # seconds between progress lines in a log


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    line = printable(" ".join(message.split()))
    ERRORS.print(Text.assemble(("error:", "bold red"), " ", line))


def print_message(message: str) -> None:
    """Print a message on stderr, apart from the results on stdout."""
    ERRORS.print(message)


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Sequence[str] = ()
) -> None:
    """Print a table on stdout; the columns named in `left` are aligned to the left."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    OUTPUT.print(table)


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
        print_message(f"{signal_name}: {message}")
    return code
