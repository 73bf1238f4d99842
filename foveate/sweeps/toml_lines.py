"""A TOML file that knows in which line each of its keys stands, for errors that name it."""

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from foveate.errors import ConfigError, FoveateError
from foveate.files import read_text

Keys: TypeAlias = tuple[str | int, ...]
"""The way to a value: keys, and the numbers of tables in an array, as ("runs", 2, "epochs")."""


@dataclass(frozen=True)
class TomlFile:
    """The values of a file, and the line where each key appears first."""

    path: Path
    values: dict[str, Any]
    lines: dict[Keys, int]

    def line(self, keys: Keys) -> int:
        """The line of a key, or else of the nearest table around it."""
        return next(
            (self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), 1
        )

    def error(self, keys: Keys, message: str) -> ConfigError:
        """An error about the value at `keys`."""
        return ConfigError(f"{self.path}, line {self.line(keys)}: {message}")

    @contextmanager
    def about(self, keys: Keys) -> Iterator[None]:
        """Let an error in the block be about the value at `keys`."""
        try:
            yield
        except FoveateError as error:
            raise self.error(keys, str(error)) from None


def read_toml(path: Path) -> TomlFile:
    """Read a file; what is no TOML is an error with its line."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text in UTF-8; save it as one") from None
    try:
        return TomlFile(path, tomllib.loads(text), dict(_lines(text)))
    except tomllib.TOMLDecodeError as error:
        message, _, where = str(error).partition(" (at ")
        found = re.search(r"line (\d+)", where)
        line = int(found[1]) if found else text.count("\n") + 1
        raise ConfigError(f"{path}, line {line}: this is no TOML: {message.lower()}") from None


def _lines(text: str) -> Iterator[tuple[Keys, int]]:
    """The line of each key and table; only of the first, where a table is opened in several."""
    table: Keys = ()
    seen: dict[Keys, int] = {}
    for number, statement in _statements(text):
        values = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _header(values, seen)
            paths = [table]
        else:
            paths = [table + rest for rest in _paths(values)]
        for path in paths:
            for length in range(1, len(path) + 1):
                if path[:length] not in seen:
                    seen[path[:length]] = number
                    yield path[:length], number


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Cut TOML into its headers and assignments, each with the number of its first line.

    A statement that goes over several lines is no TOML until its last one is there.
    """
    lines, first = [], 1
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        lines.append(line)
        try:
            empty = not tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError:
            continue
        if not empty:
            yield first, "\n".join(lines)
        lines, first = [], number + 1


def _header(values: dict[str, Any], seen: dict[Keys, int]) -> Keys:
    """The table that [a.b] or [[a.b]] opens; of arrays on the way it is the last table."""
    keys: Keys = ()
    inner: Any = values
    while inner:
        if isinstance(inner, list):
            return (*keys, _count(keys, seen))
        ((key, inner),) = inner.items()
        keys = (*keys, key)
        if inner and (count := _count(keys, seen)) and not isinstance(inner, list):
            keys = (*keys, count - 1)
    return keys


def _count(keys: Keys, seen: dict[Keys, int]) -> int:
    """How many tables the array at `keys` has so far."""
    count = 0
    while (*keys, count) in seen:
        count += 1
    return count


def _paths(values: dict[str, Any], before: Keys = ()) -> Iterator[Keys]:
    """The ways to all values of nested tables."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, (*before, key))
        else:
            yield (*before, key)
