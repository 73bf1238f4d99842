"""Audit a model on the images of a source, next to the same model in scale channels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from foveate import __version__
from foveate.errors import ConfigError
from foveate.evaluation.audit.audited_images import AuditImages
from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.measure import MEASURES, Audit, audit_together
from foveate.evaluation.audit.transforms import AnyTransform, PhotoTransform, classifier_for
from foveate.evaluation.audit.zero_shot import largest_batch, pair_with_channels
from foveate.evaluation.models import Model
from foveate.evaluation.results import write_tables
from foveate.models.channels import ScaleChannels
from foveate.models.pooling import Pool
from foveate.provenance import commit, hardware
from foveate.scales import ScaleGrid, as_scales

ORIGINAL, IN_CHANNELS = "as it is", "in scale channels"
CROPPED = 0.01  # largest cropped share of the area that is not reported
ENDS = ("", "_low", "_high")
COLUMNS = ("model", "class", "scale", "count", *(m + end for m in MEASURES for end in ENDS))


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The audits of one model, unchanged and in scale channels, with their settings.

    `channels` are the sides of the windows in units of the model's input. `notes` are warnings for
    the reader; `unreadable` contains a message for each skipped image.
    """

    model: str
    transform: AnyTransform
    channels: tuple[float, ...]
    audits: Mapping[str, Audit]
    metadata: Mapping[str, Any]
    unreadable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def plain(self) -> Audit:
        """The audit of the unchanged model."""
        return self.audits[ORIGINAL]

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write audit.csv with one row per scale and class, and audit.json; return their paths."""
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
            **self.metadata,
            "transform": self.transform.to_dict(),
            "channels": self.channels,
            "notes": self.notes,
            "unreadable": self.unreadable,
            "audits": {name: audit.to_dict() for name, audit in self.audits.items()},
        }
        return write_tables(folder / "audit.csv", folder / "audit.json", COLUMNS, rows, content)


def audit_with_channels(
    model: Model,
    images: AuditImages,
    transform: AnyTransform,
    scales: ScaleGrid | Sequence[float],
    *,
    pool: Pool | None = "logsumexp",
    patch: int | None = None,
    batch: int = 32,
    advance: Callable[[int], None] = lambda count: None,
) -> AuditReport:
    """Audit a model, and the same model in scale channels without training.

    The window of each channel is c times the model's input, where c is an audited scale divided by
    the native scale. The native scale, whose predictions are the reference for agreement, is the
    training scale of a foveate network, and 1 for other models. With the view "resolution", c is
    the inverse ratio, so that one channel sees the image at its original resolution. With the
    recipe "frame", windows larger than the input extend into the image around it. Without a `pool`,
    and for a model that already has scale channels, only the model itself is audited. Without
    training, logsumexp was the most accurate pool.

    `patch` is the side of the patches in pixels, by default that of the model's input. `advance` is
    called with the number of images after each batch and scale.
    """
    wanted, middle = as_scales(scales), model.native_scale
    for scale in (*wanted, middle):
        transform.check_scale(scale)
    net = classifier_for(model, transform, len(images.classes), batch)
    models: dict[str, nn.Module] = {ORIGINAL: net}
    notes, metadata = list(_notes(model, images)), _about(images, model)
    prepare: Callable[..., Tensor] = transform
    windows = _windows(transform, wanted, middle)
    if pool is not None and not model.scales and isinstance(transform, Transform):
        try:
            plain, inside, side = pair_with_channels(net, transform, windows, pool, patch)
        except ConfigError as error:
            notes.append(f"the model was not wrapped in scale channels: {error}")
        else:
            models = {ORIGINAL: plain, IN_CHANNELS: inside}
            prepare = partial(transform, canvas=side)
            batch = largest_batch(batch, transform.channels * side**2)
            pixels = len(windows) * (inside.size / transform.size[0]) ** 2
            metadata |= {"pool": pool, "patch": inside.size, "cost": {"pixels": pixels}}
    check = partial(transform.check, scale=max(*wanted, middle))
    batches = images.batches(prepare, batch, model.device, check)
    found = audit_together(list(models.values()), batches, wanted, images.classes, middle, advance)
    readable = {"images": len(images.readable), "checksum": images.checksum}
    return AuditReport(
        model=model.name,
        transform=transform,
        channels=windows if IN_CHANNELS in models else (),
        audits=dict(zip(models, found, strict=True)),
        metadata={**metadata, **readable},
        unreadable=tuple(images.unreadable.values()),
        notes=(*notes, *_cropped(transform, images.shapes), *_doubts(found[0], transform)),
    )


def _windows(transform: AnyTransform, scales: Sequence[float], native: float) -> tuple[float, ...]:
    """Return the sides of the windows in units of the model's input."""
    if transform.view == "resolution":
        return tuple(native / scale for scale in reversed(scales))
    return tuple(scale / native for scale in scales)


