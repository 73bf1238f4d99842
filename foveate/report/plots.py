"""Pictures of data and results, drawn with matplotlib and written as PNG or SVG."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from foveate.errors import ConfigError
from foveate.evaluation.results import Curve
from foveate.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
# Okabe and Ito's colours, which people with colour-blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def sample_grid(images: Sequence[Tensor], titles: Sequence[str]) -> "Figure":
    """Draw a column of samples under each title; every entry of `images` is (N, C, H, W)."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows, columns = len(images[0]), len(images)
    tight = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    figure = Figure(figsize=(0.85 * columns + 0.1, 0.85 * rows + 0.35), layout=tight)
    grid = figure.subplots(rows, columns, squeeze=False)
    for column, (batch, title) in enumerate(zip(images, titles, strict=True)):
        grid[0, column].set_title(title, fontsize=9)
        for row, image in enumerate(batch):
            axes = grid[row, column]
            axes.set_axis_off()
            pixels = image.movedim(0, -1).float().numpy()
            low, high = float(pixels.min()), float(pixels.max())
            axes.imshow((pixels - low) / max(high - low, 1e-9), cmap="gray", vmin=0, vmax=1)
    return figure


def accuracy_curves(*groups: Sequence[Curve], titles: Sequence[str] = ("",)) -> "Figure":
    """Draw accuracy over scale, a panel for each group of curves, with their titles above."""
    from matplotlib.figure import Figure

    size = (7.5, 4.4) if len(groups) == 1 else (5.2 * len(groups), 4.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, curves, title in zip(panels, groups, titles, strict=True):
        _draw_curves(axes, curves)
        axes.set_title(title, fontsize=10)
    return figure


def _draw_curves(axes: "Axes", curves: Sequence[Curve]) -> None:
    """The mean of each group of runs, with its spread as a band."""
    for index, curve in enumerate(curves):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        percent = [100 * value for value in curve.mean]
        label = curve.label if curve.runs == 1 else f"{curve.label} ({curve.runs} runs)"
        axes.plot(curve.scales, percent, color=colour, marker=marker, ms=4, lw=1.6, label=label)
        if curve.spread:
            band(axes, curve.scales, percent, [100 * value for value in curve.spread], colour)
    scale_axis(axes, [scale for curve in curves for scale in curve.scales])
    percent_axis(axes, min(value for curve in curves for value in curve.mean))
    axes.legend(frameon=False, fontsize=9, loc="best")


def band(
    axes: "Axes", at: Sequence[float], mean: Sequence[float], spread: Sequence[float], colour: str
) -> None:
    """Shade what is within `spread` of a curve."""
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    axes.fill_between(at, low, high, color=colour, alpha=0.2, lw=0)


def scale_axis(axes: "Axes", scales: Sequence[float]) -> None:
    """Logarithmic, with ticks at whole octaves: 1/2, 1, 2, 4, 8; at all scales if there are few."""
    low, high = min(scales), max(scales)
    octaves = range(math.ceil(math.log2(low) - 1e-6), math.floor(math.log2(high) + 1e-6) + 1)
    ticks = [2.0**k for k in octaves] if len(octaves) > 1 else sorted(set(scales))
    names = [f"1/{1 / tick:g}" if tick < 1 else f"{tick:.3g}" for tick in ticks]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, names)
    axes.set_xticks([], minor=True)
    axes.set_xlim(low / 1.06, high * 1.06)
    axes.set_xlabel("scale of the test images")


def percent_axis(axes: "Axes", worst: float, label: str = "accuracy (%)") -> None:
    """In percent, to 100; from 0 unless all curves are near the top."""
    from matplotlib.ticker import MaxNLocator

    bottom = 0 if worst < 0.8 else 10 * math.floor(10 * worst - 1e-9)
    axes.set_ylim(bottom, 100 + 0.03 * (100 - bottom))
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.grid(color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: "Figure", path: Path) -> Path:
    """Write the figure in the format that the name of `path` ends in."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"picture must end in .png, .svg or .pdf, got {path.name!r}")
    with replacing(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)
    return path
