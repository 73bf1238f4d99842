"""What may run code: only what the user names in this call, or trusts in this call.

A `package.module:factory` that the user types or passes is imported. Everything else that can run
code (TorchScript, `torch.export` programs, a backbone that a run or a study names) needs `trust`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from foveate.errors import ConfigError

ALONE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "alone")
"""A folder for `sys.path` in which this package can be found, and nothing else."""


def require_trust(trust: bool, what: str) -> None:
    """Refuse `what`, a sentence that names the thing and what it could do, unless it is trusted."""
    if not trust:
        raise ConfigError(
            f"{what}; pass --trust (trust=True in Python) if you know where it comes from"
        )


def find_factory(spec: str, what: str = "backbone") -> Callable[..., Any]:
    """Import the function that `spec` names as package.module:factory.

    Installed packages come first. If there is none of that name, the current folder is searched
    for that one module or package; other files there cannot be imported.

    Args:
        spec: Name of the function, as ``package.module:factory``.
        what: What the function makes, for error messages.
    """
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"a {what} is written as package.module:factory, got {spec!r}")
    top = module.partition(".")[0]
    try:
        with _from_current_folder(top):
            found = import_module(module)
    except Exception as error:  # a user's module may fail in any way
        reason, remedy = f"{type(error).__name__}: {error}", _remedy(error, top)
        raise ConfigError(
            f"cannot import {module!r} for the {what} ({reason}); {remedy}"
        ) from error
    factory = getattr(found, name, None)
    if not callable(factory):
        state = "is no function" if hasattr(found, name) else "is not there"
        place = getattr(found, "__file__", None) or "built into Python"
        raise ConfigError(
            f"{name!r} {state} in {module!r} ({place}); name a function that makes the {what}"
        )
    return factory  # type: ignore[no-any-return]


class _CurrentFolder:
    """Finds one top-level module in the current folder, and no other."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [""]) if name == self.name else None


@contextmanager
def _from_current_folder(name: str) -> Iterator[None]:
    """Let the top-level module `name` be found in the current folder, after all other places."""
    finder = _CurrentFolder(name)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _remedy(error: Exception, top: str) -> str:
    """What to do about a failed import, which differs for a neighbour in the current folder."""
    missing = (getattr(error, "name", None) or top).partition(".")[0]
    if missing == top or PathFinder.find_spec(missing, [""]) is None:
        return "install it, or run in its folder"
    return (
        f"of the current folder only {top!r} is imported, not {missing!r}: move both into a "
        "package, or set PYTHONPATH=."
    )
