"""The Typer application: its commands, its global options, and the messages of errors."""

import errno
import os
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from foveate import __version__
from foveate.cli import audit, compare, data, evaluation, guarded, paper, predict, sweep, training
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

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk or quota full
# Typer exports only some of its usage errors; their common base class is not among them.
UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])


class Plain:
    """A command whose help shows no type for a flag."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options and arguments."""
        params: Any = super().get_params(ctx)  # type: ignore[misc]
        for option in params:
            option.metavar = option.metavar or ""
        return params


class Command(Plain, TyperCommand):
    """A command whose help does not list --help, which would be the only option of its panel."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the hidden option --help."""
        option: Any = super().get_help_option(ctx)
        option.hidden = True
        return option


class Commands(Plain, TyperGroup):
    """The commands; prints a line at Ctrl-C, where Typer would exit silently."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the global options."""
        with interruptible(lambda: "run the same command again"):
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with interruptible(lambda: "run the same command again"):
            return super().invoke(ctx)


# Markdown mode fills paragraphs to the width of the terminal.
app = typer.Typer(
    cls=Commands,
    help=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (
    *(paper.quickstart, predict.demo, data.generate, data.show, training.train),
    *(evaluation.evaluate, audit.audit, predict.predict, predict.export, sweep.reproduce),
    *(sweep.sweep, compare.compare, paper.report, paper.verify),
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
    """Run the command line; return its exit code: 2 for errors, 130 for Ctrl-C, 143 for SIGTERM."""
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
