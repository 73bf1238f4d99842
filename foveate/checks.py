"""Validation shared by configurations and commands: field types, keys and available memory."""

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from foveate.errors import ConfigError

MIN_CHECKED = 1 << 28  # bytes; smaller requests are not checked against the free memory
GROUP = Path("/sys/fs/cgroup")  # limits of a container
_cached_hints = cache(get_type_hints)
NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    bool: "true or false",
    tuple: "a list of whole numbers",
    list: "a list",
    Mapping: "a table",
}


def check_fields(config: Any) -> None:
    """Raise a ConfigError for the first dataclass field whose value does not match its type."""
    hints = _cached_hints(config.__class__)
    for field in fields(config):
        check_type(field.name, getattr(config, field.name), hints[field.name])


def check_type(name: str, value: object, kind: Any) -> None:
    """Raise a ConfigError unless the value matches the type; whole numbers are floats too."""
    if not _fits(value, kind):
        shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:100]}..."
        raise ConfigError(f"{name} must be {_described(kind)}, got {shown}")


def is_number(value: object) -> bool:
    """Whether `value` is a finite int or float within the range of a float."""
    with suppress(OverflowError):
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return False


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a ConfigError unless `value` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def suggest(name: str, known: Iterable[str], otherwise: str, most: int = 1) -> str:
    """Return "did you mean ...?" with up to `most` similar names, or `otherwise` without any."""
    near = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def check_range(name: str, value: float, low: float, high: float, words: str) -> None:
    """Raise a ConfigError unless `low` <= `value` <= `high`; `words` describe the range."""
    if not low <= value <= high:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(f"{name} must be {words}, got {shown}")


def check_keys(what: str, values: object, known: set[str]) -> None:
    """Raise a ConfigError unless `values` is a mapping whose keys are all in `known`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what} must be a table of settings, got {type(values).__name__}")
    if unknown := sorted(map(str, set(values) - known)):
        raise ConfigError(
            f"{what} has no setting {unknown[0]!r}; valid settings are {', '.join(sorted(known))}"
        )


def check_memory(needed: float, what: str, remedy: str) -> None:
    """Raise a ConfigError if `needed` bytes exceed the free memory of this machine."""
    if needed > MIN_CHECKED and needed > (free := free_memory()):
        raise ConfigError(
            f"{what} need about {needed / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free; "
            f"{remedy}"
        )


def free_memory() -> float:
    """Return the number of free bytes, or infinity if the system does not report it."""
    free = math.inf
    with suppress(OSError, IndexError, ValueError):
        text = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2]
        free = int(text.split()[0]) * 1024
    with suppress(OSError, ValueError, KeyError):  # the limit of a container can be lower
        used, most = (int((GROUP / f"memory.{n}").read_text()) for n in ("current", "max"))
        parts = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        cache = int(parts["active_file"]) + int(parts["inactive_file"])  # is freed when needed
        free = min(free, most - used + cache)
    return free


def _fits(value: object, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(kind))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return is_number(value)
    if kind in (int, bool, str):
        return type(value) is kind
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(kind)[0]) for item in value)
    return isinstance(value, origin or kind)


def _described(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_described, get_args(kind)))
    if origin is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if origin is tuple and get_args(kind)[0] is float:
        return "a list of finite numbers"
    plain = origin or kind
    return NAMES.get(plain) or str(getattr(plain, "__name__", plain))


def check_names(found: Any) -> tuple[str, ...]:
    """Return the class names in a file as a tuple; raise a TypeError if they are not strings."""
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise TypeError("classes")
    return tuple(found)
