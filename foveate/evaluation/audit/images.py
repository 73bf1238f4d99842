"""Resize images to the input of a model at any scale.

Conventions of `zoom`, each tested:

- Pixel i covers [i, i + 1). The centre of the image maps to the centre of the output for all sizes.
- The kernel is Keys' cubic interpolation kernel (a = -1/2). Where the image shrinks, the kernel is
  widened in proportion to avoid aliasing. Factor 1 at the size of the image is the identity. The
  output is clamped to the value range of the image.
- Outside the image, "replicate" repeats the edge pixel, "reflect" mirrors the image about the edge
  pixel as often as needed, and a number or a tuple of one number per channel is a constant colour.
"""
# Shape letters: B batch, C image channel, H W pixels.

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from foveate.checks import check_choice
from foveate.data.large_scale import BACKGROUND, check_border, frame_matrices, rescale
from foveate.data.mirrored import rescale_mirrored
from foveate.errors import ConfigError
from foveate.scales import check_scale

Recipe = Literal["frame", "mirrored", "mnist-large-scale"]
Fit = Literal["fill", "inside"]
View = Literal["zoom", "resolution"]
BorderMode = str | float | tuple[float, ...]
Rescale = Callable[[float], Tensor]
"""Function that maps a scale to a batch of images at that scale."""
GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue, as in PIL


def zoom(
    images: Tensor,
    factor: float,
    size: tuple[int, int] | None = None,
    border: BorderMode = "replicate",
) -> Tensor:
    """Magnify images (B, C, H, W) about their centre, with the conventions of the module docstring.

    A `factor` below 1 shrinks the images. `size` is the height and width of the output, by default
    those of the images.
    """
    height, width = size or (images.shape[-2], images.shape[-1])
    rows = _weights(images.shape[-2], factor, height, border).to(images)
    columns = _weights(images.shape[-1], factor, width, border).to(images)
    zoomed = rows @ images @ columns.mT
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    if not isinstance(border, str):
        colour = torch.tensor(border).reshape(-1, 1, 1).to(images)
        zoomed = zoomed + colour * (1 - rows.sum(1)[:, None] * columns.sum(1))
        low, high = low.minimum(colour.min()), high.maximum(colour.max())
    return zoomed.clamp(low, high)


def reduce_resolution(images: Tensor, scale: float) -> Tensor:
    """Reduce the resolution of images (B, C, H, W), and keep their size and field of view.

    `zoom` reduces the images to ``ceil(scale * H)`` by ``ceil(scale * W)`` pixels, whose centres
    are ``1 / scale`` pixels apart, and enlarges them to their original size. The scale is above 0
    and at most 1.
    """
    check_view("resolution", scale)
    height, width = images.shape[-2:]
    small = zoom(images, scale, (math.ceil(scale * height), math.ceil(scale * width)))
    return zoom(small, 1 / scale, (height, width))


def check_view(view: str, scale: float) -> None:
    """Raise a ConfigError for an unknown view or a scale that the view does not support."""
    check_choice("view", view, get_args(View))
    check_scale(scale)
    if view == "resolution" and scale > 1:
        raise ConfigError(
            f"the view resolution requires scales of at most 1, got {scale:g}; use scales such as "
            "0.125:1:2, or the view zoom"
        )


def check_border_mode(border: BorderMode | None, channels: int = 3) -> None:
    """Raise a ConfigError unless `zoom` and `surround` accept the border, or it is None."""
    if border in (None, "replicate", "reflect"):
        return
    numbers = border if isinstance(border, tuple | list) else (border,)
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
        raise ConfigError(
            f"border must be replicate, reflect, a number or one number per channel, got {border!r}"
        )
    _check_count("border", cast(tuple[float, ...], numbers), channels)


