"""Let torchvision be imported beside a torch build that its compiled operators do not fit."""

import importlib.util
import re
from contextlib import suppress
from pathlib import Path

import torch

KEPT: list[torch.library.Library] = []  # a declaration ends with its Library


def declare_missing() -> None:
    """Declare a placeholder for every compiled operator of torchvision that cannot be loaded.

    A CPU build of torch cannot load the operators of torchvision's CUDA build, and torchvision
    describes them to the compiler at import, which fails for operators that do not exist. The
    networks of torchvision and timm call none of them. Call this before the first import.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or KEPT:
        return
    folder = Path(spec.origin).parent
    for path in folder.glob("_C*"):
        with suppress(OSError):
            torch.ops.load_library(str(path))
            return
    text = (folder / "_meta_registrations.py").read_text(encoding="utf-8")
    KEPT.append(torch.library.Library("torchvision", "DEF"))
    for name in re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"\)', text):
        KEPT[0].define(f"{name}() -> ()")
