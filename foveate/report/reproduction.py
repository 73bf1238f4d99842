"""The page of the paper's reproduction: claims, figures, tables, how it was run and how long."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from foveate import __version__
from foveate.errors import DataError
from foveate.paper.claims import Claim, claims, selection
from foveate.paper.tables import SCALES, SEEDS, Point, Row, Summaries, effort, precision_of
from foveate.report import figures
from foveate.report.html import Cell, Page
from foveate.sweeps.records import RESULTS, Record, Winners, read_records, read_winners

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE_YET = "No results yet: `foveate reproduce` makes them."
OTHER = "other settings than this version's"
BESIDE = "Solid is ours, the band its standard deviation over seeds; dashed is the paper."
STRONG = 5.0  # points of difference that get the strongest colour
VERDICT_TINTS = {"holds": 1.0, "fails": -1.0, "not yet": 0.0}


class Plate(NamedTuple):
    """A figure with its title and what it shows."""

    title: str
    figure: "Figure"
    caption: str


class Reproduction:
    """Results of the paper's rows, all of them or some, and what follows from them.

    The last of `claims` is not the paper's.
    """

    def __init__(self, records: Sequence[Record] = (), winners: Sequence[Winners] = ()) -> None:
        self.records, self.winners = records, winners
        self.results = Summaries(records)
        self.claims = [*claims(self.results), selection(winners)]
        self.effort = effort(records)

    @classmethod
    def read(cls, folder: Path) -> "Reproduction":
        """Read what 'foveate reproduce' wrote."""
        if not (folder / RESULTS).exists():
            raise DataError(f"{folder} has no {RESULTS}; 'foveate reproduce --out' writes it")
        return cls(read_records(folder), read_winners(folder))

    def lead(self) -> str:
        """Sum up the results in a sentence or two."""
        if not self.records:
            return NONE_YET
        *own, _ = self.claims
        minutes = f"{self.effort.seconds / 60:.1f} minutes of machine time"
        return (
            f"Of the paper's {len(own)} claims {_counted(own)}. "
            f"{self.effort.runs} runs in {minutes}."
        )

    def missing(self) -> list[str]:
        """Say what is not there, in lines; none if all is."""
        left = dict.fromkeys(row.name for row in self.results if not row.complete)
        if not left:
            return []
        return [
            f"Partial: {len(left)} rows are not complete; {self.effort.missing} runs are missing. "
            f"Figures of fewer than {SEEDS} seeds say of how many they are, and decide no verdict.",
            f"Not complete: {', '.join(left)}.",
        ]


def plates(found: Reproduction) -> dict[str, Plate]:
    """Draw all figures, by the names of their files."""
    results = found.results
    return {
        "generalisation": Plate(
            "Accuracy over scale",
            figures.generalisation(results),
            f"Trained on one scale, tested on all. FovConc has 3 channels. {BESIDE}",
        ),
        "close-up": Plate(
            "FovMax and FovAvg close up",
            figures.close_up(results),
            f"The same between 98 % and 99.6 %, with training on all scales from 1 to 4. {BESIDE}",
        ),
        "spacing": Plate(
            "Channel spacing",
            figures.spacing(results),
            "Trained on scale 2, with channels on [1/2, 8] at a spacing of 2^(1/4), 2^(1/2) and 2; "
            f"above 96 %. {BESIDE}",
        ),
        "multi-scale": Plate(
            "Multi-scale against single-scale training",
            figures.multiscale(results),
            f"The grey range is that of the multi-scale training set. {BESIDE}",
        ),
        "few-samples": Plate(
            "Few samples",
            figures.few_samples(results),
            f"Trained and tested on scales in [1, 4]; mean over nine test scales. {BESIDE}",
        ),
        "winning-scale": Plate(
            "The winning scale",
            figures.winning_scales(found.winners),
            "Not in the paper: at each true scale (across) the share of test images that each "
            "channel won (up), darker for more; the line is the mean. If the digit grows by a "
            "factor, the winner has to grow by the same factor: the dotted line, through the mean "
            "at the training scale. It bends at the ends, where there are no further channels.",
        ),
    }


def reproduction_page(found: Reproduction, drawn: dict[str, Plate], source: str) -> Page:
    """Write the page; `source` says where the results are from."""
    page = Page("The paper, run again", found.lead())
    if found.missing():
        page.notice(*found.missing())
    page.text(
        "Jansson and Lindeberg, “Exploring the ability of CNNs to generalise to previously unseen "
        "scales over wide scale ranges”, ICPR 2020. Every row of its three tables was trained "
        f"again, {SEEDS} seeds each; accuracies are in percent of 10,000 test images."
    )
    page.section("The paper's claims")
    _verdicts(page, found.claims)
    for plate in drawn.values():
        page.section(plate.title)
        page.figure(plate.figure, caption=plate.caption)
    _tables(page, found.results)
    _how(page, found, source)
    return page


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


def _verdicts(page: Page, judged: Sequence[Claim]) -> None:
    """The verdicts, and the numbers that they rest on."""
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
        caption="What was measured. The docstrings of `foveate.paper.claims` give the reason for "
        "each threshold.",
    )


def _tables(page: Page, results: Summaries) -> None:
    page.section("Table I: accuracy over scale")
    page.text(
        "Ours with its standard deviation over seeds, then the paper's figure and ours less the "
        "paper's, blue where ours is higher. `tr2` is trained on scale 2, `tr14` on 1 to 4."
    )
    scales = [f"{scale:.3g}" for scale in SCALES]
    for name, rows in _grouped(results.table("table1")).items():
        _compare(page, "scale", scales, {r.trained: r.points for r in rows}, name)
    page.section("Table II: channel spacing")
    for network in ("FovMax", "FovAvg"):
        own = results.table("table2", network)
        columns = {f"{row.channels} channels": row.points for row in own}
        caption = f"{network}, trained on scale 2, channels on [1/2, 8]."
        _compare(page, "scale", scales, columns, caption)
    page.section("Table III: few samples")
    few = _grouped(results.table("table3"))
    sizes = [f"{int(row.trained):,}" for row in next(iter(few.values()))]
    columns = {name: tuple(row.points[0] for row in rows) for name, rows in few.items()}
    _compare(page, "samples", sizes, columns, "Mean over the nine test scales in [1, 4].")


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of one network with one set of channels together."""
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
    """Two cells for each point: ours with its spread, and the paper's with the difference."""
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for name, *points in zip(names, *columns.values(), strict=True):
        pairs = [_cells(point) for point in points]
        rows.append([name, *(cell for pair in pairs for cell in pair)])
        tints.append([None, *(tint for point in points for tint in (None, _tint(point)))])
    headers = [head, *(text for name in columns for text in (name, "paper, diff."))]
    page.table(headers, rows, colour=tints, caption=caption)


