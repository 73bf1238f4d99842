"""Result tables of a study in tidy form: one line per row, seed and test scale."""

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from foveate.errors import DataError
from foveate.files import check_regular, wrap_write_errors, write_csv

RESULTS, WINNERS = "results.csv", "winners.csv"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Accuracy of one run at one test scale; accuracies are from 0 to 1."""

    table: str  # a table of the paper, or the name of the study
    row: str  # a configuration
    seed: int
    scale: float
    accuracy: float
    validation: float
    seconds: float  # for runs trained in parallel, the run's share
    memory: int  # peak of the process in MiB, including runs trained in parallel
    config: str  # digest of the training configuration
    version: str
    commit: str
    hardware: str
    count: int = 0  # files of earlier versions do not have this column and the following ones
    parameters: int = 0
    training_seconds: float = 0.0  # a part of seconds
    images_per_second: float = 0.0

    @property
    def key(self) -> tuple[str, str, int, float]:
        """The columns that identify a record."""
        return self.table, self.row, self.seed, self.scale


@dataclass(frozen=True, kw_only=True)
class Winners:
    """Number of test images at one scale whose strongest response is in one scale channel."""

    row: str
    seed: int
    scale: float
    channel: float
    count: int

    @property
    def key(self) -> tuple[str, int, float, float]:
        """The columns that identify a count."""
        return self.row, self.seed, self.scale, self.channel


Line = TypeVar("Line")


def read_records(folder: Path) -> list[Record]:
    """Read results.csv of a folder; empty if the file does not exist."""
    return read_lines(folder / RESULTS, Record)


def read_winners(folder: Path) -> list[Winners]:
    """Read winners.csv of a folder; empty if the file does not exist."""
    return read_lines(folder / WINNERS, Winners)


def write_results(folder: Path, records: Iterable[Record], winners: Iterable[Winners]) -> None:
    """Write winners.csv and results.csv, each sorted and atomically.

    results.csv comes last: a run that is in it counts as recorded, also after a kill between the
    two files.
    """
    write_lines(folder / WINNERS, Winners, sorted(winners, key=lambda line: line.key))
    write_lines(folder / RESULTS, Record, sorted(records, key=lambda line: line.key))


def merge_records(parts: Sequence[Sequence[Record]]) -> list[Record]:
    """Merge results, keeping the first of duplicates; two configurations of a run are an error."""
    merged: dict[object, Record] = {}
    configs: dict[object, str] = {}
    for record in (record for part in parts for record in part):
        run = (record.table, record.row, record.seed)
        if configs.setdefault(run, record.config) != record.config:
            raise DataError(
                f"{record.row} with seed {record.seed} has two configurations "
                f"({configs[run]} and {record.config}); remove the results of one"
            )
        merged.setdefault(record.key, record)
    return list(merged.values())


def write_lines(path: Path, kind: type[Line], lines: Iterable[Line]) -> None:
    """Write a CSV file atomically, with one column per field of the dataclass `kind`."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    with wrap_write_errors(path):
        write_csv(path, names, ([getattr(line, name) for name in names] for line in lines))


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Read the output of `write_lines`; missing columns have defaults, a missing file no lines."""
    if not path.exists():
        return []
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: _number, str: str}
    columns = {field.name: readers[field.type] for field in fields(kind)}  # type: ignore[arg-type]
    try:
        with check_regular(path).open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, strict=True)
            there = {k: read for k, read in columns.items() if k in (table.fieldnames or ())}
            return [kind(**{k: read(line[k]) for k, read in there.items()}) for line in table]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a copy") from None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
