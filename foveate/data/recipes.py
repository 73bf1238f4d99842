"""Recipes: the preprocessing that turns an image into a network input."""
# Shape letters: N images, C image channel, h w source pixels, H W pixels.

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from foveate.checks import check_fields, check_keys, check_range
from foveate.data.large_scale import Border, rescale
from foveate.data.mirrored import rescale_mirrored
from foveate.errors import ConfigError, DataError

RecipeName = Literal["mnist-large-scale", "photo", "mirrored"]
Transform = Callable[[Tensor], Tensor]
MAX_PIXELS = 1 << 24  # of a resized image; 200 MB in float32
MAX_BASE = 4096
INSTALL = "run pip install 'foveate[photos]', with torch and torchvision from the same index"
NO_SIZES = (1.0, 1.0)
CIFAR: dict[str, Any] = {
    "mean": (0.4914, 0.4822, 0.4465),  # of the 50,000 training images of CIFAR-10
    "std": (0.2470, 0.2435, 0.2616),
    "shift": 4.0,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The preprocessing of images, in training and in evaluation.

    ``mnist-large-scale`` is the paper's recipe (see `foveate.data.large_scale`); the other fields
    do not apply to it. ``photo`` resizes an image with antialiasing so that its short side has
    ``base`` pixels, scales its values to the range 0 to 1 and normalises them. It does not crop or
    pad, and it preserves the aspect ratio. In training, ``photo`` also augments the images: the
    fields ``flip``, ``shift``, ``sizes``, ``resolution`` and ``colour`` define how.

    ``mirrored`` is for colour images of one small size, such as CIFAR-10. It rescales an image into
    a frame that mirror images fill (see `foveate.data.mirrored`), and normalises it. In training,
    ``flip``, ``shift`` and ``sizes`` apply; ``shift`` is a whole number of frame pixels. The other
    fields do not apply. ``--recipe mirrored`` sets ``mean`` and ``std`` to those of CIFAR-10's
    training images, and ``shift`` to 4; in Python, pass them or call
    `foveate.data.recipes.find_recipe`.

    Args:
        name: ``mnist-large-scale``, ``photo`` or ``mirrored``.
        base: Short side of the resized image in pixels.
        mean: Per-channel mean (R, G, B) used for normalisation; ImageNet's by default.
        std: Per-channel standard deviation used for normalisation.
        flip: Whether to flip images horizontally in training, with probability 1/2.
        shift: Largest random offset of the window centre along each axis in training, in pixels of
            the resized image. Offsets are uniform; ``photo`` does not round them to whole pixels.
        sizes: Smallest and largest factor by which ``base``, or with ``mirrored`` the training
            scale, is multiplied in training. The factor is drawn log-uniformly for each image in
            each epoch; ``(1, 1)`` turns this off.
        resolution: Lowest relative resolution in training. With probability 1/2, an image is
            downsampled by a factor drawn log-uniformly between this value and 1, and upsampled to
            its size again. 1 turns this off.
        colour: Strength of random changes of brightness, contrast and saturation in training, as in
            torchvision's ``ColorJitter``; 0 turns this off.

    Raises:
        ConfigError: If a field is out of range.

    Examples:
        >>> recipe = Recipe(name="photo", base=160, flip=False)
        >>> transform = recipe.transform()
        >>> image = torch.zeros(3, 480, 640, dtype=torch.uint8)
        >>> transform(image).shape
        torch.Size([3, 160, 213])
    """

    name: RecipeName = "mnist-large-scale"
    base: int = 224
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    flip: bool = True
    shift: float = 12.0
    sizes: tuple[float, ...] = NO_SIZES
    resolution: float = 1.0
    colour: float = 0.0

    def __post_init__(self) -> None:
        for key in ("mean", "std", "sizes"):
            if isinstance(getattr(self, key), list):
                object.__setattr__(self, key, tuple(getattr(self, key)))
        check_fields(self)
        check_range("recipe.base", self.base, 1, MAX_BASE, f"1 to {MAX_BASE} pixels")
        check_range("recipe.shift", self.shift, 0, MAX_BASE, f"0 to {MAX_BASE} pixels")
        if self.name == "mirrored" and self.shift % 1:
            raise ConfigError(
                f"recipe.shift must be a whole number for the recipe mirrored, got {self.shift:g}"
            )
        for key in ("mean", "std"):
            if len(getattr(self, key)) != 3:
                raise ConfigError(
                    f"recipe.{key} must have 3 values (red, green, blue), "
                    f"got {len(getattr(self, key))}"
                )
        if min(self.std) <= 0:
            raise ConfigError(f"recipe.std must be above 0, got {min(self.std):g}")
        check_range("recipe.resolution", self.resolution, 1 / 64, 1, "1/64 to 1")
        check_range("recipe.colour", self.colour, 0, 1, "0 to 1")
        if len(self.sizes) != 2 or not 1 / 64 <= self.sizes[0] <= self.sizes[1] <= 64:
            raise ConfigError(
                f"recipe.sizes must be two factors from 1/64 to 64 in ascending order, "
                f"got {list(self.sizes)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values that JSON can store.

        Returns:
            A dictionary of the fields, with tuples as lists.
        """
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """Create a recipe from the output of `to_dict`.

        Args:
            values: Fields of the recipe; missing fields have their defaults.

        Returns:
            The recipe.

        Raises:
            ConfigError: If a field is unknown or out of range.
        """
        check_keys("a recipe", values, {field.name for field in fields(cls)})
        return cls(**values)

    def rescale(
        self,
        images: Tensor,
        scales: float | Tensor,
        *,
        size: int,
        border: Border = "replicate",
    ) -> Tensor:
        """Rescale images to frames of one size, with ``mnist-large-scale`` or ``mirrored``.

        The computation runs on the device of ``images``.

        Args:
            images: Images with values from 0 to 255, of any dtype; with ``mirrored``, in colour.
            scales: One scale for all images, or one per image.
            size: Width and height of the output frame in pixels.
            border: Values outside the frame when smoothing; ``mirrored`` ignores it.

        Shape:
            - images: ``(N, C, h, w)``
            - scales: a float, or ``(N,)``
            - output: ``(N, C, size, size)``

        Returns:
            Network inputs of dtype float32.

        Raises:
            DataError: If the images do not have shape ``(N, C, h, w)``, or are not in colour.
            ConfigError: If the recipe is ``photo``, a scale, the size or the border is invalid, or
                memory is insufficient.

        Examples:
            >>> recipe = find_recipe("mirrored")
            >>> recipe.rescale(torch.zeros(2, 3, 32, 32), 0.5, size=64).shape
            torch.Size([2, 3, 64, 64])
        """
        if self.name == "photo":
            raise ConfigError("the recipe photo does not rescale to frames; use its transform")
        if self.name == "mnist-large-scale":
            return rescale(images, scales, size=size, border=border)
        if images.ndim == 4 and images.shape[1] != 3:
            raise DataError(
                f"the recipe mirrored needs colour images, got {images.shape[1]} channels; use the "
                "recipe mnist-large-scale"
            )
        return self.normalise(rescale_mirrored(images, scales, size=size))

    def at_scale(self, scale: float) -> "Recipe":
        """Return the recipe ``photo`` that makes images larger by a factor.

        Args:
            scale: Factor of ``base``.

        Returns:
            The recipe with another ``base``, of at least one pixel.

        Raises:
            ConfigError: If images would have a short side of more than 4,096 pixels.
        """
        if (base := max(1, round(self.base * scale))) > MAX_BASE:
            raise ConfigError(
                f"at scale {scale:g} the short side is {base} pixels, above the limit of {MAX_BASE}"
                "; use smaller scales"
            )
        return replace(self, base=base)

    def transform(self, share: float = 1.0) -> Transform:
        """Return the evaluation transform of the recipe ``photo``.

        Args:
            share: Fraction of the pixels along each axis, as in `resize`.

        Returns:
            A function that maps a uint8 image ``(C, H, W)``, where C is 1 or 3, to float32
            ``(3, H', W')`` whose short side is ``base``. It raises a DataError if the result would
            have more than 2^24 pixels.

        Raises:
            ConfigError: If the recipe is not ``photo``, or torchvision is not installed.
        """
        resize = self.resize(share=share)
        return lambda picture: self.normalise(resize(picture))

    def resize(self, training: bool = False, share: float = 1.0) -> Transform:
        """Return the first part of the transform: resizing and, in training, augmentation.

        Args:
            training: Whether to augment. Random numbers come from PyTorch's default generator.
            share: Fraction of the pixels along each axis. Resized images are reduced by this
                factor, with antialiasing, and enlarged again.

        Returns:
            A function that maps a uint8 image ``(C, H, W)`` to uint8 ``(3, H', W')``.

        Raises:
            ConfigError: If the recipe is not ``photo``, or torchvision is not installed.
        """
        if self.name != "photo":
            raise ConfigError(f"the recipe {self.name} has no transform; use the recipe photo")
        v2 = _transforms()
        after = self._augmentation(v2) if training else v2.Identity()

        def resize(picture: Tensor) -> Tensor:
            base = self.base
            if training and self.sizes != NO_SIZES:
                base = max(1, round(base * _draw_factor(*self.sizes)))
            check_resized(picture, base)
            picture = picture.expand(3, -1, -1)
            if training and self.resolution < 1 and bool(torch.rand(()) < 0.5):
                reduced = max(1, round(base * _draw_factor(self.resolution, 1.0)))
                picture = _resize(picture, [reduced])
            resized: Tensor = after(_resize(picture, [base]))
            if share == 1:
                return resized
            fewer = [max(1, round(share * length)) for length in resized.shape[-2:]]
            return _resize(_resize(resized, fewer), list(resized.shape[-2:]))

        return resize

    def _augmentation(self, v2: Any) -> Any:
        steps = [v2.RandomHorizontalFlip(0.5)] if self.flip else []
        if self.colour:
            steps.append(v2.ColorJitter(self.colour, self.colour, self.colour))
        return v2.Compose(steps) if steps else v2.Identity()

    def normalise(self, pictures: Tensor) -> Tensor:
        """Normalise images with ``mean`` and ``std``: the second part of the transform.

        Args:
            pictures: Images with values from 0 to 255, shape ``(..., 3, H, W)``. Images of dtype
                float32 can be overwritten.

        Returns:
            Normalised images of dtype float32, contiguous, same shape.
        """
        factor, offset = _normalisation(self.mean, self.std, pictures.device)
        # Contiguous, because some processors round the sums over other layouts differently.
        # One multiplication and one subtraction take 0.74 of the time of torchvision on a CPU.
        values = pictures.to(torch.float32, memory_format=torch.contiguous_format)
        return values.mul_(factor[:, None, None]).sub_(offset[:, None, None])

    def draw_shift(self) -> Tensor:
        """Draw a random offset of the window centre from PyTorch's default generator.

        Returns:
            Offset (y, x) in pixels of the resized image, dtype float64, shape ``(2,)``.
        """
        return (2 * torch.rand(2, dtype=torch.float64) - 1) * self.shift


@cache  # a copy to a GPU waits for all that it computes
def _normalisation(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset of each channel, (3,), for values from 0 to 255."""
    means, stds = (torch.tensor(v, dtype=torch.float32, device="cpu") for v in (mean, std))
    return (1 / (255 * stds)).to(device), (means / stds).to(device)


def _draw_factor(low: float, high: float) -> float:
    """Draw a factor log-uniformly from PyTorch's default generator."""
    first, last = math.log(low), math.log(high)
    return math.exp(first + (last - first) * float(torch.rand(())))


def surround(picture: Tensor, side: float, border: str | float | tuple[float, ...]) -> Tensor:
    """Extend a uint8 image (C, H, W) evenly on all sides to fill a centred square of `side` pixels.

    The `border` is "reflect", "replicate", or a colour: one number from 0 to 1 or one per channel.
    """
    more = [(0, 0), *((max(0, math.ceil((side - n) / 2)),) * 2 for n in picture.shape[1:])]
    if isinstance(border, str):
        names = {"reflect": "reflect", "replicate": "edge"}
        return torch.from_numpy(np.pad(picture.numpy(), more, mode=cast(Any, names[border])))
    colour = torch.tensor(border).mul(255).round().clamp(0, 255).to(torch.uint8)
    (_, (top, _), (left, _)), (height, width) = more, picture.shape[1:]
    shape = len(picture), height + 2 * top, width + 2 * left
    found = colour.reshape(-1, 1, 1).expand(shape).clone()
    found[:, top : top + height, left : left + width] = picture
    return found


def check_resized(picture: Tensor, base: int) -> None:
    """Raise a DataError if an image is so narrow that the resized one would not fit in memory."""
    height, width = picture.shape[-2:]
    long = base * max(height, width) // min(height, width)
    if base * long > MAX_PIXELS:
        raise DataError(
            f"has {width}x{height} pixels: with a short side of {base} its long side "
            f"would have {long}; crop or remove it"
        )


def find_recipe(name: str) -> Recipe:
    """Return a recipe by name, with its usual settings.

    Args:
        name: ``mnist-large-scale``, ``photo`` or ``mirrored``. The last one gets the mean and
            standard deviation of CIFAR-10's training images, and a shift of 4 pixels.

    Returns:
        The recipe.

    Raises:
        ConfigError: If the name is unknown.

    Examples:
        >>> find_recipe("mirrored").shift
        4.0
    """
    if name not in (names := get_args(RecipeName)):
        raise ConfigError(f"unknown recipe {name!r}; use one of {', '.join(names)}")
    usual = CIFAR if name == "mirrored" else {}
    return Recipe(name=cast(RecipeName, name), **usual)


def _resize(picture: Tensor, size: list[int]) -> Tensor:
    if 1 in size:  # torch fails if it reduces colour planes to one pixel, and not if they alternate
        picture = picture.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return cast(Tensor, _transforms().functional.resize(picture, size))


def _transforms() -> Any:
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the recipe photo needs torchvision ({reason}); {INSTALL}") from None
    return v2
