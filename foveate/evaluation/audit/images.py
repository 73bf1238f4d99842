"""The images of an audit: read from a source and resized to the input of a model at any scale.

The conventions of `zoom`, each pinned by a test:

- Image and frame share their centre, whatever their sizes: pixel i covers [i, i + 1).
- The kernel is Keys' cubic (a = -1/2), which interpolates. Where the image shrinks, the kernel is
  widened in proportion, so nothing aliases. Factor 1 on a frame of the image's size is the
  identity. Results are clamped to the range of the image's values.
- Beyond its border the image continues as "replicate" (its edge pixel), "reflect" (mirrored about
  the edge pixel, as often as needed) or a number.
"""
# Shape letters: N images, B batch, C image channel, H W pixels.

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from foveate.data.large_scale import check_border, fold, keys, rescale
from foveate.data.pictures import has_splits, list_pictures, read_picture
from foveate.data.sources import Source, load_source
from foveate.errors import ConfigError, DataError

Recipe = Literal["frame", "large-scale"]
Beyond = str | float
Rescale = Callable[[float], Tensor]
"""From a scale to a batch of images at that scale."""
GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue, as in PIL
SPLITS = ("train", "val", "test", "all")


def zoom(
    images: Tensor,
    factor: float,
    size: tuple[int, int] | None = None,
    border: Beyond = "replicate",
) -> Tensor:
    """Magnify images about their centre, as the module's docstring defines.

    Args:
        images: Float images, shape ``(B, C, H, W)``.
        factor: Magnification; below 1 the images shrink.
        size: Height and width of the result; those of the images by default.
        border: What lies beyond the images: "replicate", "reflect" or a number.

    Returns:
        Images of shape ``(B, C, *size)``.
    """
    height, width = size or (images.shape[-2], images.shape[-1])
    rows = _weights(images.shape[-2], factor, height, border).to(images)
    columns = _weights(images.shape[-1], factor, width, border).to(images)
    zoomed = rows @ images @ columns.mT
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    if not isinstance(border, str):
        zoomed = zoomed + border * (1 - rows.sum(1)[:, None] * columns.sum(1))
        low, high = low.clamp_max(border), high.clamp_min(border)
    return zoomed.clamp(low, high)


@dataclass(frozen=True, kw_only=True)
class Transform:
    """How images become the input of a model.

    Attributes:
        size: Height and width of the input. At scale 1 an image fills it; the excess is cropped.
        channels: Number of input channels, 1 or 3.
        recipe: "frame" resizes the image itself, to values of 0 to 1 that are then normalised.
            "large-scale" makes images of MNIST Large Scale, as `foveate evaluate` does.
        border: What lies beyond the image, or with "large-scale", beyond the frame in smoothing.
        mean: Mean subtracted with the recipe "frame", one value or one per channel.
        std: Standard deviation divided by with the recipe "frame".
    """

    size: tuple[int, int]
    channels: int = 3
    recipe: Recipe = "frame"
    border: Beyond = "replicate"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ConfigError(f"size must be at least 1 pixel, got {min(self.size)}")
        if self.channels not in (1, 3):
            raise ConfigError(f"images have 1 or 3 channels, and the model takes {self.channels}")
        for name in ("mean", "std"):
            if (got := len(getattr(self, name))) not in (1, self.channels):
                raise ConfigError(f"{name} must be 1 or {self.channels} numbers, got {got}")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ConfigError(f"std must be above 0, got {self.std}, and mean finite: {self.mean}")
        if self.recipe not in ("frame", "large-scale"):
            raise ConfigError(f"recipe must be frame or large-scale, got {self.recipe!r}")
        if self.recipe == "large-scale":
            check_border(str(self.border))
            if self.size[0] != self.size[1]:
                raise ConfigError(f"the recipe large-scale makes square images, got {self.size}")
        elif self.border not in ("replicate", "reflect") and (
            isinstance(self.border, str) or not math.isfinite(self.border)
        ):
            raise ConfigError(f"border must be replicate, reflect or a number, got {self.border!r}")

    def __call__(self, images: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        """Turn images, each ``(C, H, W)`` uint8, into the input ``(B, C, *size)`` at a scale."""
        if len({image.shape for image in images}) == 1:
            return self._batch(torch.stack(list(images)), scale)
        return torch.cat([self._batch(image[None], scale) for image in images])

    def _batch(self, images: Tensor, scale: float) -> Tensor:
        images = images.float()
        if images.shape[1] == 3 and self.channels == 1:
            grey = images.new_tensor(GREY)
            images = torch.einsum("bchw,c->bhw", images, grey).unsqueeze(1)
        images = images.expand(-1, self.channels, -1, -1)
        if self.recipe == "large-scale":
            border = check_border(str(self.border))
            return rescale(images, scale, size=self.size[0], border=border)
        fill = max(self.size[0] / images.shape[-2], self.size[1] / images.shape[-1])
        resized = zoom(images / 255, scale * fill, self.size, self.border)
        mean, std = (resized.new_tensor(v)[:, None, None] for v in (self.mean, self.std))
        return (resized - mean) / std


class AuditImages:
    """Images (C, H, W) uint8 with labels, read when needed; `unreadable` names those left out.

    `read(i)` returns image i or raises a DataError. After a pass over all of them, `checksum` is
    the sha256 of the shapes, pixels and labels that were read.
    """

    def __init__(
        self,
        source: str,
        split: str,
        read: Callable[[int], Tensor],
        labels: Tensor,
        classes: Sequence[str],
    ) -> None:
        self.source, self.split, self.classes = source, split, tuple(classes)
        self.labels, self._read = labels, read
        self.unreadable: dict[int, str] = {}
        self.checksum = ""

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> list[Tensor]:
        """Return the first `count` readable images, or all if there are fewer."""
        tried = (self._try(index) for index in range(len(self)))
        found = list(itertools.islice((image for image in tried if image is not None), count))
        if not found:
            raise DataError(f"none of the {len(self)} images of {self.source} can be read")
        return found

    def batches(
        self, transform: Transform, batch: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Rescale, Tensor]]:
        """Yield functions from a scale to the input of a batch, with the labels of the batch."""
        digest = hashlib.sha256()
        for start in range(0, len(self), batch):
            found = [(i, self._try(i)) for i in range(start, min(start + batch, len(self)))]
            images = [image for _, image in found if image is not None]
            labels = self.labels[[i for i, image in found if image is not None]]
            for image, label in zip(images, labels.tolist(), strict=True):
                digest.update(f"{tuple(image.shape)} {label}".encode())
                digest.update(image.numpy().tobytes())
            if images:
                yield partial(transform, [image.to(device) for image in images]), labels
        self.checksum = digest.hexdigest()

    def _try(self, index: int) -> Tensor | None:
        try:
            return self._read(index)
        except DataError as error:
            self.unreadable[index] = str(error)
            return None


