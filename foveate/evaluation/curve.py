"""Accuracy over scale: a network tested on the same images at many sizes."""
# Shape letters: N images, S scale channel, K classes.

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foveate.data.large_scale import Border, rescale
from foveate.data.sources import Split
from foveate.errors import ConfigError, DataError
from foveate.execution.captured import CHUNK
from foveate.execution.plan import Prepared, outputs, prepare
from foveate.execution.precision import Precision, cast
from foveate.models.outputs import Outputs, strongest_channel


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
    device = next(net.parameters()).device

    def at(scale: float) -> Iterator[tuple[Prepared, Tensor]]:
        for chosen in torch.arange(len(data)).split(CHUNK):
            made = rescale(data.images[chosen].to(device), scale, size=size, border=border)
            yield prepare(net, made, precision), data.labels[chosen]

    return measure_accuracy(net, at, scales, precision, advance)


@torch.no_grad()
def measure_accuracy(
    net: nn.Module,
    batches_at: Callable[[float], Iterable[tuple[Prepared, Tensor]]],
    scales: Sequence[float],
    precision: Precision = "float32",
    advance: Callable[[int], None] = lambda count: None,
) -> list[AtScale]:
    """Count the predictions of a network, in eval mode, on prepared images with labels."""
    device, was_training, results = next(net.parameters()).device, net.training, []
    net.eval()
    try:
        for scale in scales:
            tally = _Tally()
            for images, labels in batches_at(scale):
                with cast(precision, device):
                    found = outputs(net, images)
                _check_labels(labels, found.logits.shape[1])
                tally.add(found, labels.to(device))
                advance(len(labels))
            results.append(tally.result(scale))
    finally:
        net.train(was_training)
    return results


def _check_labels(labels: Tensor, classes: int) -> None:
    if int(labels.max()) >= classes:
        raise ConfigError(
            f"the images have {int(labels.max()) + 1} classes, and the network knows {classes}"
        )


class _Tally:
    """Counts on the device, read once at the end: asking after every batch would stall a GPU."""

    def __init__(self) -> None:
        self.confusion: Tensor | None = None
        self.winners: Tensor | None = None

    def add(self, found: Outputs, labels: Tensor) -> None:
        classes = found.logits.shape[1]
        counts = torch.bincount(labels * classes + found.logits.argmax(1), minlength=classes**2)
        counts = counts.reshape(classes, classes)
        self.confusion = counts if self.confusion is None else self.confusion + counts
        if found.channels is not None:
            won = torch.bincount(strongest_channel(found), minlength=found.channels.shape[1])
            self.winners = won if self.winners is None else self.winners + won

    def result(self, scale: float) -> AtScale:
        assert self.confusion is not None
        winners = () if self.winners is None else tuple(self.winners.tolist())
        return AtScale(scale, tuple(map(tuple, self.confusion.tolist())), winners)
