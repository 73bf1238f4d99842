"""Where the command line prints, and its progress bars: quiet when nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

OUTPUT = Console(highlight=False, soft_wrap=True)
ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)


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
def interruptible(left: Callable[[], int]) -> Iterator[None]:
    """Say at Ctrl-C how many runs are left, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        words = f"{left()} runs are left; run the same command to go on"
        ERRORS.print(f"interrupted: {words}", markup=False)
        raise typer.Exit(130) from None