def _check_count(name: str, values: tuple[float, ...], channels: int) -> None:
    if len(values) not in (1, channels):
        raise ConfigError(
            f"{name} must be one number or one per channel ({channels}), got {len(values)}"
        )


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Preprocessing that turns images into the input of a model at a given scale.

    Attributes:
        size: Height and width of the input.
        channels: Number of input channels, 1 or 3.
        recipe: "frame" resizes the image and normalises its values of 0 to 1. "mnist-large-scale"
            makes images of MNIST Large Scale, and "mirrored" frames filled with mirror images, as
            `foveate evaluate` does.
        border: Pixels outside the image; with "mnist-large-scale", the border mode of the
            smoothing. "mirrored" does not use it.
        mean: Mean used for normalisation, one value or one per channel; not for
            "mnist-large-scale".
        std: Standard deviation used for normalisation; not for "mnist-large-scale".
        fit: At scale 1, "fill" resizes the image to cover the input and crops the excess; "inside"
            resizes it to fit inside the input, and the border fills the rest.
        view: At scale s, "zoom" magnifies the image s times about its centre. "resolution" reduces
            the image at scale 1 to s times the pixels along each axis, see `reduce_resolution`.
    """

    size: tuple[int, int]
    channels: int = 3
    recipe: Recipe = "frame"
    border: BorderMode = "replicate"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    fit: Fit = "fill"
    view: View = "zoom"

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ConfigError(f"size must be at least 1 pixel, got {min(self.size)}")
        if self.channels not in (1, 3):
            raise ConfigError(f"the model must take 1 or 3 image channels, got {self.channels}")
        for name in ("mean", "std"):
            _check_count(name, getattr(self, name), self.channels)
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ConfigError(
                f"std must be above 0 and mean finite, got std {self.std} and mean {self.mean}"
            )
        check_choice("recipe", self.recipe, get_args(Recipe))
        check_choice("fit", self.fit, get_args(Fit))
        check_view(self.view, 1.0)
        if self.recipe != "frame":
            self._check_square()
        else:
            check_border_mode(self.border, self.channels)

    def _check_square(self) -> None:
        if self.recipe == "mnist-large-scale":
            check_border(str(self.border))
            if (self.mean, self.std) != ((0.0,), (1.0,)):
                raise ConfigError(
                    "images of MNIST Large Scale are not normalised; leave out mean and std, got "
                    f"{self.mean} and {self.std}"
                )
        elif self.border != "replicate":
            raise ConfigError(f"the recipe mirrored has no border, got {self.border!r}")
        if self.size[0] != self.size[1]:
            raise ConfigError(f"the recipe {self.recipe} requires a square size, got {self.size}")
        if (self.fit, self.view) != ("fill", "zoom"):
            raise ConfigError(
                f"fit and view require the recipe frame, got fit {self.fit} and view {self.view} "
                f"with the recipe {self.recipe}"
            )

    def __call__(
        self, images: Sequence[Tensor], scale: float = 1.0, canvas: int | None = None
    ) -> Tensor:
        """Transform uint8 images, each (C, H, W), into the input (B, C, *size) at a scale.

        With a `canvas`, the result is a square of this many pixels with the same centre, for
        networks whose windows extend past the input. Only the recipe "frame" supports it.
        """
        if len({image.shape for image in images}) == 1:
            return self._batch(torch.stack(list(images)), scale, canvas)
        return torch.cat([self._batch(image[None], scale, canvas) for image in images])

    def show(self, images: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        """Return the input at a scale with values of 0 to 1, for display."""
        shown = self(images, scale)
        if self.recipe == "mnist-large-scale":
            return ((shown / BACKGROUND - 1) / -2).clamp(0, 1)
        return denormalise(shown, self.mean, self.std)

    def check_scale(self, scale: float) -> None:
        """Raise a ConfigError if the view does not support the scale."""
        check_view(self.view, scale)

    def check(self, image: Tensor, scale: float) -> None:
        """Accept an image of any size at any scale."""

    def cropped_share(self, height: int, width: int) -> float:
        """Return the share of the area that is cropped from an image of this size at scale 1."""
        if self.recipe == "mnist-large-scale":
            return 0.0
        factor = self._factor(height, width)
        seen = (min(1.0, n / factor / m) for n, m in zip(self.size, (height, width), strict=True))
        return 1 - math.prod(seen)

    def to_dict(self) -> dict[str, Any]:
        """Convert the transform to a dictionary that can be serialised as JSON."""
        return asdict(self)

    def _factor(self, height: int, width: int) -> float:
        """Return the magnification at scale 1."""
        if self.recipe == "mirrored":
            return 1.0
        ratios = self.size[0] / height, self.size[1] / width
        return max(ratios) if self.fit == "fill" else min(ratios)

    def _batch(self, images: Tensor, scale: float, canvas: int | None) -> Tensor:
        images = images.float()
        if images.shape[1] == 3 and self.channels == 1:
            grey = images.new_tensor(GREY)
            images = torch.einsum("bchw,c->bhw", images, grey).unsqueeze(1)
        images = images.expand(-1, self.channels, -1, -1)
        if self.recipe == "mnist-large-scale":
            border = check_border(str(self.border))
            return rescale(images, scale, size=self.size[0], border=border)
        size = self.size if canvas is None else (canvas, canvas)
        factor = self._factor(*images.shape[-2:]) * (scale if self.view == "zoom" else 1.0)
        if self.recipe == "mirrored":
            resized = rescale_mirrored(images, factor, size=size[0]) / 255
        else:
            resized = zoom(images / 255, factor, size, self.border)
        if self.view == "resolution":
            resized = reduce_resolution(resized, scale)
        mean, std = (resized.new_tensor(v)[:, None, None] for v in (self.mean, self.std))
        return (resized - mean) / std


def denormalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return normalised images (B, C, H, W) with values of 0 to 1, for display."""
    means, stds = (images.new_tensor(v)[:, None, None] for v in (mean, std))
    return (images * stds + means).clamp(0, 1)


def _weights(length: int, factor: float, size: int, border: BorderMode) -> Tensor:
    """Return the (size, length) weights of one axis.

    With a constant border, rows that extend past the image sum to less than 1.
    """
    scales = torch.tensor([factor], dtype=torch.float64)
    return frame_matrices(scales, length, size, border if isinstance(border, str) else "zero")[0]
