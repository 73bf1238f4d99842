"""The page of an audit: what was found, over scale and per class, and what to do about it."""

import shlex
from collections.abc import Sequence

from torch import Tensor

from foveate.evaluation.audit.images import Look
from foveate.evaluation.audit.measure import MEASURES, Audit, Estimate
from foveate.evaluation.audit.report import AS_IT_IS, IN_CHANNELS, AuditReport
from foveate.report.audit_plots import audit_curves
from foveate.report.html import Cell, Page
from foveate.report.plots import sample_grid

STRONG = 0.3  # a loss of accuracy that gets the strongest colour
CLASSES = 40  # that a table shows; audit.csv has all
READ = (
    "Accuracy is the share of images answered rightly, agreement the share answered as at the "
    "native scale, confidence the mean probability of the answers. Bands and brackets are 95 % "
    "intervals: Wilson's for shares, a normal mean's for confidence. All scales show the same "
    "images, so differences between scales are surer than the intervals say."
)


def audit_page(report: AuditReport, samples: Sequence[Tensor], script: str | None) -> Page:
    """Write the page; `samples` are pictures (C, H, W) to show, `script` how to fine-tune."""
    page = Page(f"How {report.model} behaves over scale", summary(report.plain))
    if report.notes:
        page.notice(*report.notes)
    page.section("Over scale")
    page.figure(
        *(audit_curves(report.audits, [measure]) for measure in MEASURES),
        caption="The grey line is the native scale, the dotted one what guessing gives.",
        alt="accuracy, agreement and confidence over scale",
    )
    page.text(READ)
    _over_scale(page, report.plain)
    _per_class(page, report.plain)
    _seen(page, report, samples)
    _remedy(page, report, script)
    _made(page, report)
    return page


def summary(audit: Audit) -> str:
    """Say in a sentence or two how the classifier holds."""
    low, high = audit.steady()
    first, last = audit.overall[0].accuracy, audit.overall[-1].accuracy
    at = audit.at_native.accuracy
    holds = (
        f"It loses at most 5 points from scale {low:.3g} to {high:.3g}"
        if low < high
        else "It loses more than 5 points at the next scale on either side"
    )
    return (
        f"{shown(at)} % right at the native scale {audit.native:g}, on {audit.count:,} images. "
        f"{holds}; at scale {audit.scales[0]:.3g} it gets {shown(first)} % right, at scale "
        f"{audit.scales[-1]:.3g} {shown(last)} %."
    )


def shown(estimate: Estimate) -> str:
    """An estimate in percent: 93.1 [90.0, 95.4]."""
    value, low, high = (100 * part for part in estimate)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def finetune_script(report: AuditReport, trust: bool = False) -> str:
    """A program that trains the model on inside scale channels, to be audited again.

    `trust` is what the model was loaded with, and what the program loads it with.
    """
    model = repr(report.model) + ", trust=True" * trust
    source, look = report.about["source"], report.look
    order = f", classes={list(report.plain.classes)!r}" if report.about["reordered"] else ""
    scales = ", ".join(f"{scale:.6g}" for scale in report.channels)
    return f'''"""Train a model on inside scale channels; its audit is that of finetune:tuned."""

import torch
from safetensors.torch import load_model as read_weights
from safetensors.torch import save_model as save_weights

from foveate import ScaleChannels
from foveate.evaluation.audit.data import open_pictures
from foveate.evaluation.audit.images import Look
from foveate.evaluation.models import load_model

LOOK = {_call(look)}
SCALES = [{scales}]


def net():
    backbone = load_model({model}).ask
    return ScaleChannels(backbone, SCALES, size={look.size[0]}, pool={report.about["pool"]!r})


def tuned():
    made = net()
    read_weights(made, "tuned.safetensors")
    return made


if __name__ == "__main__":
    made = net().train()
    pictures = open_pictures({source!r}, "train"{order})
    optimiser = torch.optim.AdamW(made.parameters(), lr=3e-4)
    for epoch in range(3):
        for show, labels in pictures.batches(LOOK, 32, seed=epoch):
            loss = torch.nn.functional.cross_entropy(made(show({report.plain.native!r})), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        print(f"epoch {{epoch + 1}}: loss {{loss.item():.3f}}")
    save_weights(made, "tuned.safetensors")
'''


def _call(look: Look) -> str:
    """The Python that makes a look again, its usual values left out."""
    usual = Look(size=look.size).to_dict()
    given = {k: v for k, v in look.to_dict().items() if k == "size" or v != usual[k]}
    return f"Look({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _over_scale(page: Page, audit: Audit) -> None:
    native = audit.at_native.accuracy.value
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for scale, counts in zip(audit.scales, audit.overall, strict=True):
        rows.append([f"{scale:.3g}", *(shown(getattr(counts, m)) for m in MEASURES)])
        tints.append([None, (counts.accuracy.value - native) / STRONG, None, None])
    page.table(
        ["scale", *(f"{measure} (%)" for measure in MEASURES)],
        rows,
        colour=tints,
        caption=f"Coloured by what is lost against scale {audit.native:g}.",
    )


