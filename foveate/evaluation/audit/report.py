"""Audit a model on the images of a source, beside the same model in scale channels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from foveate import __version__
from foveate.data.large_scale import check_scale
from foveate.errors import ConfigError, FoveateError
from foveate.evaluation.audit.images import AuditImages, Beyond, Recipe, Transform
from foveate.evaluation.audit.measure import MEASURES, SCALES, Audit, audit_together, measuring
from foveate.evaluation.foreign import Classifier
from foveate.evaluation.models import FRAME, Model
from foveate.evaluation.results import write_tables
from foveate.models.channels import PAPER_SCALES, ScaleChannels
from foveate.models.pooling import Pool
from foveate.provenance import commit, hardware
from foveate.scales import ScaleGrid, as_scales

AS_IT_IS, IN_CHANNELS = "as it is", "in scale channels"
ENDS = ("", "_low", "_high")
COLUMNS = ("model", "class", "scale", "count", *(m + end for m in MEASURES for end in ENDS))


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The audits of one model, as it is and in scale channels, and how they were made.

    `notes` are warnings for the reader; `unreadable` has a message for each image left out.
    """

    model: str
    transform: Transform
    channels: tuple[float, ...]
    audits: Mapping[str, Audit]
    about: Mapping[str, Any]
    unreadable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def plain(self) -> Audit:
        """The audit of the model as it is."""
        return self.audits[AS_IT_IS]

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write audit.csv, a line per scale and class, and audit.json; return their paths."""
        rows = [
            (name, group, scale, counts.count, *(v for m in MEASURES for v in getattr(counts, m)))
            for name, audit in self.audits.items()
            for i, scale in enumerate(audit.scales)
            for group, counts in zip(
                ("", *audit.classes), (audit.overall[i], *audit.per_class[i]), strict=True
            )
        ]
        content = {
            "model": self.model,
            **self.about,
            "transform": asdict(self.transform),
            "channels": self.channels,
            "notes": self.notes,
            "unreadable": self.unreadable,
            "audits": {name: audit.to_dict() for name, audit in self.audits.items()},
        }
        return write_tables(folder / "audit.csv", folder / "audit.json", COLUMNS, rows, content)


def choose_transform(
    model: Model,
    images: AuditImages,
    *,
    recipe: str | None = None,
    size: int | None = None,
    border: Beyond | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Transform:
    """Choose how the images are turned into the model's input, where it is not given.

    Networks of this package, and sources other than folders, get MNIST Large Scale, so that the
    results compare with `foveate evaluate`; other models get the images themselves. The size is
    that of the model's input, else of the first image. The model is called once on empty images,
    so that wrong shapes are reported before the data is read.
    """
    if model.recipe is not None:
        raise ConfigError(
            f"{model.name} is a run on photographs, and audit does not apply its recipe: use "
            "'foveate evaluate'"
        )
    image = images.first(1)[0]
    folder = images.source.startswith("folder:")
    usual = "frame" if folder and model.config is None else "large-scale"
    recipe = usual if recipe is None else recipe
    frame = (size, size) if size else _usual_frame(model, recipe, image)
    own = model.border if recipe == "large-scale" else "replicate"
    return Transform(
        size=frame,
        channels=_input_channels(model, frame, image.shape[0], len(images.classes)),
        recipe=cast(Recipe, recipe),
        border=own if border is None else border,
        mean=model.mean if mean is None else mean,
        std=model.std if std is None else std,
    )


def audit_beside(
    model: Model,
    images: AuditImages,
    transform: Transform,
    scales: ScaleGrid | Sequence[float] | None = None,
    *,
    native: float | None = None,
    pool: Pool | None = "max",
    batch: int = 32,
    advance: Callable[[int], None] = lambda count: None,
) -> AuditReport:
    """Audit a model, and beside it the same model in scale channels without any training.

    The channels are the audited scales relative to the native one, which is the training scale of
    a network of this package and otherwise 1. Without a `pool`, and for a model that has scale
    channels already, the model is audited alone.
    """
    wanted = as_scales(usual_scales(transform) if scales is None else scales)
    (middle,) = as_scales([model.native if native is None else native])
    for scale in (*wanted, middle):
        check_scale(scale)
    net = classifier(model, len(images.classes), batch)
    models: dict[str, nn.Module] = {AS_IT_IS: net}
    notes = []
    if model.has_seen(images.source, images.split):
        notes.append(
            f"{model.name} was trained on {model.source}, so it has seen images of "
            f"{images.source} ({images.split})"
        )
    channels = tuple(scale / middle for scale in wanted)
    if pool and not model.scales:
        try:
            models[IN_CHANNELS] = in_channels(net, channels, transform.size, pool)
        except ConfigError as error:
            notes.append(f"not put into scale channels: {error}")
    batches = images.batches(transform, batch, model.device)
    found = audit_together(list(models.values()), batches, wanted, images.classes, middle, advance)
    inside = IN_CHANNELS in models
    return AuditReport(
        model=model.name,
        transform=transform,
        channels=channels if inside else (),
        audits=dict(zip(models, found, strict=True)),
        about=_about(images, model, pool if inside else None),
        unreadable=tuple(images.unreadable.values()),
        notes=(*notes, *_doubts(found[0])),
    )


def usual_scales(transform: Transform) -> ScaleGrid:
    """The paper's 17 scales for MNIST Large Scale, 1/4 to 4 for other images."""
    return PAPER_SCALES if transform.recipe == "large-scale" else SCALES


