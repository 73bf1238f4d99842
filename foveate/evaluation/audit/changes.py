"""Images whose prediction changes with the scale, for people to look at."""
# Shape letters: B batch.

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST, PER_CLASS = 12, 3
RULE = (
    f"Up to {MOST} images whose prediction at another scale differs from that at the native scale, "
    "with the most confident of these predictions. The images are ordered by the lower of their "
    f"two confidences, highest first, and at most {PER_CLASS} are of one class."
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
    """Find the most confident change of each image of a batch whose prediction changes.

    Args:
        found: Confidence and prediction ``(B,)`` at each of `scales`, the native one first.
        labels: Labels ``(B,)``.
        scales: The scales.
        first: Position of the first image of the batch.
    """
    confidences, predictions = (torch.stack(part) for part in zip(*found, strict=True))
    changed = predictions != predictions[0]
    best, at = confidences.where(changed, -torch.ones_like(confidences)).max(0)
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
