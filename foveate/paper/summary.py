"""Results over seeds, row by row of the paper's tables, beside the paper's own figures."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import cast, get_args

from foveate.paper.tables import MIDDLE, Row, paper_rows
from foveate.sweeps.records import Record
from foveate.training.config import Precision

SEEDS = 3
"""Runs of a row, as in the paper; a row with fewer is partial."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of a table, in percent: what each seed gave, and what the paper has."""

    paper: float
    values: tuple[float, ...]

    @property
    def seeds(self) -> int:
        """How many runs there are."""
        return len(self.values)

    @property
    def complete(self) -> bool:
        """Whether there are as many runs as the paper had."""
        return self.seeds >= SEEDS

    @property
    def mean(self) -> float | None:
        """Mean over the runs there are; None without any."""
        return mean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over the runs (n - 1 below the fraction); None for fewer than two."""
        return stdev(self.values) if self.seeds > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, in points."""
        return None if self.mean is None else self.mean - self.paper

    @property
    def settled(self) -> float:
        """The mean if all runs are there, or else NaN."""
        return mean(self.values) if self.complete else math.nan


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A row: a point for each scale, or in Table III the only one, over the scales in [1, 4]."""

    row: Row
    points: tuple[Point, ...]

    @property
    def complete(self) -> bool:
        """Whether no run is missing."""
        return all(point.complete for point in self.points)

    def at(self, scale: float) -> Point:
        """The point of a scale."""
        place = _place(self.row.scales, scale)
        assert place is not None, f"{self.row.name} is not tested at {scale:g}"
        return self.points[place]

    def over(self, scales: Sequence[float] = MIDDLE) -> float:
        """Mean over some scales if all runs are there, or else NaN."""
        return mean(self.at(scale).settled for scale in scales)


class Summaries:
    """All rows of the paper, with the results there are."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        grouped: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            grouped.setdefault((record.table, record.row), []).append(record)
        self._rows = {
            (row.table, row.name): _summary(row, grouped.get((row.table, row.name), []))
            for row in paper_rows()
        }

    def __iter__(self) -> Iterator[Summary]:
        return iter(self._rows.values())

    def row(self, name: str, table: str = "table1") -> Summary:
        """The row of a preset."""
        return self._rows[table, name]

    def table(self, table: str, *networks: str) -> list[Summary]:
        """The rows of a table, of some networks or of all."""
        rows = (found for found in self if found.row.table == table)
        return [found for found in rows if not networks or found.row.network in networks]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What the runs took: each counts once, though two tables show it."""

    runs: int
    missing: int
    seconds: float
    memory: int
    hardware: tuple[str, ...]
    versions: tuple[str, ...]


def effort(records: Iterable[Record]) -> Effort:
    """Add up the runs of the paper's rows; `missing` are those still to be done."""
    names = {row.name for row in paper_rows()}
    runs = {(r.row, r.seed): r for r in records if r.row in names}
    done = Counter(name for name, _ in runs)
    return Effort(
        runs=len(runs),
        missing=sum(max(0, SEEDS - done[name]) for name in names),
        seconds=math.fsum(r.seconds for r in runs.values()),
        memory=max((r.memory for r in runs.values()), default=0),
        hardware=tuple(sorted({r.hardware for r in runs.values()})),
        versions=tuple(sorted({f"{r.version} {r.commit}".strip() for r in runs.values()})),
    )


def precision_of(record: Record) -> Precision | None:
    """How the run was computed; None if it is not the run that this version has for the row."""
    for row in (row for row in paper_rows() if row.name == record.row):
        for precision in get_args(Precision):
            asked = replace(row.config, seed=record.seed, precision=precision)
            if asked.digest() == record.config:
                return cast(Precision, precision)
    return None


def _summary(row: Row, records: Sequence[Record]) -> Summary:
    """Sort the accuracies by scale and seed; each seed counts once."""
    cells: list[dict[int, float]] = [{} for _ in row.scales]
    for record in records:
        place = _place(row.scales, record.scale)
        if place is not None:
            cells[place].setdefault(record.seed, 100 * record.accuracy)
    if len(row.paper) < len(cells):
        cells = [_over_scales(cells)]
    points = [
        Point(paper=paper, values=tuple(cell[seed] for seed in sorted(cell)))
        for paper, cell in zip(row.paper, cells, strict=True)
    ]
    return Summary(row=row, points=tuple(points))


def _over_scales(cells: Sequence[dict[int, float]]) -> dict[int, float]:
    """Average each seed over the scales, if it has them all."""
    seeds = set.intersection(*(set(cell) for cell in cells))
    return {seed: mean(cell[seed] for cell in cells) for seed in seeds}


def _place(scales: Sequence[float], scale: float) -> int | None:
    """Which of the scales it is, also when it was written with four digits."""
    near = (math.isclose(known, scale, rel_tol=1e-3) for known in scales)
    return next((place for place, found in enumerate(near) if found), None)
