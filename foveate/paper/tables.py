"""The paper's tables as data: each row with its published figures and the run that repeats it."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files

from foveate.errors import ConfigError
from foveate.models.channels import PAPER_SCALES
from foveate.training.config import TrainConfig
from foveate.training.presets import preset

TABLES = ("table1", "table2", "table3")
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
    return (*_table_1(), *_table_2(), *_table_3())


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


def _table_1() -> Iterator[Row]:
    for line in _lines("table1"):
        conc5 = line["network"] == "FovConc" and line["channels"] == "5"
        name = f"{line['network'].lower()}{'5' if conc5 else ''}-{line['train']}"
        yield _row("table1", name, line, line["train"])


def _table_2() -> Iterator[Row]:
    """Rows of 17 channels are runs of Table I; the paper printed them again from other runs."""
    for line in _lines("table2"):
        few = "" if line["channels"] == "17" else f"-{line['channels']}ch"
        yield _row("table2", f"{line['network'].lower()}-tr2{few}", line, "tr2")


def _table_3() -> Iterator[Row]:
    for line in _lines("table3"):
        for samples in [key for key in line if key.isdigit()]:
            yield Row(
                table="table3",
                name=f"{line['network'].lower()}-few{samples}",
                network=line["network"],
                channels=int(line["channels"] or 0),
                trained=samples,
                paper=(float(line[samples]),),
            )


def _row(table: str, name: str, line: dict[str, str], trained: str) -> Row:
    figures = [float(value) for key, value in line.items() if _is_scale(key)]
    channels = int(line["channels"] or 0)
    return Row(
        table=table, name=name, network=line["network"], channels=channels, trained=trained,
        paper=tuple(figures),
    )  # fmt: skip


def _is_scale(key: str) -> bool:
    return key.replace(".", "", 1).isdigit()


def _lines(table: str) -> list[dict[str, str]]:
    text = files("foveate.paper").joinpath("published", f"{table}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
