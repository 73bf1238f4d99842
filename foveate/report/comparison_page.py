"""HTML page of a comparison of methods: figures with the ceiling, tables, costs, settings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, mean, stdev
from typing import TYPE_CHECKING, NamedTuple

from foveate import __version__
from foveate.baselines.comparison import Measurement
from foveate.baselines.data_sets import ALL, DATA_SETS, DataSet
from foveate.baselines.methods import METHODS, Method, Settings
from foveate.data.splits import SplitName
from foveate.evaluation.results import Curve
from foveate.report.html import Cell, Page
from foveate.report.plots import COLOURS, MARKERS, band, percent_axis, scale_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 5  # scales in the short table; the full table has all
DEEP = 50.0  # points below the ceiling that get the strongest colour
COLUMNS = 3  # panels side by side
CEILING = "trained on the test scale"
DASHED = (0, (4, 2))
# 97.5 % quantiles of Student's t distribution with 1 to 9 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, kw_only=True)
class ComparisonResults:
    """The results of a comparison, and what is missing.

    Args:
        lines: Accuracy of every run at every test scale.
        split: Split of the test images.
        missing: Names of the planned runs without a result.
        provenance: Facts about the runs, such as version and hardware.
    """

    lines: Sequence[Measurement]
    split: SplitName = "test"
    missing: Sequence[str] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets with results, in the order of the registry."""
        there = {line.data for line in self.lines}
        return [data for name, data in DATA_SETS.items() if name in there]

    def of(self, data: DataSet, method: str = "") -> list[Measurement]:
        """Return the results on a data set, of one method or of all."""
        lines = (line for line in self.lines if line.data == data.name)
        return [line for line in lines if not method or line.method == method]

    def trained(self, data: DataSet) -> list[str]:
        """Return the training sets of a data set with results of their own."""
        there = {line.trained for line in self.of(data) if not _is_expert(line.method)}
        return [trained for trained in data.trained if trained in there] or [ALL][: len(there)]

    def curves(self, data: DataSet, trained: str) -> dict[str, Curve]:
        """Return the accuracy over scale by method; methods on all scales are always included."""
        found = {}
        for name in METHODS:
            lines = [line for line in self.of(data, name) if line.trained in (trained, ALL)]
            if lines and not _is_expert(name):
                found[name] = _curve(name, trained, ((m.scale, m.seed, m.accuracy) for m in lines))
        return found

    def few(self, data: DataSet) -> dict[str, Curve]:
        """Return the mean accuracy over all scales against the number of samples, by method."""
        found = {}
        for name in METHODS:
            runs: dict[tuple[float, int], list[float]] = {}
            for line in self.of(data, name):
                runs.setdefault((float(line.trained), line.seed), []).append(line.accuracy)
            if runs:
                points = ((count, seed, mean(values)) for (count, seed), values in runs.items())
                found[name] = _curve(name, "few", points)
        return found

    def ceiling(self, data: DataSet) -> dict[float, float]:
        """Return the accuracy of the best expert by test scale."""
        best: dict[float, float] = {}
        for name in filter(_is_expert, METHODS):
            lines = self.of(data, name)
            for scale in {line.scale for line in lines}:
                own = mean(line.accuracy for line in lines if line.scale == scale)
                best[scale] = max(own, best.get(scale, 0.0))
        return dict(sorted(best.items()))


class ComparisonFigure(NamedTuple):
    """A figure of one data set and training set, with its name and caption."""

    name: str
    data: str
    trained: str
    figure: "Figure"
    caption: str


def comparison_figures(found: ComparisonResults) -> list[ComparisonFigure]:
    """Draw one figure per data set and training set; one for all numbers of few samples."""
    drawn = []
    for data in found.data_sets():
        if data.few:
            figure = _panels(found.few(data), {}, few=True)
            caption = f"{data.title}: mean accuracy over scales {_range(data)}."
            drawn.append(ComparisonFigure(data.name, data.name, "", figure, caption))
            continue
        for trained in found.trained(data):
            figure = _panels(found.curves(data, trained), found.ceiling(data))
            caption = f"{data.title}, {data.describe(trained)}."
            name = f"{data.name}-{trained}"
            drawn.append(ComparisonFigure(name, data.name, trained, figure, caption))
    return drawn


