"""The paper's tables as data: each row with its published figures and the run that repeats it."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from foveate.errors import ConfigError
from foveate.models.channels import PAPER_SCALES
from foveate.sweeps.jobs import Job
from foveate.sweeps.records import RESULTS
from foveate.training.config import Precision, TrainConfig
from foveate.training.presets import preset

TABLES = ("table1", "table2", "table3")
MAX_SEEDS = 1000  # runs of one row
SCALES = tuple(PAPER_SCALES)
"""The 17 scales of the test sets."""
MIDDLE = tuple(scale for scale in SCALES if 1 <= scale <= 4)
"""The scales over which the few-sample accuracies are averaged."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: percentages at each scale, or one over all scales in [1, 4] (Table III).

    `name` is the preset of its run. `channels` is 0 for the CNN, which has none.
    """

    table: str
    name: str
    network: str
    channels: int
    trained: str
    paper: tuple[float, ...]

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
            trained=trained, paper=paper,
        )  # fmt: skip


def _lines(table: str) -> list[dict[str, str]]:
    text = files("foveate.paper").joinpath("published", f"{table}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
