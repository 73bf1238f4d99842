"""Rules for running foreign code: only code that the user names or trusts in this call runs.

A `package.module:factory` that the user passes directly is imported. Everything else that can run
code (TorchScript, `torch.export` programs, a backbone named in a run or a study) requires `trust`.
The factories of `foveate.baselines` are part of this package and require none.
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
"""Folder for `sys.path` that makes this package importable and nothing else."""
OWN = "foveate.baselines."
"""Start of the names of this package's own factories."""


def is_own(spec: str) -> bool:
    """Whether `spec` names a factory of this package, which requires no trust."""
    return spec.startswith(OWN)


def require_trust(trust: bool, what: str) -> None:
    """Raise a ConfigError unless `trust` is set; `what` names the object and its risk."""
    if not trust:
        raise ConfigError(f"{what}; pass --trust (trust=True in Python) if you trust its origin")


def find_factory(spec: str, what: str = "backbone") -> Callable[..., Any]:
    """Import the function named by ``package.module:factory``, which returns a `what`.

    If no installed package has this name, it is searched in the current folder, and nothing else is
    imported from there. A function of this package must be defined in the module that is named.
    """
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ConfigError(
            f"{what} must be given as package.module:factory, got {spec!r}; write timm:NAME for a "
            "model of timm"
        )
    top = module.partition(".")[0]
    try:
        with _from_current_folder(top):
            found = import_module(module)
    except Exception as error:  # the user's module can raise anything
        raise ConfigError(
            f"cannot import {module!r} for the {what}: {type(error).__name__}: {error}; install "
            f"it, or run from its folder, where only {top!r} is found unless PYTHONPATH=. is set"
        ) from error
    factory = getattr(found, name, None)
    if not callable(factory):
        state = "is not a function" if hasattr(found, name) else "does not exist"
        place = getattr(found, "__file__", None) or "built into Python"
        raise ConfigError(
            f"{name!r} {state} in {module!r} ({place}); pass a function that returns the {what}"
        )
    if is_own(spec) and getattr(factory, "__module__", None) != module:
        raise ConfigError(f"{name!r} is not defined in {module!r}; pass a factory of this module")
    return factory  # type: ignore[no-any-return]


class _CurrentFolder:
    """Import finder for a single top-level module in the current folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [""]) if name == self.name else None


@contextmanager
def _from_current_folder(name: str) -> Iterator[None]:
    """Search the current folder for the top-level module `name`, after all other locations."""
    finder = _CurrentFolder(name)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
