"""Choose the transform for a model and its audit images."""

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from foveate.errors import ConfigError, FoveateError
from foveate.evaluation.audit.audited_images import AuditImages
from foveate.evaluation.audit.images import BorderMode, Fit, Recipe, Transform, View
from foveate.evaluation.audit.run_recipe import PhotoTransform, from_patches
from foveate.evaluation.curve import eval_mode
from foveate.evaluation.models import FRAME, Model
from foveate.evaluation.third_party import Classifier
from foveate.training.photos import windows_of

AnyTransform: TypeAlias = Transform | PhotoTransform


def choose_transform(
    model: Model,
    images: AuditImages,
    *,
    recipe: str | None = None,
    size: int | None = None,
    border: BorderMode | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    fit: str | None = None,
    view: str = "zoom",
) -> AnyTransform:
    """Choose the transform from images to the input of the model; arguments override the defaults.

    Runs with the recipe `photo` or `mirrored` use it, and CIFAR-10 uses `mirrored`. Other foveate
    networks, and sources other than folders, use MNIST Large Scale, so that results are comparable
    with `foveate evaluate`. Other models receive the resized images. The size defaults to the input
    size of the model, else to the size of the first image. The model is called once on zeros, so
    that wrong shapes are reported before the data is read.
    """
    image = images.first(1)[0]
    files = images.source.startswith(("folder:", "shards:"))
    if model.photo is not None and recipe in (None, "photo"):
        given = {"size": size, "mean": mean, "std": std, "fit": fit}
        return _own_transform(model, len(images.classes), given, cast(View, view), border)
    usual = "frame" if files and model.config is None else "large-scale"
    own = model.recipe
    if (own and own.name == "mirrored") or images.source.partition(":")[0] == "cifar10":
        usual = "mirrored"
    recipe = usual if recipe is None else recipe
    frame = (size, size) if size else _usual_frame(model, recipe, image)
    beyond = model.border if recipe == "large-scale" else "replicate"
    return Transform(
        size=frame,
        channels=_input_channels(model, frame, image.shape[0], len(images.classes)),
        recipe=cast(Recipe, recipe),
        border=beyond if border is None else border,
        mean=mean or (own.mean if own else model.mean),
        std=std or (own.std if own else model.std),
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
        raise ConfigError(
            f"{model.name} uses the recipe of its run; leave out --{named[0]}, or pass "
            "--recipe frame"
        )
    assert model.photo is not None and isinstance(model.net, nn.Module)
    seen: dict[str, Any] = {"view": view, "border": border}
    transform = PhotoTransform(recipe=model.photo, windows=windows_of(model.net), **seen)
    with torch.no_grad():
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
    if recipe != "frame":
        height = width = FRAME if recipe == "large-scale" else 2 * max(height, width)
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
    raise errors[0]
