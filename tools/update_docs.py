"""Write the tables and figures of the published results into the README and the documentation.

The tables replace the text between the markers ``results:begin NAME`` and ``results:end``.

python tools/update_docs.py
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from bars import bars
from illustration import foveated
from matplotlib.figure import Figure

from foveate.errors import ConfigError
from foveate.evaluation.results import Curve
from foveate.files import write_text
from foveate.paper.claims import Claim
from foveate.paper.tables import SCALES, Point, Row, published_folder
from foveate.report.plots import accuracy_curves, save
from foveate.report.reproduction import (
    NO_RESULTS,
    Reproduction,
    captioned_figures,
    format_difference,
    format_mean,
)

ROOT = Path(__file__).parents[1]
DOCS = (
    "README.md",
    "docs/reproduction.md",
    "results/paper/README.md",
    "results/photographs/README.md",
)
BLOCK = re.compile(r"(<!-- results:begin (\S+) -->\n)(.*?)(<!-- results:end -->)", re.DOTALL)
HEADLINE = ("cnn-tr2", "fovconc-tr2", "swmax-tr2", "fovmax-tr2", "fovavg-tr2")
NETWORKS = ("CNN", "FovAvg", "FovMax", "FovConc", "SWMax")
FIGURES = ("generalisation", "spacing", "few-samples", "winning-scale", "foveated", "photographs")
PHOTOGRAPHS = ROOT / "results" / "photographs"
SHOWN = (
    "whole frame of 448, one size",
    "whole frame of 448, all sizes",
    "whole frame, all sizes, logits averaged over 5 windows",
    "scale channels of 160 pixels, avg, one size",
)
"""Networks on photographs in the README and in the figure; results/photographs has all of them."""
CELLS = "Accuracy in percent (difference from the paper in points); every second of the 17 scales."


def tables_markdown(found: Reproduction) -> dict[str, str]:
    """Return the text of every block by name; without results, each is a notice."""
    return {name: write(found) if found.records else NO_RESULTS for name, write in BLOCKS.items()}


def fill_blocks(text: str, blocks: dict[str, str]) -> str:
    """Replace the text between the markers of a Markdown page with the blocks."""

    def put(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in blocks:
            raise ConfigError(f"unknown table {name!r} in a marker; use one of {', '.join(blocks)}")
        return f"{begin}\n{blocks[name]}\n\n{end}"  # mkdocs needs empty lines around a table

    return BLOCK.sub(put, text)


def update_docs(found: Reproduction, root: Path) -> list[Path]:
    """Write the tables and figures into the pages of a checkout; return the paths written."""
    paths = [path for path in (root / name for name in DOCS) if path.exists()]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    having = [path for path in paths if BLOCK.search(texts[path])]
    if not having:
        raise ConfigError(f"no page in {root} has markers for tables; use a checkout of foveate")
    blocks = tables_markdown(found)
    for path in having:
        write_text(path, fill_blocks(texts[path], blocks))
    folder = root / "docs" / "images"
    if not (found.records and folder.is_dir()):
        return having
    drawn = {name: each.figure for name, each in captioned_figures(found).items()}
    drawn["foveated"] = foveated()
    drawn["photographs"] = _photo_figure(photo_curves("test.csv", SHOWN))
    return having + [save(drawn[name], folder / f"{name}.png") for name in FIGURES]


def verdict_table(what: str, claims: Sequence[Claim]) -> str:
    """Return a Markdown table of claims with their numbers, thresholds and verdicts."""
    rows = [
        [
            f"**{claim.name}** {claim.statement}",
            "<br>".join(f"{check.measured}, {check.threshold}" for check in claim.checks),
            claim.verdict,
        ]
        for claim in claims
    ]
    return markdown_table([what, "measured, threshold", "verdict"], rows)


def _headline(found: Reproduction) -> str:
    rows = [found.results.row(name) for name in HEADLINE]
    return _partial_notice(rows) + _over_scale(rows, 4)


def photo_curves(name: str, networks: Sequence[str] = ()) -> list[Curve]:
    """Read the accuracy over size of all or some networks in a file of results/photographs.

    The columns are network, seed, scale and accuracy. A seed that was not tested at every scale is
    left out.
    """
    found: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    with (PHOTOGRAPHS / name).open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            found[line["network"]][line["seed"]][float(line["scale"])] = float(line["accuracy"])
    scales = sorted({scale for runs in found.values() for run in runs.values() for scale in run})
    curves = []
    for network in [name for name in found if name in (networks or found)]:
        whole = [run for run in found[network].values() if len(run) == len(scales)]
        values = [[run[scale] for run in whole] for scale in scales]
        curves.append(Curve.of(network, "1", scales, values))
    return curves


def _photo_table(curves: Sequence[Curve]) -> str:
    """Return the accuracy in percent at each scale, and its mean over scale."""
    lines = []
    for curve in curves:
        cells = [f"{100 * value:.1f}" for value in (*curve.mean, mean(curve.mean))]
        lines.append([curve.label, *cells, str(curve.runs)])
    head = [f"{scale:.2g}" for scale in curves[0].scales]
    return markdown_table(["network", *head, "mean", "runs"], lines)


def _photo_figure(curves: Sequence[Curve]) -> Figure:
    figure = accuracy_curves(curves)
    figure.axes[0].set_xlabel("size of the photograph relative to training")
    return figure


def _over_scale_of(table: str) -> Callable[[Reproduction], str]:
    def write(found: Reproduction) -> str:
        rows = found.results.table(table)
        return f"{_partial_notice(rows)}{CELLS}\n\n" + _over_scale(rows, 2)

    return write


def _few_samples(found: Reproduction) -> str:
    lines = {network: found.results.table("table3", network) for network in NETWORKS}
    rows = [[name, *(_cell(row.points[0]) for row in own)] for name, own in lines.items()]
    sizes = [f"{int(row.trained):,}" for row in lines["CNN"]]
    return _partial_notice(found.results.table("table3")) + markdown_table(
        ["network", *sizes], rows
    )


def _provenance(found: Reproduction) -> str:
    spent, missing = found.effort, found.missing_lines()
    return (
        "".join(f"{line}\n\n" for line in missing[:1])
        + f"{spent.runs} runs, {spent.seconds / 60:.1f} minutes of machine time on "
        f"{'; '.join(spent.hardware)}, foveate {', '.join(spent.versions)}."
    )


def _spread(found: Reproduction) -> str:
    """Return the mean and the standard deviation over seeds at each scale of Table I."""
    rows = found.results.table("table1")
    lines = [[row.label, *map(_mean_and_spread, row.points)] for row in rows]
    return _partial_notice(rows) + markdown_table(
        ["network", *(f"{scale:.3g}" for scale in SCALES)], lines
    )


def _mean_and_spread(point: Point) -> str:
    return "–" if point.spread is None else f"{point.mean:.2f} ± {point.spread:.2f}"


def _over_scale(rows: Sequence[Row], step: int) -> str:
    """Return a table with every ``step``-th scale."""
    scales = ["1/2", "0.71", "1", "1.41", "2", "2.83", "4", "5.66", "8"][:: step // 2]
    lines = [[row.label, *map(_cell, row.points[::step])] for row in rows]
    return markdown_table(["network", *scales], lines)


def _cell(point: Point) -> str:
    if point.mean is None:
        return "–"
    return f"{format_mean(point)} ({format_difference(point.difference)})"


def _partial_notice(rows: Sequence[Row]) -> str:
    """Return the notice above a table whose results are incomplete, or an empty string."""
    count = sum(not row.complete for row in rows)
    return f"Partial: {count} of {len(rows)} rows are not complete.\n\n" if count else ""


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; with more than three columns, numbers are aligned to the right."""
    align = ["---", *["---:"] * (len(headers) - 1)] if len(headers) > 3 else ["---"] * len(headers)
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, align, *rows))


BLOCKS: dict[str, Callable[[Reproduction], str]] = {
    "headline": _headline,
    "photographs": lambda found: _photo_table(photo_curves("test.csv", SHOWN)),
    "all-photographs": lambda found: _photo_table(photo_curves("test.csv")),
    "cifar": lambda found: _photo_table(photo_curves("cifar.csv")),
    "claims": lambda found: verdict_table("claim", found.claims),
    "bars": lambda found: verdict_table("requirement", bars(found.results, found.records)),
    "spread": _spread,
    "table1": _over_scale_of("table1"),
    "table2": _over_scale_of("table2"),
    "table3": _few_samples,
    "made": _provenance,
}


if __name__ == "__main__":
    for written in update_docs(Reproduction.read(published_folder()), ROOT):
        print(written)
