"""Acceptance criteria of the published results: distance to the paper and machine time."""

from collections.abc import Iterable
from itertools import product
from math import nan
from statistics import mean

from foveate.paper.claims import Check, Claim, Measured, largest, smallest
from foveate.paper.tables import SCALES, Row, Summaries, effort
from foveate.sweeps.records import Record

MAX_MINUTES = 20


def bars(results: Summaries, records: Iterable[Record]) -> list[Claim]:
    """Evaluate all five criteria."""
    judges = (foveated, single_scale, sliding, few)
    return [*(judge(results) for judge in judges), machine_time(records)]


def foveated(results: Summaries) -> Claim:
    """Compare FovMax and FovAvg with the paper at each scale, for all four training sets.

    The standard deviation of the difference of two means over three seeds is 0.05 points in
    [1, 4] and 0.2 points at scale 1/2. The tolerance is three standard deviations in [1, 4] and
    two at 1/2. At scale 8 the seeds differ by several points, sometimes by thirty, so chance
    alone can exceed the tolerance there.
    """
    rows = results.table("table1", "FovMax", "FovAvg")

    def worst(low: float, high: float) -> Measured:
        scales = [scale for scale in SCALES if low <= scale <= high]
        return smallest(_difference(row, scale) for row, scale in product(rows, scales))

    return Claim(
        "FovMax and FovAvg",
        "at each scale at most 0.15 points below the paper in [1, 4], 0.4 points for smaller and 1 "
        "point for larger scales",
        (
            Check("smallest difference in [1, 4]", "≥", -0.15, *worst(1, 4)),
            Check("smallest difference in [1/2, 1)", "≥", -0.4, *worst(0.5, 0.99)),
            Check("smallest difference above 4", "≥", -1, *worst(4.1, 8)),
        ),
    )


def single_scale(results: Summaries) -> Claim:
    """Compare the CNN and FovConc with the paper; both lose accuracy outside the trained scales.

    On these slopes the accuracy varies with the seed, so there the mean of each row is compared.
    """
    rows = results.table("table1", "CNN", "FovConc")
    top = [(row, scale) for row, scale in product(rows, SCALES) if row.at(scale).paper >= 95]
    return Claim(
        "CNN and FovConc",
        "within 0.5 points where the paper has 95 % or more, within 8 points on average elsewhere",
        (
            Check("largest difference at 95 % or more", "≤", 0.5,
                  *largest(_distance(row, scale) for row, scale in top)),
            Check("largest mean difference elsewhere", "≤", 8,
                  *largest(_mean_distance(r, [s for s in SCALES if r.at(s).paper < 95])
                           for r in rows)),
        ),
    )  # fmt: skip


def sliding(results: Summaries) -> Claim:
    """Compare SWMax with the paper: each row close to it, or with a higher mean over 17 scales."""

    def away(row: Row) -> Measured:
        distance = _mean_distance(row, SCALES).value
        gain = mean(_difference(row, scale).value for scale in SCALES)
        detail = f"distance {distance:.2f}, {'better' if gain > 0 else 'worse'} by {abs(gain):.2f}"
        return Measured(0.0 if gain > 0 else distance, detail)

    return Claim(
        "SWMax",
        "within 2 points of the paper on average over the 17 scales, or better",
        tuple(
            Check(f"{row.label} (0 if better)", "≤", 2, *away(row))
            for row in results.table("table1", "SWMax")
        ),
    )


def few(results: Summaries) -> Claim:
    """Compare FovAvg and FovMax in Table III with the paper at each training set size."""
    worst = smallest(
        Measured(row.points[0].complete_mean - row.points[0].paper, f"{row.label} samples")
        for row in results.table("table3", "FovAvg", "FovMax")
    )
    return Claim(
        "few samples",
        "FovAvg and FovMax at most 1 point below the paper at each training set size",
        (Check("smallest difference", "≥", -1, *worst),),
    )


def machine_time(records: Iterable[Record]) -> Claim:
    """Check the time to train and test all runs; only an H200 gives a verdict."""
    records = list(records)
    spent = effort(records)
    judged = not spent.missing and all("H200" in name for name in spent.hardware)
    minutes = spent.seconds / 60 if judged else nan
    untimed = nan if spent.missing else len({(r.row, r.seed) for r in records if not r.seconds > 0})
    location = f"{spent.runs} runs on {', '.join(spent.hardware)}"
    return Claim(
        "time",
        f"all runs in at most {MAX_MINUTES} minutes on one H200, with the time of each run "
        "recorded",
        (
            Check("all runs", "≤", MAX_MINUTES, minutes, location, "minutes"),
            Check("without a recorded time", "≤", 0, untimed, unit="runs"),
        ),
    )


def _difference(row: Row, scale: float) -> Measured:
    """Return our accuracy minus the paper's."""
    point = row.at(scale)
    return Measured(point.complete_mean - point.paper, f"{row.label} at {scale:.3g}")


def _distance(row: Row, scale: float) -> Measured:
    """Return the absolute difference to the paper."""
    found = _difference(row, scale)
    return Measured(abs(found.value), found.location)


def _mean_distance(row: Row, scales: Iterable[float]) -> Measured:
    return Measured(mean(_distance(row, scale).value for scale in scales), row.label)
