"""Images whose prediction changes with the scale, for people to look at."""
# Shape letters: B batch.

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST, PER_CLASS = 12, 3
RULE = (
    f"Up to {MOST} images whose prediction at another scale differs from that at the native scale. "
    "Of each image, the scale is shown at which the lower of the two confidences is highest; the "
    f"most confident images come first, at most {PER_CLASS} of a class."
)


class Change(NamedTuple):
    """An image, by its position among those audited, at the native scale and at another one.

    Predictions and `label` are indices of classes; confidences are their probabilities.
    """

    image: int
    label: int
    scale: float
    native_prediction: int
    native_confidence: float
    prediction: int
    confidence: float

    @property
    def certainty(self) -> float:
        """The lower of the two confidences."""
        return min(self.native_confidence, self.confidence)


def best_changes(
    found: Sequence[tuple[Tensor, Tensor]], labels: Tensor, scales: Sequence[float], first: int = 0
) -> list[Change]:
    """Find the most certain change of each image of a batch whose prediction changes.

    Args:
        found: Confidence and prediction ``(B,)`` at each of `scales`, the native one first.
        labels: Labels ``(B,)``.
        scales: The scales.
        first: Position of the first image of the batch.
    """
    confidences, predictions = (torch.stack(part) for part in zip(*found, strict=True))
    lower = torch.minimum(confidences, confidences[0])
    best, at = lower.where(predictions != predictions[0], -torch.ones_like(lower)).max(0)
    return [
        Change(
            first + i,
            int(labels[i]),
            scales[int(at[i])],
            int(predictions[0, i]),
            float(confidences[0, i]),
            int(predictions[at[i], i]),
            float(confidences[at[i], i]),
        )
        for i in (best >= 0).nonzero().flatten().tolist()
    ]


def most_confident(changes: Iterable[Change], most: int | None = MOST) -> list[Change]:
    """Choose the most certain changes, at most `PER_CLASS` of a class and `most` in all."""
    chosen: list[Change] = []
    taken: Counter[int] = Counter()
    for change in sorted(changes, key=lambda c: (-c.certainty, c.image)):
        if taken[change.label] < PER_CLASS:
            taken[change.label] += 1
            chosen.append(change)
    return chosen[:most]
