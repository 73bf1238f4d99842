"""Section of the audit page that compares the model with and without scale channels."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.report import IN_CHANNELS, ORIGINAL, AuditReport
from foveate.report.html import Cell, Page

NAMES = {ORIGINAL: "original model"}  # on the page; other names are shown unchanged
STRONG = 0.3  # difference in accuracy that gets the strongest colour


def scale_channel_section(page: Page, report: AuditReport, trainable: bool) -> None:
    """Add the section: accuracy in scale channels without training, its cost, and the code."""
    page.section("The model in scale channels")
    if IN_CHANNELS not in report.audits:
        page.text(
            "The model was not wrapped in scale channels: it already has them, `--pool none` was "
            "given, or a note at the top gives the reason."
        )
        return
    before, after = report.audits[ORIGINAL], report.audits[IN_CHANNELS]
    metadata = report.metadata
    rows = [[100 * at.accuracy.value for at in audit.overall] for audit in (before, after)]
    rows.append([b - a for a, b in zip(*rows, strict=True)])
    gain, cost = rows[2], metadata["cost"]["pixels"]
    page.text(
        f"`ScaleChannels` applies the same model to {len(report.channels)} windows of the image, "
        f"from {report.channels[0]:.3g} to {report.channels[-1]:.3g} times the size of its input, "
        f"resampled to patches of {metadata['patch']} pixels, and pools the logits "
        f"({metadata['pool']}). Without any training, accuracy changes by "
        f"{_signed(gain[before.scales.index(before.native)])} points at the native scale and by "
        f"{_signed(mean(gain))} points on average over the scales.{_beyond(report)} "
        f"The model processes {cost:.3g} times the pixels."
    )
    _compare(page, before.scales, rows)
    page.text(
        "A model that was never trained on windows that do not fit the object can misclassify them "
        "with high confidence. Fine-tuning in scale channels corrects this."
    )
    if not trainable:
        page.text("To fine-tune this model, audit the PyTorch module that it was exported from.")
        return
    page.text(
        "Fine-tune this network like any other PyTorch module, save it, and audit it again as "
        "`package.module:factory`:"
    )
    _code(page, report)


def _signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


def _beyond(report: AuditReport) -> str:
    framed = isinstance(report.transform, Transform) and report.transform.recipe == "frame"
    return " Windows larger than the input also see what the input crops." if framed else ""


def _compare(page: Page, scales: Sequence[float], rows: Sequence[Sequence[float]]) -> None:
    names = (NAMES[ORIGINAL], IN_CHANNELS, "difference")
    cells: list[list[Cell]] = [
        [name, *(_signed(v) if name == names[2] else f"{v:.1f}" for v in (*row, mean(row)))]
        for name, row in zip(names, rows, strict=True)
    ]
    shades = [v / (100 * STRONG) for v in (*rows[2], mean(rows[2]))]
    blank: list[float | None] = [None] * len(cells[0])
    header = ["model", *(f"{scale:.3g}" for scale in scales), "mean"]
    page.table(
        header,
        cells,
        colour=[blank, blank, [None, *shades]],
        caption="Accuracy in percent at each scale.",
    )


def _code(page: Page, report: AuditReport) -> None:
    transform, patch = report.transform, report.metadata["patch"]
    assert isinstance(transform, Transform)  # photograph runs already have scale channels
    unit, smooth = transform.size[0] / patch, transform.recipe == "frame"
    scales = ", ".join(f"{scale * unit:.6g}" for scale in report.channels)
    weights = report.metadata.get("weights", "")
    start = ", pretrained=True" if weights == "pretrained" else f", weights={weights!r}"
    file = Path(report.model)
    script = file.is_file() and file.suffix.lower() != ".safetensors"  # TorchScript can run code
    options = (start if weights else "") + ", trust=True" * script
    page.code(
        "from foveate import ScaleChannels, load_model\n\n"
        f"backbone = load_model({report.model!r}{options}).net.train()\n"
        f"scales = [{scales}]\n"
        f"net = ScaleChannels(backbone, scales, size={patch}, pool={report.metadata['pool']!r}, "
        f"antialias={smooth})"
    )
