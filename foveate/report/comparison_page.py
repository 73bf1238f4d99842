"""HTML page of a comparison of methods: figures with the ceiling, tables, costs, settings."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foveate import __version__
from foveate.baselines.comparison import Measurement
from foveate.baselines.data_sets import DATA_SETS, MOST_REPEATED
from foveate.baselines.methods import METHODS, Method
from foveate.baselines.summary import (
    CALIBRATED,
    ComparisonView,
    check_references,
    mean_interval,
)
from foveate.data.splits import SplitName
from foveate.evaluation.results import Curve
from foveate.report.html import Cell, Page, root_tint
from foveate.report.plots import (
    DASHED,
    draw_curves,
    panel_grid,
    percent_axis,
    samples_axis,
    scale_axis,
)
from foveate.training.config import TrainConfig

SHOWN = 5  # scales in the short table; the full table has all
DEEP = 50.0  # points below the ceiling that get the strongest colour
COLUMN_KEYS = ("learning_rate", "epochs", "batch")
CEILING = "trained on the test scale"
HOW_TO_READ = (
    "Curves are means over seeds, with one standard deviation as a band. ± is a 95 % confidence "
    "interval of the mean over seeds (Student's t); it does not contain the uncertainty of a "
    "finite test set."
)
HOW_TO_READ_CEILING = (
    "The dashed line is the ceiling: at each scale, the better of the experts, which are trained "
    "on that scale alone. In the tables, colours show the distance from the ceiling."
)


def comparison_figure(view: ComparisonView) -> Figure:
    """Draw one panel per family of methods, each with the ceiling."""
    families: dict[str, list[Curve]] = {}
    for name, curve in view.curves.items():
        families.setdefault(METHODS[name].family, []).append(curve)
    figure, grid, _ = panel_grid(len(families), 3.6 if len(families) > 1 else 6.4, 3.2)
    for axes, (family, curves) in zip(grid, families.items(), strict=True):
        axes.set_title(family, fontsize=10)
        _panel(axes, curves, view)
    if view.ceiling:
        line = grid[0].get_lines()[0]
        figure.legend([line], [CEILING], loc="outside lower center", frameon=False, fontsize=9)
    return figure


def comparison_page(
    lines: Sequence[Measurement],
    drawn: Sequence[tuple[ComparisonView, Figure]],
    facts: Mapping[str, object],
    *,
    split: SplitName = "test",
    missing: Sequence[str] = (),
) -> Page:
    """Build the page from the results and their figures.

    `facts` are those of the section Provenance, by name; `missing` are the names of the planned
    runs without a result.
    """
    images = "test images" if split == "test" else "validation images"
    runs = {(m.data, METHODS[m.method].run_name, m.trained, m.seed) for m in lines}
    methods = [name for name in METHODS if name in {line.method for line in lines}]
    sets = [name for name in DATA_SETS if name in {line.data for line in lines}]
    lead = (
        f"Methods: {len(methods)}. Datasets: {len(sets)}. Trained networks: {len(runs)}. All "
        f"accuracies are in percent of the {images}."
    )
    page = Page("Comparison of methods over scale", lead)
    _missing(page, missing)
    page.text(HOW_TO_READ)
    if any(view.ceiling for view, _ in drawn):
        page.text(HOW_TO_READ_CEILING)
    for name in sets:
        page.section(DATA_SETS[name].title)
        for view, figure in drawn:
            if view.data.name == name:
                page.figure(figure, caption=view.caption)
                _accuracies(page, view)
        _costs(page, [line for line in lines if line.data == name])
    _methods(page, methods, sets)
    _calibrations(page, lines)
    page.provenance({**facts, "foveate version of this page": __version__})
    return page


def _panel(axes: Axes, curves: Sequence[Curve], view: ComparisonView) -> None:
    if view.ceiling:
        percent = [100 * value for value in view.ceiling.values()]
        axes.plot(list(view.ceiling), percent, color="0.35", ls=DASHED, lw=1.2)
    draw_curves(axes, curves, [curve.label for curve in curves], ms=3)
    places = sorted({place for curve in curves for place in curve.scales} | set(view.ceiling))
    if view.data.few:
        samples_axis(axes, places, fontsize=8, rotation=45)
    else:
        scale_axis(axes, places)
    percent_axis(axes, 0)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _missing(page: Page, missing: Sequence[str]) -> None:
    if missing:
        count = "1 run is" if len(missing) == 1 else f"{len(missing)} runs are"
        page.notice(
            f"Partial results: {count} missing, of those that the last command names. Run it again "
            "to resume.",
            f"Missing: {', '.join(missing)}.",
        )


def _accuracies(page: Page, view: ComparisonView) -> None:
    """Add the accuracy at some scales with the mean over all, and a collapsed table of all."""
    places = sorted({place for curve in view.curves.values() for place in curve.scales})
    if view.data.few:
        rows: list[list[Cell]] = []
        for name, sets in view.averages.items():
            found = [sets.get(str(place)) for place in places]
            rows.append([name, *(_percent(*mean_interval(s)) if s else "–" for s in found)])
        headers = ["method", *(f"{place:,}" for place in places)]
        page.table(headers, rows, caption="Accuracy by number of training samples.")
        return
    last, count = len(places) - 1, min(SHOWN, len(places))
    chosen = [places[round(k * last / max(1, count - 1))] for k in range(count)]
    _table(page, view, chosen, "Accuracy by test scale, and the mean over all test scales.")
    if len(chosen) < len(places):
        with page.details("All scales"):
            _table(page, view, places, "Accuracy by test scale.")


def _table(page: Page, view: ComparisonView, scales: Sequence[float], caption: str) -> None:
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for name, curve in view.curves.items():
        at = dict(zip(curve.scales, curve.mean, strict=True))
        overall = _percent(*mean_interval(*view.averages[name].values()))
        rows.append([name, *(_percent(at.get(s)) for s in scales), overall, str(curve.runs)])
        gaps = {s: 100 * (at[s] - best) for s, best in view.ceiling.items() if s in at}
        tints.append([None, *(root_tint(gaps.get(s), DEEP) for s in scales), None, None])
    if view.ceiling:
        best = [_percent(view.ceiling.get(scale)) for scale in scales]
        complete = all(scale in view.ceiling for scale in view.data.scales)  # no run is missing
        overall = _percent(mean(view.ceiling.values()) if complete else None)
        rows.append([CEILING, *best, overall, "–"])
        tints.append([None] * len(rows[0]))
    headers = ["method", *(f"{scale:.3g}" for scale in scales), "mean", "seeds"]
    page.table(headers, rows, colour=tints, caption=caption)


def _percent(value: float | None, half: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f}" + ("" if half is None else f" ±{100 * half:.2f}")


def _costs(page: Page, lines: Sequence[Measurement]) -> None:
    """Add a table of the costs, from the fastest run: other runs can have shared the machine."""
    caption = (
        "Cost of the fastest run. Methods that test the same networks share their training. The "
        "training time of runs that one process trains together is divided among them. Processes "
        "that share a GPU slow each other down, and their times are not divided."
    )
    if DATA_SETS[lines[0].data].few:
        most = max((line.trained for line in lines), key=int)
        lines = [line for line in lines if line.trained == most]
        caption += f" With {int(most):,} samples."
    rows: list[list[Cell]] = []
    for name in METHODS:
        runs = {(m.trained, m.seed): m for m in lines if m.method == name}.values()
        if runs:
            seconds = f"{min(run.training_seconds for run in runs):,.1f}"
            speed = f"{max(run.images_per_second for run in runs):,.0f}"
            rows.append([name, next(iter(runs)).parameters, seconds, speed, len(runs)])
    headers = ["method", "parameters", "training seconds", "images per second", "runs"]
    page.table(headers, rows, caption=caption)


def _methods(page: Page, names: Sequence[str], sets: Sequence[str]) -> None:
    page.section("Methods")
    methods = [METHODS[name] for name in names]
    page.table(["method", "network", "paper"], [[m.name, m.title, m.paper] for m in methods])
    headers = ["method", "datasets", "learning rate", "epochs", "batch", "other settings"]
    caption = (
        "Settings, from the registry foveate.baselines.methods. Photographs have "
        f"{DATA_SETS['photographs'].repeated} times as many epochs, and few samples up to "
        f"{MOST_REPEATED} times as many."
    )
    rows = [row for method in methods for row in _settings(method, sets)]
    page.table(headers, rows, caption=caption)


def _calibrations(page: Page, lines: Sequence[Measurement]) -> None:
    """Compare methods with the accuracy of their authors' networks, if there are results."""
    rows: list[list[Cell]] = []
    for found in check_references(lines):
        known = found.reference
        scales = ", ".join(f"{scale:g}" for scale in known.scales) or "all 17"
        verdict = "holds" if found.holds else "fails"
        means = [f"{known.mean:.1f}", f"{found.mean:.2f}"]
        rows.append([found.method.name, known.trained, scales, *means, known.origin, verdict])
    if rows:
        page.section("Calibration")
        page.text(
            "Mean accuracy over scale on MNIST Large Scale, of the authors' own network and of "
            f"ours. A method is calibrated if it is at most {CALIBRATED} points below."
        )
        headers = ["method", "trained on", "test scales", "authors", "ours", "from", "calibrated"]
        page.table(headers, rows)


