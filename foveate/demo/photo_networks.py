"""Networks that the photograph page compares, and their predictions."""
# Shape letters: S scale channel, C image channel, H W pixels, P patch pixels, K classes.

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.data.recipes import Recipe
from foveate.demo.networks import PageNetwork
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import TIMM, Model
from foveate.evaluation.predict import Prediction, to_prediction
from foveate.execution import patches
from foveate.models.channels import ScaleChannels
from foveate.models.wrap import wrap
from foveate.training.backbones import fixed_size

SIZE = 160  # patch size in pixels for timm models that accept any size


class PhotoView(NamedTuple):
    """The prediction of a network for a photograph, and the patches (S, C, P, P) that it saw."""

    network: PageNetwork
    prediction: Prediction
    patches: Tensor


def to_photo_networks(models: Sequence[Model]) -> list[PageNetwork]:
    """Prepare models for the page; add a whole-frame baseline if there is only one."""
    found = [_network(model) for model in models]
    base = recipe_of(found[0]).base
    for model, network in zip(models, found, strict=True):
        if recipe_of(network).base != base:
            raise ConfigError(
                f"{models[0].name} and {model.name} need images with short sides of "
                f"{base} and {recipe_of(network).base} pixels; choose matching networks"
            )
    network, count = found[0], len(found[0].windows)
    if len(found) > 1 or count == 1:
        titles = [network.title for network in found]
        return [n if titles.count(n.title) == 1 else replace(n, title=n.model.name) for n in found]
    return [_on_whole_frame(network), replace(network, title=f"{network.title}, {count} channels")]


def recipe_of(network: PageNetwork) -> Recipe:
    """Return the preprocessing of a network for photographs."""
    assert network.model.photo is not None
    return network.model.photo


def _network(model: Model) -> PageNetwork:
    if model.name.startswith(TIMM):
        return _of_timm(model)
    return PageNetwork(title=Path(model.name).name or model.name, model=model)


def _of_timm(model: Model) -> PageNetwork:
    """Wrap a timm model in scale channels without changing its weights."""
    net: Any = model.net
    if model.shape[1] != 3 or net.num_classes < 1:
        raise ConfigError(f"{model.name} is not a classifier of RGB images; choose another model")
    recipe = Recipe(name="photo", mean=model.mean, std=model.std)
    name = model.name.removeprefix(TIMM)
    size = model.size if fixed_size(name) else SIZE
    wrapped = wrap(net, recipe.base / 4, 2 * recipe.base, size=size, pool="logsumexp").eval()
    inside = replace(model, net=wrapped, recipe=recipe)
    return PageNetwork(title=name, model=inside)


def _on_whole_frame(network: PageNetwork) -> PageNetwork:
    """Build a baseline: the backbone with the same weights on the largest window only."""
    net = network.model.net
    assert isinstance(net, ScaleChannels)
    plain = ScaleChannels(
        net.backbone, net.scales[-1:], net.size, padding=net.padding, antialias=net.antialias
    )
    model = replace(network.model, net=plain.eval())
    return PageNetwork(title=f"{network.title}, whole frame", model=model)


@torch.no_grad()
def predict_photo(
    networks: Sequence[PageNetwork],
    picture: Tensor,
    scale: float,
    shift: tuple[float, float] = (0.0, 0.0),
) -> list[PhotoView]:
    """Classify an image with all networks, preprocessed as in `foveate evaluate`.

    Args:
        networks: The networks.
        picture: uint8 image ``(C, H, W)``.
        scale: Short side of the resized image, relative to the base size of the recipe.
        shift: Translation (y, x) of the resized image in pixels.

    Returns:
        One prediction per network.

    Raises:
        DataError: If the image is too narrow, or a network returns non-finite logits.
    """
    recipes = {recipe_of(network) for network in networks}
    images = {recipe: _resized(picture, recipe, scale) for recipe in recipes}
    return [_predict(network, images[recipe_of(network)], shift) for network in networks]


def _resized(picture: Tensor, recipe: Recipe, scale: float) -> Tensor:
    try:
        return recipe.at_scale(scale).transform()(picture).unsqueeze(0)
    except DataError as error:
        raise DataError(f"the image {error}") from None


def _predict(network: PageNetwork, image: Tensor, shift: tuple[float, float]) -> PhotoView:
    net, centres = network.model.net, None
    assert isinstance(net, ScaleChannels)
    if any(shift):
        middle = torch.tensor(image.shape[-2:], dtype=torch.float64) / 2
        centres = (middle - torch.tensor(shift, dtype=torch.float64)).unsqueeze(0)
    cut = net.patches(image, centres)
    prediction = to_prediction(network.model, patches.outputs(net, (cut,)))
    return PhotoView(network, prediction, cut[0])
