"""The Typer application: its commands, its global options, and the messages of errors."""

import errno
import os
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from foveate import __version__
from foveate.cli import (
    audit,
    compare,
    data,
    demo,
    evaluation,
    export,
    guarded,
    predict,
    quickstart,
    report,
    sweep,
    theory,
    training,
)
from foveate.cli.console import interrupted, interruptible, print_error
from foveate.errors import FoveateError

HELP = """Vision networks that recognise objects at sizes they were never trained on.

```
foveate quickstart
foveate audit mynets:classifier --source folder:photos
foveate train finetune --source folder:photos --pretrained --out runs/photos
```

Run 'foveate COMMAND --help' for the options of a command.
"""

FEW = 6  # options that the help shows in one panel; more are grouped
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk or quota full
# Typer exports only some of its usage errors; their common base class is not among them.
UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])


class Commands(TyperGroup):
    """The commands; prints a line at Ctrl-C, where Typer would exit silently."""

    def get_params(self, ctx: Any) -> Any:
        """Return the global options; a flag shows no type."""
        params: Any = super().get_params(ctx)
        for option in params:
            option.metavar = option.metavar or ""
        return params

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the global options."""
        with interruptible(lambda: "run the same command again"):
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with interruptible(lambda: "run the same command again"):
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command whose help groups the options into panels if there are many."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        options = [p for p in self.params if p.param_type_name == "option"]
        self.grouped = len(options) > FEW
        for option in () if self.grouped else options:
            cast(Any, option).rich_help_panel = None

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help, hidden in a grouped help, where it would need its own panel."""
        option: Any = super().get_help_option(ctx)
        option.hidden = self.grouped
        option.metavar = ""  # a flag shows no type
        return option


# Markdown mode fills paragraphs to the width of the terminal.
app = typer.Typer(
    cls=Commands,
    help=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (
    *(quickstart.quickstart, demo.demo, data.generate, data.show, training.train),
    *(evaluation.evaluate, audit.audit, predict.predict, export.export, sweep.reproduce),
    *(sweep.sweep, compare.compare, report.report, theory.verify),
):
    app.command(cls=Command)(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"foveate {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error.")
    ] = False,
) -> None:
    """Accept the global options; `run` reads --debug from the arguments itself."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code.

    Errors give 2, Ctrl-C 130 and SIGTERM 143.
    """
    try:
        return guarded(lambda: int(app(arguments, prog_name="foveate", standalone_mode=False) or 0))
    except UsageError as problem:
        usage = cast(Any, problem)
        where = usage.ctx.command_path if usage.ctx else "foveate"
        if os.environ.get("RANK", "0") != "0":  # torchrun: the first process prints for all
            return 2
        print_error(f"{usage.format_message().rstrip('.')}; see '{where} --help'")
    except (typer.Abort, KeyboardInterrupt) as error:  # click raises Abort outside a command
        return interrupted(error, "run the same command again")
    except Exception as error:
        if "--debug" in arguments:
            raise
        print_error(_error_message(error))
    return 2


def _error_message(error: Exception) -> str:
    """Return the message for an error: with a remedy where there is one, else its type and text."""
    if isinstance(error, FoveateError):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        reason = error.strerror or os.strerror(error.errno)
        what = f"cannot use {error.filename}" if error.filename else "cannot use a file"
        remedy = "free some space" if error.errno in FULL else "check the path and permissions"
        return f"{what} ({reason}); {remedy}, or choose another path"
    failed = isinstance(error, RuntimeError) and "allocate memory" in str(error)  # torch, CPU
    if failed or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory; use a smaller --size, --batch or model"
    return f"{type(error).__name__}: {error} (run 'foveate --debug ...' for the traceback)"
