"""Choose the transform for a model and its audit images."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from foveate.data.recipes import Recipe as RunRecipe
from foveate.data.recipes import check_resized, surround
from foveate.errors import ConfigError, FoveateError
from foveate.evaluation.audit.audited_images import AuditImages
from foveate.evaluation.audit.images import (
    BorderMode,
    Fit,
    Recipe,
    Transform,
    View,
    check_border_mode,
    check_view,
    denormalise,
)
from foveate.evaluation.curve import eval_mode
from foveate.evaluation.models import FRAME, Model, frame_of
from foveate.evaluation.third_party import Classifier
from foveate.execution import patches
from foveate.execution.plan import Prepared, outputs
from foveate.execution.precision import cast as cast_to
from foveate.models.channels import ScaleChannels
from foveate.training.photos import windows_of

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

    recipe: RunRecipe
    windows: ScaleChannels
    view: View = "zoom"
    border: BorderMode | None = None

    def __post_init__(self) -> None:
        check_view(self.view, 1.0)
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
        return denormalise(found, self.recipe.mean, self.recipe.std)

    def check_scale(self, scale: float) -> None:
        """Raise a ConfigError if the view does not support the scale or images become too large."""
        check_view(self.view, scale)
        self._at_scale(scale)

    def check(self, image: Tensor, scale: float) -> None:
        """Raise a DataError if an image is too large at a scale."""
        check_resized(image, self._at_scale(scale).base)

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

    def _at_scale(self, scale: float) -> RunRecipe:
        return self.recipe.at_scale(scale) if self.view == "zoom" else self.recipe

    def _resized(self, image: Tensor, scale: float) -> Tensor:
        """Return the resized image as a batch of one, (1, 3, H, W)."""
        share = 1.0 if self.view == "zoom" else scale
        resized = self._at_scale(scale).resize(share=share)(image)
        if self.border is not None:
            resized = surround(resized, frame_of(self.windows), self.border)
        return self.recipe.normalise(resized)[None]


AnyTransform: TypeAlias = Transform | PhotoTransform


def choose_transform(
    model: Model,
    images: AuditImages,
    *,
    size: int | None = None,
    border: BorderMode | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    fit: str | None = None,
    view: str = "zoom",
) -> AnyTransform:
    """Choose the transform from images to the input of the model; arguments override the defaults.

    Runs with the recipe `photo` or `mirrored` use it, and CIFAR-10 uses `mirrored`. Other foveate
    networks, and sources other than folders and tar files, use MNIST Large Scale, so that results
    are comparable with `foveate evaluate`. Other models receive the resized images of folders and
    tar files. The size defaults to the input size of the model, else to the size of the first
    image. The model is called once on zeros, so that wrong shapes are reported before the data is
    read.
    """
    image = images.first(1)[0]
    if model.photo is not None and model.config is not None:
        given = {"size": size, "mean": mean, "std": std, "fit": fit}
        return _own_transform(model, len(images.classes), given, cast(View, view), border)
    own, kind = model.recipe, images.source.partition(":")[0]
    recipe: Recipe = "mnist-large-scale"
    if (own and own.name == "mirrored") or kind == "cifar10":
        recipe = "mirrored"
    elif kind in ("folder", "shards") and model.config is None and own in (None, model.photo):
        recipe = "frame"
    frame = (size, size) if size else _usual_frame(model, recipe, image)
    large_scale = recipe == "mnist-large-scale"
    normal: Any = Transform if large_scale else own or model
    beyond = model.border if large_scale else "replicate"
    return Transform(
        size=frame,
        channels=_input_channels(model, frame, image.shape[0], len(images.classes)),
        recipe=recipe,
        border=beyond if border is None else border,
        mean=mean or normal.mean,
        std=std or normal.std,
        fit=cast(Fit, fit or "fill"),
        view=cast(View, view),
    )


def _own_transform(
    model: Model,
    classes: int,
    given: Mapping[str, object],
    view: View,
    border: BorderMode | None,
) -> PhotoTransform:
    """Return the transform of a run on photographs, after one call of the model on zeros."""
    if named := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{model.name} uses the recipe of its run; leave out --{named[0]}")
    assert model.photo is not None and isinstance(model.net, nn.Module)
    seen: dict[str, Any] = {"view": view, "border": border}
    transform = PhotoTransform(recipe=model.photo, windows=windows_of(model.net), **seen)
    empty = torch.zeros(2, 3, 2, 2, device=model.device)
    classifier_for(model, transform, classes)(transform.windows.patches(empty))
    return transform


def classifier(model: Model, classes: int | None = None, batch: int = 64) -> Classifier:
    """Wrap the model in a `Classifier` of its fixed batch size, or of `batch` images."""
    fixed = model.shape[0]
    return Classifier(model.net, classes, fixed or batch, exact=fixed is not None)


def classifier_for(
    model: Model, transform: AnyTransform, classes: int, batch: int = 64
) -> Classifier:
    """Wrap the model in a `Classifier` that accepts the output of the transform.

    The transform of a run on photographs returns patches; other transforms return images.
    """
    if isinstance(transform, PhotoTransform):
        return Classifier(from_patches(model), classes, batch)
    return classifier(model, classes, batch)


def _usual_frame(model: Model, recipe: str, image: Tensor) -> tuple[int, int]:
    height, width = image.shape[-2:]
    if recipe == "frame" and model.photo is not None:
        height = width = model.photo.base
    elif recipe != "frame":
        height = width = FRAME if recipe == "mnist-large-scale" else 2 * max(height, width)
    return model.shape[2] or height, model.shape[3] or width


def _input_channels(model: Model, size: tuple[int, int], own: int, classes: int) -> int:
    """Return the number of input channels, 1 or 3, that the model accepts; try `own` first."""
    net, errors = classifier(model, classes), []
    with eval_mode(net):
        for channels in [model.shape[1]] if model.shape[1] else [own, 4 - own]:
            try:
                net(torch.zeros(2, channels, *size, device=model.device))
                return channels
            except FoveateError as error:
                errors.append(error)
    if of_outputs := [error for error in errors if error.__cause__ is None]:
        raise of_outputs[0]
    # One of two failures can be about the number of channels, and the other about the size.
    raise ConfigError("; ".join(map(str, errors)))


def from_patches(model: Model) -> Callable[[Tensor], Tensor]:
    """Return the function from patches (B, S, C, P, P) to logits (B, K), in the run's precision."""
    net = model.net
    assert isinstance(net, nn.Module)

    @torch.no_grad()
    def classify(cut: Tensor) -> Tensor:
        with cast_to(model.precision, cut.device):
            return outputs(net, Prepared(patches, (cut,))).logits.float()

    return classify
