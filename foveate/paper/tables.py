"""The tables of the paper: published figures, the runs of each row, and the reproduced results."""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from typing import cast, get_args

from foveate.checks import check_range, suggest
from foveate.errors import ConfigError
from foveate.models.channels import PAPER_SCALES
from foveate.sweeps.jobs import MAX_SEEDS, Job
from foveate.sweeps.records import Record
from foveate.training.config import Precision, TrainConfig
from foveate.training.presets import preset

TABLES = ("table1", "table2", "table3")
SEEDS = 3
"""Number of runs per row, as in the paper; a row with fewer runs is incomplete."""
SCALES = tuple(PAPER_SCALES)
"""The 17 scales of the test sets."""
SCALES_1_TO_4 = tuple(scale for scale in SCALES if 1 <= scale <= 4)
"""The scales over which the few-sample accuracies are averaged."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of a table: the accuracy in the paper and in the reproduced runs, in percent.

    Attributes:
        paper: Accuracy published in the paper.
        values: Accuracy of each reproduced run, one per seed.

    Examples:
        >>> point = Point(paper=98.5, values=(98.0, 99.0, 99.0))
        >>> round(point.mean, 2), round(point.spread, 2), round(point.difference, 2)
        (98.67, 0.58, 0.17)
    """

    paper: float
    values: tuple[float, ...] = ()

    @property
    def seeds(self) -> int:
        """Number of reproduced runs."""
        return len(self.values)

    @property
    def complete(self) -> bool:
        """Whether there are at least as many runs as in the paper."""
        return self.seeds >= SEEDS

    @property
    def mean(self) -> float | None:
        """Mean over the available runs; None without runs."""
        return mean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation (n - 1) over the runs; None for fewer than two runs."""
        return stdev(self.values) if self.seeds > 1 else None

    @property
    def difference(self) -> float | None:
        """Mean of the runs minus the figure of the paper, in percentage points."""
        return None if self.mean is None else self.mean - self.paper

    @property
    def complete_mean(self) -> float:
        """Mean over the runs if all of them are available, else NaN."""
        return mean(self.values) if self.complete else math.nan


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table of the paper.

    Attributes:
        table: ``table1``, ``table2`` or ``table3``.
        name: Preset of the runs, such as ``fovavg-tr2``.
        network: Name of the network in the paper, such as ``FovAvg``.
        channels: Number of scale channels; 0 for the CNN.
        trained: Training set: ``tr1``, ``tr2``, ``tr4``, ``tr14``, or the number of samples in
            Table III.
        points: Accuracy at each scale; in Table III, one mean over the scales in [1, 4].

    Examples:
        >>> row = paper_rows()[0]
        >>> row.label, row.config.scales, row.at(2.0).paper
        ('CNN tr1', '1', 36.82)
    """

    table: str
    name: str
    network: str
    channels: int
    trained: str
    points: tuple[Point, ...]

    @property
    def scales(self) -> tuple[float, ...]:
        """Test scales of the row."""
        return SCALES_1_TO_4 if self.table == "table3" else SCALES

    @property
    def config(self) -> TrainConfig:
        """Training configuration of the row, for seed 0."""
        return preset(self.name)

    @property
    def label(self) -> str:
        """Label for readers, such as ``FovAvg 17 tr2``."""
        return " ".join(
            [self.network, *([str(self.channels)] if self.channels else []), self.trained]
        )

    @property
    def complete(self) -> bool:
        """Whether all runs of all points are available."""
        return all(point.complete for point in self.points)

    def at(self, scale: float) -> Point:
        """Return the point at a scale.

        Args:
            scale: One of `scales`, with a tolerance of 0.1 %.

        Returns:
            The point.
        """
        place = _place(self.scales, scale)
        assert place is not None, f"{self.name} is not tested at {scale:g}"
        return self.points[place]

    def mean_over(self, scales: Sequence[float] = SCALES_1_TO_4) -> float:
        """Average the accuracy of complete points over some scales.

        Args:
            scales: Scales to average over; those in [1, 4] by default.

        Returns:
            Mean accuracy in percent; NaN while runs are missing.
        """
        return mean(self.at(scale).complete_mean for scale in scales)


@lru_cache(maxsize=1)
def paper_rows() -> tuple[Row, ...]:
    """Return all rows of Tables I to III, in the order of the paper.

    The rows contain the published figures only. `Summaries` adds the reproduced results.

    Returns:
        The rows.

    Examples:
        >>> [row.name for row in paper_rows() if row.network == "CNN"][:4]
        ['cnn-tr1', 'cnn-tr2', 'cnn-tr4', 'cnn-tr14']
    """
    return tuple(_row(table, line) for table in TABLES for line in _lines(table))


def network_title(name: str) -> str:
    """Return the paper's name of a zoo network, such as FovAvg for fovavg."""
    titles = {row.network.lower(): row.network for row in paper_rows()}
    return titles.get(name, name)


