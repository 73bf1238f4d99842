"""Summaries of a comparison: curves over scale, the ceiling, and intervals over seeds."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

from foveate.baselines.comparison import Measurement
from foveate.baselines.data_sets import ALL, DATA_SETS, DataSet
from foveate.baselines.methods import METHODS, Method, Reference
from foveate.evaluation.results import Curve

CALIBRATED = 1.5  # points below the authors' mean accuracy at most
# 97.5 % quantiles of Student's t distribution with 1 to 9 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, kw_only=True)
class ComparisonView:
    """The results of all methods on a dataset, after training on one set.

    A dataset of few samples has one view, whose `trained` is empty. `curves` has the accuracy by
    method: over scale, or over the number of samples as a mean over scales. `averages` has the mean
    accuracy over all scales, one value per seed, by method and training set. `ceiling` has the
    accuracy of the best expert by test scale.
    """

    data: DataSet
    trained: str
    curves: dict[str, Curve]
    averages: dict[str, dict[str, list[float]]]
    ceiling: dict[float, float]

    @property
    def name(self) -> str:
        """Name of the view, for files."""
        return f"{self.data.name}-{self.trained}" if self.trained else self.data.name

    @property
    def caption(self) -> str:
        """Description for readers."""
        if self.trained:
            return f"{self.data.title}, {self.data.describe(self.trained)}."
        scales = self.data.scales
        return f"{self.data.title}: mean over test scales from {scales.low:g} to {scales.high:g}."


def comparison_views(lines: Sequence[Measurement]) -> Iterator[ComparisonView]:
    """Yield one view per dataset and training set with results.

    A method that is trained on all scales is part of every view of its dataset.
    """
    for name, data in DATA_SETS.items():
        own = [line for line in lines if line.data == name]
        if data.few and own:
            curves, averages = _curves(own, few=True), _averages_by_set(own)
            yield ComparisonView(
                data=data, trained="", curves=curves, averages=averages, ceiling={}
            )
            continue
        methods = [line for line in own if not _is_expert(line)]
        there = {line.trained for line in methods}
        for trained in [t for t in data.trained if t in there] or there & {ALL}:
            shown = [line for line in methods if line.trained in (trained, ALL)]
            yield ComparisonView(
                data=data,
                trained=trained,
                curves=_curves(shown),
                averages=_averages_by_set(shown),
                ceiling=find_ceiling(own),
            )


def find_ceiling(lines: Iterable[Measurement]) -> dict[float, float]:
    """Return the accuracy of the best expert by test scale, from the results on one dataset.

    Several seeds of an expert are averaged.
    """
    experts = [line for line in lines if _is_expert(line)]
    best: dict[float, float] = {}
    for curve in _curves(experts).values():
        for scale, accuracy in zip(curve.scales, curve.mean, strict=True):
            best[scale] = max(accuracy, best.get(scale, 0.0))
    return dict(sorted(best.items()))


@dataclass(frozen=True, kw_only=True)
class ReferenceCheck:
    """Mean accuracy of a method in percent, over all seeds and the scales of its reference."""

    method: Method
    reference: Reference
    mean: float

    @property
    def holds(self) -> bool:
        """Whether the method is within `CALIBRATED` points of the reference, or better."""
        return self.mean >= self.reference.mean - CALIBRATED


def check_references(lines: Sequence[Measurement]) -> Iterator[ReferenceCheck]:
    """Yield the check of each method that has a reference and all results for it."""
    for method in METHODS.values():
        if not (reference := method.reference):
            continue
        scales = reference.scales or tuple(DATA_SETS["mnist"].scales)
        key = "mnist", method.name, reference.trained
        own = [m for m in lines if (m.data, m.method, m.trained) == key]
        found = {s: [m.accuracy for m in own if m.scale == s] for s in scales}
        if all(found.values()):
            average = mean(mean(values) for values in found.values())
            yield ReferenceCheck(method=method, reference=reference, mean=100 * average)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of some runs, and half the width of its 95 % confidence interval.

    The interval is that of Student's t; it is None for a single run.

    Examples:
        >>> centre, half = mean_interval([98.0, 99.0, 100.0])
        >>> centre, round(half, 2)  # 4.303 / sqrt(3)
        (99.0, 2.48)
    """
    if len(values) < 2:
        return mean(values), None
    return mean(values), _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    Above 9 degrees of freedom, two terms of its expansion about the normal quantile are exact to
    0.003.
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _is_expert(line: Measurement) -> bool:
    return METHODS[line.method].trained == "expert"


def _by_method(lines: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {name: [] for name in METHODS}
    for line in lines:
        groups[line.method].append(line)
    return {name: found for name, found in groups.items() if found}


def _averages(lines: Sequence[Measurement]) -> list[float]:
    seeds = sorted({line.seed for line in lines})
    return [mean(line.accuracy for line in lines if line.seed == seed) for seed in seeds]


def _curves(lines: Iterable[Measurement], *, few: bool = False) -> dict[str, Curve]:
    """Average the seeds of each method at each scale, or over scales for each number of samples."""
    found = {}
    for name, own in _by_method(lines).items():
        groups: dict[float, list[Measurement]] = {}
        for line in own:
            groups.setdefault(int(line.trained) if few else line.scale, []).append(line)
        places = sorted(groups)
        found[name] = Curve.of(name, "", places, [_averages(groups[place]) for place in places])
    return found


def _averages_by_set(lines: Iterable[Measurement]) -> dict[str, dict[str, list[float]]]:
    """Return the mean accuracy over scales of each seed, by method and training set."""
    found = {}
    for name, own in _by_method(lines).items():
        sets = {line.trained for line in own}
        found[name] = {t: _averages([line for line in own if line.trained == t]) for t in sets}
    return found
