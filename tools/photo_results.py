"""The accuracy of networks on photographs over object size, as a table and a figure.

python tools/photo_results.py results/photographs/test.csv     print the table as Markdown
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from foveate.evaluation.results import Curve
from foveate.report.plots import accuracy_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHOWN = (
    "whole frame of 448, one size",
    "whole frame of 448, all sizes",
    "whole frame, all sizes, logits averaged over 5 windows",
    "scale channels of 160 pixels, avg, one size",
)
"""Networks in the README and in the figure; results/photographs has all of them."""


def read_curves(path: Path) -> list[Curve]:
    """Read a CSV file with the columns network, seed, scale and accuracy, one curve per network.

    A seed that was not tested at every scale is left out.
    """
    found: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            found[line["network"]][line["seed"]][float(line["scale"])] = float(line["accuracy"])
    scales = sorted({scale for runs in found.values() for run in runs.values() for scale in run})
    return [_curve(name, scales, list(runs.values())) for name, runs in found.items()]


def _curve(name: str, scales: Sequence[float], runs: Sequence[dict[float, float]]) -> Curve:
    whole = [run for run in runs if len(run) == len(scales)]
    columns = [[run[scale] for run in whole] for scale in scales]
    return Curve(
        label=name,
        trained_on="1",
        runs=len(whole),
        scales=tuple(scales),
        mean=tuple(map(mean, columns)),
        spread=tuple(map(stdev, columns)) if len(whole) > 1 else (),
    )


def table(curves: Sequence[Curve]) -> str:
    """Return a Markdown table of the accuracy in percent at each scale, and its mean over scale."""
    head = [f"{scale:.2g}" for scale in curves[0].scales]
    lines = [["network", *head, "mean", "runs"], ["---", *["---:"] * (len(head) + 2)]]
    for curve in curves:
        cells = [f"{100 * value:.1f}" for value in (*curve.mean, mean(curve.mean))]
        lines.append([curve.label, *cells, str(curve.runs)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(curves: Sequence[Curve]) -> "Figure":
    """Plot the accuracy over scale; the band is the standard deviation over the runs."""
    drawn = accuracy_curves(curves)
    drawn.axes[0].set_xlabel("size of the photograph relative to training")
    return drawn


if __name__ == "__main__":
    print(table(read_curves(Path(sys.argv[1]))))
