"""Accuracy of runs over scale: written as CSV and JSON, read back, and summarised over seeds."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from foveate import __version__
from foveate.errors import ConfigError, DataError
from foveate.evaluation.curve import AtScale
from foveate.files import parse_json, read_text, write_text
from foveate.provenance import commit
from foveate.training.config import TrainConfig
from foveate.training.data import is_photo
from foveate.training.presets import model_name

COLUMNS = ("run", "model", "trained_on", "seed", "scale", "accuracy", "count")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Results of one run at each scale; `made_with` has its version, commit and hardware."""

    run: str
    config: TrainConfig
    scales: tuple[AtScale, ...]
    made_with: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Name of the network."""
        return model_name(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        names = {"run": self.run, "model": self.model, "trained_on": self.config.scales}
        scales = [_without_nan(at.to_dict()) for at in self.scales]
        rest = {"config": self.config.to_dict(), "made_with": self.made_with, "scales": scales}
        return {**names, "seed": self.config.seed, **rest}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunResult":
        """Read what `to_dict` wrote."""
        return cls(
            run=values["run"],
            config=TrainConfig.from_dict(values["config"]),
            scales=tuple(map(AtScale.from_dict, values["scales"])),
            made_with={key: str(words) for key, words in values["made_with"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Mean accuracy over runs that differ in their seed alone, and its spread.

    `spread` is the sample standard deviation over the runs (n - 1), and empty for a single run.
    """

    label: str
    trained_on: str
    runs: int
    scales: tuple[float, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...] = ()


def summarise(results: Sequence[RunResult]) -> list[Curve]:
    """Average runs that differ only in their seed, in the order in which they come."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(replace(result.config, seed=0).digest(), []).append(result)
    labels = _labels([group[0] for group in groups.values()])
    return [_curve(label, group) for label, group in zip(labels, groups.values(), strict=True)]


def save_results(
    results: Sequence[RunResult], folder: Path, about: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write accuracy.csv, a line per run and scale, and results.json; return their paths.

    `about` adds to the JSON file what the runs were tested on, and with what.
    """
    made = {"version": __version__, "commit": commit(), **(about or {})}
    summary = [asdict(curve) for curve in summarise(results)]
    content = {**made, "summary": summary, "runs": [result.to_dict() for result in results]}
    rows = [
        (r.run, r.model, r.config.scales, r.config.seed, at.scale, at.accuracy, at.count)
        for r in results
        for at in r.scales
    ]
    return write_tables(folder / "accuracy.csv", folder / "results.json", COLUMNS, rows, content)


def write_tables(
    table: Path, whole: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]], content: Any
) -> tuple[Path, Path]:
    """Write the rows to `table` (.csv) and the content to `whole` (.json); return both paths."""
    lines, text = io.StringIO(), json.dumps(content, allow_nan=False, indent=1)
    csv.writer(lines, lineterminator="\n").writerows([columns, *rows])
    try:
        write_text(table, lines.getvalue())
        write_text(whole, text + "\n")
    except OSError as error:
        raise DataError(f"cannot write {table.name} in {table.parent} ({error.strerror})") from None
    return table, whole


def read_results(path: Path) -> list[RunResult]:
    """Read a results.json, or the one in a folder."""
    path = path / "results.json" if path.is_dir() else path
    try:
        return [RunResult.from_dict(run) for run in parse_json(read_text(path))["runs"]]
    except FileNotFoundError:
        raise DataError(f"no such file: {path}; 'foveate evaluate' writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(f"{path} is damaged ({error}); evaluate again") from None


def _curve(label: str, group: list[RunResult]) -> Curve:
    scales = tuple(at.scale for at in group[0].scales)
    if any(tuple(at.scale for at in result.scales) != scales for result in group):
        raise DataError(f"the runs of {label} were tested at different scales; evaluate them again")
    columns = list(zip(*([at.accuracy for at in r.scales] for r in group), strict=True))
    return Curve(
        label=label,
        trained_on=group[0].config.scales,
        runs=len(group),
        scales=scales,
        mean=tuple(mean(column) for column in columns),
        spread=tuple(stdev(column) for column in columns) if len(group) > 1 else (),
    )


def _labels(firsts: list[RunResult]) -> list[str]:
    """Name each group by its network and training scales; by its run too where two are alike.

    Photographs have no training scale: they are trained at the base size of their recipe.
    """
    names = [
        r.model if is_photo(r.config) else f"{r.model}, trained on {r.config.scales}"
        for r in firsts
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({result.run})"
        for name, result in zip(names, firsts, strict=True)
    ]


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: the accuracy of a class without images becomes null."""
    per_class = [None if math.isnan(share) else share for share in values["per_class"]]
    return {**values, "per_class": per_class}
