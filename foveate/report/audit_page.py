"""The page of an audit: its figures, and its results per scale and class."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from foveate.evaluation.audit.changes import RULE
from foveate.evaluation.audit.measure import MEASURES, Audit, Estimate
from foveate.evaluation.audit.report import AuditReport
from foveate.evaluation.audit.run_recipe import PhotoTransform
from foveate.evaluation.audit.transforms import AnyTransform
from foveate.report.audit_remedy import STRONG, remedy
from foveate.report.html import Cell, Page
from foveate.report.plots import COLOURS, MARKERS, percent_axis, sample_grid, scale_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "accuracy": "accuracy (%)",
    "agreement": "agreement with native (%)",
    "confidence": "mean confidence (%)",
}
ENOUGH = 10  # images of a class for a share of them to say anything
CLASSES = 40  # rows of the table per class; audit.csv has all
VIEWS = {
    "zoom": "At scale s objects are s times as large as at scale 1: below 1 the border continues "
    "the image, above 1 the image reaches beyond the model's input.",
    "resolution": "At scale s the same scene has s times the pixels along each axis: the image is "
    "reduced with antialiasing and enlarged to its size again.",
}
READ = (
    "Accuracy is the share of correct predictions, agreement the share of predictions that equal "
    "those at the native scale, confidence the mean probability of the predictions. Bands and "
    "brackets are 95 % intervals: Wilson's for shares, a normal mean's for confidence. All scales "
    "use the same images, so differences between scales are more certain than the intervals."
)


def audit_curves(audits: Mapping[str, Audit], measures: Sequence[str] = MEASURES) -> "Figure":
    """Draw each measure over scale, a line per audit with its 95 % interval as a band.

    A vertical line marks the native scale, a dotted one the accuracy of guessing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9 * len(measures), 3.5), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, measure in zip(panels, measures, strict=True):
        _draw(axes, audits, measure)
    if len(audits) > 1:
        lines = panels[0].get_legend_handles_labels()
        style: dict[str, Any] = {"ncols": len(audits), "frameon": False, "fontsize": 9}
        figure.legend(*lines, loc="outside lower center", **style)
    return figure


def audit_page(
    report: AuditReport,
    samples: Sequence[Tensor],
    trainable: bool = True,
    changed: Sequence[Tensor] = (),
) -> Page:
    """Write the page.

    Args:
        report: The audits.
        samples: A few images, each ``(C, H, W)`` uint8, to show at every scale.
        trainable: Whether the model is a PyTorch module, which can be fine-tuned.
        changed: The image of each of the changes of the plain audit.
    """
    page = Page(f"How {report.model} behaves over scale", summary(report.plain))
    if report.notes:
        page.notice(*report.notes)
    page.section("Over scale")
    page.text(VIEWS[report.transform.view])
    page.figure(
        *(audit_curves(report.audits, [measure]) for measure in MEASURES),
        caption="The grey line is the native scale, the dotted one the accuracy of guessing.",
        alt="accuracy, agreement and confidence over scale",
    )
    page.text(READ)
    header, rows = over_scale(report)
    page.table(header, cast(list[list[Cell]], rows), caption="In percent.")
    _per_class(page, report.plain)
    _gallery(page, report, changed)
    page.section("Model input")
    scales = report.plain.scales
    columns = [report.transform.show(samples, scale).cpu() for scale in scales]
    figure = sample_grid(columns, [f"{scale:.3g}" for scale in scales])
    page.figure(figure, caption=_caption(report.transform))
    remedy(page, report, trainable)
    _made(page, report)
    return page


def summary(audit: Audit) -> str:
    """Summarise in two sentences over which scales the classifier holds."""
    low, high = audit.steady()
    first, last = audit.overall[0].accuracy, audit.overall[-1].accuracy
    holds = (
        f"It loses at most 5 points from scale {low:.3g} to {high:.3g}"
        if low < high
        else "It loses more than 5 points at the next scale on either side"
    )
    return (
        f"{shown(audit.at_native.accuracy)} % right at the native scale {audit.native:g}, on "
        f"{audit.count:,} images. {holds}; at scale {audit.scales[0]:.3g} it gets {shown(first)} % "
        f"right, at scale {audit.scales[-1]:.3g} {shown(last)} %."
    )


def shown(estimate: Estimate) -> str:
    """Format an estimate in percent with its interval: 93.1 (90-95)."""
    value, low, high = (100 * part for part in estimate)
    return f"{value:.1f} ({low:.0f}-{high:.0f})"