def _settings(method: Method, sets: Sequence[str]) -> list[list[Cell]]:
    """Return one row for all datasets that have the same settings."""
    groups: dict[tuple[TrainConfig, str], list[str]] = {}
    rows: list[list[Cell]] = []
    for name in sets:
        if name in method.presets:
            preset = f"those of the presets {method.presets[name]}..."
            rows.append([method.name, name, None, None, None, preset])
        elif method.trainings(DATA_SETS[name]):
            settings = method.settings_by_data.get(name, method.settings)
            objects = "objects {} to {}".format(*DATA_SETS[name].objects) if method.zooms else ""
            groups.setdefault((settings, objects), []).append(name)
    known: list[list[Cell]] = [
        [method.name, ", ".join(names), s.learning_rate, s.epochs, s.batch, _others(s, objects)]
        for (s, objects), names in groups.items()
    ]
    return [*known, *rows]


def _others(settings: TrainConfig, objects: str) -> str:
    """Return the settings that differ from the usual ones and have no column of their own."""
    usual, keys = TrainConfig(), [field.name for field in fields(settings)]
    values = {key: getattr(settings, key) for key in keys if key not in COLUMN_KEYS}
    found = [f"{k.replace('_', ' ')} {v}" for k, v in values.items() if v != getattr(usual, k)]
    return ", ".join([*found, objects] if objects else found)
