"""Accuracy over scale: evaluate a network on the same images at many scales."""
# Shape letters: N images, S scale channel, K classes.

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from foveate.checks import check_choice, is_number
from foveate.data.large_scale import Border
from foveate.data.recipes import Recipe
from foveate.data.sources import Split
from foveate.errors import ConfigError, DataError
from foveate.execution.captured import CHUNK
from foveate.execution.plan import Prepared, outputs, prepare
from foveate.execution.precision import Precision, cast
from foveate.models.channels import PAPER_SCALES
from foveate.models.outputs import strongest_channel
from foveate.scales import ScaleGrid

SCALES = ScaleGrid(0.25, 2, per_octave=2)
"""Default scales of photographs."""


@dataclass(frozen=True)
class AtScale:
    """Confusion matrix of a network at one scale.

    Attributes:
        scale: Scale of the images.
        confusion: Number of images by label and predicted class, ``confusion[label][prediction]``.
        winners: Number of images for which each scale channel has the largest logit of the
            predicted class; empty for networks without scale channels.

    Examples:
        >>> at = AtScale(2.0, confusion=((8, 2), (1, 9)))
        >>> at.count, at.accuracy, at.per_class
        (20, 0.85, (0.8, 0.9))
        >>> AtScale.from_dict(at.to_dict()) == at
        True
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
        """Share of correct predictions."""
        return sum(row[k] for k, row in enumerate(self.confusion)) / self.count

    @property
    def per_class(self) -> tuple[float, ...]:
        """Share of correct predictions per class; NaN for a class without images."""
        rows = enumerate(self.confusion)
        return tuple(row[k] / sum(row) if sum(row) else float("nan") for k, row in rows)

    def to_dict(self) -> dict[str, Any]:
        """Convert the counts to a dictionary that can be serialised as JSON.

        Returns:
            The fields, plus ``accuracy`` and ``per_class``, which has None for NaN.
        """
        per_class = [None if math.isnan(share) else share for share in self.per_class]
        return {**asdict(self), "accuracy": self.accuracy, "per_class": per_class}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AtScale":
        """Restore an object from the output of `to_dict`.

        Args:
            values: Dictionary written by `to_dict`.

        Returns:
            The restored object.

        Raises:
            ValueError: If the scale is not above 0, or the counts are invalid.
        """
        rows = tuple(map(tuple, values["confusion"]))
        found = cls(values["scale"], rows, tuple(values["winners"]))
        counts = [count for row in (*rows, found.winners) for count in row]
        square = all(len(row) == len(rows) for row in rows)
        if not square or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("the confusion matrix is not a square matrix of counts")
        if not is_number(found.scale) or not found.count or not found.scale > 0:
            raise ValueError(f"scale {found.scale!r} is not above 0 or has no images")
        return found


def accuracy_over_scale(
    net: nn.Module,
    data: Split,
    scales: Sequence[float],
    *,
    size: int = 112,
    border: Border = "replicate",
    recipe: Recipe | None = None,
    precision: Precision = "float32",
    advance: Callable[[int], None] = lambda count: None,
) -> list[AtScale]:
    """Evaluate a network on a split rescaled to each scale.

    The network runs in eval mode on its own device; its previous mode is restored.

    Args:
        net: Network that returns logits.
        data: Images and labels.
        scales: Scales to evaluate at.
        size: Side of the rescaled images in pixels.
        border: Border mode of the smoothing, see `foveate.data.large_scale`.
        recipe: Recipe that rescales the images, ``mirrored`` or ``mnist-large-scale``; by default
            the latter.
        precision: Precision of the forward pass.
        advance: Called with the number of images after each batch.

    Returns:
        One confusion matrix per scale.

    Raises:
        ConfigError: If the labels exceed the classes of the network, or an argument is invalid.
        DataError: If the split has no images.

    Examples:
        >>> from foveate import create_model, load_source
        >>> net = create_model("fovmax-mnist-tr2", pretrained=True)
        >>> digits = load_source("mnist-5k").test[:50]  # part of the training set of this network
        >>> [at.accuracy for at in accuracy_over_scale(net, digits, [1, 4])]
        [1.0, 1.0]
    """
    check_choice("precision", precision, get_args(Precision))
    how: dict[str, Any] = {"size": size, "border": border, "recipe": recipe, "precision": precision}
    at = partial(rescaled_batches, net, data, **how)
    return measure_accuracy(net, at, scales, precision, advance)


def default_scales(recipe: str, view: str = "zoom") -> ScaleGrid:
    """Return the default test scales of images that a recipe prepares.

    They are the 17 scales of the paper for MNIST Large Scale, 1/2 to 2 for mirrored images, 1/4 to
    2 for other images, and 1/8 to 1 for the view "resolution".
    """
    if view == "resolution":
        return ScaleGrid(0.125, 1, per_octave=2)
    usual = {"mnist-large-scale": PAPER_SCALES, "mirrored": ScaleGrid(0.5, 2, per_octave=4)}
    return usual.get(recipe, SCALES)


def rescaled_batches(
    net: nn.Module,
    data: Split,
    scale: float,
    *,
    size: int,
    border: Border,
    recipe: Recipe | None,
    precision: Precision,
) -> Iterator[tuple[Prepared, Tensor]]:
    """Yield batches of a split at a scale, prepared for a network on its device, with labels."""
    if not len(data):
        raise DataError("the split has no images; choose another split or source")
    device, made_by = next(net.parameters()).device, recipe or Recipe()
    for chosen in torch.arange(len(data)).split(CHUNK):
        images = data.images[chosen].to(device)
        made = made_by.rescale(images, scale, size=size, border=border)
        yield prepare(net, made, precision), data.labels[chosen]


def measure_accuracy(
    net: nn.Module,
    batches_at: Callable[[float], Iterable[tuple[Prepared, Tensor]]],
    scales: Sequence[float],
    precision: Precision,
    advance: Callable[[int], None],
) -> list[AtScale]:
    """Count the predictions of a network in eval mode on batches of prepared images and labels."""
    device, results = next(net.parameters()).device, []
    with eval_mode(net):
        for scale in scales:
            # Counted on the device and copied once: a copy per batch would stall the GPU.
            confusion, winners = torch.zeros((), dtype=torch.int64, device=device), None
            for images, labels in batches_at(scale):
                with cast(precision, device):
                    found = outputs(net, images)
                confusion = confusion + _confusion(found.logits, labels)
                if found.channels is not None:
                    won = strongest_channel(found).bincount(minlength=found.channels.shape[1])
                    winners = won if winners is None else winners + won
                advance(len(labels))
            rows = tuple(map(tuple, confusion.tolist()))
            results.append(AtScale(scale, rows, () if winners is None else tuple(winners.tolist())))
    return results


def _confusion(logits: Tensor, labels: Tensor) -> Tensor:
    """Count the images of each class (rows) by their predicted class (columns), as (K, K)."""
    classes = logits.shape[1]
    if int(labels.max()) >= classes:
        raise ConfigError(
            f"an image has class index {int(labels.max())}, but the network has {classes} classes; "
            "evaluate on the source it was trained on"
        )
    cells = labels.to(logits.device) * classes + logits.argmax(1)
    return cells.bincount(minlength=classes**2).reshape(classes, classes)


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Disable gradients and switch modules to eval mode; restore their modes afterwards."""
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
