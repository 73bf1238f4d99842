"""The command line: parse, call, print. Nothing heavy is imported before a command runs."""

import os
import sys

from foveate.cli.app import run


def main() -> None:
    """Run the command line and leave with its exit code."""
    os.environ["PYTHONSAFEPATH"] = "1"  # of Python processes started from here
    leave(run(sys.argv[1:]))


def leave(code: int) -> None:
    """End the process; under torchrun at once: while it tidies up, torch's threads may abort it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
