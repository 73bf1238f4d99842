"""The command line: parse, call, print. Nothing heavy is imported before a command runs."""

import sys

from foveate.cli.app import run


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(sys.argv[1:]))
