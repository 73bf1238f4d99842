"""Provenance of a result: the git commit of the code, and the hardware."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch


def commit() -> str:
    """Return FOVEATE_COMMIT, or the git commit of this checkout, -dirty if there are changes."""
    return os.environ["FOVEATE_COMMIT"] if "FOVEATE_COMMIT" in os.environ else _commit()


@cache  # later changes of the checkout do not change the code that this process has imported
def _commit() -> str:
    here = Path(__file__)
    if not (here.parents[1] / ".git").exists():  # git would search the parent folders
        return ""
    tracked = _git(here.parent, "ls-files", here.name)  # empty if installed inside another checkout
    return _git(here.parent, "describe", "--always", "--dirty", "--exclude", "*") if tracked else ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def hardware(device: torch.device) -> str:
    """Return a description of the device and the torch version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' * (count != 1)}"
    return f"{platform.machine()} CPU, {threads}, torch {torch.__version__}"
