"""Figures of the reproduction: accuracy curves next to the paper's, and winning channels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from foveate.paper.tables import SCALES, SEEDS, Point, Row, Summaries
from foveate.report.plots import (
    COLOURS,
    DASHED,
    MARKERS,
    band,
    panel_grid,
    percent_axis,
    samples_axis,
    scale_axis,
)
from foveate.sweeps.records import Winners

NETWORKS = ("FovMax", "FovAvg", "SWMax", "CNN", "FovConc")
TRAINED = {"tr1": "trained on scale 1", "tr2": "trained on scale 2", "tr4": "trained on scale 4"}
CHANNELS = {"": "17 channels", "-9ch": "9 channels", "-5ch": "5 channels"}
GREY = "0.45"


class Style(NamedTuple):
    """Label, colour and marker of a curve."""

    label: str
    colour: str
    marker: str


def generalisation(results: Summaries) -> Figure:
    """Plot accuracy over scale, one panel per network and one curve per training scale."""
    panels = {n: [results.row(f"{n.lower()}-{t}") for t in TRAINED] for n in NETWORKS}
    return _over_scale(panels, TRAINED.values())


def close_up(results: Summaries) -> Figure:
    """Plot FovMax and FovAvg between 98 % and 99.6 %, one curve per training set."""
    sets = {**TRAINED, "tr14": "trained on scales 1 to 4"}
    panels = {n: [results.row(f"{n.lower()}-{t}") for t in sets] for n in NETWORKS[:2]}
    return _over_scale(panels, sets.values(), (98, 99.6))


def spacing(results: Summaries) -> Figure:
    """Plot accuracy over scale for 17, 9 and 5 channels on the same range."""
    panels = {
        n: [results.row(f"{n.lower()}-tr2{few}", "table2") for few in CHANNELS]
        for n in NETWORKS[:2]
    }
    return _over_scale(panels, CHANNELS.values(), (96, 99.8))


def multiscale(results: Summaries) -> Figure:
    """Plot accuracy over scale after training on scales in [1, 4] and on scale 2 only."""
    names = {n: n.lower() for n in NETWORKS[:-1]} | {"FovConc, 5 channels": "fovconc5"}
    panels = {
        title: [results.row(f"{name}-{t}") for t in ("tr14", "tr2")]
        for title, name in names.items()
    }
    figure = _over_scale(panels, ("trained on scales 1 to 4", "trained on scale 2"))
    for axes in figure.axes[: len(panels)]:
        axes.axvspan(1, 4, color="0.5", alpha=0.1, lw=0, zorder=0)
    return figure


def few_samples(results: Summaries) -> Figure:
    """Plot mean accuracy over [1, 4] against the training set size, one curve per network."""
    figure, (axes,), _ = panel_grid(1, 6.8, 4.6)
    styles = _styles(NETWORKS)
    for style in styles:
        rows = results.table("table3", style.label)
        sizes = [int(row.trained) for row in rows]
        _curve(axes, sizes, [row.points[0] for row in rows], style)
    samples_axis(axes, sorted(sizes))
    percent_axis(axes, 0)
    axes.set_ylim(40, 101)
    _legend(figure, [], results.table("table3"), styles)
    return figure


def winning_scales(winners: Iterable[Winners]) -> Figure:
    """Plot a histogram of the winning channel for each test scale, darker for more images.

    The dotted line shows a winning scale proportional to the test scale, through the mean winner
    at the training scale.
    """
    counted = list(winners)
    figure, panels, _ = panel_grid(9, 2.87, 2.73, share=True)
    grid = [(network, trained) for network in NETWORKS[:3] for trained in TRAINED]
    for (network, trained), axes in zip(grid, panels, strict=True):
        own = [w for w in counted if w.row == f"{network.lower()}-{trained}"]
        _histogram(axes, own, float(trained[2:]))
        axes.set_title(f"{network}, {TRAINED[trained]}{_partly(own)}", fontsize=10)
    for axes in panels[-3:]:
        axes.set_xlabel("test scale")
    for axes in panels[::3]:
        axes.set_ylabel("winning channel (scale)")
    return figure


def _over_scale(
    panels: Mapping[str, Sequence[Row]],
    labels: Iterable[str],
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Plot one panel per title and one curve per row; a blank panel holds the legend."""
    figure, grid, blank = panel_grid(len(panels), 3.6, 3.0 if len(panels) > 3 else 3.9)
    styles = _styles(labels)
    for (title, rows), axes in zip(panels.items(), grid, strict=True):
        for row, style in zip(rows, styles, strict=True):
            _curve(axes, row.scales, row.points, style)
        axes.set_title(title, fontsize=10)
        scale_axis(axes, SCALES)
        percent_axis(axes, 0)
        axes.set_ylim(limits)
    _legend(figure, blank, [row for rows in panels.values() for row in rows], styles)
    return figure


