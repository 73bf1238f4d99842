"""The tidy file of results: a line for each row, seed and test scale, with how it was made."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from foveate.errors import DataError
from foveate.files import regular, write_text

RESULTS, WINNERS = "results.csv", "winners.csv"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Accuracy (of 1) of one run at one scale.

    `seconds` is the run's share of the machine's time, `memory` the peak in MiB of the process
    that trained it, with the runs beside it.
    """

    table: str
    row: str
    seed: int
    scale: float
    accuracy: float
    validation: float
    seconds: float
    memory: int
    config: str
    version: str
    commit: str
    hardware: str

    @property
    def key(self) -> tuple[str, str, int, float]:
        """What there may be one record of."""
        return self.table, self.row, self.seed, self.scale


@dataclass(frozen=True, kw_only=True)
class Winners:
    """How many images of a test scale had their strongest answer in the channel `channel`."""

    row: str
    seed: int
    scale: float
    channel: float
    count: int

    @property
    def key(self) -> tuple[str, int, float, float]:
        """What there may be one count of."""
        return self.row, self.seed, self.scale, self.channel


Line = TypeVar("Line", Record, Winners)


def read_records(folder: Path) -> list[Record]:
    """Read results.csv of a folder; none if there is no such file."""
    return _read(folder / RESULTS, Record)


def read_winners(folder: Path) -> list[Winners]:
    """Read winners.csv of a folder; none if there is no such file."""
    return _read(folder / WINNERS, Winners)


def write_results(folder: Path, records: Iterable[Record], winners: Iterable[Winners]) -> None:
    """Write both files, each whole or not at all, sorted, so that equal results are equal files."""
    try:
        for name, kind, lines in ((RESULTS, Record, records), (WINNERS, Winners, winners)):
            write_text(folder / name, _csv(kind, sorted(lines, key=lambda line: line.key)))
    except OSError as error:
        raise DataError(f"cannot write results in {folder} ({error.strerror})") from None


def merge_records(parts: Sequence[Sequence[Record]]) -> list[Record]:
    """Put results together, each once; the first one counts where two have the same run.

    Runs of one name that were configured differently do not mix.
    """
    merged: dict[object, Record] = {}
    configs: dict[object, str] = {}
    for record in (record for part in parts for record in part):
        run = (record.table, record.row, record.seed)
        if configs.setdefault(run, record.config) != record.config:
            raise DataError(
                f"{record.row} with seed {record.seed} was run in two ways "
                f"({configs[run]} and {record.config}); leave one of them out"
            )
        merged.setdefault(record.key, record)
    return list(merged.values())


def _csv(kind: type, lines: Iterable[object]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(vars, lines))
    return text.getvalue()


def _read(path: Path, kind: type[Line]) -> list[Line]:
    if not path.exists():
        return []
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: _number, str: str}
    columns = {field.name: readers[field.type] for field in fields(kind)}
    try:
        with regular(path).open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, strict=True))
        return [kind(**{k: read(line[k]) for k, read in columns.items()}) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a copy") from None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
