"""HTML page of a scale audit: curves, tables per scale and class, and sample images."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from foveate.evaluation.audit.changes import RULE
from foveate.evaluation.audit.measure import MEASURES, Audit, Estimate
from foveate.evaluation.audit.report import AuditReport
from foveate.evaluation.audit.transforms import AnyTransform, PhotoTransform
from foveate.report.audit_remedy import NAMES, STRONG, scale_channel_section
from foveate.report.html import Cell, Page
from foveate.report.plots import COLOURS, MARKERS, percent_axis, sample_grid, scale_axis

LABELS = {
    "accuracy": "accuracy (%)",
    "agreement": "agreement with native scale (%)",
    "confidence": "mean confidence (%)",
}
ENOUGH = 10  # images of a class below which its accuracy is not shown
CLASSES = 40  # rows of the per-class table; audit.csv has all classes
RESOLUTION = (
    "At scale s, the same scene is sampled with s times the pixels along each axis: the image is "
    "downsampled with antialiasing and then upsampled to its size at scale 1."
)
ZOOM = "At scale s, objects are s times as large as at scale 1."
CROPPED = "What extends past the model input is cropped, and"
OUTSIDE = {
    "frame": f"{CROPPED} the area around a smaller image is padded.",
    "mnist-large-scale": f"{CROPPED} the area around a smaller image is black.",
    "mirrored": f"{CROPPED} mirror images surround a smaller image.",
    "photo": "The network sees what is inside its largest window; windows that extend past the "
    "image see padding.",
}
READ = (
    "Accuracy is the share of correct predictions. Agreement is the share of predictions that "
    "equal the prediction at the native scale. Confidence is the mean probability of the predicted "
    "class. Bands and brackets show 95 % confidence intervals: Wilson intervals for accuracy and "
    "agreement, normal intervals of the mean for confidence. All scales use the same images, so "
    "differences between scales are more certain than the intervals suggest."
)
CURVES = (
    "The vertical grey line marks the native scale; the dotted line is the accuracy of random "
    "guessing."
)


def audit_curves(audits: Mapping[str, Audit], measures: Sequence[str] = MEASURES) -> Figure:
    """Plot each measure against scale, one curve per audit with its 95 % interval as a band.

    A vertical line marks the native scale and a dotted line the accuracy of random guessing.

    Args:
        audits: Audits keyed by legend label.
        measures: Measures to plot, one panel each, from ``accuracy``, ``agreement`` and
            ``confidence``.

    Returns:
        A matplotlib figure with one panel per measure.

    Examples:
        >>> import torch
        >>> from foveate import audit
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
        >>> figure = audit_curves({"linear": audit(net, images, labels, [0.5, 1, 2])})
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['accuracy (%)', 'agreement with native scale (%)', 'mean confidence (%)']
    """
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
    """Build the HTML page of a scale audit, as ``foveate audit`` writes it.

    Args:
        report: Result of the audit.
        samples: A few images to show at every scale, each ``(C, H, W)`` uint8.
        trainable: Whether the model is a PyTorch module, so that it can be fine-tuned.
        changed: Images whose prediction changes, in the order of ``report.plain.changes``. The
            page shows no such images if it is empty.

    Returns:
        The page; `Page.save` writes it to a file.

    Examples:
        >>> from foveate import load_model
        >>> from foveate.evaluation.audit.audited_images import open_images
        >>> from foveate.evaluation.audit.report import audit_with_channels
        >>> from foveate.evaluation.audit.transforms import choose_transform
        >>> model, images = load_model("cnn-mnist-tr2"), open_images("mnist-5k", limit=8)
        >>> report = audit_with_channels(model, images, choose_transform(model, images), [1, 2, 4])
        >>> audit_page(report, images.first(2)).title
        'Scale audit of cnn-mnist-tr2'
    """
    page = Page(f"Scale audit of {report.model}", summary(report.plain))
    if report.notes:
        page.notice(*(f"{note[0].upper()}{note[1:]}." for note in report.notes))
    page.section("Accuracy, agreement and confidence over scale")
    recipe = report.transform.to_dict()["recipe"]
    page.text(RESOLUTION if report.transform.view == "resolution" else f"{ZOOM} {OUTSIDE[recipe]}")
    page.figure(
        *(audit_curves(report.audits, [measure]) for measure in MEASURES),
        caption=CURVES,
        alt="accuracy, agreement and confidence over scale",
    )
    page.text(READ)
    page.table(*scale_table(report), caption="Values in percent; 95 % intervals in brackets.")
    _per_class(page, report.plain)
    _gallery(page, report, changed)
    page.section("Model input")
    scales = report.plain.scales
    columns = [report.transform.show(samples, scale).cpu() for scale in scales]
    figure = sample_grid(columns, [f"{scale:.3g}" for scale in scales])
    page.figure(figure, caption=_caption(report.transform))
    scale_channel_section(page, report, trainable)
    _provenance(page, report)
    return page


def summary(audit: Audit) -> str:
    """Summarise over which scales the classifier keeps its accuracy."""
    native, first, last = (
        format_estimate(counts.accuracy)
        for counts in (audit.at_native, audit.overall[0], audit.overall[-1])
    )
    images = f"{audit.count:,} image{'s' * (audit.count != 1)}"
    begin = f"{native} % accuracy at the native scale {audit.native:g}, on {images}."
    if len(audit.scales) == 1:
        return begin
    low, high = audit.stable_range()
    holds = (
        f"Accuracy drops by at most 5 points from scale {low:.3g} to {high:.3g}"
        if low < high
        else "Accuracy drops by more than 5 points at the neighbouring scales"
    )
    return (
        f"{begin} {holds}; it is {first} % at scale {audit.scales[0]:.3g} and {last} % at scale "
        f"{audit.scales[-1]:.3g}."
    )


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate in percent with its interval, such as 93.1 (90–95)."""
    value, low, high = (100 * part for part in estimate)
    return f"{value:.1f} ({low:.0f}–{high:.0f})"