def open_images(
    source: str,
    split: str | None = None,
    limit: int | None = None,
    classes: Sequence[str] = (),
    load: Callable[[str], Source] = load_source,
) -> AuditImages:
    """Open the images of a source; those of a folder may differ in size.

    Args:
        source: Data source, such as ``folder:photos`` or ``mnist``.
        split: train, val, test or all; test by default, all for a folder without splits.
        limit: Use only this many images, the first ones.
        classes: Class names in the order of the model's logits, if it differs from the source's.
        load: Function that loads sources other than folders.
    """
    kind, _, name = source.partition(":")
    folder = Path(name).expanduser() if kind == "folder" and name else None
    if split is None:
        split = "all" if folder and not has_splits(folder) else "test"
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 image, got {limit}")
    if folder:
        items, names = list_pictures(folder, split)
        labels = torch.tensor([label for _, label in items[:limit]], dtype=torch.int64)
        found = AuditImages(source, split, lambda i: _read_file(items[i][0]), labels, names)
    else:
        found = _loaded(source, split, limit, load(source))
    if classes:
        found.labels = _reordered(found, classes)
        found.classes = tuple(classes)
    return found


def _loaded(source: str, split: str, limit: int | None, data: Source) -> AuditImages:
    parts = [getattr(data, name) for name in (SPLITS[:3] if split == "all" else [split])]
    images = torch.cat([part.images for part in parts])[:limit]
    labels = torch.cat([part.labels for part in parts])[:limit]
    return AuditImages(source, split, images.__getitem__, labels, data.classes)


def _read_file(path: Path) -> Tensor:
    return torch.from_numpy(read_picture(path).copy()).movedim(-1, 0)


def _reordered(images: AuditImages, classes: Sequence[str]) -> Tensor:
    """The labels as indices into `classes`."""
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise ConfigError(f"the model's classes have the name {twice!r} twice; name each once")
    if missing := [name for name in images.classes if name not in classes]:
        raise ConfigError(
            f"the images have the class {missing[0]!r}, which is not among the {len(classes)} "
            "classes given for the model; use the same names"
        )
    return torch.tensor([list(classes).index(name) for name in images.classes])[images.labels]


def _weights(length: int, factor: float, size: int, border: Beyond) -> Tensor:
    """The (size, length) weights that zoom one axis; with a number beyond, rows sum to less."""
    if not (math.isfinite(factor) and factor > 0):
        raise ConfigError(f"scale must be finite and above 0, got {factor:g}")
    position = (torch.arange(size, dtype=torch.float64) + 0.5 - size / 2) / factor + length / 2
    width = max(1.0, 1 / factor)
    beyond = math.ceil(max(0.0, -float(position[0])) + 2 * width)
    pixel = torch.arange(-beyond, length + beyond)
    weights = keys((position[:, None] - (pixel + 0.5)) / width)
    weights = weights / weights.sum(-1, keepdim=True)
    return fold(weights, pixel, length, cast(Any, border if isinstance(border, str) else "zero"))
