"""The paper's tables with ours beside them, and the findings, as rows of cells."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from foveate.paper.findings import Finding
from foveate.paper.summary import SEEDS, Point, Summaries, Summary
from foveate.paper.tables import SCALES
from foveate.report.html import Cell, Page

STRONG = 5.0  # points of difference that get the strongest colour
NETWORKS = ("CNN", "FovAvg", "FovMax", "FovConc", "SWMax")
VERDICT_TINTS = {"holds": 1.0, "fails": -1.0, "not yet": 0.0}


class Line(NamedTuple):
    """Points with a name: a row over scale, or a network over the sizes of Table III."""

    name: str
    points: tuple[Point, ...]


def over_scale(page: Page, rows: Mapping[str, Summary], caption: str) -> None:
    """Write rows of Table I or II: scales downwards, for each row ours, and the paper's beside it.

    The difference comes after the paper's figure, and in its colour: three columns for
    each of four training sets would be wider than a page.
    """
    lines = [Line(name, row.points) for name, row in rows.items()]
    columns: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for line in lines:
        ours, paper, difference = _lines(line)
        beside = [f"{p} {d or ''}".strip() for p, d in zip(paper, difference, strict=True)]
        columns += [ours, list(beside)]
        tints += [_tints(line)[0], _tints(line)[-1]]
    page.table(
        ["scale", *(header for line in lines for header in (line.name, "paper, diff."))],
        [[f"{scale:.3g}", *cells] for scale, *cells in zip(SCALES, *columns, strict=True)],
        colour=[[None, *cells] for cells in zip(*tints, strict=True)],
        caption=caption,
    )


def over_samples(page: Page, results: Summaries, caption: str) -> None:
    """Write Table III: sizes across, for each network a line of ours, the paper's, difference."""
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for network in NETWORKS:
        line = sample_line(results, network)
        names = [[network, "ours"], ["", "paper"], ["", "difference"]]
        rows += [[*name, *cells] for name, cells in zip(names, _lines(line), strict=True)]
        tints += [[None, None, *cells] for cells in _tints(line)]
    page.table(["", "", *sample_sizes(results)], rows, colour=tints, caption=caption)


def sample_sizes(results: Summaries) -> list[str]:
    """The sizes of Table III, largest first."""
    return [f"{int(row.row.trained):,}" for row in results.table("table3", NETWORKS[0])]


def sample_line(results: Summaries, network: str) -> Line:
    """A network's line of Table III."""
    return Line(network, tuple(row.points[0] for row in results.table("table3", network)))


def verdicts(page: Page, findings: Sequence[Finding], what: str) -> None:
    """Write what was found: the verdicts, and the numbers that they rest on."""
    page.table(
        [what, "verdict", "statement"],
        [[finding.name, finding.verdict, finding.statement] for finding in findings],
        colour=[[None, VERDICT_TINTS[finding.verdict], None] for finding in findings],
    )
    checks = [(finding.name, check) for finding in findings for check in finding.checks]
    page.table(
        [what, "measured", "threshold"],
        [[name, check.measured, check.threshold] for name, check in checks],
        colour=[[None, VERDICT_TINTS[check.verdict], None] for _, check in checks],
        caption="What was measured. The docstrings of `foveate.paper.claims` and `bars` "
        "give the reason for each threshold.",
    )


def shown(point: Point) -> str | None:
    """The mean, with the number of seeds where some are missing: 99.31, or 99.31 (2 of 3)."""
    if point.mean is None:
        return None
    partly = "" if point.complete else f" ({point.seeds} of {SEEDS})"
    return f"{point.mean:.2f}{partly}"


def signed(difference: float | None) -> str | None:
    """A difference with its sign: +0.12, −0.07, and 0.00 without one."""
    if difference is None:
        return None
    text = f"{difference:+.2f}".replace("-", "−")
    return "0.00" if text[1:] == "0.00" else text


def _lines(line: Line) -> tuple[list[Cell], list[Cell], list[Cell]]:
    """Ours with its spread, the paper's, and the difference."""
    spreads = ["" if p.spread is None else f"±{p.spread:.2f}" for p in line.points]
    ours = [f"{shown(p) or '–'}{spread}" for p, spread in zip(line.points, spreads, strict=True)]
    return (
        list(ours),
        [f"{p.paper:.2f}" for p in line.points],
        [signed(p.difference) for p in line.points],
    )


def _tints(line: Line) -> tuple[list[float | None], ...]:
    """Colours of the three: only differences have any."""
    plain: list[float | None] = [None] * len(line.points)
    return plain, plain, [_tint(point) for point in line.points]


def _tint(point: Point) -> float | None:
    """By the root of the difference, so that tenths of a point are seen beside tens."""
    if point.difference is None:
        return None
    return math.copysign(math.sqrt(min(1.0, abs(point.difference) / STRONG)), point.difference)
