"""Where the command line prints, and its progress bars: quiet when nobody watches."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

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

from foveate.training.interrupt import Terminated, arrived

OUTPUT = Console(highlight=False, soft_wrap=True)
ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run code that a file contains or names: TorchScript, .pt2, a backbone."
    ),
]

PretrainedOption = Annotated[
    bool, typer.Option("--pretrained", help="Download the weights of a timm model.")
]


def complain(message: str) -> None:
    """Say in one line what went wrong."""
    ERRORS.print("[bold red]error:[/] " + escape(" ".join(message.split())))


def tell(message: str) -> None:
    """Say beside the results what is going on."""
    ERRORS.print(message, markup=False)


def status(message: str) -> Status:
    """Show `message` while the block runs, where somebody watches."""
    return ERRORS.status(escape(message))


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for `total` steps while the block runs; yields the function that advances it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=ERRORS, disable=not ERRORS.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def interruptible(words: Callable[[], str]) -> Iterator[None]:
    """At Ctrl-C or SIGTERM print one line, which ends with `words`, and exit with 130 or 143."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise typer.Exit(interrupted(error, words())) from None


def interrupted(error: BaseException, words: str) -> int:
    """Print one line for Ctrl-C or SIGTERM, which ends with `words`; returns the exit code."""
    terminated = isinstance(error, Terminated) or signal.SIGTERM in arrived
    said, code = ("terminated", 143) if terminated else ("interrupted", 130)
    if words and os.environ.get("RANK", "0") == "0":  # torchrun's first process says it for all
        ERRORS.print(f"{said}: {words}", markup=False)
    return code
