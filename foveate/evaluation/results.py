"""Save, read and average the accuracy of runs over scale."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from foveate import __version__
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.measure import wilson
from foveate.evaluation.curve import AtScale
from foveate.files import parse_json, read_text, wrap_write_errors, write_csv, write_text
from foveate.provenance import commit
from foveate.training.config import TrainConfig
from foveate.training.data import is_photo
from foveate.training.presets import model_name

COLUMNS = ("run", "model", "trained_on", "seed", "scale", "accuracy", "count")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Results of one run at each scale.

    Attributes:
        run: Path of the run folder.
        config: Configuration of the run.
        scales: Confusion matrix at each scale.
        made_with: Version, commit and hardware of the training.

    Examples:
        >>> at = AtScale(2.0, confusion=((8, 2), (1, 9)))
        >>> result = RunResult(run="runs/fovavg", config=TrainConfig(), scales=(at,))
        >>> result.scales[0].accuracy
        0.85
    """

    run: str
    config: TrainConfig
    scales: tuple[AtScale, ...]
    made_with: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Name of the network."""
        return model_name(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Convert the result to a dictionary that can be serialised as JSON.

        Returns:
            The fields, plus the network name, training scales, seed, and the 95 % Wilson interval
            of each accuracy.
        """
        names = {"run": self.run, "model": self.model, "trained_on": self.config.scales}
        scales = [{**at.to_dict(), "interval": _interval(at)} for at in self.scales]
        rest = {"config": self.config.to_dict(), "made_with": self.made_with, "scales": scales}
        return {**names, "seed": self.config.seed, **rest}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunResult":
        """Restore a result from the output of `to_dict`.

        Args:
            values: Dictionary written by `to_dict`.

        Returns:
            The restored result.
        """
        return cls(
            run=values["run"],
            config=TrainConfig.from_dict(values["config"]),
            scales=tuple(map(AtScale.from_dict, values["scales"])),
            made_with={key: str(words) for key, words in values["made_with"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Mean and standard deviation of the accuracy over runs that differ only in their seed.

    Attributes:
        label: Network and training scales, for legends and tables.
        trained_on: Training scales.
        runs: Number of runs.
        scales: Test scales.
        mean: Mean accuracy at each scale.
        spread: Sample standard deviation (n - 1) at each scale; empty for a single run.
        intervals: 95 % Wilson interval of the accuracy at each scale; only for a single run.

    Examples:
        >>> Curve(label="FovMax", trained_on="2", runs=1, scales=(1, 2), mean=(0.98, 0.99)).spread
        ()
    """

    label: str
    trained_on: str
    runs: int
    scales: tuple[float, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...] = ()
    intervals: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(
        cls, label: str, trained_on: str, scales: Sequence[float], values: Sequence[Sequence[float]]
    ) -> "Curve":
        """Average the accuracies of runs.

        Args:
            label: Network and training scales, for legends and tables.
            trained_on: Training scales.
            scales: Test scales.
            values: Accuracy of each run, for each scale.

        Returns:
            The curve; the number of runs is that of the scale with the fewest.
        """
        runs = min(map(len, values))
        return cls(
            label=label,
            trained_on=trained_on,
            runs=runs,
            scales=tuple(scales),
            mean=tuple(map(mean, values)),
            spread=tuple(map(stdev, values)) if runs > 1 else (),
        )

    @property
    def title(self) -> str:
        """The label, with the number of runs if there are several."""
        return self.label if self.runs == 1 else f"{self.label} ({self.runs} runs)"


def summarise(results: Sequence[RunResult]) -> list[Curve]:
    """Average the runs that differ only in their seed.

    Args:
        results: Results of the runs.

    Returns:
        One curve per configuration, in the order of first appearance.

    Raises:
        DataError: If runs of one configuration were tested at different scales.

    Examples:
        >>> counts = ((8, 2), (1, 9)), ((9, 1), (0, 10))
        >>> runs = [
        ...     RunResult(run=f"runs/{i}", config=TrainConfig(seed=i), scales=(AtScale(2.0, c),))
        ...     for i, c in enumerate(counts)
        ... ]
        >>> (curve,) = summarise(runs)
        >>> curve.runs, round(curve.mean[0], 2), round(curve.spread[0], 2)
        (2, 0.9, 0.07)
    """
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(replace(result.config, seed=0).digest(), []).append(result)
    labels = _labels([group[0] for group in groups.values()])
    return [_curve(label, group) for label, group in zip(labels, groups.values(), strict=True)]


def save_results(
    results: Sequence[RunResult], folder: Path, metadata: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write ``accuracy.csv`` with one row per run and scale, and ``results.json``.

    Args:
        results: Results of the runs.
        folder: Folder for both files.
        metadata: Further entries of the JSON file, such as the test source, split and hardware.

    Returns:
        The paths of the CSV and the JSON file.

    Raises:
        DataError: If a file cannot be written, or runs that differ only in their seed were tested
            at different scales.

    Examples:
        >>> at = AtScale(2.0, confusion=((8, 2), (1, 9)))
        >>> result = RunResult(run="runs/fovavg", config=TrainConfig(), scales=(at,))
        >>> table, _ = save_results([result], Path("results"))
        >>> print(table.read_text())
        run,model,trained_on,seed,scale,accuracy,count
        runs/fovavg,fovavg,2,0,2.0,0.85,20
        <BLANKLINE>
    """
    made = {"version": __version__, "commit": commit(), **(metadata or {})}
    summary = [asdict(curve) for curve in summarise(results)]
    content = {**made, "summary": summary, "runs": [result.to_dict() for result in results]}
    rows = [
        (r.run, r.model, r.config.scales, r.config.seed, at.scale, at.accuracy, at.count)
        for r in results
        for at in r.scales
    ]
    return write_tables(folder / "accuracy.csv", folder / "results.json", COLUMNS, rows, content)


def write_tables(
    table: Path,
    json_path: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    content: Any,
) -> tuple[Path, Path]:
    """Write `rows` to the CSV file `table` and `content` to the JSON file `json_path`."""
    text = json.dumps(content, allow_nan=False, indent=1)
    with wrap_write_errors(table):
        write_csv(table, columns, rows)
        write_text(json_path, text + "\n")
    return table, json_path


def read_results(path: Path) -> list[RunResult]:
    """Read the results that `save_results` wrote.

    Args:
        path: A ``results.json`` file, or the folder that contains it.

    Returns:
        The results of every run in the file.

    Raises:
        DataError: If the file is missing or damaged.

    Examples:
        >>> at = AtScale(2.0, confusion=((8, 2), (1, 9)))
        >>> result = RunResult(run="runs/fovavg", config=TrainConfig(), scales=(at,))
        >>> _ = save_results([result], Path("results"))
        >>> read_results(Path("results")) == [result]
        True
    """
    path = path / "results.json" if path.is_dir() else path
    try:
        return [RunResult.from_dict(run) for run in parse_json(read_text(path))["runs"]]
    except FileNotFoundError:
        raise DataError(f"cannot find {path}; run 'foveate evaluate' to write it") from None
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(f"{path} is damaged ({error}); run 'foveate evaluate' again") from None


def _curve(label: str, group: list[RunResult]) -> Curve:
    scales = tuple(at.scale for at in group[0].scales)
    if any(tuple(at.scale for at in result.scales) != scales for result in group):
        raise DataError(
            f"the runs of {label} were tested at different scales; evaluate them at the same scales"
        )
    columns = list(zip(*([at.accuracy for at in r.scales] for r in group), strict=True))
    curve = Curve.of(label, group[0].config.scales, scales, columns)
    if len(group) > 1:
        return curve
    return replace(curve, intervals=tuple(map(_interval, group[0].scales)))


def _interval(at: AtScale) -> tuple[float, float]:
    """Return the 95 % Wilson interval of the accuracy at a scale."""
    found = wilson(sum(row[k] for k, row in enumerate(at.confusion)), at.count)
    return found.low, found.high


def _labels(firsts: list[RunResult]) -> list[str]:
    """Label each group with its network and training scales, plus its run where two labels match.

    Runs on photographs have no training scale: they are trained at the base size of their recipe.
    """
    names = [
        r.model if is_photo(r.config) else f"{r.model}, trained on {r.config.scales}"
        for r in firsts
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({result.run})"
        for name, result in zip(names, firsts, strict=True)
    ]
