"""The section of an audit's page about the model in scale channels."""

from collections.abc import Sequence
from statistics import mean

from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.report import AS_IT_IS, IN_CHANNELS, AuditReport
from foveate.report.html import Cell, Page

STRONG = 0.3  # difference of accuracy with the strongest colour


def remedy(page: Page, report: AuditReport, trainable: bool) -> None:
    """Write what scale channels give without training, what they cost, and how to build them."""
    page.section("In scale channels")
    if IN_CHANNELS not in report.audits:
        page.text("The model was not put into scale channels: see the notes, or it has its own.")
        return
    before, after = report.audits[AS_IT_IS], report.audits[IN_CHANNELS]
    about = report.about
    rows = [[100 * at.accuracy.value for at in audit.overall] for audit in (before, after)]
    rows.append([b - a for a, b in zip(*rows, strict=True)])
    gain, cost = rows[2], about["cost"]
    page.text(
        f"`ScaleChannels` shows the same model {len(report.channels)} windows of the image, from "
        f"{report.channels[0]:.3g} to {report.channels[-1]:.3g} times its input, as patches of "
        f"{about['patch']} pixels, and pools the logits ({about['pool']}). Without any training, "
        f"accuracy changes by {gain[before.scales.index(before.native)]:+.1f} points at the native "
        f"scale and by {mean(gain):+.1f} on average over the scales.{_beyond(report)} It costs "
        f"{cost['pixels']:.3g} times the pixels through the model; a batch of this audit took "
        f"{cost['time']:.2g} times as long."
    )
    _compare(page, before.scales, rows)
    page.text(
        "A model that was never trained on windows of the wrong size can be wrong about them with "
        "high confidence; fine-tuning in the channels corrects that."
    )
    if not trainable:
        page.text("To fine-tune it, name the PyTorch module it was made from.")
        return
    page.text(
        "Fine-tune this network like any PyTorch module, save it, and audit it again as "
        "`package.module:factory`:"
    )
    _code(page, report)


def _beyond(report: AuditReport) -> str:
    framed = isinstance(report.transform, Transform) and report.transform.recipe == "frame"
    return " Windows larger than the input also see what the input crops." if framed else ""


def _compare(page: Page, scales: Sequence[float], rows: Sequence[Sequence[float]]) -> None:
    names = (AS_IT_IS, IN_CHANNELS, "difference")
    cells: list[list[Cell]] = [
        [name, *(f"{v:+.1f}" if name == names[2] else f"{v:.1f}" for v in (*row, mean(row)))]
        for name, row in zip(names, rows, strict=True)
    ]
    shades = [v / (100 * STRONG) for v in (*rows[2], mean(rows[2]))]
    blank: list[float | None] = [None] * len(cells[0])
    header = ["network", *(f"{scale:.3g}" for scale in scales), "mean"]
    page.table(
        header,
        cells,
        colour=[blank, blank, [None, *shades]],
        caption="Accuracy in percent at each scale.",
    )


def _code(page: Page, report: AuditReport) -> None:
    """The lines that make the network in scale channels."""
    transform, patch = report.transform, report.about["patch"]
    assert isinstance(transform, Transform)  # photographs' runs have channels of their own
    unit, smooth = transform.size[0] / patch, transform.recipe == "frame"
    scales = ", ".join(f"{scale * unit:.6g}" for scale in report.channels)
    page.code(
        "from foveate import ScaleChannels, load_model\n\n"
        f"backbone = load_model({report.model!r}).net.train()\n"
        f"scales = [{scales}]\n"
        f"net = ScaleChannels(backbone, scales, size={patch}, pool={report.about['pool']!r}, "
        f"antialias={smooth})"
    )
