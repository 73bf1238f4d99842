"""How close to the paper a faithful reproduction has to come, and in what time."""

from collections.abc import Iterable, Sequence
from statistics import mean

from foveate.paper.findings import Finding, Measured, check, largest, smallest
from foveate.paper.summary import IncompleteError, Summaries, Summary, effort
from foveate.paper.tables import SCALES
from foveate.sweeps.records import Record

MINUTES = 60


def bars(results: Summaries, records: Iterable[Record]) -> list[Finding]:
    """Judge all five."""
    judges = (foveated, single_scale, sliding, few)
    return [*(judge(results) for judge in judges), machine_time(records)]


def foveated(results: Summaries) -> Finding:
    """FovMax and FovAvg, all four training sets, scale by scale.

    At least the paper's figure less 0.15 points in [1, 4], less 0.4 in [1/2, 1) and less 1 above
    4. In [1, 4] that is three standard deviations of a difference of two means over three seeds
    (0.05 points), and at 1/2 two (0.2). At 8 seeds differ by several points, or by thirty, so
    there the bar is the hard one: chance alone can break it.
    """
    rows = results.table("table1", "FovMax", "FovAvg")

    def worst(low: float, high: float) -> Measured:
        scales = [scale for scale in SCALES if low <= scale <= high]
        return smallest(_difference(row, scale) for row in rows for scale in scales)

    return Finding(
        name="FovMax and FovAvg",
        statement="at least the paper's figure at each scale, less 0.15 points in [1, 4], less 0.4 "
        "below, less 1 above",
        checks=(
            check("smallest difference in [1, 4]", "≥", -0.15, worst, 1, 4),
            check("smallest in [1/2, 1)", "≥", -0.4, worst, 0.5, 0.99),
            check("smallest above 4", "≥", -1, worst, 4.1, 8),
        ),
    )


def single_scale(results: Summaries) -> Finding:
    """The CNN and FovConc, which are right at trained scales and fall beside them.

    Where the paper has 95 % or more, within 0.5 points either way; elsewhere, on the slopes where
    chance rules, each row by 8 points or less on average.
    """
    rows = results.table("table1", "CNN", "FovConc")

    def top() -> Measured:
        cells = [(r, s) for r in rows for s in SCALES if r.at(s).paper >= 95]
        return largest(_distance(row, scale) for row, scale in cells)

    def slope() -> Measured:
        return largest(_mean_distance(r, [s for s in SCALES if r.at(s).paper < 95]) for r in rows)

    return Finding(
        name="CNN and FovConc",
        statement="within 0.5 points where the paper has 95 % or more, within 8 on average "
        "elsewhere",
        checks=(
            check("largest difference at 95 % or more", "≤", 0.5, top),
            check("largest mean difference elsewhere", "≤", 8, slope),
        ),
    )


def sliding(results: Summaries) -> Finding:
    """SWMax: each row within 2 points on average over the 17 scales, or better than the paper.

    Better is a higher mean over the 17 scales.
    """
    rows = results.table("table1", "SWMax")

    def away(row: Summary) -> Measured:
        distance = _mean_distance(row, SCALES).value
        gain = mean(_difference(row, scale).value for scale in SCALES)
        told = f"distance {distance:.2f}, {'better' if gain > 0 else 'worse'} by {abs(gain):.2f}"
        return Measured(0.0 if gain > 0 else distance, told)

    return Finding(
        name="SWMax",
        statement="within 2 points on average over the 17 scales, or better than the paper",
        checks=tuple(check(f"{row.row.label}, 0 if better", "≤", 2, away, row) for row in rows),
    )


def few(results: Summaries) -> Finding:
    """Table III: FovAvg and FovMax at each size, at least the paper's figure less a point."""
    rows = results.table("table3", "FovAvg", "FovMax")

    def worst() -> Measured:
        return smallest(
            Measured(row.points[0].settled - row.points[0].paper, f"{row.row.label} samples")
            for row in rows
        )

    return Finding(
        name="few samples",
        statement="FovAvg and FovMax at each size of the training set at least the paper's figure "
        "less 1 point",
        checks=(check("smallest difference", "≥", -1, worst),),
    )


def machine_time(records: Iterable[Record]) -> Finding:
    """Everything, trained and tested, in an hour of one H200, with the seconds of each run.

    On other hardware there is no verdict.
    """
    spent = effort(records)
    hardware = ", ".join(spent.hardware)

    def minutes() -> Measured:
        if spent.missing:
            raise IncompleteError
        if not all("H200" in name for name in spent.hardware):
            raise IncompleteError(f"made on {hardware}, not on one H200")
        return Measured(spent.seconds / 60, f"{spent.runs} runs on {hardware}")

    def untimed() -> float:
        if spent.missing:
            raise IncompleteError
        return spent.untimed

    return Finding(
        name="time",
        statement="all of it in 60 minutes or less of one H200, with the seconds of each run",
        checks=(
            check("all runs", "≤", MINUTES, minutes, unit="minutes"),
            check("without their seconds", "≤", 0, untimed, unit="runs"),
        ),
    )


def _difference(row: Summary, scale: float) -> Measured:
    """Ours less the paper's."""
    point = row.at(scale)
    return Measured(point.settled - point.paper, f"{row.row.label} at {scale:.3g}")


def _distance(row: Summary, scale: float) -> Measured:
    """How far ours is from the paper's, either way."""
    found = _difference(row, scale)
    return Measured(abs(found.value), found.where)


def _mean_distance(row: Summary, scales: Sequence[float]) -> Measured:
    return Measured(mean(_distance(row, scale).value for scale in scales), row.row.label)
