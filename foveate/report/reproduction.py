"""HTML page of the reproduction: claims, figures, tables, and how the runs were made."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from matplotlib.figure import Figure

from foveate import __version__
from foveate.errors import DataError
from foveate.paper.claims import Claim, claims, selection
from foveate.paper.tables import SCALES, SEEDS, Point, Row, Summaries, effort, find_precision
from foveate.report import figures
from foveate.report.html import Cell, Page, root_tint
from foveate.sweeps.records import RESULTS, Record, Winners, read_records, read_winners

NO_RESULTS = "No results yet; run `foveate reproduce` to create them."
OTHER = "unknown: settings of another version"
LINES = (
    "Solid lines: this reproduction, with the standard deviation over seeds as a band. Dashed "
    "lines: the paper."
)
STRONG = 5.0  # difference in points that gets the strongest colour
VERDICT_TINTS = {"holds": 1.0, "fails": -1.0, "undecided": 0.0}


class CaptionedFigure(NamedTuple):
    """A figure with its title and caption."""

    title: str
    figure: Figure
    caption: str


class Reproduction:
    """Results of some or all rows of the paper's tables, and the verdicts on its claims.

    `claims` contains the claims of the paper, followed by one claim of this project.
    """

    def __init__(self, records: Sequence[Record] = (), winners: Sequence[Winners] = ()) -> None:
        self.records, self.winners = records, winners
        self.results = Summaries(records)
        self.claims = [*claims(self.results), selection(winners)]
        self.effort = effort(records)

    @classmethod
    def read(cls, folder: Path) -> "Reproduction":
        """Read the results that `foveate reproduce` wrote to a folder."""
        if not (folder / RESULTS).exists():
            raise DataError(f"{folder} has no {RESULTS}; run 'foveate reproduce --out {folder}'")
        return cls(read_records(folder), read_winners(folder))

    def summary(self) -> str:
        """Summarise the verdicts and the machine time."""
        if not self.records:
            return NO_RESULTS
        *own, _ = self.claims
        minutes = f"{self.effort.seconds / 60:.1f} minutes of machine time"
        return (
            f"Of the paper's {len(own)} claims, {_counted(own)}. "
            f"{self.effort.runs} runs took {minutes}."
        )

    def missing_lines(self) -> list[str]:
        """Return lines that describe the missing runs; empty if all results are complete."""
        left = dict.fromkeys(row.name for row in self.results if not row.complete)
        if not left:
            return []
        return [
            f"Partial results: {len(left)} rows are incomplete; {self.effort.missing} runs are "
            f"missing. Values from fewer than {SEEDS} seeds give the number of seeds and do not "
            "count towards a verdict.",
            f"Incomplete rows: {', '.join(left)}.",
        ]


def captioned_figures(found: Reproduction) -> dict[str, CaptionedFigure]:
    """Draw all figures, keyed by file name."""
    results = found.results
    return {
        "generalisation": CaptionedFigure(
            "Accuracy over scale, trained on one scale",
            figures.generalisation(results),
            "Each network is trained on one scale and tested on 17. FovConc has 3 channels. "
            f"{LINES}",
        ),
        "close-up": CaptionedFigure(
            "FovMax and FovAvg above 98 %",
            figures.close_up(results),
            "The same curves between 98 % and 99.6 %, with training on scales 1 to 4 added. "
            f"{LINES}",
        ),
        "spacing": CaptionedFigure(
            "Channel spacing",
            figures.spacing(results),
            "Trained on scale 2. Channels cover [1/2, 8] with a spacing of 2^(1/4), 2^(1/2) and 2. "
            f"The axis starts at 96 %. {LINES}",
        ),
        "multi-scale": CaptionedFigure(
            "Multi-scale and single-scale training",
            figures.multiscale(results),
            f"The grey area marks the scales of the multi-scale training set. {LINES}",
        ),
        "few-samples": CaptionedFigure(
            "Accuracy with few training samples",
            figures.few_samples(results),
            f"Trained and tested on scales in [1, 4]; mean over 9 test scales. {LINES}",
        ),
        "winning-scale": CaptionedFigure(
            "Winning channel",
            figures.winning_scales(found.winners),
            "Not in the paper. Each column shows the share of test images that each channel won "
            "at one test scale, darker for more; the solid line is the mean. If the digit grows by "
            "a factor, the winning channel should grow by the same factor: this is the dotted "
            "line, drawn through the mean at the training scale. The mean bends at both ends, "
            "where there are no further channels.",
        ),
    }


def reproduction_page(found: Reproduction, drawn: dict[str, CaptionedFigure], source: str) -> Page:
    """Build the page from the results and figures; `source` describes the origin of the results."""
    page = Page("Reproduction of the paper", found.summary())
    if found.missing_lines():
        page.notice(*found.missing_lines())
    page.text(
        "Jansson and Lindeberg, “Exploring the ability of CNNs to generalise to previously unseen "
        "scales over wide scale ranges”, ICPR 2020, compared with our own runs. "
        f"Seeds per row of its three tables: {_seeds(found.results)}. Accuracies are in percent, "
        "on 10,000 test images."
    )
    page.section("Claims of the paper")
    _verdicts(page, found.claims)
    for each in drawn.values():
        page.section(each.title)
        page.figure(each.figure, caption=each.caption)
    _tables(page, found.results)
    _how(page, found, source)
    return page


def format_mean(point: Point) -> str | None:
    """Format a mean, with the number of seeds if some are missing: 99.31 or 99.31 (2 of 3)."""
    if point.mean is None:
        return None
    partly = "" if point.complete else f" ({point.seeds} of {SEEDS})"
    return f"{point.mean:.2f}{partly}"


def format_difference(difference: float | None) -> str | None:
    """Format a difference with its sign, such as +0.12 or −0.07; zero has no sign."""
    if difference is None:
        return None
    text = f"{difference:+.2f}".replace("-", "−")
    return "0.00" if text[1:] == "0.00" else text


def _verdicts(page: Page, judged: Sequence[Claim]) -> None:
    """Add the table of verdicts, and the table of measurements behind them."""
    page.table(
        ["claim", "verdict", "statement"],
        [[claim.name, claim.verdict, claim.statement] for claim in judged],
        colour=[[None, VERDICT_TINTS[claim.verdict], None] for claim in judged],
    )
    checks = [(claim.name, check) for claim in judged for check in claim.checks]
    page.table(
        ["claim", "measured", "threshold"],
        [[name, check.measured, check.threshold] for name, check in checks],
        colour=[[None, VERDICT_TINTS[check.verdict], None] for _, check in checks],
        caption="Measurements behind the verdicts. The docstrings of `foveate.paper.claims` give "
        "the reason for each threshold.",
    )


def _tables(page: Page, results: Summaries) -> None:
    page.section("Table I: accuracy over scale")
    page.text(
        "Each pair of columns gives our accuracy with its standard deviation over seeds, then the "
        "accuracy in the paper and the difference (ours minus the paper's, blue if ours is "
        "higher). `tr2` means trained on scale 2, `tr14` on scales 1 to 4."
    )
    scales = [f"{scale:.3g}" for scale in SCALES]
    for name, rows in _grouped(results.table("table1")).items():
        _compare(page, "scale", scales, {r.trained: r.points for r in rows}, name)
    page.section("Table II: channel spacing")
    for network in ("FovMax", "FovAvg"):
        own = results.table("table2", network)
        columns = {f"{row.channels} channels": row.points for row in own}
        caption = f"{network}, trained on scale 2, channels covering [1/2, 8]."
        _compare(page, "scale", scales, columns, caption)
    page.section("Table III: few training samples")
    few = _grouped(results.table("table3"))
    sizes = [f"{int(row.trained):,}" for row in next(iter(few.values()))]
    columns = {name: tuple(row.points[0] for row in rows) for name, rows in few.items()}
    _compare(page, "samples", sizes, columns, "Mean over the 9 test scales in [1, 4].")


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by network and set of channels."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.label.removesuffix(f" {row.trained}"), []).append(row)
    return groups


def _compare(
    page: Page,
    head: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[Point]],
    caption: str,
) -> None:
    """Add a table with two cells per point: our result, and the paper's with the difference."""
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for name, *points in zip(names, *columns.values(), strict=True):
        pairs = [_cells(point) for point in points]
        rows.append([name, *(cell for pair in pairs for cell in pair)])
        shades = [root_tint(point.difference, STRONG) for point in points]
        tints.append([None, *(tint for shade in shades for tint in (None, shade))])
    headers = [head, *(text for name in columns for text in (name, "paper, diff."))]
    page.table(headers, rows, colour=tints, caption=caption)


