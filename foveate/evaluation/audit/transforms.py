"""The choice of a transform for a model and the images that it is audited on."""

from collections.abc import Mapping
from typing import TypeAlias, cast

import torch
from torch import Tensor

from foveate.errors import ConfigError, FoveateError
from foveate.evaluation.audit.audited_images import AuditImages
from foveate.evaluation.audit.images import Beyond, Fit, Recipe, Transform, View
from foveate.evaluation.audit.measure import measuring
from foveate.evaluation.audit.run_recipe import PhotoTransform, from_patches, photo_transform
from foveate.evaluation.foreign import Classifier
from foveate.evaluation.models import FRAME, Model

AnyTransform: TypeAlias = Transform | PhotoTransform


def choose_transform(
    model: Model,
    images: AuditImages,
    *,
    recipe: str | None = None,
    size: int | None = None,
    border: Beyond | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    fit: str | None = None,
    view: str = "zoom",
) -> AnyTransform:
    """Choose how the images are turned into the model's input, where it is not given.

    Runs on photographs get their own recipe, other networks of this package, and sources other than
    folders, MNIST Large Scale, so that the results compare with `foveate evaluate`; other models
    get the images themselves. The size is that of the model's input, else of the first image. The
    model is called once on empty images, so that wrong shapes are reported before the data is read.
    """
    image = images.first(1)[0]
    folder = images.source.startswith("folder:")
    if model.recipe is not None and recipe in (None, "photo"):
        given = {"size": size, "border": border, "mean": mean, "std": std, "fit": fit}
        return _own_transform(model, len(images.classes), given, cast(View, view))
    usual = "frame" if folder and model.config is None else "large-scale"
    recipe = usual if recipe is None else recipe
    own = model.recipe
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
    model: Model, classes: int, given: Mapping[str, object], view: View
) -> PhotoTransform:
    """The transform of a run on photographs, tried on empty patches."""
    if named := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{model.name} prepares pictures by the recipe of the run: leave out --{named[0]}, or "
            "pass --recipe frame"
        )
    transform = photo_transform(model, view)
    with torch.no_grad():
        empty = torch.zeros(2, 3, 2, 2, device=model.device)
        classifier_for(model, transform, classes)(transform.windows.patches(empty))
    return transform


def classifier(model: Model, classes: int | None = None, batch: int = 64) -> Classifier:
    """Call the model in batches, of the one size that a graph with a fixed batch size takes."""
    fixed = model.shape[0]
    return Classifier(model.net, classes, fixed or batch, exact=fixed is not None)


def classifier_for(
    model: Model, transform: AnyTransform, classes: int, batch: int = 64
) -> Classifier:
    """Call the model on what the transform makes: images, or patches for a run on photographs."""
    if isinstance(transform, PhotoTransform):
        return Classifier(from_patches(model), classes, batch)
    return classifier(model, classes, batch)


def _usual_frame(model: Model, recipe: str, image: Tensor) -> tuple[int, int]:
    height, width = image.shape[-2:]
    if recipe == "large-scale":
        height = width = FRAME
    return model.shape[2] or height, model.shape[3] or width


def _input_channels(model: Model, size: tuple[int, int], own: int, classes: int) -> int:
    """The number of image channels that the model takes: `own`, or the other of 1 and 3."""
    net, errors = classifier(model, classes), []
    with measuring(net):
        for channels in [model.shape[1]] if model.shape[1] else [own, 4 - own]:
            try:
                net(torch.zeros(2, channels, *size, device=model.device))
                return channels
            except FoveateError as error:
                errors.append(error)
    raise errors[0]
