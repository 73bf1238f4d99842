"""Result tables of a study in tidy form: one line per row, seed and test scale."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from foveate.errors import DataError
from foveate.files import check_regular, write_text

RESULTS, WINNERS = "results.csv", "winners.csv"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Accuracy of one run at one test scale.

    Attributes:
        table: Table of the results: a table of the paper, or the name of the study.
        row: Row of the table, a configuration.
        seed: Random seed of the run.
        scale: Test scale.
        accuracy: Test accuracy, 0 to 1.
        validation: Validation accuracy, 0 to 1.
        seconds: Time in seconds; for runs trained side by side, the run's share of it.
        memory: Peak memory in MiB of the process, including runs trained side by side.
        config: Digest of the training configuration.
        version: Version of foveate.
        commit: Commit of foveate.
        hardware: Name of the device.
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


Line = TypeVar("Line", Record, Winners)


def read_records(folder: Path) -> list[Record]:
    """Read results.csv of a folder; empty if the file does not exist."""
    return _read(folder / RESULTS, Record)


def read_winners(folder: Path) -> list[Winners]:
    """Read winners.csv of a folder; empty if the file does not exist."""
    return _read(folder / WINNERS, Winners)


def write_results(folder: Path, records: Iterable[Record], winners: Iterable[Winners]) -> None:
    """Write results.csv and winners.csv atomically.

    The lines are sorted, so that equal results give equal files.
    """
    try:
        for name, kind, lines in ((RESULTS, Record, records), (WINNERS, Winners, winners)):
            write_text(folder / name, _csv(kind, sorted(lines, key=lambda line: line.key)))
    except OSError as error:
        raise DataError(
            f"cannot write results in {folder}: {error.strerror}; check the folder"
        ) from None


def merge_records(parts: Sequence[Sequence[Record]]) -> list[Record]:
    """Merge results; of duplicates the first record is kept.

    Raises:
        DataError: If two runs have the same row and seed but different configurations.
    """
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
        with check_regular(path).open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, strict=True))
        return [kind(**{k: read(line[k]) for k, read in columns.items()}) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a copy") from None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
