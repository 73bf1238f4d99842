"""Accuracy, agreement and confidence of a classifier on images at many scales."""
# Shape letters: B batch, C image channel, H W pixels, K classes.

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.changes import Change, best_changes, most_confident
from foveate.evaluation.audit.images import Beyond, Rescale, View, check_view, zoom
from foveate.evaluation.audit.images import reduce_resolution as reduced
from foveate.evaluation.foreign import Classifier, Classify
from foveate.resampling import check_images
from foveate.scales import ScaleGrid, as_scales

SCALES = ScaleGrid(0.25, 4, per_octave=2)
MEASURES = ("accuracy", "agreement", "confidence")
Z = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value with its 95 % confidence interval; without images, NaN between 0 and 1."""

    value: float
    low: float
    high: float


def wilson(hits: int, count: int) -> Estimate:
    """Estimate a share with Wilson's interval: where |hits / count - share| is Z deviations."""
    if count == 0:
        return Estimate(math.nan, 0.0, 1.0)
    share, spread = hits / count, Z * Z / count
    middle = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    low, high = ((middle + sign * half) / (1 + spread) for sign in (-1, 1))
    return Estimate(share, min(max(low, 0.0), share), max(min(high, 1.0), share))


@dataclass(frozen=True)
class Counts:
    """Sums over `count` images.

    `right` predictions are correct and `agreeing` ones equal those at the native scale;
    `confidences` sums the probabilities of the predictions, `squares` their squares.
    """

    count: int
    right: int
    agreeing: int
    confidences: float
    squares: float

    @property
    def accuracy(self) -> Estimate:
        """Share of correct predictions."""
        return wilson(self.right, self.count)

    @property
    def agreement(self) -> Estimate:
        """Share of predictions that equal those at the native scale."""
        return wilson(self.agreeing, self.count)

    @property
    def confidence(self) -> Estimate:
        """Mean probability of the predictions, with the interval of a normal mean."""
        if self.count < 2:
            return Estimate(self.confidences if self.count else math.nan, 0.0, 1.0)
        mean = self.confidences / self.count
        variance = max(0.0, self.squares - self.count * mean**2) / (self.count - 1)
        half = Z * math.sqrt(variance / self.count)
        return Estimate(mean, max(mean - half, 0.0), min(mean + half, 1.0))

    def to_dict(self) -> dict[str, Any]:
        """Sums and measures, ready for JSON, which has no NaN."""
        measures = {name: getattr(self, name)._asdict() for name in MEASURES}
        return {**asdict(self), **(measures if self.count else dict.fromkeys(MEASURES))}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Results of a classifier at each of `scales`; `native` is the scale to compare with.

    `overall[i]` counts all images at `scales[i]`, and `per_class[i][k]` those of `classes[k]`.
    `changes` are images whose prediction is another one than at the native scale, see
    `foveate.evaluation.audit.changes.most_confident`.
    """

    scales: tuple[float, ...]
    native: float
    classes: tuple[str, ...]
    overall: tuple[Counts, ...]
    per_class: tuple[tuple[Counts, ...], ...]
    changes: tuple[Change, ...] = ()

    @property
    def count(self) -> int:
        """Number of images."""
        return self.overall[0].count

    @property
    def at_native(self) -> Counts:
        """Counts of all images at the native scale."""
        return self.overall[self.scales.index(self.native)]

    def steady(self, drop: float = 0.05) -> tuple[float, float]:
        """Range of scales around the native one in which accuracy loses at most `drop`."""
        least = self.at_native.accuracy.value - drop
        first = last = self.scales.index(self.native)
        while first > 0 and self.overall[first - 1].accuracy.value >= least:
            first -= 1
        while last + 1 < len(self.scales) and self.overall[last + 1].accuracy.value >= least:
            last += 1
        return self.scales[first], self.scales[last]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        points = [
            {
                "scale": scale,
                **whole.to_dict(),
                "per_class": {n: c.to_dict() for n, c in zip(self.classes, counts, strict=True)},
            }
            for scale, whole, counts in zip(self.scales, self.overall, self.per_class, strict=True)
        ]
        changes = [change._asdict() for change in self.changes]
        classes = list(self.classes)
        return {"native": self.native, "classes": classes, "scales": points, "changes": changes}


def audit(
    model: Classify,
    images: Tensor,
    labels: Tensor,
    scales: ScaleGrid | Sequence[float] = SCALES,
    *,
    classes: Sequence[str] = (),
    border: Beyond = "replicate",
    view: View = "zoom",
    native: float = 1.0,
    batch: int = 64,
) -> Audit:
    """Measure how a classifier behaves when its images are rescaled.

    Scale 1 is the image itself, and all images keep their size in pixels.

    Args:
        model: Any callable from images ``(B, C, H, W)`` to logits or probabilities ``(B, K)``.
        images: Float images, shape ``(N, C, H, W)``.
        labels: Integer labels from 0, shape ``(N,)``.
        scales: Scales to test at; the native scale is added if it is missing.
        classes: Class names; numbers by default.
        border: What lies beyond the images: "replicate", "reflect", a number, or a tuple of one
            number per channel.
        view: What scale s means. "zoom" magnifies the images s times about their centre, see
            `foveate.evaluation.audit.images.zoom`. "resolution" shows them with s times the pixels
            along each axis, s being at most 1, see `reduce_resolution` there.
        native: Scale whose predictions those at other scales are compared with.
        batch: Number of images per call of the model.

    Returns:
        Accuracy, agreement and confidence at every scale, overall and per class, and the most
        confident changes of predictions.

    Raises:
        ConfigError: If an argument is invalid, or the model does not return finite logits.
        DataError: If there are no images.

    Example:
        >>> found = audit(net, images, labels, [0.5, 1, 2])
        >>> [round(counts.accuracy.value, 2) for counts in found.overall]
        [0.61, 0.94, 0.72]
    """
    check_images(images)
    if labels.shape != images.shape[:1]:
        got = tuple(labels.shape)
        raise ConfigError(f"labels must be one for each of {len(images)} images, got {got}")
    if not len(images):
        raise DataError("there are no images to audit")
    names = tuple(classes) or _numbers(model, images[:1])
    if int(labels.min()) < 0 or int(labels.max()) >= len(names):
        raise ConfigError(
            f"labels must lie from 0 to {len(names) - 1}, one of {len(names)} classes, got "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    check_view(view, 1.0)
    shown = partial(zoom, border=border) if view == "zoom" else reduced
    parts = zip(images.split(batch), labels.cpu().long().split(batch), strict=True)
    batches = ((partial(shown, part), chunk) for part, chunk in parts)
    classifier = Classifier(model, len(names), batch)
    return audit_together([classifier], batches, scales, names, native)[0]


def audit_together(
    models: Sequence[Classify],
    batches: Iterable[tuple[Rescale, Tensor]],
    scales: ScaleGrid | Sequence[float],
    classes: Sequence[str],
    native: float = 1.0,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Audit]:
    """Audit several models in one pass over batches of (function from a scale to images, labels).

    The native scale is added to `scales` if it is missing.
    """
    (native,) = as_scales([native])
    others = [s for s in as_scales(scales) if not math.isclose(s, native, rel_tol=1e-9)]
    grid = tuple(sorted((*others, native)))
    order = sorted(range(len(grid)), key=lambda i: grid[i] != native)  # the native scale first
    shown = tuple(grid[i] for i in order)
    sums = torch.zeros(len(models), len(grid), len(classes), 5, dtype=torch.float64)
    changes: list[list[Change]] = [[] for _ in models]
    count = 0
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(measuring(model))
        for rescaled, labels in batches:
            found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in models]
            for i in order:
                images = rescaled(grid[i])
                for m, model in enumerate(models):
                    confidence, prediction = _predictions(model(images), grid[i])
                    found[m].append((confidence, prediction))
                    same = prediction == found[m][0][1]
                    facts = (same | True, prediction == labels, same, confidence, confidence**2)
                    rows = torch.stack([fact.double() for fact in facts], 1)
                    sums[m, i].index_add_(0, labels, rows)
                advance(len(labels))
            for m, each in enumerate(found):
                new = best_changes(each, labels, shown, count)
                changes[m] = most_confident([*changes[m], *new], most=None)
            count += len(labels)
    if not sums.any():
        raise DataError("there are no images to audit")
    return [
        _result(each, grid, native, tuple(classes), tuple(most_confident(chosen)))
        for each, chosen in zip(sums, changes, strict=True)
    ]


def _predictions(logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Probability and index of the predicted class of each image, on the CPU."""
    confidence, prediction = logits.float().cpu().double().softmax(1).max(1)
    if bad := int(confidence.isnan().sum()):
        raise ConfigError(
            f"the model returned non-finite logits for {bad} of {len(logits)} images at scale "
            f"{scale:g}; check its weights and its input range"
        )
    return confidence, prediction


def _result(
    sums: Tensor,
    scales: tuple[float, ...],
    native: float,
    classes: tuple[str, ...],
    changes: tuple[Change, ...],
) -> Audit:
    return Audit(
        scales=scales,
        native=native,
        classes=classes,
        overall=tuple(_counts(row) for row in sums.sum(1).tolist()),
        per_class=tuple(tuple(_counts(row) for row in rows) for rows in sums.tolist()),
        changes=changes,
    )


def _counts(sums: list[float]) -> Counts:
    count, right, agreeing = (round(value) for value in sums[:3])
    return Counts(count, right, agreeing, sums[3], sums[4])


def _numbers(model: Classify, image: Tensor) -> tuple[str, ...]:
    """Numbers for class names, as many as the model has logits."""
    classifier = Classifier(model)
    with measuring(classifier):
        return tuple(map(str, range(classifier(image).shape[1])))


@contextmanager
def measuring(model: object) -> Iterator[None]:
    """Disable gradients and put modules in eval mode; restore their modes afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
