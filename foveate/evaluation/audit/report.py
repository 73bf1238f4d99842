"""An audit from a model and pictures to files: beside the model, the same in scale channels."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from foveate import __version__
from foveate.data.large_scale import check_scale
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.data import Pictures
from foveate.evaluation.audit.images import Beyond, Look, Recipe
from foveate.evaluation.audit.measure import MEASURES, SCALES, Audit, audit_together
from foveate.evaluation.invariance import measuring
from foveate.evaluation.models import Model, fitting_channels, in_channels
from foveate.files import write_text
from foveate.models.channels import PAPER_SCALES
from foveate.models.pooling import Pool
from foveate.scales import ScaleGrid, as_scales
from foveate.training.checkpoint import commit, hardware

AS_IT_IS, IN_CHANNELS = "as it is", "in scale channels"
FRAME = 112  # pixels of the frame in MNIST Large Scale
ENDS = ("", "_low", "_high")
COLUMNS = ("model", "class", "scale", "count", *(m + end for m in MEASURES for end in ENDS))


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The audits of one model, by the form it was asked in, and all that was done to get them.

    `notes` are warnings for the reader, `unreadable` what was said of each image left out.
    """

    model: str
    look: Look
    channels: tuple[float, ...]
    audits: Mapping[str, Audit]
    about: Mapping[str, Any]
    unreadable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def plain(self) -> Audit:
        """The audit of the model as it is."""
        return self.audits[AS_IT_IS]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "model": self.model,
            **self.about,
            "look": self.look.to_dict(),
            "channels": list(self.channels),
            "notes": list(self.notes),
            "unreadable": list(self.unreadable),
            "audits": {name: audit.to_dict() for name, audit in self.audits.items()},
        }


def fitted_look(
    model: Model,
    pictures: Pictures,
    *,
    recipe: str | None = None,
    size: int | None = None,
    border: Beyond | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
    device: torch.device | str = "cpu",
) -> Look:
    """How to show the pictures to the model, where nothing else is said.

    Networks of this package, and sources other than folders, get MNIST Large Scale, so that an
    audit can be held against `foveate evaluate`; other models see the pictures themselves. The
    frame is what the model takes, else that of the first picture. The model is tried out once.
    """
    picture = pictures.some(1)[0]
    way = _usual_recipe(model, pictures) if recipe is None else recipe
    frame = (size, size) if size else _usual_frame(model, way, picture)
    usual = model.training.border if model.training and way == "large-scale" else "replicate"
    channels = model.shape[1] or fitting_channels(
        model.classifier(), frame, picture.shape[0], device
    )
    _try_out(model.classifier(len(pictures.classes)), (2, channels, *frame), device)
    return Look(
        size=frame,
        channels=channels,
        recipe=cast(Recipe, way),
        border=usual if border is None else border,
        mean=mean,
        std=std,
    )


def audit_beside(
    model: Model,
    pictures: Pictures,
    look: Look,
    scales: ScaleGrid | Sequence[float] | None = None,
    *,
    native: float | None = None,
    pool: Pool | None = "max",
    batch: int = 32,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> AuditReport:
    """Audit a model, and beside it the same put into scale channels without any training.

    The channels are the audited scales relative to the native one, the training scale of a network
    of this package and otherwise 1. Without a `pool`, and for a model that has scale channels
    already, there is the model alone.
    """
    wanted = as_scales(usual_scales(look) if scales is None else scales)
    usual = model.training.native if model.training else 1.0
    (middle,) = as_scales([usual if native is None else native])
    for scale in (*wanted, middle):
        check_scale(scale)
    classifier = model.classifier(len(pictures.classes), batch)
    models: dict[str, nn.Module] = {AS_IT_IS: classifier}
    notes = _notes(model, pictures)
    channels = tuple(scale / middle for scale in wanted)
    if pool and not model.has_channels:
        try:
            models[IN_CHANNELS] = in_channels(classifier, channels, look.size, pool)
        except ConfigError as error:
            notes.append(f"not put into scale channels: {error}")
    batches = pictures.batches(look, batch, device)
    found = audit_together(
        list(models.values()), batches, wanted, pictures.classes, middle, advance
    )
    return AuditReport(
        model=model.name,
        look=look,
        channels=channels if IN_CHANNELS in models else (),
        audits=dict(zip(models, found, strict=True)),
        about=_about(pictures, device, pool if IN_CHANNELS in models else None),
        unreadable=tuple(pictures.unreadable.values()),
        notes=(*notes, *_doubts(found[0])),
    )


def usual_scales(look: Look) -> ScaleGrid:
    """The paper's 17 scales for MNIST Large Scale, 1/4 to 4 for other pictures."""
    return PAPER_SCALES if look.recipe == "large-scale" else SCALES


def save_audit(report: AuditReport, folder: Path) -> tuple[Path, Path]:
    """Write audit.csv, a line per class and scale, and audit.json, everything; give their paths."""
    table, whole = folder / "audit.csv", folder / "audit.json"
    content = json.dumps(report.to_dict(), allow_nan=False, indent=1)
    try:
        write_text(table, _csv(report))
        write_text(whole, content + "\n")
    except OSError as error:
        raise DataError(f"cannot write the audit in {folder} ({error.strerror})") from None
    return table, whole


def _usual_recipe(model: Model, pictures: Pictures) -> Recipe:
    folder = pictures.source.startswith("folder:")
    return "frame" if folder and model.training is None else "large-scale"


def _usual_frame(model: Model, recipe: str, picture: Tensor) -> tuple[int, int]:
    own = (picture.shape[-2], picture.shape[-1])
    if recipe == "large-scale":
        own = (FRAME, FRAME) if model.training is None else (model.training.size,) * 2
    return model.shape[2] or own[0], model.shape[3] or own[1]


def _try_out(classifier: nn.Module, shape: tuple[int, ...], device: torch.device | str) -> None:
    """Hear of a wrong number of classes before the pictures are read."""
    with measuring(classifier):
        classifier(torch.zeros(shape, device=device))


def _notes(model: Model, pictures: Pictures) -> list[str]:
    seen = model.training and model.training.overlap(pictures.source, pictures.split)
    return [seen] if seen else []


def _doubts(audit: Audit) -> list[str]:
    """What to say of a model that does no better than guessing even at its native scale."""
    if audit.at_native.accuracy.low > 1 / len(audit.classes):
        return []
    return [
        f"at scale {audit.native:g} the model does no better than guessing: are its classes "
        f"{', '.join(audit.classes[:3])}, ... in this order (--classes), and its pixels as it "
        "wants them (--mean, --std, --size)?"
    ]


def _about(pictures: Pictures, device: torch.device | str, pool: Pool | None) -> dict[str, Any]:
    return {
        "source": pictures.source,
        "split": pictures.split,
        "images": len(pictures) - len(pictures.unreadable),
        "checksum": pictures.checksum,
        "reordered": pictures.reordered,
        "pool": pool,
        "version": __version__,
        "commit": commit(),
        "hardware": hardware(torch.device(device)),
    }


def _csv(report: AuditReport) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, audit in report.audits.items():
        for i, scale in enumerate(audit.scales):
            groups = zip(("", *audit.classes), (audit.overall[i], *audit.per_class[i]), strict=True)
            for group, counts in groups:
                values = [value for m in MEASURES for value in getattr(counts, m)]
                writer.writerow((name, group, scale, counts.count, *values))
    return text.getvalue()
