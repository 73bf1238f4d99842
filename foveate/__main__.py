"""Run the command line with `python -m foveate`, without the current folder on `sys.path`."""

import os
import sys

# Python puts the current folder first, so any file in it could shadow an installed package. In a
# checkout that is not installed, that folder also contains foveate, which worker processes import.
HERE = os.path.dirname(os.path.abspath(__file__))
try:
    added = not sys.flags.safe_path and sys.path[0] == os.getcwd()
except FileNotFoundError:  # the current folder was deleted
    added = False
if added:
    sys.path[:1] = [os.path.join(HERE, "alone")] if sys.path[0] == os.path.dirname(HERE) else []

from foveate.cli import main  # noqa: E402

main()
