"""Matplotlib figures of images and of accuracy over scale, saved as PNG, SVG or PDF."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from foveate.errors import ConfigError
from foveate.evaluation.results import Curve
from foveate.files import escape_bytes, replacing

# Equal figures give equal files: ids in an SVG follow from its content, and files have no date.
SALT = "foveate"
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
FORMATS = ("png", "svg", "pdf")
# The palette of Okabe and Ito, which is safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHED = (0, (4, 2))


def sample_grid(images: Sequence[Tensor], titles: Sequence[str]) -> Figure:
    """Show batches of images in a grid, one column per batch.

    Images with values from 0 to 1 are shown as they are; the contrast of others is stretched to
    their full range.

    Args:
        images: One batch per column, all with the same number of images.
        titles: Column titles.

    Shape:
        Each entry of ``images``: ``(N, C, H, W)``, where ``C`` is 1 or 3.

    Returns:
        A matplotlib figure with ``N`` rows and one column per batch.

    Examples:
        >>> import torch
        >>> figure = sample_grid([torch.rand(4, 1, 28, 28)] * 3, ["1/2", "1", "2"])
        >>> len(figure.axes)
        12
    """
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
            if low < 0 or high > 1:
                pixels = (pixels - low) / max(high - low, 1e-9)
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1)
    return figure


def accuracy_curves(*groups: Sequence[Curve], titles: Sequence[str] = ("",)) -> Figure:
    """Plot accuracy against scale, one panel per group of curves.

    Each curve is the mean over its runs; the band is the standard deviation over the runs.

    Args:
        *groups: Curves of each panel, as `foveate.evaluation.results.summarise` returns them.
        titles: Title of each panel.

    Returns:
        A matplotlib figure with one panel per group.

    Raises:
        ValueError: If ``titles`` does not have one title per group.

    Examples:
        >>> curve = Curve(
        ...     label="FovMax", trained_on="2", runs=1, scales=(1.0, 2.0), mean=(0.98, 0.99)
        ... )
        >>> figure = accuracy_curves([curve], titles=["trained on scale 2"])
        >>> figure.axes[0].get_title()
        'trained on scale 2'
    """
    size = (7.5, 4.4) if len(groups) == 1 else (5.2 * len(groups), 4.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, curves, title in zip(panels, groups, titles, strict=True):
        draw_curves(axes, curves, [curve.title for curve in curves], ms=4, lw=1.6)
        scale_axis(axes, [scale for curve in curves for scale in curve.scales])
        percent_axis(axes, min(value for curve in curves for value in curve.mean))
        axes.legend(frameon=False, fontsize=9, loc="best")
        axes.set_title(title, fontsize=10)
    return figure


def panel_grid(
    count: int, width: float, height: float, *, columns: int = 3, share: bool = False
) -> tuple[Figure, list[Axes], list[Axes]]:
    """Return a figure, its panels row by row, and the blank rest of the last row.

    Each panel is `width` by `height` inches.
    """
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    panels, blank = list(grid.flat[:count]), list(grid.flat[count:])
    for axes in blank:
        axes.set_axis_off()
    return figure, panels, blank


def draw_curves(axes: Axes, curves: Sequence[Curve], labels: Sequence[str], **style: Any) -> None:
    """Plot the mean of each curve in percent, with its standard deviation as a band."""
    for index, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        percent = [100 * value for value in curve.mean]
        label = escape_bytes(label).replace("$", r"\$")  # no formula, in names of runs
        axes.plot(curve.scales, percent, color=colour, marker=marker, label=label, **style)
        if curve.spread:
            band(axes, curve.scales, percent, [100 * value for value in curve.spread], colour)


def band(
    axes: Axes, at: Sequence[float], mean: Sequence[float], spread: Sequence[float], colour: str
) -> None:
    """Shade the area within `spread` of a curve."""
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    axes.fill_between(at, low, high, color=colour, alpha=0.2, lw=0)


def scale_axis(axes: Axes, scales: Sequence[float]) -> None:
    """Set a log2 x-axis with ticks at octaves, or at up to 8 scales below two octaves."""
    low, high = min(scales), max(scales)
    octaves = range(math.ceil(math.log2(low) - 1e-6), math.floor(math.log2(high) + 1e-6) + 1)
    if len(octaves) > 1:
        ticks = [2.0**k for k in octaves]
        names = [f"1/{1 / tick:g}" if tick < 1 else f"{tick:.3g}" for tick in ticks]
    else:
        ticks = sorted(set(scales))
        ticks = ticks[:: math.ceil(len(ticks) / 8)]
        names = [f"{tick:.3g}" for tick in ticks]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, names)
    axes.set_xticks([], minor=True)
    axes.set_xlim(low / 1.06, high * 1.06)
    axes.set_xlabel("test scale")


def samples_axis(axes: Axes, sizes: Sequence[float], **style: Any) -> None:
    """Set a logarithmic x-axis with a tick at each training set size."""
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], **style)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("number of training samples")


def percent_axis(axes: Axes, worst: float, label: str = "accuracy (%)") -> None:
    """Label the y-axis in percent, up to 100; it starts at 0 unless `worst` is 0.8 or more."""
    bottom = 0 if worst < 0.8 else 10 * math.floor(10 * worst - 1e-9)
    axes.set_ylim(bottom, 100 + 0.03 * (100 - bottom))
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.grid(color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """Save a figure in the format given by the suffix of the file name.

    Args:
        figure: Figure to save.
        path: File to write, ending in .png, .svg or .pdf.

    Returns:
        The path.

    Raises:
        ConfigError: If the suffix is not supported.

    Examples:
        >>> import torch
        >>> save(sample_grid([torch.rand(2, 3, 8, 8)], ["samples"]), Path("samples.svg")).name
        'samples.svg'
    """
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"figure file must end in .png, .svg or .pdf, got {path.name!r}")
    with replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": SALT}):
        figure.savefig(temporary, format=kind, dpi=150, metadata=UNDATED.get(kind))
    return path


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Save a figure in a folder as PNG and SVG."""
    return [save(figure, folder / f"{name}.{kind}") for kind in ("png", "svg")]
