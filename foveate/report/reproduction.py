"""The page of the paper's reproduction: claims, figures, tables, how it was run and how long."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from foveate import __version__
from foveate.errors import DataError
from foveate.paper.bars import bars
from foveate.paper.claims import claims, selection
from foveate.paper.findings import Finding
from foveate.paper.summary import SEEDS, Summaries, Summary, effort, precision_of
from foveate.report import figures, figures_data
from foveate.report.html import Cell, Page
from foveate.report.tables import over_samples, over_scale, verdicts
from foveate.sweeps.records import RESULTS, Record, Winners, read_records, read_winners

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE_YET = "No results yet: `foveate reproduce` makes them."
OTHER = "other settings than this version's"
BESIDE = "Solid is ours, the band its standard deviation over seeds; dashed is the paper."


class Plate(NamedTuple):
    """A figure with its title and what it shows."""

    title: str
    figure: "Figure"
    caption: str


class Reproduction:
    """Results of the paper's rows, all of them or some, and what follows from them."""

    def __init__(self, records: Sequence[Record] = (), winners: Sequence[Winners] = ()) -> None:
        self.records, self.winners = records, winners
        self.results = Summaries(records)
        self.claims = claims(self.results)
        self.theory = selection(winners)
        self.bars = bars(self.results, records)
        self.effort = effort(records)

    @classmethod
    def read(cls, folder: Path) -> "Reproduction":
        """Read what 'foveate reproduce' wrote."""
        if not (folder / RESULTS).exists():
            raise DataError(f"{folder} has no {RESULTS}; 'foveate reproduce --out' writes it")
        return cls(read_records(folder), read_winners(folder))

    @property
    def findings(self) -> list[Finding]:
        """Everything that was judged."""
        return [*self.claims, self.theory, *self.bars]

    def lead(self) -> str:
        """Say in a sentence or two what came out."""
        if not self.records:
            return NONE_YET
        told = f"Of the paper's {len(self.claims)} claims {_counted(self.claims)}; of our "
        told += f"{len(self.bars)} bars {_counted(self.bars)}. "
        spent = self.effort
        return told + f"{spent.runs} runs in {spent.seconds / 60:.1f} minutes of machine time."

    def missing(self) -> list[str]:
        """Say what is not there, in lines; none if all is."""
        left = dict.fromkeys(row.row.name for row in self.results if not row.complete)
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
        "data-set": Plate(
            "The data set",
            figures_data.data_set(),
            "Four digits at the 17 test scales, each in a frame of 112 × 112 pixels. Above scale "
            "4 parts of a digit leave the frame.",
        ),
        "foveated": Plate(
            "Foveated processing",
            figures_data.foveated(),
            "A digit of scale 4 with the nested windows of 17 channels, and the patch of 28 × 28 "
            "pixels that each channel shows to the same network. The window of channel 4 is the "
            "frame itself; larger windows repeat its border.",
        ),
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
            figures_data.winning_scales(found.winners),
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
    verdicts(page, [*found.claims, found.theory], "claim")
    page.section("How close it has to come")
    verdicts(page, found.bars, "bar")
    for plate in drawn.values():
        page.section(plate.title)
        page.figure(plate.figure, caption=plate.caption)
    _tables(page, found.results)
    _how(page, found, source)
    return page


def _tables(page: Page, results: Summaries) -> None:
    page.section("Table I: accuracy over scale")
    page.text(
        "Ours with its standard deviation over seeds, then the paper's figure and ours less the "
        "paper's, blue where ours is higher. `tr2` is trained on scale 2, `tr14` on 1 to 4."
    )
    for name, rows in _grouped(results.table("table1")).items():
        over_scale(page, {row.row.trained: row for row in rows}, name)
    page.section("Table II: channel spacing")
    for network in ("FovMax", "FovAvg"):
        rows = results.table("table2", network)
        named = {f"{row.row.channels} channels": row for row in rows}
        over_scale(page, named, f"{network}, trained on scale 2, channels on [1/2, 8].")
    page.section("Table III: few samples")
    over_samples(page, results, "Mean over the nine test scales in [1, 4].")


def _grouped(rows: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Rows of one network with one set of channels together."""
    groups: dict[str, list[Summary]] = {}
    for row in rows:
        groups.setdefault(row.row.label.removesuffix(f" {row.row.trained}"), []).append(row)
    return groups


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
    for name in dict.fromkeys(row.row.name for row in found.results):
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


def _counted(findings: Sequence[Finding]) -> str:
    """As: 6 hold, 1 fails."""
    counts = Counter[str](finding.verdict for finding in findings)
    many = {"holds": "hold", "fails": "fail", "not yet": "cannot be judged yet"}
    words = {**many, **{kind: kind for kind in ("holds", "fails") if counts[kind] == 1}}
    return ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])
