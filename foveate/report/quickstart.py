"""The page of the first experiment: what it showed, what it would show at full size, what next."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foveate import __version__
from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.evaluation.results import Curve, RunResult, summarise
from foveate.paper.tables import network_title
from foveate.report.html import Cell, Page
from foveate.report.plots import accuracy_curves, sample_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (0.5, 1.0, 2.0, 4.0, 8.0)
STRONG = 0.5  # a loss of accuracy that gets the strongest colour
NO_FULL_SIZE = "No full-size results come with this version: `foveate reproduce` makes them."
FULL_SIZE = (
    "Full size, from `results/`: the same networks trained on 50,000 images of MNIST for 20 epochs "
    "and tested on its 10,000 test images. Nothing of it was computed in this run."
)


def quick_figure(results: Sequence[RunResult], full: Sequence[Curve]) -> "Figure":
    """Draw the curves of this run, and beside them those of full size if there are any."""
    own = summarise(results)
    if not full:
        return accuracy_curves(own)
    return accuracy_curves(own, full, titles=["this run", "full size, from results/"])


def quick_page(results: Sequence[RunResult], full: Sequence[Curve], folder: Path) -> Page:
    """Write the page of the runs in `folder`."""
    page = Page("Trained on one size, tested on many", quick_lead(results))
    page.section("Accuracy over scale")
    caption = f"This run: {_size(results)}, tested on {results[0].scales[0].count:,} other digits."
    page.figure(
        quick_figure(results, full),
        caption=f"{caption} {FULL_SIZE if full else NO_FULL_SIZE}",
        alt="accuracy of each network over scale",
    )
    _table(page, results, full)
    _seen(page, results)
    _next(page, results, folder)
    _made(page, results)
    return page


def quick_lead(results: Sequence[RunResult]) -> str:
    """Say in a sentence how each network holds between half and twice the training scale."""
    trained = float(results[0].config.scales)
    near = [
        (result, [at.accuracy for at in result.scales if 0.5 <= at.scale / trained <= 2])
        for result in results
    ]
    told = ", ".join(f"{network_title(r.model)} {100 * min(found):.1f} %" for r, found in near)
    return (
        f"Digits of scale {trained:g} were learned. The lowest accuracy from half to twice that "
        f"scale, on digits never seen: {told}."
    )


def _size(results: Sequence[RunResult]) -> str:
    config = results[0].config
    count = config.samples or len(load_source(config.source).train)
    return f"{count:,} digits of scale {config.scales}, {config.epochs} epochs"


def _table(page: Page, results: Sequence[RunResult], full: Sequence[Curve]) -> None:
    own = summarise(results)
    curves = {network_title(r.model): curve for r, curve in zip(results, own, strict=True)}
    curves |= {f"{curve.label}, full size": curve for curve in full}
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for scale in own[0].scales:
        cells = [_at(curve, scale) for curve in curves.values()]
        best = [max(curve.mean) for curve in curves.values()]
        rows.append([f"{scale:.3f}", *(f"{100 * share:.1f}" for share in cells)])
        tints.append([None, *((c - b) / STRONG for c, b in zip(cells, best, strict=True))])
    headers = ["scale", *(f"{name} (%)" for name in curves)]
    page.table(headers, rows, colour=tints, caption="Coloured by what is lost against the best.")


def _at(curve: Curve, scale: float) -> float:
    """The accuracy at the nearest scale: those of full size were written with four digits."""
    nearest = min(range(len(curve.scales)), key=lambda k: abs(curve.scales[k] - scale))
    return curve.mean[nearest]


def _seen(page: Page, results: Sequence[RunResult]) -> None:
    config = results[0].config
    page.section("What they were shown")
    digits = load_source(config.source).test.images[:4]
    made = [rescale(digits, s, size=config.size, border=config.border) for s in SHOWN]
    page.figure(
        sample_grid(made, [f"{scale:g}" for scale in SHOWN]),
        caption=f"Test digits at some of the {len(results[0].scales)} scales, in frames of "
        f"{config.size} × {config.size} pixels. Only digits of scale {config.scales} were learned.",
    )
    page.text(
        "The CNN sees the whole frame. FovAvg and FovMax show one small network windows of many "
        "sizes about its centre and pool the answers: what was learned in one window holds in all."
    )


def _next(page: Page, results: Sequence[RunResult], folder: Path) -> None:
    page.section("Next")
    models = " ".join(f"--model {folder / Path(result.run).name}" for result in results)
    run = folder / Path(results[-1].run).name
    page.text("Draw digits and drag their size, with these networks answering side by side:")
    page.code(f"foveate demo {models}")
    page.text("Ask one of them about a picture, or train a row of the paper at full size:")
    page.code(f"foveate predict digit.png --model {run}\nfoveate train fovavg-tr2")


def _made(page: Page, results: Sequence[RunResult]) -> None:
    first = results[0]
    page.made(
        {
            "images": f"{first.config.source}, digits inside the package (part of MNIST's "
            "training set); training, validation and test digits are apart",
            "networks": ", ".join(network_title(result.model) for result in results),
            "schedule": f"{first.config.epochs} epochs in batches of {first.config.batch}, rate "
            f"{first.config.learning_rate:g} divided by e every "
            f"{first.config.epochs_per_decay:g} epochs",
            "seed": first.config.seed,
            "made with": f"foveate {__version__} {first.made_with.get('commit', '')}",
            "computed on": first.made_with.get("hardware", ""),
        }
    )