def classifier(model: Model, classes: int | None = None, batch: int = 64) -> Classifier:
    """Call the model in batches, of the one size that a graph with a fixed batch size takes."""
    fixed = model.shape[0]
    return Classifier(model.net, classes, fixed or batch, exact=fixed is not None)


def in_channels(
    net: nn.Module, scales: Sequence[float], size: tuple[int, int], pool: Pool
) -> ScaleChannels:
    """Put a classifier into scale channels: channel s sees a window of s times the frame.

    Patches are plain samples: an object made s times larger has no detail that they could alias.
    (A DenseNet on digits, 9 channels, kept 63 % at its native scale; antialiased 51 %.)
    """
    if size[0] != size[1]:
        shape = f"{size[0]} x {size[1]}"
        raise ConfigError(f"scale channels need a square frame, got {shape}: pass --size")
    return ScaleChannels(net, scales, size[0], pool)


def _usual_frame(model: Model, recipe: str, image: Tensor) -> tuple[int, int]:
    height, width = image.shape[-2:]
    if recipe == "large-scale":
        height = width = FRAME
    return model.shape[2] or height, model.shape[3] or width


def _input_channels(model: Model, size: tuple[int, int], own: int, classes: int) -> int:
    """The number of image channels that the model takes: `own`, or the other of 1 and 3."""
    net, errors = classifier(model, classes), []
    with measuring(net):
        for channels in [model.shape[1]] if model.shape[1] else [own, 4 - own]:
            try:
                net(torch.zeros(2, channels, *size, device=model.device))
                return channels
            except FoveateError as error:
                errors.append(error)
    raise errors[0]


def _doubts(audit: Audit) -> list[str]:
    """A warning if the model does no better than guessing even at its native scale."""
    if audit.at_native.accuracy.low > 1 / len(audit.classes):
        return []
    return [
        f"at scale {audit.native:g} the model does no better than guessing: are its classes "
        f"{', '.join(audit.classes[:3])}, ... in this order (--classes), and its pixels as it "
        "wants them (--mean, --std, --size)?"
    ]


def _about(images: AuditImages, model: Model, pool: Pool | None) -> dict[str, Any]:
    return {
        "source": images.source,
        "split": images.split,
        "images": len(images) - len(images.unreadable),
        "checksum": images.checksum,
        "pool": pool,
        "version": __version__,
        "commit": commit(),
        "hardware": hardware(torch.device(model.device)),
    }
