"""Recipes: how a picture becomes what a network sees."""
# Shape letters: C image channel, H W pixels.

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from foveate.checks import check_fields, check_keys
from foveate.errors import ConfigError, DataError

RecipeName = Literal["mnist-large-scale", "photo"]
Transform = Callable[[Tensor], Tensor]
MAX_PIXELS = 1 << 24  # of a picture brought to its base size; 200 MB as float32
MAX_BASE = 4096


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a picture becomes what a network sees, in training and afterwards.

    `mnist-large-scale` is the paper's recipe (see `foveate.data.large_scale`); the other fields do
    not apply to it. `photo` resizes the picture, with antialiasing, until its short side has `base`
    pixels, maps its values to 0 to 1 and normalises them. No frame is needed and nothing is
    cropped: any aspect ratio is kept. In training, `photo` also flips every other picture at random
    and moves the centre of its windows. With `sizes` it shows pictures at random sizes.

    Args:
        name: `mnist-large-scale` or `photo`.
        base: Short side of a picture in pixels after resizing.
        mean: Mean per channel (R, G, B) that is subtracted; ImageNet's by default.
        std: Standard deviation per channel used for normalisation.
        flip: Whether pictures are flipped horizontally in training, with a probability of 1/2.
        shift: Largest distance in pixels of the resized picture by which the centre of the windows
            moves along each axis in training; uniform, and not rounded to whole pixels.
        sizes: Smallest and largest factor of `base` in training, drawn log-uniformly for each
            picture; (1, 1) shows all at `base`.
        resolution: Smallest share of its resolution that a picture keeps in training: every other
            picture, at random, is reduced by a factor drawn log-uniformly from here to 1, and
            enlarged again to its size. 1 reduces none.
        colour: Strength of the changes of brightness, contrast and saturation in training, as in
            torchvision's `ColorJitter`; 0 for none.

    Raises:
        ConfigError: If a field is out of range.

    Example:
        >>> Recipe(name="photo", base=160, flip=False)
    """

    name: RecipeName = "mnist-large-scale"
    base: int = 224
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    flip: bool = True
    shift: float = 12.0
    sizes: tuple[float, ...] = (1.0, 1.0)
    resolution: float = 1.0
    colour: float = 0.0

    def __post_init__(self) -> None:
        for key in ("mean", "std", "sizes"):
            if isinstance(getattr(self, key), list):
                object.__setattr__(self, key, tuple(getattr(self, key)))
        check_fields(self)
        if not 1 <= self.base <= MAX_BASE:
            raise ConfigError(f"recipe.base must be 1 to {MAX_BASE} pixels, got {self.base}")
        if not 0 <= self.shift <= MAX_BASE:
            raise ConfigError(f"recipe.shift must be 0 to {MAX_BASE} pixels, got {self.shift:g}")
        for key in ("mean", "std"):
            if len(getattr(self, key)) != 3:
                raise ConfigError(
                    f"recipe.{key} must be 3 numbers, for red, green and blue, "
                    f"got {len(getattr(self, key))}"
                )
        if min(self.std) <= 0:
            raise ConfigError(f"recipe.std must be above 0, got {min(self.std):g}")
        if not 1 / 64 <= self.resolution <= 1:
            raise ConfigError(f"recipe.resolution must be 1/64 to 1, got {self.resolution:g}")
        if not 0 <= self.colour <= 1:
            raise ConfigError(f"recipe.colour must be 0 to 1, got {self.colour:g}")
        if len(self.sizes) != 2 or not 1 / 64 <= self.sizes[0] <= self.sizes[1] <= 64:
            raise ConfigError(
                f"recipe.sizes must be two factors from 1/64 to 64, the smaller first, "
                f"got {list(self.sizes)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """Read what `to_dict` wrote."""
        check_keys("a recipe", values, {field.name for field in fields(cls)})
        return cls(**values)

    def transform(self) -> Transform:
        """Build the transform of the recipe `photo` outside training.

        Returns:
            A function from uint8 ``(C, H, W)``, with C of 1 or 3, to float32 ``(3, H', W')`` whose
            short side is `base`. It raises a DataError for a picture that would have more than
            `MAX_PIXELS` pixels.

        Raises:
            ConfigError: If the recipe has no transform, or torchvision is not installed.
        """
        resize = self.resize()
        return lambda picture: self.normalise(resize(picture))

    def resize(self, training: bool = False) -> Transform:
        """Build the first part of the transform: uint8 ``(C, H, W)`` to uint8 ``(3, H', W')``.

        Args:
            training: Whether to augment, with draws from torch's default generator.
        """
        if self.name != "photo":
            raise ConfigError(f"the recipe {self.name} has no transform; use the recipe photo")
        v2 = _transforms()
        after = self._augmentation(v2) if training else v2.Identity()

        def resize(picture: Tensor) -> Tensor:
            base = self._draw_base() if training else self.base
            check_resized(picture, base)
            picture = picture.expand(3, -1, -1)
            if training and self.resolution < 1 and bool(torch.rand(()) < 0.5):
                share = math.exp(_draw(math.log(self.resolution), 0.0))
                picture = v2.functional.resize(picture, [max(1, round(base * share))])
            found: Tensor = after(v2.functional.resize(picture, [base]))
            return found

        return resize

    def _augmentation(self, v2: Any) -> Any:
        steps = [v2.RandomHorizontalFlip(0.5)] if self.flip else []
        if self.colour:
            steps.append(v2.ColorJitter(self.colour, self.colour, self.colour))
        return v2.Compose(steps) if steps else v2.Identity()

    def normalise(self, pictures: Tensor) -> Tensor:
        """Normalise uint8 pictures ``(..., 3, H, W)``, the second part of the transform.

        One product and one difference take 0.74 of the time of torchvision's functions on a CPU.
        """
        values = pictures.to(torch.float32)
        mean, std = (values.new_tensor(v)[:, None, None] for v in (self.mean, self.std))
        return values.mul_(1 / (255 * std)).sub_(mean / std)

    def _draw_base(self) -> int:
        low, high = self.sizes
        if low == high == 1:
            return self.base
        return max(1, round(self.base * math.exp(_draw(math.log(low), math.log(high)))))

    def draw_shift(self) -> Tensor:
        """Draw a shift (y, x) of the window centre from torch's default generator, in float64."""
        return (2 * torch.rand(2, dtype=torch.float64) - 1) * self.shift


def _draw(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def check_resized(picture: Tensor, base: int) -> None:
    """Refuse a picture so narrow that its long side would not fit in memory."""
    height, width = picture.shape[-2:]
    long = base * max(height, width) // min(height, width)
    if base * long > MAX_PIXELS:
        raise DataError(
            f"has {width}x{height} pixels: with a short side of {base} its long side "
            f"would have {long}; crop or remove it"
        )


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name with its default settings."""
    if name not in (names := get_args(RecipeName)):
        raise ConfigError(f"there is no recipe {name!r}; use {' or '.join(names)}")
    return Recipe(name=cast(RecipeName, name))


def _transforms() -> Any:
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the recipe photo needs torchvision ({reason}): pip install 'foveate[photos]'"
        ) from None
    return v2
