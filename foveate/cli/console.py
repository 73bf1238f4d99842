"""Console output of the commands: messages, and progress as a bar or as lines in a log."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from foveate.training.interrupt import Terminated, received_signals

if TYPE_CHECKING:
    from foveate.training.checkpoint import Progress as RunProgress
    from foveate.training.config import TrainConfig


class _Console(Console):
    """A console that escapes control characters, such as those of file names in a message."""

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
REFRESH = 0.1  # seconds between updates of a bar; a training step on a GPU takes far less


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
    """Show progress as a bar, or in a log as a line every `LOG_EVERY` seconds; yield `advance`."""
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


class Display:
    """Shows epoch, loss, validation accuracy, images per second and remaining time."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting  # printed after the first step: a refused run prints its error
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
        watched = ERRORS.is_terminal
        self.bar = Progress(*columns, console=ERRORS, disable=not watched, transient=True)
        self.task = self.bar.add_task("preparing", total=None, now="")
        self.start: tuple[float, int] | None = None
        self.printed_epochs = 0  # epochs whose line is printed
        self.drawn = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, config: "TrainConfig", progress: "RunProgress", steps: int) -> None:
        """Show the progress of the run."""
        now, done = time.monotonic(), progress.epoch * steps + progress.step
        total = config.epochs * steps
        if self.start is None:
            ended = progress.step == 0  # stopped in validation: that epoch still needs its line
            self.start, self.printed_epochs = (now, done), len(progress.metrics) - ended
            OUTPUT.print(self.greeting)
        left = self._left(now, done, total, config.batch) if done < total else ""
        if len(progress.metrics) > self.printed_epochs:
            self.printed_epochs = len(progress.metrics)
            OUTPUT.print(_join(epoch_line(config, progress), left))
        if now - self.drawn > REFRESH and ERRORS.is_terminal:
            self.drawn = now
            loss = f"loss {progress.loss / progress.step:.4f}" if progress.loss else ""
            self.bar.update(
                self.task,
                description=f"epoch {min(progress.epoch + 1, config.epochs)}/{config.epochs}",
                total=total,
                completed=done,
                now=_join(loss, _validation(progress), left),
            )

    def _left(self, now: float, done: int, total: int, batch: int) -> str:
        """Return images per second and the remaining time, measured since this process started."""
        assert self.start is not None
        begun, first = self.start
        if done == first or now == begun:
            return ""
        pace = (done - first) / (now - begun)
        left = timedelta(seconds=round((total - done) / pace))
        speed = pace * batch
        digits = 0 if speed >= 10 else 1
        return f"{speed:,.{digits}f} images/s  {left} remaining"


def epoch_line(config: "TrainConfig", progress: "RunProgress") -> str:
    """Return number, loss and validation accuracy of the last epoch as one line."""
    loss = f"loss {progress.metrics[-1]['loss']:.4f}"
    return _join(f"epoch {progress.epoch}/{config.epochs}", loss, _validation(progress))


def _join(*texts: str) -> str:
    return "  ".join(filter(None, texts))


def _validation(progress: "RunProgress") -> str:
    """Return the most recent validation accuracy, or an empty text before the first one."""
    measured = [entry["validation"] for entry in progress.metrics if "validation" in entry]
    return f"validation {100 * measured[-1]:.2f} %" if measured else ""


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