def scale_table(report: AuditReport) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the results table, with one row per scale."""
    others = list(report.audits.items())[1:]
    rows = [
        [f"{scale:.3f}", *(format_estimate(getattr(report.plain.overall[i], m)) for m in MEASURES)]
        + [format_estimate(audit.overall[i].accuracy) for _, audit in others]
        for i, scale in enumerate(report.plain.scales)
    ]
    return ["scale", *MEASURES, *(f"accuracy {name}" for name, _ in others)], rows


def _draw(axes: Axes, audits: Mapping[str, Audit], measure: str) -> None:
    for index, (name, audit) in enumerate(audits.items()):
        found = [getattr(counts, measure) for counts in audit.overall]
        value, low, high = ([100 * point[k] for point in found] for k in range(3))
        style = {"color": COLOURS[index], "marker": MARKERS[index], "ms": 4, "lw": 1.6}
        axes.plot(audit.scales, value, label=NAMES.get(name, name), **style)  # type: ignore[arg-type]
        axes.fill_between(audit.scales, low, high, color=COLOURS[index], alpha=0.2, lw=0)
    first = next(iter(audits.values()))
    axes.axvline(first.native, color="0.5", lw=0.8, zorder=0)
    if measure == "accuracy":
        axes.axhline(100 / len(first.classes), color="0.5", lw=0.8, ls=":", zorder=0)
    scale_axis(axes, first.scales)
    axes.set_xlabel("scale")
    percent_axis(axes, 0.0, LABELS[measure])


def _per_class(page: Page, audit: Audit) -> None:
    page.section("Accuracy per class")
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
        "Accuracy in percent at each scale. Classes are ordered by their loss relative to the "
        "native scale, largest first"
        + (f"; classes with fewer than {ENOUGH} images are at the end. " if few else ". ")
        + "`audit.csv` contains agreement, confidence and intervals per class"
        + (f", and the remaining {left} classes." if left else ".")
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
    page.text(f"{RULE} The title is the true class; the captions give the predictions.")
    page.gallery(items)


def _caption(transform: AnyTransform) -> str:
    if isinstance(transform, PhotoTransform):
        padding = transform.windows.padding if transform.border is None else transform.border
        return (
            f"The largest window of the network, {transform.largest:.0f} pixels. At scale 1 the "
            f"short side of an image is {transform.recipe.base} pixels, as set by the recipe of "
            "the run and as in `foveate evaluate`. The network cuts its windows from the whole "
            f"image. Padding: {'replicate' if padding == 'border' else padding}."
        )
    height, width = transform.size
    if transform.recipe == "mnist-large-scale":
        return (
            "Images generated at each scale by the recipe of MNIST Large Scale, as in `foveate "
            f"evaluate`, {height} × {width} pixels; border mode of the smoothing: "
            f"{transform.border}."
        )
    if transform.recipe == "mirrored":
        return (
            "Each image is rescaled about its centre in one step from the original pixels "
            f"(bicubic, antialiased) into a frame of {height} × {width} pixels, as in `foveate "
            "evaluate`. Its mirror images fill the rest of the frame."
        )
    fits = "fills" if transform.fit == "fill" else "fits inside"
    return (
        "Each image is rescaled about its centre in one step from the original pixels (bicubic, "
        f"antialiased). At scale 1 it {fits} a frame of {height} × {width} pixels. "
        f"Padding: {transform.border}."
    )


def _provenance(page: Page, report: AuditReport) -> None:
    metadata, skipped = report.metadata, len(report.unreadable)
    page.provenance(
        {
            "model": report.model,
            "scales": ", ".join(f"{scale:.6g}" for scale in report.plain.scales),
            "images": f"{metadata['images']:,} of {metadata['source']} ({metadata['split']})",
            "skipped": f"{skipped} unreadable image{'s' * (skipped != 1)}",
            "transform": ", ".join(f"{k}={v}" for k, v in report.transform.to_dict().items()),
            "SHA-256 of the images": metadata["checksum"],
            "foveate": f"{metadata['version']} {metadata['commit']}",
            "hardware": metadata["hardware"],
        }
    )
    if report.unreadable:
        with page.details("Skipped images"):
            page.text(*report.unreadable)
