"""How close to the paper the published results have to be, and how long they may have taken."""

from collections.abc import Iterable
from itertools import product
from math import nan
from statistics import mean

from foveate.paper.claims import Check, Claim, Measured, largest, smallest
from foveate.paper.tables import SCALES, Row, Summaries, effort
from foveate.sweeps.records import Record

MINUTES = 60


def bars(results: Summaries, records: Iterable[Record]) -> list[Claim]:
    """Judge all five."""
    judges = (foveated, single_scale, sliding, few)
    return [*(judge(results) for judge in judges), machine_time(records)]


def foveated(results: Summaries) -> Claim:
    """FovMax and FovAvg, all four training sets, scale by scale.

    In [1, 4] the bar is three standard deviations of a difference of two means over three seeds
    (0.05 points), at 1/2 it is two (0.2). At 8 seeds differ by several points, or by thirty, so
    chance alone can break the bar there.
    """
    rows = results.table("table1", "FovMax", "FovAvg")

    def worst(low: float, high: float) -> Measured:
        scales = [scale for scale in SCALES if low <= scale <= high]
        return smallest(_difference(row, scale) for row, scale in product(rows, scales))

    return Claim(
        "FovMax and FovAvg",
        "at least the paper's figure at each scale, less 0.15 points in [1, 4], less 0.4 below, "
        "less 1 above",
        (
            Check("smallest difference in [1, 4]", "≥", -0.15, *worst(1, 4)),
            Check("smallest in [1/2, 1)", "≥", -0.4, *worst(0.5, 0.99)),
            Check("smallest above 4", "≥", -1, *worst(4.1, 8)),
        ),
    )


def single_scale(results: Summaries) -> Claim:
    """The CNN and FovConc, which are right at trained scales and fall beside them.

    Chance decides on the slopes, so those are judged by the mean of each row.
    """
    rows = results.table("table1", "CNN", "FovConc")
    top = [(row, scale) for row, scale in product(rows, SCALES) if row.at(scale).paper >= 95]
    return Claim(
        "CNN and FovConc",
        "within 0.5 points where the paper has 95 % or more, within 8 on average elsewhere",
        (
            Check("largest difference at 95 % or more", "≤", 0.5,
                  *largest(_distance(row, scale) for row, scale in top)),
            Check("largest mean difference elsewhere", "≤", 8,
                  *largest(_mean_distance(r, [s for s in SCALES if r.at(s).paper < 95])
                           for r in rows)),
        ),
    )  # fmt: skip


def sliding(results: Summaries) -> Claim:
    """SWMax: each row near the paper, or with a higher mean over the 17 scales."""

    def away(row: Row) -> Measured:
        distance = _mean_distance(row, SCALES).value
        gain = mean(_difference(row, scale).value for scale in SCALES)
        told = f"distance {distance:.2f}, {'better' if gain > 0 else 'worse'} by {abs(gain):.2f}"
        return Measured(0.0 if gain > 0 else distance, told)

    return Claim(
        "SWMax",
        "within 2 points on average over the 17 scales, or better than the paper",
        tuple(
            Check(f"{row.label}, 0 if better", "≤", 2, *away(row))
            for row in results.table("table1", "SWMax")
        ),
    )


def few(results: Summaries) -> Claim:
    """Table III: FovAvg and FovMax at each size."""
    worst = smallest(
        Measured(row.points[0].settled - row.points[0].paper, f"{row.label} samples")
        for row in results.table("table3", "FovAvg", "FovMax")
    )
    return Claim(
        "few samples",
        "FovAvg and FovMax at each size of the training set at least the paper's figure less 1 "
        "point",
        (Check("smallest difference", "≥", -1, *worst),),
    )


def machine_time(records: Iterable[Record]) -> Claim:
    """All runs, trained and tested; there is no verdict on other hardware."""
    records = list(records)
    spent = effort(records)
    judged = not spent.missing and all("H200" in name for name in spent.hardware)
    untimed = len({(r.row, r.seed) for r in records if not r.seconds > 0})
    where = f"{spent.runs} runs on {', '.join(spent.hardware)}"
    return Claim(
        "time",
        f"all of it in {MINUTES} minutes or less of one H200, with the seconds of each run",
        (
            Check(
                "all runs", "≤", MINUTES, spent.seconds / 60 if judged else nan, where, "minutes"
            ),
            Check("without their seconds", "≤", 0, nan if spent.missing else untimed, "", "runs"),
        ),
    )


def _difference(row: Row, scale: float) -> Measured:
    """Ours less the paper's."""
    point = row.at(scale)
    return Measured(point.settled - point.paper, f"{row.label} at {scale:.3g}")


def _distance(row: Row, scale: float) -> Measured:
    """How far ours is from the paper's, either way."""
    found = _difference(row, scale)
    return Measured(abs(found.value), found.where)


def _mean_distance(row: Row, scales: Iterable[float]) -> Measured:
    return Measured(mean(_distance(row, scale).value for scale in scales), row.label)
