"""HTML page of the quickstart: its results next to the full-size results, and next steps."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from matplotlib.figure import Figure

from foveate import __version__
from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.evaluation.results import Curve, RunResult, summarise
from foveate.paper.tables import network_title
from foveate.report.html import Cell, Page
from foveate.report.plots import accuracy_curves, sample_grid

SHOWN = (0.5, 1.0, 2.0, 4.0, 8.0)
STRONG = 0.5  # loss of accuracy that gets the strongest colour
FULL_SIZE = (
    "Full size: published results from `results/`, not computed in this run. The same networks "
    "were trained on 50,000 MNIST images for 20 epochs and tested on the 10,000 MNIST test images."
)


def quick_figure(results: Sequence[RunResult], full: Sequence[Curve]) -> Figure:
    """Plot the accuracy of this run, next to the full-size results."""
    return accuracy_curves(
        summarise(results), full, titles=["this run", "full size (published results)"]
    )


def quick_page(results: Sequence[RunResult], full: Sequence[Curve], folder: Path) -> Page:
    """Build the page of the quickstart runs in `folder`."""
    page = Page("Quickstart: trained on one scale, tested on many", quick_summary(results))
    page.section("Accuracy over scale")
    config, count = results[0].config, results[0].scales[0].count
    caption = (
        f"This run: trained on {len(load_source(config.source).train):,} digits of scale "
        f"{config.scales} for {config.epochs} epochs, tested on {count:,} test digits."
    )
    page.figure(
        quick_figure(results, full),
        caption=f"{caption} {FULL_SIZE}",
        alt="accuracy of each network over scale",
    )
    _table(page, results, full)
    _seen(page, results)
    _next(page, results, folder)
    _provenance(page, results)
    return page


def quick_summary(results: Sequence[RunResult]) -> str:
    """Summarise the lowest accuracy of each network from half to twice the training scale."""
    trained = float(results[0].config.scales)
    near = [
        (result, [at.accuracy for at in result.scales if 0.5 <= at.scale / trained <= 2])
        for result in results
    ]
    lowest = ", ".join(f"{network_title(r.model)} {100 * min(found):.1f} %" for r, found in near)
    return (
        f"The networks were trained on digits of scale {trained:g}. Lowest test accuracy from half "
        f"to twice that scale: {lowest}."
    )


def _table(page: Page, results: Sequence[RunResult], full: Sequence[Curve]) -> None:
    own = summarise(results)
    curves = {network_title(r.model): curve for r, curve in zip(results, own, strict=True)}
    curves |= {f"{curve.label}, full size": curve for curve in full}
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for scale in own[0].scales:
        cells = [curve.mean[curve.scales.index(scale)] for curve in curves.values()]
        best = [max(curve.mean) for curve in curves.values()]
        rows.append([f"{scale:.3f}", *(f"{100 * share:.1f}" for share in cells)])
        tints.append([None, *((c - b) / STRONG for c, b in zip(cells, best, strict=True))])
    headers = ["scale", *(f"{name} (%)" for name in curves)]
    page.table(
        headers,
        rows,
        colour=tints,
        caption="Test accuracy in percent. The stronger the colour, the larger the drop from "
        "the best accuracy of the column.",
    )


def _seen(page: Page, results: Sequence[RunResult]) -> None:
    config = results[0].config
    page.section("Test images")
    digits = load_source(config.source).test.images[:4]
    made = [rescale(digits, s, size=config.size, border=config.border) for s in SHOWN]
    page.figure(
        sample_grid(made, [f"{scale:g}" for scale in SHOWN]),
        caption=f"Test digits at {len(SHOWN)} of the {len(results[0].scales)} scales, in frames of "
        f"{config.size} × {config.size} pixels. The training set contains scale {config.scales} "
        "only.",
    )
    page.text(
        "The CNN takes the whole frame as its input. FovAvg and FovMax apply one small network to "
        "windows of many sizes around the centre and pool the logits. All windows share the same "
        "weights, so features learned at one scale apply at all scales."
    )


def _next(page: Page, results: Sequence[RunResult], folder: Path) -> None:
    page.section("Next steps")
    runs = [quote(str(folder / Path(result.run).name)) for result in results]
    models = " ".join(f"--model {run}" for run in runs)
    page.text("Draw digits, change their size, and compare the predictions of these networks:")
    page.code(f"foveate demo {models}")
    page.text("Classify an image with one of them, or train a network of the paper at full size:")
    page.code(f"foveate predict digit.png --model {runs[-1]}\nfoveate train fovavg-tr2")


def _provenance(page: Page, results: Sequence[RunResult]) -> None:
    first = results[0]
    page.provenance(
        {
            "images": f"{first.config.source}, the digits in the package (part of the MNIST "
            "training set); training, validation and test splits are disjoint",
            "networks": ", ".join(network_title(result.model) for result in results),
            "schedule": f"{first.config.epochs} epochs, batch size {first.config.batch}, "
            f"learning rate {first.config.learning_rate:g} divided by e every "
            f"{first.config.epochs_per_decay:g} epochs",
            "seed": first.config.seed,
            "foveate": f"{__version__} {first.made_with.get('commit', '')}",
            "hardware": first.made_with.get("hardware", ""),
        }
    )