def comparison_page(found: ComparisonResults, drawn: Sequence[ComparisonFigure]) -> Page:
    """Build the page from the results and their figures."""
    images = "test images" if found.split == "test" else "validation images"
    runs = {(m.data, METHODS[m.method].run_name, m.trained, m.seed) for m in found.lines}
    methods = [name for name in METHODS if name in {line.method for line in found.lines}]
    lead = (
        f"{len(methods)} methods on {len(found.data_sets())} data sets: accuracy of {len(runs)} "
        f"trained networks over the scale of the {images}, in percent."
    )
    page = Page("Comparison of methods over scale", lead)
    _missing(page, found)
    page.text(
        "Curves are means over seeds, with one standard deviation as a band. The dashed line is "
        "the ceiling: at each scale, the better of the experts, which are trained on that scale "
        "alone. Colours show the distance from the ceiling. Intervals are 95 % confidence intervals of the mean over seeds (Student's "
        "t); they do not contain the uncertainty of a finite test set."
    )
    for data in found.data_sets():
        page.section(data.title)
        for each in drawn:
            if each.data == data.name:
                page.figure(each.figure, caption=each.caption)
                _accuracies(page, found, data, each.trained)
        _costs(page, found, data)
    _methods(page, methods)
    page.provenance({**found.provenance, "foveate version of this page": __version__})
    return page


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of some runs, and half of its 95 % confidence interval.

    Args:
        values: One value per run.

    Returns:
        The mean, and half the width of the interval, or None for a single run.

    Examples:
        >>> centre, half = mean_interval([98.0, 99.0, 100.0])
        >>> centre, round(half, 2)  # 4.303 / sqrt(3)
        (99.0, 2.48)
    """
    if len(values) < 2:
        return mean(values), None
    return mean(values), _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    Above 9 degrees of freedom, two terms of its expansion about the normal quantile are exact to
    0.003.
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _is_expert(name: str) -> bool:
    return METHODS[name].trained == "expert"


def _curve(name: str, trained: str, points: Iterable[tuple[float, int, float]]) -> Curve:
    """Return the curve through points (scale, seed, accuracy)."""
    at: dict[float, list[float]] = {}
    for scale, _, accuracy in sorted(points):
        at.setdefault(scale, []).append(accuracy)
    runs = min(map(len, at.values()))
    return Curve(
        label=name,
        trained_on=trained,
        runs=runs,
        scales=tuple(at),
        mean=tuple(map(mean, at.values())),
        spread=tuple(map(stdev, at.values())) if runs > 1 else (),
    )


def _panels(
    curves: Mapping[str, Curve], ceiling: Mapping[float, float], few: bool = False
) -> "Figure":
    """Draw one panel per family of methods, each with the ceiling."""
    from matplotlib.figure import Figure

    families: dict[str, list[Curve]] = {}
    for name, curve in curves.items():
        families.setdefault(METHODS[name].family, []).append(curve)
    columns = min(COLUMNS, len(families))
    rows = math.ceil(len(families) / columns)
    figure = Figure(figsize=(3.6 * columns if columns > 1 else 6.4, 3.2 * rows))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (family, own) in zip(grid, families.items(), strict=False):
        axes.set_title(family, fontsize=10)
        _panel(axes, own, ceiling, few)
    for axes in grid[len(families) :]:
        axes.set_axis_off()
    if ceiling:
        line = grid[0].get_lines()[0]
        figure.legend([line], [CEILING], loc="outside lower center", frameon=False, fontsize=9)
    return figure


def _panel(
    axes: "Axes", curves: Sequence[Curve], ceiling: Mapping[float, float], few: bool
) -> None:
    if ceiling:
        percent = [100 * value for value in ceiling.values()]
        axes.plot(list(ceiling), percent, color="0.35", ls=DASHED, lw=1.2)
    for curve, colour, marker in zip(curves, COLOURS, MARKERS, strict=False):
        percent = [100 * value for value in curve.mean]
        axes.plot(curve.scales, percent, color=colour, marker=marker, ms=3, label=curve.label)
        if curve.spread:
            band(axes, curve.scales, percent, [100 * value for value in curve.spread], colour)
    scales = sorted({scale for curve in curves for scale in curve.scales} | set(ceiling))
    if few:
        axes.set_xscale("log")
        axes.set_xticks(scales, [f"{scale:,.0f}" for scale in scales], fontsize=8, rotation=45)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("number of training samples")
    else:
        scale_axis(axes, scales)
    percent_axis(axes, 0)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _missing(page: Page, found: ComparisonResults) -> None:
    if found.missing:
        count = len(found.missing)
        page.notice(
            f"Partial results: {count} {'run is' if count == 1 else 'runs are'} missing. Run the "
            "same command again to resume.",
            f"Missing runs: {', '.join(found.missing)}.",
        )


def _accuracies(page: Page, found: ComparisonResults, data: DataSet, trained: str) -> None:
    """Add a short table with the mean over all scales, and a table of all scales."""
    curves = found.few(data) if data.few else found.curves(data, trained)
    ceiling = {} if data.few else found.ceiling(data)
    scales = sorted({scale for curve in curves.values() for scale in curve.scales})
    last, count = len(scales) - 1, min(SHOWN, len(scales))
    chosen = scales if data.few else [scales[round(k * last / max(1, count - 1))] for k in range(count)]
    what = "samples" if data.few else "scale"
    caption = f"Accuracy by {what}" + ("." if data.few else ", and the mean over all scales.")
    _table(page, found, data, trained, curves, ceiling, chosen, caption)
    if len(chosen) < len(scales):
        with page.details("All scales"):
            _table(page, found, data, trained, curves, ceiling, scales, "Accuracy by scale.")


def _table(
    page: Page,
    found: ComparisonResults,
    data: DataSet,
    trained: str,
    curves: Mapping[str, Curve],
    ceiling: Mapping[float, float],
    scales: Sequence[float],
    caption: str,
) -> None:
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for name, curve in curves.items():
        values = dict(zip(curve.scales, curve.mean, strict=True))
        cells: list[Cell] = [_percent(values.get(scale)) for scale in scales]
        extra: list[Cell] = [] if data.few else [_overall(found, data, name, trained)]
        rows.append([name, *cells, *extra, str(curve.runs)])
        colours = [_tint(values.get(scale), ceiling.get(scale)) for scale in scales]
        tints.append([None, *colours, *([None] * (len(extra) + 1))])
    if ceiling:
        average = [] if data.few else [_percent(mean(ceiling.values()))]
        rows.append([CEILING, *(_percent(ceiling.get(s)) for s in scales), *average, "–"])
        tints.append([None] * len(rows[0]))
    heads = [f"{scale:,.0f}" if data.few else f"{scale:.3g}" for scale in scales]
    extra_heads = [] if data.few else ["mean"]
    page.table(["method", *heads, *extra_heads, "seeds"], rows, colour=tints, caption=caption)


def _overall(found: ComparisonResults, data: DataSet, name: str, trained: str) -> str:
    """Return the mean over all scales with its interval over seeds."""
    lines = [line for line in found.of(data, name) if line.trained in (trained, ALL)]
    seeds = sorted({line.seed for line in lines})
    values = [100 * mean(m.accuracy for m in lines if m.seed == seed) for seed in seeds]
    centre, half = mean_interval(values)
    return f"{centre:.2f}" + ("" if half is None else f" ±{half:.2f}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _tint(value: float | None, best: float | None) -> float | None:
    """Colour by the square root of the gap to the ceiling, so that small gaps are visible."""
    if value is None or best is None:
        return None
    gap = 100 * (best - value)
    return -math.copysign(math.sqrt(min(1.0, abs(gap) / DEEP)), gap) if gap else 0.0


def _costs(page: Page, found: ComparisonResults, data: DataSet) -> None:
    rows: list[list[Cell]] = []
    for name in METHODS:
        if lines := found.of(data, name):
            runs = {(m.trained, m.seed): m for m in lines}.values()
            seconds = mean(run.training_seconds for run in runs)
            speed = mean(run.images_per_second for run in runs)
            weights = next(iter(runs)).parameters
            rows.append([name, weights, f"{seconds:,.1f}", f"{speed:,.0f}", len(runs)])
    headers = ["method", "parameters", "training seconds per run", "images per second", "runs"]
    page.table(headers, rows, caption="Cost. Methods that test the same run share its training.")


def _methods(page: Page, names: Sequence[str]) -> None:
    page.section("Methods")
    page.text(
        "Learning rate, epochs and batch of each method are chosen on validation images. With few "
        "samples, the number of epochs is up to 20 times as large."
    )
    rows: list[list[Cell]] = []
    for method in map(METHODS.__getitem__, names):
        rows.append([method.name, method.title, method.paper, _settings(method)])
    page.table(["method", "network", "paper", "settings"], rows)


def _settings(method: Method) -> str:
    """Return the settings as text, with those of single data sets in brackets."""
    special = method.settings_by_data.items()
    other = "; ".join(f"{name}: {_words(settings)}" for name, settings in special)
    return _words(method.settings) + (f" ({other})" if other else "")


def _words(settings: Settings) -> str:
    usual = asdict(Settings())
    values = asdict(settings)
    shown = ("learning_rate", "epochs", "batch")
    keys = [key for key in values if key in shown or values[key] != usual[key]]
    return ", ".join(f"{key.replace('_', ' ')} {values[key]}" for key in keys)


def _range(data: DataSet) -> str:
    return f"{data.scales.low:g} to {data.scales.high:g}"