def _styles(labels: Iterable[str]) -> list[Style]:
    return [Style(*style) for style in zip(labels, COLOURS, MARKERS, strict=False)]


def _curve(axes: Axes, at: Sequence[float], points: Sequence[Point], style: Style) -> None:
    """Plot our mean with its spread as a band; the paper is dashed, missing seeds are hollow."""
    colour, marker = style.colour, style.marker
    ours = [math.nan if p.mean is None else p.mean for p in points]
    spread = [math.nan if p.spread is None else p.spread for p in points]
    axes.plot(at, [p.paper for p in points], color=colour, ls=DASHED, lw=1.1, gid="paper")
    axes.plot(at, ours, color=colour, lw=1.6, gid="ours")
    band(axes, at, ours, spread, colour)
    for complete, face in ((True, colour), (False, "none")):
        shown = [(x, y) for x, y, p in zip(at, ours, points, strict=True) if p.complete == complete]
        x, y = zip(*shown, strict=True) if shown else ((), ())
        axes.plot(x, y, ls="", marker=marker, ms=4, color=colour, mfc=face)


def _legend(
    figure: Figure, blank: Sequence[Axes], rows: Sequence[Row], styles: Sequence[Style]
) -> None:
    """Draw the legend in the blank panels, or below the figure if there are none."""
    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, ms=4, lw=1.6, label=style.label)
        for style in styles
    ]
    handles.append(Line2D([], [], color=GREY, ls=DASHED, lw=1.1, label="paper"))
    if not all(row.complete for row in rows):
        words = f"partial: fewer than {SEEDS} seeds"
        handles.append(Line2D([], [], color=GREY, ls="", marker="o", ms=4, mfc="none", label=words))
    for axes in blank:
        axes.legend(handles=handles, frameon=False, fontsize=10, loc="center left")
    if not blank:
        lines = math.ceil(len(handles) / 4)  # 5 labels in one line are wider than the figure
        columns = math.ceil(len(handles) / lines)
        below: Any = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
        figure.legend(handles=handles, ncols=columns, **below)


def _histogram(axes: Axes, winners: Sequence[Winners], trained: float) -> None:
    octaves = [math.log2(scale) for scale in SCALES]
    for place in (axes.set_xticks, axes.set_yticks):
        place(octaves[::4], ["1/2", "1", "2", "4", "8"])
    axes.set_xlim(octaves[0] - 0.125, octaves[-1] + 0.125)
    axes.set_ylim(octaves[0] - 0.125, octaves[-1] + 0.125)
    if not winners:
        return
    shares = _shares(winners)
    axes.pcolormesh(octaves, octaves, shares.T.numpy(), cmap="Blues", vmin=0, rasterized=True)
    means = (shares * torch.tensor(octaves)).sum(1).tolist()
    start = means[octaves.index(math.log2(trained))] - math.log2(trained)
    axes.plot(octaves, means, color="#D55E00", marker="o", ms=3, lw=1.4)
    axes.plot(octaves, [o + start for o in octaves], color="0.35", ls=":", lw=1.2)


def _partly(winners: Sequence[Winners]) -> str:
    seeds = len({w.seed for w in winners})
    if seeds >= SEEDS:
        return ""
    return f"\n{seeds} of {SEEDS} seeds" if seeds else "\nno results yet"


def _shares(winners: Sequence[Winners]) -> Tensor:
    """Return the share of images at each test scale (rows) that each channel won, (17, 17)."""
    counts = torch.zeros(len(SCALES), len(SCALES))
    for line in winners:
        counts[_nearest(line.scale), _nearest(line.channel)] += line.count
    return counts / counts.sum(1, keepdim=True)


def _nearest(scale: float) -> int:
    return min(range(len(SCALES)), key=lambda k: abs(math.log(SCALES[k] / scale)))
