"""Run the command line as `python -m foveate`, without the current folder on `sys.path`."""

import os
import sys

# Python puts the current folder first, so any file in it could pass for an installed package. In a
# checkout that is not installed it holds foveate too, which other processes must still find.
HERE = os.path.dirname(os.path.abspath(__file__))
try:
    added = not sys.flags.safe_path and sys.path[0] == os.getcwd()
except FileNotFoundError:  # the current folder was deleted
    added = False
if added:
    sys.path[:1] = [os.path.join(HERE, "alone")] if sys.path[0] == os.path.dirname(HERE) else []

from foveate.cli import main  # noqa: E402

main()