def find_rows(tables: Sequence[str] = TABLES, names: Sequence[str] = ()) -> list[Row]:
    """Return the rows of some tables; `names` are presets or their prefixes, such as fovavg."""
    for table in tables:
        if table not in TABLES:
            raise ConfigError(f"no table {table!r}; choose from {', '.join(TABLES)}")
    there = [row for row in paper_rows() if row.table in tables]
    for name in names:
        if not any(_goes_by(row, name) for row in there):
            names_there = (row.name for row in there)
            hint = suggest(name, names_there, "list them with foveate reproduce --dry-run")
            raise ConfigError(f"no row {name!r} in {', '.join(tables)}; {hint}")
    return [row for row in there if not names or any(_goes_by(row, name) for name in names)]


def _goes_by(row: Row, name: str) -> bool:
    return row.name == name or row.name.startswith(f"{name}-")


def paper_jobs(rows: Iterable[Row], seeds: int, precision: Precision) -> list[Job]:
    """Return the runs of the rows without duplicates, ordered by row and seed.

    Table II of the paper repeats two rows of Table I with other runs; here both tables share them.
    """
    check_range("seeds", seeds, 1, MAX_SEEDS, f"1 to {MAX_SEEDS}")
    jobs: dict[str, Job] = {}
    for row in rows:
        for seed in range(seeds):
            config = replace(row.config, seed=seed, precision=precision)
            new = Job(name=row.name, config=config, scales=row.scales, rows=())
            job = jobs.get(config.digest(), new)
            jobs[config.digest()] = replace(job, rows=(*job.rows, (row.table, row.name)))
    return list(jobs.values())


def published_folder() -> Path:
    """Return the folder of the results published with the package."""
    package = Path(__file__).parents[1]
    installed = package / "published"
    return installed if installed.exists() else package.parent / "results" / "paper"


class Summaries:
    """All rows of the paper, filled with the available results.

    Iterating yields the rows in the order of the paper.

    Args:
        records: Results of reproduced runs, see `foveate.sweeps.records.read_records`.

    Examples:
        >>> results = Summaries()
        >>> results.row("fovmax-tr2").at(2.0).seeds
        0
        >>> [row.channels for row in results.table("table2", "FovMax")]
        [17, 9, 5]
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        grouped: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            grouped.setdefault((record.table, record.row), []).append(record)
        self._rows = {
            (row.table, row.name): _filled(row, grouped.get((row.table, row.name), []))
            for row in paper_rows()
        }

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def row(self, name: str, table: str = "table1") -> Row:
        """Return the row of a preset.

        Args:
            name: Preset, such as ``fovavg-tr2``.
            table: ``table1``, ``table2`` or ``table3``.

        Returns:
            The row with its results.
        """
        return self._rows[table, name]

    def table(self, table: str, *networks: str) -> list[Row]:
        """Return the rows of a table.

        Args:
            table: ``table1``, ``table2`` or ``table3``.
            *networks: Names of the networks to include, such as ``FovAvg``; all by default.

        Returns:
            The rows with their results.
        """
        rows = (row for row in self if row.table == table)
        return [row for row in rows if not networks or row.network in networks]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Time, memory and hardware of the runs; a run shared by two tables counts once."""

    runs: int
    missing: int
    seconds: float
    memory: int
    hardware: tuple[str, ...]
    versions: tuple[str, ...]


def effort(records: Iterable[Record]) -> Effort:
    """Sum up the runs of the paper's rows; `missing` is the number of runs not yet available."""
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


def find_precision(record: Record) -> Precision | None:
    """Return the precision of a run; None if its configuration differs from that of the row."""
    for row in (row for row in paper_rows() if row.name == record.row):
        for precision in get_args(Precision):
            asked = replace(row.config, seed=record.seed, precision=precision)
            if asked.digest() == record.config:
                return cast(Precision, precision)
    return None


def _row(table: str, line: dict[str, str]) -> Row:
    figures = (value for key, value in line.items() if key[0].isdigit())  # scales, or their range
    return Row(
        table=table, name=line["name"], network=line["network"], channels=int(line["channels"]),
        trained=line["trained"], points=tuple(Point(paper=float(figure)) for figure in figures),
    )  # fmt: skip


def _lines(table: str) -> list[dict[str, str]]:
    text = files("foveate.paper").joinpath("published", f"{table}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def _filled(row: Row, records: Sequence[Record]) -> Row:
    """Fill the points with the accuracy of the runs, ordered by seed; each seed counts once."""
    cells: list[dict[int, float]] = [{} for _ in row.scales]
    for record in records:
        place = _place(row.scales, record.scale)
        if place is not None:
            cells[place].setdefault(record.seed, 100 * record.accuracy)
    if len(row.points) < len(cells):  # the mean of each seed with results at all scales
        seeds = set.intersection(*(set(cell) for cell in cells))
        cells = [{seed: mean(cell[seed] for cell in cells) for seed in seeds}]
    values = [tuple(cell[seed] for seed in sorted(cell)) for cell in cells]
    points = zip(row.points, values, strict=True)
    return replace(row, points=tuple(replace(point, values=own) for point, own in points))


def _place(scales: Sequence[float], scale: float) -> int | None:
    """Return the index of a scale, which can be rounded to four digits; None if it is missing."""
    near = (math.isclose(known, scale, rel_tol=1e-3) for known in scales)
    return next((place for place, found in enumerate(near) if found), None)
