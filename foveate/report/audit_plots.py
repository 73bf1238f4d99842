"""Pictures of an audit: its measures over scale, with their confidence intervals."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from foveate.evaluation.audit.measure import MEASURES, Audit
from foveate.report.plots import COLOURS, MARKERS, percent_axis, scale_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "accuracy": "accuracy (%)",
    "agreement": "agreement with native (%)",
    "confidence": "mean confidence (%)",
}


def audit_curves(audits: Mapping[str, Audit], measures: Sequence[str] = MEASURES) -> "Figure":
    """Draw each measure over scale, a line per audit with its 95 % interval as a band.

    A thin upright line marks the native scale; in accuracy, a dotted one what guessing gives.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9 * len(measures), 3.5), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, measure in zip(panels, measures, strict=True):
        _draw(axes, audits, measure)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            frameon=False,
            fontsize=9,
        )
    return figure


def _draw(axes: "Axes", audits: Mapping[str, Audit], measure: str) -> None:
    for index, (name, audit) in enumerate(audits.items()):
        found = [getattr(counts, measure) for counts in audit.overall]
        value, low, high = ([100 * point[k] for point in found] for k in range(3))
        style = {"color": COLOURS[index], "marker": MARKERS[index], "ms": 4, "lw": 1.6}
        axes.plot(audit.scales, value, label=name, **style)  # type: ignore[arg-type]
        axes.fill_between(audit.scales, low, high, color=COLOURS[index], alpha=0.2, lw=0)
    first = next(iter(audits.values()))
    axes.axvline(first.native, color="0.5", lw=0.8, zorder=0)
    if measure == "accuracy":
        axes.axhline(100 / len(first.classes), color="0.5", lw=0.8, ls=":", zorder=0)
    scale_axis(axes, first.scales)
    axes.set_xlabel("scale")
    percent_axis(axes, 0.0, LABELS[measure])