def _per_class(page: Page, audit: Audit) -> None:
    page.section("Per class")
    native = audit.scales.index(audit.native)
    values = [[at[k].accuracy.value for at in audit.per_class] for k in range(len(audit.classes))]
    present = [k for k, row in enumerate(values) if audit.per_class[0][k].count]
    worst = sorted(present, key=lambda k: sum(values[k]) - len(values[k]) * values[k][native])
    rows: list[list[Cell]] = []
    tints: list[list[float | None]] = []
    for k in worst[:CLASSES]:
        count = audit.per_class[0][k].count
        rows.append([audit.classes[k], count, *(f"{100 * v:.1f}" for v in values[k])])
        tints.append([None, None, *((v - values[k][native]) / STRONG for v in values[k])])
    page.text(
        "Accuracy in percent at each scale, the classes that lose most first. Agreement, "
        f"confidence and intervals per class are in `audit.csv`{_left_out(len(present))}."
    )
    page.table(["class", "images", *(f"{s:.3g}" for s in audit.scales)], rows, colour=tints)


def _left_out(classes: int) -> str:
    return f", and so are the other {classes - CLASSES} classes" if classes > CLASSES else ""


def _seen(page: Page, report: AuditReport, samples: Sequence[Tensor]) -> None:
    page.section("What it saw")
    columns = [report.look.show(samples, scale).cpu() for scale in report.plain.scales]
    titles = [f"{scale:.3g}" for scale in report.plain.scales]
    page.figure(sample_grid(columns, titles), caption=_told(report.look))


def _told(look: Look) -> str:
    height, width = look.size
    if look.recipe == "large-scale":
        return (
            "Images made at each scale by the recipe of MNIST Large Scale, as `foveate evaluate` "
            f"does, on frames of {height} × {width} pixels; in smoothing, beyond the frame: "
            f"{look.border}."
        )
    return (
        "Each image rescaled about its centre in one step from its own pixels (bicubic; widened "
        f"against aliasing where it shrinks), on frames of {height} × {width} pixels that it fills "
        f"at scale 1, its excess cut off. Beyond the image: {look.border}."
    )


def _remedy(page: Page, report: AuditReport, script: str | None) -> None:
    page.section("In scale channels")
    if IN_CHANNELS not in report.audits:
        page.text("The model was not put into scale channels: see the notes, or it has its own.")
        return
    before, after = report.audits[AS_IT_IS], report.audits[IN_CHANNELS]
    pairs = list(zip(before.overall, after.overall, strict=True))
    gain = [100 * (b.accuracy.value - a.accuracy.value) for a, b in pairs]
    page.text(
        f"`ScaleChannels` shows the same model {len(report.channels)} windows of the image, from "
        f"{report.channels[0]:.3g} to {report.channels[-1]:.3g} times its frame, and pools the "
        f"answers ({report.about['pool']}). Nothing was trained: accuracy changes by "
        f"{gain[before.scales.index(before.native)]:+.1f} points at the native scale and by "
        f"{sum(gain) / len(gain):+.1f} on average over the scales. A model that was never shown "
        "windows of the wrong size can be loudly wrong about them, which is what training on "
        "inside the channels mends."
    )
    _side_by_side(page, before, after, gain)
    if script is None:
        page.text("To train it on, name the PyTorch module it was made from.")
        return
    page.text("Save this as `finetune.py` and run `python finetune.py`, then audit it again:")
    page.code(script)
    page.code(_again(report))


def _side_by_side(page: Page, before: Audit, after: Audit, gain: Sequence[float]) -> None:
    rows: list[list[Cell]] = [
        [f"{scale:.3g}", shown(a.accuracy), *(shown(getattr(b, m)) for m in MEASURES), f"{g:+.1f}"]
        for scale, a, b, g in zip(before.scales, before.overall, after.overall, gain, strict=True)
    ]
    tints: list[list[float | None]] = [[None] * 5 + [g / 100 / STRONG] for g in gain]
    inside = [f"{measure} {IN_CHANNELS}" for measure in MEASURES]
    page.table(["scale", f"accuracy {AS_IT_IS} (%)", *inside, "change"], rows, colour=tints)


def _again(report: AuditReport) -> str:
    command = ["foveate", "audit", "finetune:tuned", "--source", report.about["source"]]
    command += ["--split", "test"]
    if report.about["reordered"]:
        command += ["--classes", ",".join(report.plain.classes)]
    return shlex.join([*command, *_options(report.look)])


def _options(look: Look) -> list[str]:
    """The options of a look."""
    values = {
        "recipe": look.recipe,
        "size": look.size[0],
        "border": look.border,
        "mean": ",".join(f"{v:g}" for v in look.mean),
        "std": ",".join(f"{v:g}" for v in look.std),
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def _made(page: Page, report: AuditReport) -> None:
    about, look = report.about, report.look
    page.made(
        {
            "model": report.model,
            "scales": ", ".join(f"{scale:.6g}" for scale in report.plain.scales),
            "images": f"{about['images']:,} of {about['source']} ({about['split']})",
            "left out": f"{len(report.unreadable)} images that cannot be read",
            "shown as": _call(look),
            "sha256 of the images": about["checksum"],
            "foveate": f"{about['version']} {about['commit']}",
            "computed on": about["hardware"],
        }
    )
    if report.unreadable:
        with page.details("Images left out"):
            page.text(*report.unreadable)
