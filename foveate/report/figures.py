"""The paper's curves beside ours: accuracy over scale and over the size of the training set."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from foveate.paper.summary import SEEDS, Point, Summaries, Summary
from foveate.paper.tables import SCALES
from foveate.report.plots import COLOURS, MARKERS, percent_axis, scale_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NETWORKS = ("FovMax", "FovAvg", "SWMax", "CNN", "FovConc")
TRAINED = {"tr1": "trained on 1", "tr2": "trained on 2", "tr4": "trained on 4"}
CHANNELS = {"": "17 channels", "-9ch": "9 channels", "-5ch": "5 channels"}
SHADE = 0.2  # of the band that shows the spread over seeds
GREY = "0.45"


class Look(NamedTuple):
    """How a curve is drawn."""

    label: str
    colour: str
    marker: str


def generalisation(results: Summaries) -> "Figure":
    """Accuracy over scale, a panel for each network, a curve for each training scale."""
    figure, panels = _panels(2, 3)
    looks = _looks(TRAINED.values())
    for network, axes in zip(NETWORKS, panels, strict=False):
        rows = [results.row(f"{network.lower()}-{trained}") for trained in TRAINED]
        _draw(axes, network, rows, looks)
        percent_axis(axes, 0)
    _legend_panel(panels[-1], results.table("table1"), looks)
    return figure


def close_up(results: Summaries) -> "Figure":
    """The upper end of FovMax and FovAvg, where all training sets look alike from afar."""
    figure, panels = _panels(1, 2, height=3.9)
    names = [*TRAINED, "tr14"]
    looks = _looks([*TRAINED.values(), "trained on 1 to 4"])
    rows: list[Summary] = []
    for network, axes in zip(NETWORKS, panels, strict=False):
        rows += (own := [results.row(f"{network.lower()}-{trained}") for trained in names])
        _draw(axes, network, own, looks)
        percent_axis(axes, 0)
        axes.set_ylim(98, 99.6)
    _legend_below(figure, rows, looks)
    return figure


def spacing(results: Summaries) -> "Figure":
    """Accuracy over scale for 17, 9 and 5 channels on the same range."""
    figure, panels = _panels(1, 2, height=3.9)
    looks = _looks(CHANNELS.values())
    for network, axes in zip(NETWORKS, panels, strict=False):
        names = [f"{network.lower()}-tr2{few}" for few in CHANNELS]
        _draw(axes, network, [results.row(name, "table2") for name in names], looks)
        percent_axis(axes, 0)
        axes.set_ylim(96, 99.8)
    _legend_below(figure, results.table("table2"), looks)
    return figure


def multiscale(results: Summaries) -> "Figure":
    """Accuracy over scale when trained on all scales in [1, 4], and when trained on 2 alone."""
    figure, panels = _panels(2, 3)
    looks = _looks(["trained on 1 to 4", "trained on 2"])
    rows: list[Summary] = []
    for network, axes in zip(NETWORKS, panels, strict=False):
        name = "fovconc5" if network == "FovConc" else network.lower()
        rows += (own := [results.row(f"{name}-{trained}") for trained in ("tr14", "tr2")])
        title = "FovConc, 5 channels" if network == "FovConc" else network
        _draw(axes, title, own, looks)
        axes.axvspan(1, 4, color="0.5", alpha=0.1, lw=0, zorder=0)
        percent_axis(axes, 0)
    _legend_panel(panels[-1], rows, looks)
    return figure


def few_samples(results: Summaries) -> "Figure":
    """Accuracy over [1, 4] against the number of training samples, a curve for each network."""
    figure, (axes,) = _panels(1, 1, width=6.8, height=4.6)
    looks = _looks(NETWORKS)
    for look in looks:
        rows = results.table("table3", look.label)
        sizes = [int(row.row.trained) for row in rows]
        _curve(axes, sizes, [row.points[0] for row in rows], look)
    ticks = sorted(int(row.row.trained) for row in results.table("table3", "CNN"))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("training samples")
    percent_axis(axes, 0)
    axes.set_ylim(40, 101)
    _legend_below(figure, results.table("table3"), looks)
    return figure


def _panels(
    rows: int, columns: int, width: float = 3.6, height: float = 3.0
) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _looks(labels: Iterable[str]) -> list[Look]:
    return [Look(*look) for look in zip(labels, COLOURS, MARKERS, strict=False)]


def _draw(axes: "Axes", title: str, rows: Sequence[Summary], looks: Sequence[Look]) -> None:
    """A curve for each row, over scale."""
    for row, look in zip(rows, looks, strict=True):
        _curve(axes, row.row.scales, row.points, look)
    axes.set_title(title, fontsize=10)
    scale_axis(axes, SCALES)


def _curve(axes: "Axes", at: Sequence[float], points: Sequence[Point], look: Look) -> None:
    """Ours with its spread as a band, and the paper's dashed; hollow where seeds are missing."""
    colour, marker = look.colour, look.marker
    ours = [math.nan if p.mean is None else p.mean for p in points]
    spread = [math.nan if p.spread is None else p.spread for p in points]
    axes.plot(at, [p.paper for p in points], color=colour, ls=(0, (4, 2)), lw=1.1, gid="paper")
    axes.plot(at, ours, color=colour, lw=1.6, gid="ours")
    low = [y - s for y, s in zip(ours, spread, strict=True)]
    high = [y + s for y, s in zip(ours, spread, strict=True)]
    axes.fill_between(at, low, high, color=colour, alpha=SHADE, lw=0)
    for complete, face in ((True, colour), (False, "none")):
        shown = [(x, y) for x, y, p in zip(at, ours, points, strict=True) if p.complete == complete]
        x, y = zip(*shown, strict=True) if shown else ((), ())
        axes.plot(x, y, ls="", marker=marker, ms=4, color=colour, mfc=face)


def _handles(rows: Sequence[Summary], looks: Sequence[Look]) -> list[Any]:
    """What a legend shows: the curves, what is dashed, and what is hollow if anything is."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, ms=4, lw=1.6, label=look.label)
        for look in looks
    ]
    handles.append(Line2D([], [], color=GREY, ls=(0, (4, 2)), lw=1.1, label="the paper"))
    if not all(row.complete for row in rows):
        words = f"partial: fewer than {SEEDS} seeds"
        handles.append(Line2D([], [], color=GREY, ls="", marker="o", ms=4, mfc="none", label=words))
    return handles


def _legend_panel(axes: "Axes", rows: Sequence[Summary], looks: Sequence[Look]) -> None:
    """Use a panel that is left over for the legend."""
    axes.set_axis_off()
    axes.legend(handles=_handles(rows, looks), frameon=False, fontsize=10, loc="center left")


def _legend_below(figure: "Figure", rows: Sequence[Summary], looks: Sequence[Look]) -> None:
    handles = _handles(rows, looks)
    columns = math.ceil(len(handles) / math.ceil(len(handles) / 4))  # more than 4 are too wide
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
