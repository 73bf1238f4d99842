"""Show pictures to a classifier at many sizes: rescaled about their centre, on one frame.

The conventions of `zoom`, each pinned by a test:

- Image and frame share their centre, whatever their sizes: pixel i covers [i, i + 1).
- The kernel is Keys' cubic (a = -1/2), which interpolates; where the image shrinks it is wider by
  as much as the image shrinks, so nothing aliases. Factor 1 on a frame of the image's size is the
  identity. No result leaves the range of the image's own values.
- Beyond its border the image goes on as "replicate" (its edge pixel), "reflect" (mirrored about
  the edge pixel, as often as needed) or a number.
"""
# Shape letters: B batch, C image channel, H W pixels.

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from foveate.data.large_scale import check_border, fold, keys, rescale
from foveate.errors import ConfigError
from foveate.evaluation.invariance import Rescale

Recipe = Literal["frame", "large-scale"]
Beyond = str | float
GREY = (0.299, 0.587, 0.114)  # how red, green and blue make a grey, as in PIL


def zoom(
    images: Tensor,
    factor: float,
    size: tuple[int, int] | None = None,
    border: Beyond = "replicate",
) -> Tensor:
    """Make what images (B, C, H, W) show larger by `factor`, on a frame of `size`, (H, W) if None.

    The module's docstring gives the conventions.
    """
    height, width = size or (images.shape[-2], images.shape[-1])
    rows = _weights(images.shape[-2], factor, height, border).to(images)
    columns = _weights(images.shape[-1], factor, width, border).to(images)
    zoomed = rows @ images @ columns.mT
    ends = [images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)]
    if not isinstance(border, str):
        zoomed = zoomed + border * (1 - rows.sum(1)[:, None] * columns.sum(1))
        ends = [ends[0].clamp_max(border), ends[1].clamp_min(border)]
    return zoomed.clamp(*ends)


def zooming(images: Tensor, border: Beyond = "replicate") -> Rescale:
    """Give images (B, C, H, W) at any scale, on a frame of their own size."""
    return lambda scale: zoom(images, scale, border=border)


@dataclass(frozen=True, kw_only=True)
class Look:
    """How images are shown: at scale 1 each fills a frame of `size` (H, W), its excess cut off.

    `recipe` "frame" rescales the picture itself, in one step from its own pixels, into values of
    0 to 1 less `mean` over `std` (one number, or one per channel). "large-scale" makes images of
    MNIST Large Scale instead, as `foveate train` and `evaluate` do: there `border` is what the
    smoothing meets beyond the frame, and mean and std are not used.
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
            if len(getattr(self, name)) not in (1, self.channels):
                got = len(getattr(self, name))
                raise ConfigError(f"{name} must be 1 or {self.channels} numbers, got {got}")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ConfigError(f"std must be above 0, got {self.std}, and mean finite: {self.mean}")
        if self.recipe == "frame":
            _check_beyond(self.border)
        elif self.recipe == "large-scale":
            check_border(str(self.border))
            if self.size[0] != self.size[1]:
                raise ConfigError(f"the recipe large-scale makes square images, got {self.size}")
        else:
            raise ConfigError(f"recipe must be frame or large-scale, got {self.recipe!r}")

    def show(self, pictures: Sequence[Tensor], scale: float) -> Tensor:
        """Turn pictures, each (C, H, W) uint8, into the (B, C, H, W) that a model gets to see."""
        shapes = {picture.shape for picture in pictures}
        if len(shapes) == 1:
            return self._show(torch.stack(list(pictures)), scale)
        return torch.cat([self._show(picture[None], scale) for picture in pictures])

    def _show(self, pictures: Tensor, scale: float) -> Tensor:
        images = _coloured(pictures, self.channels)
        if self.recipe == "large-scale":
            border = check_border(str(self.border))
            return rescale(images, scale, size=self.size[0], border=border)
        fill = max(self.size[0] / images.shape[-2], self.size[1] / images.shape[-1])
        shown = zoom(images / 255, scale * fill, self.size, self.border)
        mean, std = (shown.new_tensor(v)[:, None, None] for v in (self.mean, self.std))
        return (shown - mean) / std

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


def read_border(text: str) -> Beyond:
    """Read a border: a number, or a name."""
    try:
        return float(text)
    except ValueError:
        return text


def _check_beyond(border: Beyond) -> None:
    known = border in ("replicate", "reflect")
    if not known and not (isinstance(border, int | float) and math.isfinite(border)):
        raise ConfigError(f"border must be replicate, reflect or a number, got {border!r}")


def _coloured(pictures: Tensor, channels: int) -> Tensor:
    """Grey to RGB or RGB to grey, as floats of 0 to 255."""
    images = pictures.float()
    if images.shape[1] == 3 and channels == 1:
        return torch.einsum("bchw,c->bhw", images, images.new_tensor(GREY)).unsqueeze(1)
    return images.expand(-1, channels, -1, -1)


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