def _doubts(audit: Audit, transform: AnyTransform) -> list[str]:
    """Return a warning if the accuracy at the native scale is not above chance."""
    if audit.at_native.accuracy.low > 1 / len(audit.classes):
        return []
    doubt = f"the accuracy at scale {audit.native:g} is not above chance"
    if not isinstance(transform, Transform):  # a run on photographs fixes its input and classes
        return [f"{doubt}; train the network longer, or audit more images (--samples)"]
    names = ", ".join([*audit.classes[:3], *(["..."] if len(audit.classes) > 3 else [])])
    made = "its input is normalised and sized as in training (--mean, --std, --size)"
    if transform.recipe == "mnist-large-scale":
        made = "it was trained on images of MNIST Large Scale"
    return [
        f"{doubt}; check that the classes of the model are {names} in this order (--classes), and "
        f"that {made}"
    ]


def _notes(model: Model, images: AuditImages) -> Iterator[str]:
    """Yield a note if the model was trained or validated on these images, or is lazy."""
    if model.was_trained_on(images.source, images.split):
        yield (
            f"the model {model.name} was trained on {model.source}, which includes images of "
            f"{images.source} ({images.split})"
        )
    if images.split == "val" and images.source == model.source:
        yield (
            f"the images are the validation images of {model.name}, which was not trained on them; "
            "their accuracy can have selected its weights"
        )
    if isinstance(model.net, ScaleChannels) and model.net.lazy is not None:
        yield (
            f"lazy evaluation with a tolerance of {model.net.lazy:g} logits: confidences are those "
            "of the evaluated channels"
        )


def _cropped(transform: AnyTransform, shapes: Sequence[tuple[int, int]]) -> list[str]:
    """Return a note if the input omits parts of some images at scale 1."""
    lost = [transform.cropped_share(*shape) for shape in shapes]
    if not (cut := [share for share in lost if share > CROPPED]):
        return []
    middle, most = (f"{100 * share:.0f} %" for share in (median(cut), max(cut)))
    one = len(cut) == 1
    amount = most if one else f"{middle} of their area in the median and at most {most}"
    lose = f"it loses {amount} of its area" if one else f"they lose {amount}"
    if isinstance(transform, PhotoTransform):
        verb, largest = "extends" if one else "extend", f"{transform.largest:.0f} pixels"
        words = f"{verb} past the largest window of {largest} at scale 1: {lose}"
    else:
        remedy = "--fit inside" if transform.recipe == "frame" else "a larger --size"
        words = (
            f"{'is' if one else 'are'} cropped to the shape of the input at scale 1: {lose}; pass "
            f"{remedy} to keep the whole images"
        )
    return [f"{len(cut):,} of {len(lost):,} images {words}"]


def _about(images: AuditImages, model: Model) -> dict[str, Any]:
    return {
        "source": images.source,
        "split": images.split,
        "weights": model.weights,
        "pool": None,
        "lazy": getattr(model.net, "lazy", None) if model.scales else None,
        "version": __version__,
        "commit": commit(),
        "hardware": hardware(torch.device(model.device)),
    }
