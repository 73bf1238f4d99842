"""The application itself: its commands, its options for all commands, and how errors are told."""

import errno
import os
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from foveate import __version__
from foveate.cli import (
    audit,
    data,
    demo,
    export,
    guarded,
    predict,
    quickstart,
    report,
    reproduce,
    sweep,
    theory,
    training,
)
from foveate.cli.console import complain, interrupted, interruptible
from foveate.errors import FoveateError

HELP = """Vision networks that recognise things at sizes they were never trained on.

Example: foveate show mnist-5k --out digits.png
"""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, on the disk or for this user
# Typer publishes one usage error of many; its base is the class they share.
UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])


class Commands(TyperGroup):
    """The commands; Typer by itself would exit without a word at Ctrl-C."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the options that go before the command."""
        with interruptible(lambda: "run the same command again"):
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with interruptible(lambda: "run the same command again"):
            return super().invoke(ctx)


# In Markdown a paragraph is filled to the width of the terminal.
app = typer.Typer(
    cls=Commands,
    help=HELP,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (
    *(quickstart.quickstart, demo.demo, data.generate, data.show, training.train),
    *(training.evaluate, audit.audit, predict.predict, export.export, reproduce.reproduce),
    *(sweep.sweep, report.report, theory.verify),
):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"foveate {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Take the options that go before the command; `run` itself looks for --debug."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: list[str]) -> int:
    """Run the command line; its exit code is 2 for an error, 130 for Ctrl-C, 143 for SIGTERM."""
    try:
        return guarded(lambda: int(app(arguments, prog_name="foveate", standalone_mode=False) or 0))
    except UsageError as problem:
        usage = cast(Any, problem)
        where = usage.ctx.command_path if usage.ctx else "foveate"
        if os.environ.get("RANK", "0") != "0":  # torchrun's first process says it for all
            return 2
        complain(f"{usage.format_message().rstrip('.')}; see '{where} --help'")
    except (typer.Abort, KeyboardInterrupt) as error:  # outside a command: click makes it Abort
        return interrupted(error, "run the same command again")
    except Exception as error:
        if "--debug" in arguments:
            raise
        complain(_told(error))
    return 2


def _told(error: Exception) -> str:
    """The line for an error: what a user can mend in words, anything else as it is."""
    if isinstance(error, FoveateError):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        reason = error.strerror or os.strerror(error.errno)
        what = f"cannot use {error.filename}" if error.filename else "a file cannot be used"
        remedy = "free some space" if error.errno in FULL else "check the path and permissions"
        return f"{what} ({reason}); {remedy}, or choose another place"
    failed = isinstance(error, RuntimeError) and "allocate memory" in str(error)  # torch, CPU
    if failed or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "the memory does not suffice; use a smaller --size, --batch or model"
    return f"{type(error).__name__}: {error} ('foveate --debug ...' shows where)"