def _cells(point: Point) -> tuple[str, str]:
    spread = "" if point.spread is None else f"±{point.spread:.2f}"
    paper = f"{point.paper:.2f} {signed(point.difference) or ''}".strip()
    return f"{shown(point) or '–'}{spread}", paper


def _tint(point: Point) -> float | None:
    """By the root of the difference, so that tenths of a point are seen beside tens."""
    if point.difference is None:
        return None
    return math.copysign(math.sqrt(min(1.0, abs(point.difference) / STRONG)), point.difference)


def _how(page: Page, found: Reproduction, source: str) -> None:
    page.section("How it was run, and how long it took")
    page.text(
        "A run's seconds are its share of the machine: training and testing of the runs that went "
        "side by side, divided by their number. Each run counts once, though Table II shows some "
        "of Table I again. What the paper leaves open, and what was chosen, is in "
        "`docs/reproduction.md`."
    )
    page.code("foveate reproduce --out paper\nfoveate report paper --out report")
    runs = list({(r.row, r.seed): r for r in found.records}.values())
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(row.name for row in found.results):
        if own := [run for run in runs if run.row == name]:
            seconds = mean(run.seconds for run in own)
            validation = f"{100 * mean(run.validation for run in own):.2f}"
            rows.append([name, len(own), f"{seconds:.1f}", validation, own[0].memory])
    with page.details("Seconds of each run"):
        headers = ["row", "runs", "seconds per run", "validation (%)", "peak memory (MiB)"]
        page.table(headers, rows)
    spent, precisions = found.effort, Counter(map(precision_of, runs))
    page.made(
        {
            "results": source,
            "runs": spent.runs,
            "machine time": f"{spent.seconds / 60:.1f} minutes",
            "hardware": "; ".join(spent.hardware),
            "precision": ", ".join(f"{p or OTHER} ({n} runs)" for p, n in precisions.items()),
            "peak memory": f"{spent.memory:,} MiB",
            "foveate of the runs": ", ".join(spent.versions),
            "foveate of this page": __version__,
        },
        title="How this page was made",
    )


def _counted(judged: Sequence[Claim]) -> str:
    """Count the verdicts in words: 6 hold, 1 fails."""
    counts = Counter[str](claim.verdict for claim in judged)
    words = {
        "holds": "holds" if counts["holds"] == 1 else "hold",
        "fails": "fails" if counts["fails"] == 1 else "fail",
        "not yet": "cannot be judged yet",
    }
    return ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])