def _cells(point: Point) -> tuple[str, str]:
    spread = "" if point.spread is None else f"±{point.spread:.2f}"
    paper = f"{point.paper:.2f} {format_difference(point.difference) or ''}".strip()
    return f"{format_mean(point) or '–'}{spread}", paper


def _how(page: Page, found: Reproduction, source: str) -> None:
    page.section("Commands and run times")
    page.text(
        "The time of a run is its share of the machine: the time to train and test a group of "
        "parallel runs, divided by their number. Each run counts once, although Table II repeats "
        "some runs of Table I. `docs/reproduction.md` lists the details that the paper leaves open "
        "and our choices."
    )
    page.code("foveate reproduce --out paper\nfoveate report paper --out report")
    runs = list({(r.row, r.seed): r for r in found.records}.values())
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(row.name for row in found.results):
        if own := [run for run in runs if run.row == name]:
            seconds = mean(run.seconds for run in own)
            validation = f"{100 * mean(run.validation for run in own):.2f}"
            rows.append([name, len(own), f"{seconds:.1f}", validation, own[0].memory])
    with page.details("Time and memory of each run"):
        headers = ["row", "runs", "seconds per run", "validation accuracy (%)", "peak memory (MiB)"]
        page.table(headers, rows)
    spent, precisions = found.effort, Counter(map(find_precision, runs))
    page.provenance(
        {
            "results": source,
            "runs": spent.runs,
            "machine time": f"{spent.seconds / 60:.1f} minutes",
            "hardware": "; ".join(spent.hardware),
            "precision": ", ".join(f"{p or OTHER} ({n} runs)" for p, n in precisions.items()),
            "peak memory": f"{spent.memory:,} MiB",
            "foveate version of the runs": ", ".join(spent.versions),
            "foveate version of this page": __version__,
        }
    )


def _seeds(results: Summaries) -> str:
    """Return the smallest and the largest number of seeds of a row, such as 3 to 5."""
    counts = {point.seeds for row in results for point in row.points}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _counted(judged: Sequence[Claim]) -> str:
    """Count the verdicts in words, such as 6 hold, 1 fails."""
    counts = Counter[str](claim.verdict for claim in judged)
    words = {
        "holds": "holds" if counts["holds"] == 1 else "hold",
        "fails": "fails" if counts["fails"] == 1 else "fail",
        "undecided": "cannot be judged yet",
    }
    return ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])
