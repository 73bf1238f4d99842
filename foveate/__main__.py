"""Run the command line as `python -m foveate`."""

from foveate.cli import main

main()
