"""Networks that the photograph page compares, and their predictions."""
# Shape letters: S scale channel, C image channel, H W pixels, P patch pixels, K classes.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate.data.recipes import Recipe
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import TIMM, Model
from foveate.execution import patches
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import strongest_channel
from foveate.models.wrap import wrap
from foveate.training.backbones import fixed_size

SIZE = 160  # patch size in pixels for timm models that accept any size


@dataclass(frozen=True, kw_only=True, eq=False)
class PhotoNetwork:
    """A network of the photograph page.

    Attributes:
        title: Name shown on the page.
        net: The network.
        recipe: Preprocessing of the images.
        classes: Class names.
        source: Data source of the run; empty for a network without a run.
    """

    title: str
    net: ScaleChannels
    recipe: Recipe
    classes: tuple[str, ...]
    source: str = ""

    @property
    def windows(self) -> tuple[float, ...]:
        """Window sides in pixels of the resized image."""
        return tuple(self.net.size * scale for scale in self.net.scales)


@dataclass(frozen=True, kw_only=True, eq=False)
class PhotoPrediction:
    """Prediction of one network for a photograph.

    Attributes:
        network: The network.
        probabilities: Class probabilities, ``(K,)``.
        strengths: Logit of the predicted class in each channel.
        channel: Index of the strongest channel.
        patches: Input patches of the channels, ``(S, C, P, P)``.
    """

    network: PhotoNetwork
    probabilities: Tensor
    strengths: tuple[float, ...]
    channel: int
    patches: Tensor

    @property
    def label(self) -> int:
        """Predicted class index."""
        return int(self.probabilities.argmax())


def to_photo_networks(models: Sequence[Model]) -> list[PhotoNetwork]:
    """Prepare models for the page; add a whole-frame baseline if there is only one."""
    found = [_network(model) for model in models]
    for model, network in zip(models, found, strict=True):
        if network.recipe.base != found[0].recipe.base:
            raise ConfigError(
                f"{models[0].name} and {model.name} need images with short sides of "
                f"{found[0].recipe.base} and {network.recipe.base} pixels; choose matching networks"
            )
    if len(found) > 1 or len(found[0].net.scales) == 1:
        titles = [network.title for network in found]
        return [
            n if titles.count(n.title) == 1 else replace(n, title=model.name)
            for n, model in zip(found, models, strict=True)
        ]
    network, count = found[0], len(found[0].net.scales)
    return [_on_whole_frame(network), replace(network, title=f"{network.title}, {count} channels")]


def _network(model: Model) -> PhotoNetwork:
    if model.name.startswith(TIMM):
        return _of_timm(model)
    assert model.photo is not None and isinstance(model.net, ScaleChannels)
    return PhotoNetwork(
        title=Path(model.name).name or model.name, net=model.net, recipe=model.photo,
        classes=model.classes, source=model.source,
    )  # fmt: skip


def _of_timm(model: Model) -> PhotoNetwork:
    """Wrap a timm model in scale channels without changing its weights."""
    net: Any = model.net
    if model.shape[1] != 3 or net.num_classes < 1:
        raise ConfigError(f"{model.name} is not a classifier of RGB images; choose another model")
    recipe = Recipe(name="photo", mean=model.mean, std=model.std)
    name = model.name.removeprefix(TIMM)
    size = model.size if fixed_size(name) else SIZE
    wrapped = wrap(net, recipe.base / 4, 2 * recipe.base, size=size, pool="logsumexp")
    return PhotoNetwork(title=name, net=wrapped.eval(), recipe=recipe, classes=_class_names(net))


def _class_names(net: Any) -> tuple[str, ...]:
    """Return the first name of each ImageNet class, or numbers if timm has no class names."""
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    if not (subset := infer_imagenet_subset(net)):
        return tuple(map(str, range(net.num_classes)))
    info = ImageNetInfo(subset)
    names = (info.index_to_description(k) for k in range(net.num_classes))
    return tuple(name.partition(",")[0] for name in names)


def _on_whole_frame(network: PhotoNetwork) -> PhotoNetwork:
    """Build a baseline: the backbone with the same weights on the largest window only."""
    net = network.net
    plain = ScaleChannels(
        net.backbone, net.scales[-1:], net.size, padding=net.padding, antialias=net.antialias
    )
    return replace(network, title=f"{network.title}, whole frame", net=plain.eval())


@torch.no_grad()
def predict_photo(
    networks: Sequence[PhotoNetwork],
    picture: Tensor,
    scale: float,
    shift: tuple[float, float] = (0.0, 0.0),
) -> list[PhotoPrediction]:
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
    recipes = {network.recipe for network in networks}
    images = {recipe: _resized(picture, recipe, scale) for recipe in recipes}
    return [_predict(network, images[network.recipe], shift) for network in networks]


def _resized(picture: Tensor, recipe: Recipe, scale: float) -> Tensor:
    try:
        return recipe.at_scale(scale).transform()(picture).unsqueeze(0)
    except DataError as error:
        raise DataError(f"the image {error}") from None


def _predict(network: PhotoNetwork, image: Tensor, shift: tuple[float, float]) -> PhotoPrediction:
    net, centres = network.net, None
    if any(shift):
        middle = torch.tensor(image.shape[-2:], dtype=torch.float64) / 2
        centres = (middle - torch.tensor(shift, dtype=torch.float64)).unsqueeze(0)
    cut = net.patches(image, centres)
    outputs = patches.outputs(net, (cut,))
    if outputs.channels is None or not outputs.logits.isfinite().all():
        raise DataError(f"{network.title} returns non-finite logits; check its weights")
    label = int(outputs.logits.argmax())
    return PhotoPrediction(
        network=network,
        probabilities=outputs.logits[0].double().softmax(0),
        strengths=tuple(outputs.channels[0, :, label].tolist()),
        channel=int(strongest_channel(outputs)),
        patches=cut[0],
    )
