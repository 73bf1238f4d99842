"""How a classifier behaves when objects change size: accuracy, agreement and confidence."""
# Shape letters: B batch, C image channel, H W pixels, K classes.

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.images import Beyond, zooming
from foveate.evaluation.invariance import Rescale, measuring
from foveate.evaluation.models import Ask, Classifier
from foveate.resampling import check_images
from foveate.scales import ScaleGrid, as_scales

SCALES = ScaleGrid(0.25, 4, per_octave=2)
MEASURES = ("accuracy", "agreement", "confidence")
Z = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value and the ends of its 95 % confidence interval; NaN between 0 and 1 of no images."""

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
    """What was answered on `count` images.

    How many rightly, how many as at the native scale, and the sums of the confidences (the
    probability of the answer) and of their squares.
    """

    count: int
    right: int
    agreeing: int
    confidences: float
    squares: float

    @property
    def accuracy(self) -> Estimate:
        """Share of images answered rightly."""
        return wilson(self.right, self.count)

    @property
    def agreement(self) -> Estimate:
        """Share of images answered as at the native scale."""
        return wilson(self.agreeing, self.count)

    @property
    def confidence(self) -> Estimate:
        """Mean probability that the answers were given, with the interval of a normal mean."""
        if self.count < 2:
            return Estimate(self.confidences if self.count else math.nan, 0.0, 1.0)
        mean = self.confidences / self.count
        variance = max(0.0, self.squares - self.count * mean**2) / (self.count - 1)
        half = Z * math.sqrt(variance / self.count)
        return Estimate(mean, max(mean - half, 0.0), min(mean + half, 1.0))


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What a classifier answered at each of `scales`, of which `native` is the one to compare with.

    `overall[i]` counts all images at `scales[i]`, and `per_class[i][k]` those of `classes[k]`.
    """

    scales: tuple[float, ...]
    native: float
    classes: tuple[str, ...]
    overall: tuple[Counts, ...]
    per_class: tuple[tuple[Counts, ...], ...]

    @property
    def count(self) -> int:
        """Number of images."""
        return self.overall[0].count

    @property
    def at_native(self) -> Counts:
        """The counts of all images at the native scale."""
        return self.overall[self.scales.index(self.native)]

    def steady(self, drop: float = 0.05) -> tuple[float, float]:
        """The range of scales about the native one where accuracy loses at most `drop`."""
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
                **_shown(whole),
                "per_class": {n: _shown(c) for n, c in zip(self.classes, counts, strict=True)},
            }
            for scale, whole, counts in zip(self.scales, self.overall, self.per_class, strict=True)
        ]
        return {"native": self.native, "classes": list(self.classes), "scales": points}


def audit(
    classify: Ask,
    images: Tensor,
    labels: Tensor,
    scales: ScaleGrid | Sequence[float] = SCALES,
    *,
    classes: Sequence[str] = (),
    border: Beyond = "replicate",
    native: float = 1.0,
    batch: int = 64,
) -> Audit:
    """Ask `classify`, any callable from images to logits (B, K), about images at many scales.

    Float images (N, C, H, W) are rescaled about their centre on their own frame, as
    `foveate.evaluation.audit.images.zoom` says; scale 1 is the image as it is. `labels` are (N,)
    whole numbers from 0, `classes` their names. Answers are compared with those at `native`.
    """
    check_images(images)
    if labels.shape != images.shape[:1]:
        got = tuple(labels.shape)
        raise ConfigError(f"labels must be one for each of {len(images)} images, got {got}")
    if not len(images):
        raise DataError("there are no images to audit")
    names = tuple(classes) or _names(classify, images[:1])
    if int(labels.min()) < 0 or int(labels.max()) >= len(names):
        raise ConfigError(
            f"labels must lie from 0 to {len(names) - 1}, one of {len(names)} classes, got "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    parts = zip(images.split(batch), labels.cpu().long().split(batch), strict=True)
    shown = ((zooming(part, border), chunk) for part, chunk in parts)
    model = Classifier(classify, len(names), batch)
    return audit_together([model], shown, scales, names, native)[0]


def audit_together(
    models: Sequence[Ask],
    batches: Iterable[tuple[Rescale, Tensor]],
    scales: ScaleGrid | Sequence[float],
    classes: Sequence[str],
    native: float = 1.0,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Audit]:
    """Audit several models in one pass over batches, each a way to show images and their labels.

    The native scale is added to `scales` if it is not one of them.
    """
    grid = _with_native(as_scales(scales), native)
    order = sorted(range(len(grid)), key=lambda i: grid[i] != native)  # what others agree with
    tallies = [_Tally(grid, native, len(classes)) for _ in models]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(measuring(model))
        for show, labels in batches:
            for i in order:
                images = show(grid[i])
                for model, tally in zip(models, tallies, strict=True):
                    tally.add(i, model(images), labels)
                advance(len(labels))
    return [tally.result(tuple(classes)) for tally in tallies]


class _Tally:
    """Sums over images, for each scale and class."""

    def __init__(self, grid: tuple[float, ...], native: float, classes: int) -> None:
        self.grid, self.native = grid, native
        self.sums = torch.zeros(5, len(grid), classes, dtype=torch.float64)
        self.said = torch.empty(0)  # the answers at the native scale, of the present batch

    def add(self, at: int, logits: Tensor, labels: Tensor) -> None:
        confidence, answer = logits.float().cpu().double().softmax(1).max(1)
        bad = int(confidence.isnan().sum())
        if bad:
            raise ConfigError(
                f"the model gave logits {tuple(logits.shape)} that are no numbers for {bad} of "
                f"{len(labels)} images at scale {self.grid[at]:g}; they must be finite"
            )
        if self.grid[at] == self.native:
            self.said = answer
        facts = (answer == answer, answer == labels, answer == self.said, confidence)
        rows = torch.stack([fact.double() for fact in (*facts, confidence**2)])
        self.sums[:, at].index_add_(1, labels, rows)

    def result(self, classes: tuple[str, ...]) -> Audit:
        if not self.sums[0].any():
            raise DataError("there are no images to audit")
        each = self.sums.permute(1, 2, 0).tolist()
        return Audit(
            scales=self.grid,
            native=self.native,
            classes=classes,
            overall=tuple(_counts(sums) for sums in self.sums.sum(2).T.tolist()),
            per_class=tuple(tuple(_counts(sums) for sums in scale) for scale in each),
        )


def _counts(sums: list[float]) -> Counts:
    count, right, agreeing = (round(value) for value in sums[:3])
    return Counts(count, right, agreeing, sums[3], sums[4])


def _with_native(scales: tuple[float, ...], native: float) -> tuple[float, ...]:
    """The scales with the native one among them, once."""
    (native,) = as_scales([native])
    others = (scale for scale in scales if not math.isclose(scale, native, rel_tol=1e-9))
    return tuple(sorted((*others, native)))


def _names(classify: Ask, image: Tensor) -> tuple[str, ...]:
    """Numbers for names: as many as the model has logits."""
    model = Classifier(classify)
    with measuring(model):
        return tuple(str(k) for k in range(model(image).shape[1]))


def _shown(counts: Counts) -> dict[str, Any]:
    measures = {name: getattr(counts, name)._asdict() for name in MEASURES}
    if not counts.count:  # JSON has no NaN
        measures = dict.fromkeys(MEASURES)
    return {**asdict(counts), **measures}
