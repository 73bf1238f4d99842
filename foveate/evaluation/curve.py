"""Accuracy over scale: a network tested on the same images at many sizes."""
# Shape letters: N images, S scale channel, K classes.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foveate.data.large_scale import Border, rescale
from foveate.data.sources import Split
from foveate.errors import ConfigError, DataError
from foveate.execution.captured import CHUNK
from foveate.execution.plan import predict
from foveate.execution.precision import Precision
from foveate.models.outputs import strongest_channel


@dataclass(frozen=True)
class AtScale:
    """What a network answered on a test set shown at one scale.

    `confusion[label][answer]` counts images; `winners[channel]` counts the images whose predicted
    class answered most strongly in that scale channel (empty for networks without channels).
    """

    scale: float
    confusion: tuple[tuple[int, ...], ...]
    winners: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """Share of images answered rightly."""
        return sum(row[k] for k, row in enumerate(self.confusion)) / self.count

    @property
    def per_class(self) -> tuple[float, ...]:
        """Share of the images of each class answered rightly; NaN where a class has none."""
        rows = enumerate(self.confusion)
        return tuple(row[k] / sum(row) if sum(row) else float("nan") for k, row in rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**asdict(self), "accuracy": self.accuracy, "per_class": self.per_class}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AtScale":
        """Read what `to_dict` wrote; counts that cannot be are a ValueError."""
        rows = tuple(map(tuple, values["confusion"]))
        found = cls(values["scale"], rows, tuple(values["winners"]))
        counts = [count for row in (*rows, found.winners) for count in row]
        square = all(len(row) == len(rows) for row in rows)
        if not square or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("the confusion matrix is not a square of counts")
        if type(found.scale) not in (int, float) or not found.count or not found.scale > 0:
            raise ValueError("a scale without images")
        return found


def accuracy_over_scale(
    net: nn.Module,
    data: Split,
    scales: Sequence[float],
    *,
    size: int = 112,
    border: Border = "replicate",
    precision: Precision = "float32",
    advance: Callable[[int], None] = lambda count: None,
) -> list[AtScale]:
    """Show `data` to the network at each scale, on the device where the network is."""
    if not len(data):
        raise DataError("there are no images to test the network on")
    was_training = net.training
    net.eval()
    try:
        return [_at_scale(net, data, scale, size, border, precision, advance) for scale in scales]
    finally:
        net.train(was_training)


def _at_scale(
    net: nn.Module,
    data: Split,
    scale: float,
    size: int,
    border: Border,
    precision: Precision,
    advance: Callable[[int], None],
) -> AtScale:
    device = next(net.parameters()).device
    tally = _Tally()
    for images, labels in zip(
        torch.split(data.images, CHUNK), torch.split(data.labels, CHUNK), strict=True
    ):
        made = rescale(images.to(device), scale, size=size, border=border)
        logits, winners = _outputs(net, made, precision)
        _check_labels(labels, logits.shape[1])
        tally.add(logits, winners, labels.to(device))
        advance(len(labels))
    return tally.result(scale)


def _check_labels(labels: Tensor, classes: int) -> None:
    if int(labels.max()) >= classes:
        raise ConfigError(
            f"the images have {int(labels.max()) + 1} classes, and the network knows {classes}"
        )


def _outputs(net: nn.Module, images: Tensor, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """Logits (N, K), and for networks with channels the strongest one, one-hot (N, S)."""
    found = predict(net, images, precision)
    if found.channels is None:
        return found.logits.float(), None
    won = strongest_channel(found)
    return found.logits.float(), torch.nn.functional.one_hot(won, found.channels.shape[1])


class _Tally:
    """Counts on the device, read once at the end: asking after every batch would stall a GPU."""

    def __init__(self) -> None:
        self.confusion: Tensor | None = None
        self.winners: Tensor | None = None

    def add(self, logits: Tensor, winners: Tensor | None, labels: Tensor) -> None:
        classes = logits.shape[1]
        counts = torch.bincount(labels * classes + logits.argmax(1), minlength=classes**2)
        counts = counts.reshape(classes, classes)
        self.confusion = counts if self.confusion is None else self.confusion + counts
        if winners is not None:
            won = winners.sum(0)
            self.winners = won if self.winners is None else self.winners + won

    def result(self, scale: float) -> AtScale:
        assert self.confusion is not None
        winners = () if self.winners is None else tuple(self.winners.tolist())
        return AtScale(scale, tuple(map(tuple, self.confusion.tolist())), winners)
