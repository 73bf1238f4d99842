"""Audit of a run on photographs, with the recipe and the windows of the run."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foveate.data.recipes import MAX_BASE, Recipe, check_resized, surround
from foveate.errors import ConfigError
from foveate.evaluation.audit.images import BorderMode, View, check_border_mode, check_view
from foveate.evaluation.models import Model, frame_of
from foveate.execution import patches
from foveate.execution.plan import Prepared, outputs
from foveate.execution.precision import cast
from foveate.models.channels import ScaleChannels

SHOWN = 160  # largest side of displayed images in pixels


@dataclass(frozen=True, kw_only=True, eq=False)
class PhotoTransform:
    """Transform from images to the patches of a run on photographs, as in `foveate evaluate`.

    Attributes:
        recipe: Recipe of the run.
        windows: Scale channels without a backbone, which extract the patches.
        view: At scale s, "zoom" resizes the short side of an image to s times the base size.
            "resolution" resizes it to the base size, then reduces it to s times the pixels along
            each axis and enlarges it again, both with antialiasing.
        border: What windows see outside the image; None for the padding of the run.
    """

    recipe: Recipe
    windows: ScaleChannels
    view: View = "zoom"
    border: BorderMode | None = None

    def __post_init__(self) -> None:
        check_view(self.view, 1.0)
        if self.border is not None:
            check_border_mode(self.border)
        self.recipe.transform()

    def __call__(self, images: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        """Extract patches ``(B, S, 3, P, P)`` at a scale from images, each ``(C, H, W)`` uint8."""
        cut = [self.windows.patches(self._resized(image.cpu(), scale)) for image in images]
        return torch.cat(cut).to(images[0].device)

    @property
    def largest(self) -> float:
        """Side of the largest window in pixels."""
        return self.windows.size * self.windows.scales[-1]

    def show(self, images: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        """Return the largest window ``(B, 3, H, W)`` at a scale, with values of 0 to 1."""
        side = min(SHOWN, math.ceil(self.largest))
        options: dict[str, Any] = {"padding": self.windows.padding, "antialias": True}
        whole = ScaleChannels(nn.Identity(), [self.largest / side], side, **options)
        found = replace(self, windows=whole)(images, scale)[:, 0]
        mean, std = (
            found.new_tensor(v)[:, None, None] for v in (self.recipe.mean, self.recipe.std)
        )
        return (found * std + mean).clamp(0, 1)

    def check_scale(self, scale: float) -> None:
        """Raise a ConfigError if the view does not support the scale or images become too large."""
        check_view(self.view, scale)
        if (base := self._base(scale)) > MAX_BASE:
            raise ConfigError(
                f"at scale {scale:g} the short side is {base} pixels, above the limit of {MAX_BASE}"
                "; use smaller scales"
            )

    def check(self, image: Tensor, scale: float) -> None:
        """Raise a DataError if an image is too large at a scale."""
        check_resized(image, self._base(scale))

    def cropped_share(self, height: int, width: int) -> float:
        """Return the share of an image of this size outside the largest window at scale 1."""
        factor = self.recipe.base / min(height, width)
        seen = (min(1.0, self.largest / factor / length) for length in (height, width))
        return 1 - math.prod(seen)

    def to_dict(self) -> dict[str, Any]:
        """Convert the transform to a dictionary that can be serialised as JSON."""
        net, recipe = self.windows, self.recipe
        return {
            "recipe": recipe.name,
            "base": recipe.base,
            "mean": list(recipe.mean),
            "std": list(recipe.std),
            "view": self.view,
            "windows": [net.size * scale for scale in net.scales],
            "size": net.size,
            "padding": net.padding if self.border is None else self.border,
            "antialias": net.antialias,
        }

    def _base(self, scale: float) -> int:
        return max(1, round(self.recipe.base * scale)) if self.view == "zoom" else self.recipe.base

    def _resized(self, image: Tensor, scale: float) -> Tensor:
        """Return the resized image as a batch of one, (1, 3, H, W)."""
        share = 1.0 if self.view == "zoom" else scale
        resized = replace(self.recipe, base=self._base(scale)).resize(share=share)(image)
        if self.border is not None:
            resized = surround(resized, frame_of(self.windows), self.border)
        return self.recipe.normalise(resized)[None]


def from_patches(model: Model) -> Callable[[Tensor], Tensor]:
    """Return the function from patches (B, S, C, P, P) to logits (B, K), in the run's precision."""
    net = model.net
    assert isinstance(net, nn.Module)

    @torch.no_grad()
    def classify(cut: Tensor) -> Tensor:
        with cast(model.precision, cut.device):
            return outputs(net, Prepared(patches, (cut,))).logits.float()

    return classify
