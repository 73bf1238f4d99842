"""Modules that leave a mark when they are imported, for tests that plant them."""

import sys

PLANT = """
import os
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "SPRUNG"), "a") as mark:
    mark.write(__name__ + " ")
"""
NET = f"""{PLANT}
from torch import nn

def net(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 144, classes))
"""


def sprung(folder):
    """The names of the modules in a folder that were imported."""
    mark = folder / "SPRUNG"
    return mark.read_text().split() if mark.exists() else []


def forget(folder):
    """Remove modules that were imported from a folder."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
