"""The application itself: its commands, its options for all commands, and how errors are told."""

from typing import Annotated, Any, cast

import typer
from rich.markup import escape

from foveate import __version__
from foveate.cli import data, theory, training
from foveate.cli.console import ERRORS
from foveate.errors import FoveateError

HELP = """Vision networks that recognise things at sizes they were never trained on.

Start with a picture of the data:

    foveate show mnist-5k --out digits.png
"""

# Typer publishes one usage error of many; its base is the class they share.
UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])

app = typer.Typer(help=HELP, add_completion=False, pretty_exceptions_enable=False)
app.command()(data.generate)
app.command()(data.show)
app.command()(training.train)
app.command()(training.evaluate)
app.command()(theory.verify)


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
    """Run the command line and return its exit code: 0, 2 for an error, 130 for Ctrl-C."""
    try:
        return int(app(arguments, prog_name="foveate", standalone_mode=False) or 0)
    except UsageError as problem:
        usage = cast(Any, problem)
        where = usage.ctx.command_path if usage.ctx else "foveate"
        return _fail(f"{usage.format_message().rstrip('.')}; see '{where} --help'")
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted; run the same command to go on", code=130)
    except Exception as error:
        if "--debug" in arguments:
            raise
        if isinstance(error, FoveateError):
            return _fail(str(error))
        return _fail(f"{type(error).__name__}: {error} ('foveate --debug ...' shows where)")


def _fail(message: str, code: int = 2) -> int:
    ERRORS.print("[bold red]error:[/] " + escape(" ".join(message.split())))
    return code
