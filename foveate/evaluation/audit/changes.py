"""Select the images whose prediction changes with the scale, for display in the report."""
# Shape letters: B batch.

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_SHOWN, PER_CLASS = 12, 3
RULE = (
    f"Up to {MAX_SHOWN} images whose prediction at another scale differs from the one at the "
    "native scale, each with its most confident differing prediction. The images are sorted by the "
    f"lower of their two confidences, highest first; at most {PER_CLASS} are of one class."
)


class Change(NamedTuple):
    """Predictions of one image at the native scale and at another scale.

    `image` is the position among the audited images. Predictions and `label` are class indices;
    confidences are the probabilities of the predictions.
    """

    image: int
    label: int
    scale: float
    native_prediction: int
    native_confidence: float
    prediction: int
    confidence: float

    @property
    def min_confidence(self) -> float:
        """The lower of the two confidences."""
        return min(self.native_confidence, self.confidence)


def best_changes(
    found: Sequence[tuple[Tensor, Tensor]], labels: Tensor, scales: Sequence[float], first: int
) -> list[Change]:
    """Find the most confident changed prediction of each image in a batch.

    Images with the same prediction at every scale are omitted. `found` has the confidences and
    predictions (B,) at each of the `scales`, the native scale first. `first` is the position of the
    first image of the batch among all images.
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


def most_confident(changes: Iterable[Change], most: int | None = MAX_SHOWN) -> list[Change]:
    """Select the most confident changes: at most `PER_CLASS` per class and `most` in total."""
    chosen: list[Change] = []
    taken: Counter[int] = Counter()
    for change in sorted(changes, key=lambda c: (-c.min_confidence, c.image)):
        if taken[change.label] < PER_CLASS:
            taken[change.label] += 1
            chosen.append(change)
    return chosen[:most]
