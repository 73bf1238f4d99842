"""The paper's tables: each row with its published figures, its runs, and our results beside it."""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from typing import cast, get_args

from foveate.errors import ConfigError
from foveate.models.channels import PAPER_SCALES
from foveate.sweeps.jobs import MAX_SEEDS, Job
from foveate.sweeps.records import RESULTS, Record
from foveate.training.config import Precision, TrainConfig
from foveate.training.presets import preset

TABLES = ("table1", "table2", "table3")
SEEDS = 3
"""Runs of a row, as in the paper; a row with fewer is partial."""
SCALES = tuple(PAPER_SCALES)
"""The 17 scales of the test sets."""
MIDDLE = tuple(scale for scale in SCALES if 1 <= scale <= 4)
"""The scales over which the few-sample accuracies are averaged."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of a table, in percent: what each seed gave, and what the paper has."""

    paper: float
    values: tuple[float, ...] = ()

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
class Row:
    """A row of a table: percentages at each scale, or one over all scales in [1, 4] (Table III).

    `name` is the preset of its run. `channels` is 0 for the CNN, which has none. `points` are the
    paper's figures, each with what our seeds gave.
    """

    table: str
    name: str
    network: str
    channels: int
    trained: str
    points: tuple[Point, ...]

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales at which the run is tested."""
        return MIDDLE if self.table == "table3" else SCALES

    @property
    def config(self) -> TrainConfig:
        """The run that makes the row, for seed 0."""
        return preset(self.name)

    @property
    def label(self) -> str:
        """What a reader calls it: FovAvg 17 tr2."""
        return " ".join(
            [self.network, *([str(self.channels)] if self.channels else []), self.trained]
        )

    @property
    def complete(self) -> bool:
        """Whether no run is missing."""
        return all(point.complete for point in self.points)

    def at(self, scale: float) -> Point:
        """The point of a scale."""
        place = _place(self.scales, scale)
        assert place is not None, f"{self.name} is not tested at {scale:g}"
        return self.points[place]

    def over(self, scales: Sequence[float] = MIDDLE) -> float:
        """Mean over some scales if all runs are there, or else NaN."""
        return mean(self.at(scale).settled for scale in scales)


@lru_cache(maxsize=1)
def paper_rows() -> tuple[Row, ...]:
    """All rows of the three tables, in the paper's order."""
    lines = ((table, line) for table in TABLES for line in _lines(table))
    return tuple(row for table, line in lines for row in _rows(table, line))


def network_title(name: str) -> str:
    """What a reader calls a network of the zoo: FovAvg for fovavg."""
    titles = {row.network.lower(): row.network for row in paper_rows()}
    return titles.get(name, name)


def find_rows(tables: Sequence[str] = TABLES, names: Sequence[str] = ()) -> list[Row]:
    """Pick the rows of some tables; `names` are presets, or their beginnings, as fovavg."""
    for table in tables:
        if table not in TABLES:
            raise ConfigError(f"no table {table!r}; there are {', '.join(TABLES)}")
    there = [row for row in paper_rows() if row.table in tables]
    for name in names:
        if not any(_goes_by(row, name) for row in there):
            near = get_close_matches(name, [row.name for row in there], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"no row {name!r} in {', '.join(tables)}{hint}")
    return [row for row in there if not names or any(_goes_by(row, name) for name in names)]


def _goes_by(row: Row, name: str) -> bool:
    return row.name == name or row.name.startswith(f"{name}-")


def paper_jobs(rows: Iterable[Row], seeds: int, precision: Precision) -> list[Job]:
    """List the runs that the rows need, each once, the seeds of a row one after another.

    Table II repeats two rows of Table I from other runs; here both tables share one run.
    """
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds must be 1 to {MAX_SEEDS}, got {seeds}")
    jobs: dict[str, Job] = {}
    for row in rows:
        for seed in range(seeds):
            config = replace(row.config, seed=seed, precision=precision)
            new = Job(name=row.name, config=config, scales=row.scales, rows=())
            job = jobs.get(config.digest(), new)
            jobs[config.digest()] = replace(job, rows=(*job.rows, (row.table, row.name)))
    return list(jobs.values())


def published() -> Path | None:
    """The folder of the results that come with the package; None if there are none."""
    package = Path(__file__).parents[1]
    for folder in (package / "published", package.parent / "results" / "paper"):
        if (folder / RESULTS).exists():
            return folder
    return None


class Summaries:
    """All rows of the paper, with the results that there are."""

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
        """The row of a preset."""
        return self._rows[table, name]

    def table(self, table: str, *networks: str) -> list[Row]:
        """The rows of a table, of some networks or of all."""
        rows = (row for row in self if row.table == table)
        return [row for row in rows if not networks or row.network in networks]


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


def _rows(table: str, line: dict[str, str]) -> Iterator[Row]:
    """The rows in a line of a published table: one, or in Table III one for each sample size."""
    name, channels = line["network"].lower(), int(line["channels"] or 0)
    figures = {key: float(value) for key, value in line.items() if key[0].isdigit()}
    named: dict[str, tuple[str, tuple[float, ...]]]
    if table == "table3":
        named = {f"{name}-few{size}": (size, (figure,)) for size, figure in figures.items()}
    elif table == "table2":
        few = "" if channels == 17 else f"-{channels}ch"
        named = {f"{name}-tr2{few}": ("tr2", tuple(figures.values()))}
    else:
        five = "5" if (name, channels) == ("fovconc", 5) else ""
        named = {f"{name}{five}-{line['train']}": (line["train"], tuple(figures.values()))}
    for preset_name, (trained, paper) in named.items():
        yield Row(
            table=table, name=preset_name, network=line["network"], channels=channels,
            trained=trained, points=tuple(Point(paper=figure) for figure in paper),
        )  # fmt: skip


def _lines(table: str) -> list[dict[str, str]]:
    text = files("foveate.paper").joinpath("published", f"{table}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def _filled(row: Row, records: Sequence[Record]) -> Row:
    """Add the accuracies of the runs, sorted by scale and seed; each seed counts once."""
    cells: list[dict[int, float]] = [{} for _ in row.scales]
    for record in records:
        place = _place(row.scales, record.scale)
        if place is not None:
            cells[place].setdefault(record.seed, 100 * record.accuracy)
    if len(row.points) < len(cells):  # the mean over the scales of each seed that has them all
        seeds = set.intersection(*(set(cell) for cell in cells))
        cells = [{seed: mean(cell[seed] for cell in cells) for seed in seeds}]
    values = [tuple(cell[seed] for seed in sorted(cell)) for cell in cells]
    points = zip(row.points, values, strict=True)
    return replace(row, points=tuple(replace(point, values=own) for point, own in points))


def _place(scales: Sequence[float], scale: float) -> int | None:
    """Which of the scales it is, also when it was written with four digits."""
    near = (math.isclose(known, scale, rel_tol=1e-3) for known in scales)
    return next((place for place, found in enumerate(near) if found), None)
