"""Accuracy, agreement and confidence of a classifier on images at many scales."""
# Shape letters: B batch, C image channel, H W pixels, K classes.

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foveate.checks import check_range
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.changes import Change, best_changes, most_confident
from foveate.evaluation.audit.images import (
    BorderMode,
    Rescale,
    View,
    check_border_mode,
    check_view,
    zoom,
)
from foveate.evaluation.audit.images import reduce_resolution as reduced
from foveate.evaluation.curve import SCALES, eval_mode
from foveate.evaluation.third_party import Classifier, ImageClassifier
from foveate.resampling import check_images
from foveate.scales import ScaleGrid, as_scales

MEASURES = ("accuracy", "agreement", "confidence")
Z = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value with its 95 % confidence interval.

    Without images, the value is NaN and the interval is 0 to 1.

    Attributes:
        value: Point estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Examples:
        >>> Estimate(0.9, 0.85, 0.94).value
        0.9
    """

    value: float
    low: float
    high: float


def wilson(hits: int, count: int) -> Estimate:
    """Estimate a proportion with its 95 % Wilson score interval."""
    if count == 0:
        return Estimate(math.nan, 0.0, 1.0)
    share, spread = hits / count, Z * Z / count
    middle = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    low, high = ((middle + sign * half) / (1 + spread) for sign in (-1, 1))
    return Estimate(share, min(max(low, 0.0), share), max(min(high, 1.0), share))


@dataclass(frozen=True)
class Counts:
    """Sums over images at one scale, and the estimates that follow from them.

    Attributes:
        count: Number of images.
        right: Number of correct predictions.
        agreeing: Number of predictions that equal those at the native scale.
        confidences: Sum of the probabilities of the predicted classes.
        squares: Sum of the squares of these probabilities.

    Examples:
        >>> counts = Counts(count=100, right=90, agreeing=95, confidences=80.0, squares=66.0)
        >>> counts.accuracy.value, counts.agreement.value, counts.confidence.value
        (0.9, 0.95, 0.8)
        >>> round(counts.accuracy.low, 3), round(counts.accuracy.high, 3)
        (0.826, 0.945)
    """

    count: int
    right: int
    agreeing: int
    confidences: float
    squares: float

    @property
    def accuracy(self) -> Estimate:
        """Share of correct predictions, with a Wilson score interval."""
        return wilson(self.right, self.count)

    @property
    def agreement(self) -> Estimate:
        """Share of predictions equal to those at the native scale, with a Wilson score interval."""
        return wilson(self.agreeing, self.count)

    @property
    def confidence(self) -> Estimate:
        """Mean probability of the predicted classes, with a normal approximation interval."""
        if self.count < 2:
            return Estimate(self.confidences if self.count else math.nan, 0.0, 1.0)
        mean = self.confidences / self.count
        variance = max(0.0, self.squares - self.count * mean**2) / (self.count - 1)
        half = Z * math.sqrt(variance / self.count)
        return Estimate(mean, max(mean - half, 0.0), min(mean + half, 1.0))

    def to_dict(self) -> dict[str, Any]:
        """Convert the sums and estimates to a dictionary that can be serialised as JSON.

        Returns:
            The sums, and each estimate with its interval; None for estimates without images.
        """
        measures = {name: getattr(self, name)._asdict() for name in MEASURES}
        return {**asdict(self), **(measures if self.count else dict.fromkeys(MEASURES))}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Accuracy, agreement and confidence of a classifier at each scale.

    Attributes:
        scales: Audited scales, in ascending order.
        native: Scale whose predictions are the reference for agreement.
        classes: Class names.
        overall: Results over all images, one `Counts` per scale.
        per_class: Results per class: ``per_class[i][k]`` at ``scales[i]`` for ``classes[k]``.
        changes: Most confident predictions that differ from those at the native scale.

    Examples:
        >>> from torch import nn
        >>> images, labels = torch.rand(20, 3, 32, 32), torch.arange(20) % 5
        >>> net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 5))
        >>> found = audit(net, images, labels, [0.5, 1, 2])
        >>> found.count, found.at_native == found.overall[1]
        (20, True)
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
        """Results over all images at the native scale."""
        return self.overall[self.scales.index(self.native)]

    def stable_range(self, drop: float = 0.05) -> tuple[float, float]:
        """Return the range of scales around the native one where accuracy drops by `drop` or less.

        Args:
            drop: Largest allowed loss of accuracy relative to the native scale, 0.05 being 5
                points.

        Returns:
            The lowest and the highest scale of the range.
        """
        least = self.at_native.accuracy.value - drop - 1e-9  # shares are not exact in binary
        first = last = self.scales.index(self.native)
        while first > 0 and self.overall[first - 1].accuracy.value >= least:
            first -= 1
        while last + 1 < len(self.scales) and self.overall[last + 1].accuracy.value >= least:
            last += 1
        return self.scales[first], self.scales[last]

    def to_dict(self) -> dict[str, Any]:
        """Convert the audit to a dictionary that can be serialised as JSON.

        Returns:
            The native scale, the class names, the results per scale and class, and the changes.
        """
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
    model: ImageClassifier,
    images: Tensor,
    labels: Tensor,
    scales: ScaleGrid | Sequence[float] = SCALES,
    *,
    classes: Sequence[str] = (),
    border: BorderMode = "replicate",
    view: View = "zoom",
    batch: int = 64,
) -> Audit:
    """Measure accuracy, agreement and confidence of a classifier on rescaled images.

    Scale 1 is the original image. All images keep their size in pixels. Modules run in eval mode
    and without gradients; their previous mode is restored.

    Args:
        model: Any callable from images to logits or probabilities.
        images: Float images, preprocessed for the model.
        labels: Class indices.
        scales: Scales to audit at; scale 1 is added if it is missing, as the reference for
            agreement.
        classes: Class names; class indices by default.
        border: Pixels outside the images: "replicate", "reflect", a number, or a tuple of one
            number per channel.
        view: Meaning of scale s. "zoom" magnifies the images s times about their centre.
            "resolution" reduces them to s times the pixels along each axis and keeps their size,
            for s of at most 1.
        batch: Number of images per call of the model.

    Shape:
        - images: ``(N, C, H, W)``.
        - labels: ``(N,)``.
        - Input and output of the model: ``(B, C, H, W)`` and ``(B, K)``.

    Returns:
        Accuracy, agreement and confidence at every scale, overall and per class, and the most
        confident predictions that change with the scale.

    Raises:
        ConfigError: If an argument is invalid, or the model does not return finite logits.
        DataError: If there are no images.

    Examples:
        >>> from foveate import create_model, load_source
        >>> from foveate.data.large_scale import rescale
        >>> digits = load_source("mnist-5k").test[:50]
        >>> net = create_model("cnn-mnist-tr2", pretrained=True)
        >>> found = audit(net, rescale(digits.images, 2.0), digits.labels, [0.5, 1, 2])
        >>> [round(counts.accuracy.value, 2) for counts in found.overall]
        [0.62, 1.0, 0.44]
    """
    check_images(images)
    if labels.shape != images.shape[:1]:
        got = tuple(labels.shape)
        raise ConfigError(f"labels must have the shape ({len(images)},), got {got}")
    if not len(images):
        raise DataError("the audit requires at least 1 image, got 0")
    names = tuple(classes) or _numbers(model, images[:1])
    if int(labels.min()) < 0 or int(labels.max()) >= len(names):
        raise ConfigError(
            f"labels must lie between 0 and {len(names) - 1} for {len(names)} classes, got "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    check_view(view, 1.0)
    check_border_mode(border, images.shape[1])
    check_range("batch", batch, 1, math.inf, "at least 1 image")
    shown = partial(zoom, border=border) if view == "zoom" else reduced
    parts = zip(images.split(batch), labels.cpu().long().split(batch), strict=True)
    batches = ((partial(shown, part), chunk) for part, chunk in parts)
    classifier = Classifier(model, len(names), batch)
    return audit_together([classifier], batches, scales, names)[0]


def audit_together(
    models: Sequence[nn.Module],
    batches: Iterable[tuple[Rescale, Tensor]],
    scales: ScaleGrid | Sequence[float],
    classes: Sequence[str],
    native: float = 1.0,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Audit]:
    """Audit several models in one pass over batches.

    Each batch is a function from a scale to images, and labels. The native scale is added to
    `scales` if it is missing.
    """
    others = [s for s in as_scales(scales) if not math.isclose(s, native, rel_tol=1e-9)]
    grid = tuple(sorted((*others, native)))
    order = sorted(range(len(grid)), key=lambda i: grid[i] != native)  # native scale first
    shown = tuple(grid[i] for i in order)
    sums = torch.zeros(len(models), len(grid), len(classes), 5, dtype=torch.float64)
    changes: list[list[Change]] = [[] for _ in models]
    count = 0
    with eval_mode(nn.ModuleList(models)):
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
        raise DataError("no image could be read; check the files")
    return [
        Audit(
            scales=grid,
            native=native,
            classes=tuple(classes),
            overall=tuple(_counts(row) for row in each.sum(1).tolist()),
            per_class=tuple(tuple(_counts(row) for row in rows) for rows in each.tolist()),
            changes=tuple(most_confident(chosen)),
        )
        for each, chosen in zip(sums, changes, strict=True)
    ]


def _predictions(logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the probability and the index of the predicted class per image, on the CPU."""
    confidence, prediction = logits.float().cpu().double().softmax(1).max(1)
    if bad := int(confidence.isnan().sum()):
        raise ConfigError(
            f"the model returned non-finite logits for {bad} of {len(logits)} images at scale "
            f"{scale:g}; check its weights and its input range"
        )
    return confidence, prediction


def _counts(sums: list[float]) -> Counts:
    count, right, agreeing = (round(value) for value in sums[:3])
    return Counts(count, right, agreeing, sums[3], sums[4])


def _numbers(model: ImageClassifier, image: Tensor) -> tuple[str, ...]:
    """Return class indices as class names, one per logit of the model."""
    classifier = Classifier(model)
    with eval_mode(classifier):
        return tuple(map(str, range(classifier(image).shape[1])))