def over_scale(report: AuditReport) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of all measures over scale, and of accuracy in scale channels."""
    others = list(report.audits.items())[1:]
    rows = [
        [f"{scale:.3f}", *(shown(getattr(report.plain.overall[i], m)) for m in MEASURES)]
        + [shown(audit.overall[i].accuracy) for _, audit in others]
        for i, scale in enumerate(report.plain.scales)
    ]
    return ["scale", *MEASURES, *(f"accuracy {name}" for name, _ in others)], rows


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


def _per_class(page: Page, audit: Audit) -> None:
    page.section("Per class")
    native = audit.scales.index(audit.native)
    values = [[at[k].accuracy.value for at in audit.per_class] for k in range(len(audit.classes))]
    present = [k for k, row in enumerate(values) if audit.per_class[0][k].count]
    few = {k for k in present if audit.per_class[0][k].count < ENOUGH}
    loss = {k: sum(values[k]) - len(values[k]) * values[k][native] for k in present}
    worst = sorted(present, key=lambda k: (k in few, loss[k]))
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for k in worst[:CLASSES]:
        count = audit.per_class[0][k].count
        cells = ["–" if k in few else f"{100 * v:.1f}" for v in values[k]]
        shades = [None if k in few else (v - values[k][native]) / STRONG for v in values[k]]
        rows.append([audit.classes[k], f"{count:,}" + " (too few)" * (k in few), *cells])
        tints.append([None, None, *shades])
    left = len(present) - len(rows)
    page.text(
        "Accuracy in percent at each scale, the classes that lose most first"
        + (f"; classes with fewer than {ENOUGH} images at the end. " if few else ". ")
        + "Agreement, confidence and intervals per class are in `audit.csv`"
        + (f", and so are the other {left} classes." if left else ".")
    )
    page.table(["class", "images", *(f"{s:.3g}" for s in audit.scales)], rows, colour=tints)


def _gallery(page: Page, report: AuditReport, changed: Sequence[Tensor]) -> None:
    if not changed:
        return
    audit, items = report.plain, []
    for change, image in zip(audit.changes, changed, strict=True):
        views = (
            (audit.native, change.native_prediction, change.native_confidence),
            (change.scale, change.prediction, change.confidence),
        )
        pictures = [
            (
                report.transform.show([image], scale)[0],
                f"scale {scale:.3g}: {audit.classes[prediction]}, {100 * confidence:.0f}\u00a0%",
            )
            for scale, prediction, confidence in views
        ]
        items.append((audit.classes[change.label], pictures))
    page.section("Changed predictions")
    page.text(f"{RULE} The title is the true class, the captions are what the model predicted.")
    page.gallery(items)


def _caption(transform: AnyTransform) -> str:
    if isinstance(transform, PhotoTransform):
        return (
            f"The largest window of the network, {transform.largest:.0f} pixels. At scale 1 the "
            f"short side of a picture has {transform.recipe.base} pixels, by the recipe of the "
            "run, as in `foveate evaluate`. The network cuts its own windows from the whole "
            "picture and repeats its border."
        )
    height, width = transform.size
    if transform.recipe == "large-scale":
        return (
            "Images made at each scale by the recipe of MNIST Large Scale, as `foveate evaluate` "
            f"does, of {height} × {width} pixels; border mode of the smoothing: {transform.border}."
        )
    fits = "fills" if transform.fit == "fill" else "lies inside of"
    return (
        "Each image rescaled about its centre in one step from its own pixels (bicubic, "
        f"antialiased), on frames of {height} × {width} pixels that it {fits} at scale 1. "
        f"Beyond the image: {transform.border}."
    )


def _made(page: Page, report: AuditReport) -> None:
    about = report.about
    page.made(
        {
            "model": report.model,
            "scales": ", ".join(f"{scale:.6g}" for scale in report.plain.scales),
            "images": f"{about['images']:,} of {about['source']} ({about['split']})",
            "left out": f"{len(report.unreadable)} images that cannot be read",
            "transform": ", ".join(f"{k}={v}" for k, v in report.transform.to_dict().items()),
            "sha256 of the images": about["checksum"],
            "foveate": f"{about['version']} {about['commit']}",
            "computed on": about["hardware"],
        }
    )
    if report.unreadable:
        with page.details("Images left out"):
            page.text(*report.unreadable)
