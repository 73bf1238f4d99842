"""Render the panels of the photograph page as HTML and SVG."""
# Shape letters: S scale channel, C image channel, P patch pixels.

from collections.abc import Sequence
from html import escape

import torch
from PIL import Image
from torch import Tensor

from foveate.data.recipes import Recipe
from foveate.demo import panels
from foveate.demo.photo_networks import PhotoPrediction

TOP = 5  # classes per card


def windows(predictions: Sequence[PhotoPrediction], frame: float) -> str:
    """Render the window of each network's strongest channel over the frame."""
    sides = {k: p.network.windows[p.channel] for k, p in enumerate(predictions)}
    return panels.windows(sides, frame)


def cards(predictions: Sequence[PhotoPrediction], truth: str | None) -> str:
    """Render one card per network: its prediction, and its most probable classes."""
    return "".join(_card(k, prediction, truth) for k, prediction in enumerate(predictions))


def _card(k: int, prediction: PhotoPrediction, truth: str | None) -> str:
    network = prediction.network
    label = network.classes[prediction.label]
    right = label == truth if truth in network.classes else None
    shares, labels = prediction.probabilities.topk(min(TOP, len(prediction.probabilities)))
    rows = "".join(
        f"<li><span>{escape(network.classes[label])}</span><b>{100 * share:.1f}</b>"
        f'<i style="--w:{panels.bar_height(share)}%"></i></li>'
        for share, label in zip(shares.tolist(), labels.tolist(), strict=True)
    )
    window = network.windows[prediction.channel]
    kind = "strongest window" if len(network.windows) > 1 else "input window"
    seen, top = f"{kind}: {window:.0f} pixels", f'<ol class="top">{rows}</ol>'
    return panels.card(k, network.title, (label, float(shares[0])), right, top, seen)


def channels(predictions: Sequence[PhotoPrediction]) -> str:
    """Render the patch of each channel, and its response in each network.

    The patches belong to the first network with several channels. Other networks are included if
    they have the same windows.
    """
    several = {k: p for k, p in enumerate(predictions) if len(p.network.windows) > 1}
    if not several:
        return '<p class="quiet">These networks have only one channel each.</p>'
    first = next(iter(several.values()))
    sides = first.network.windows
    alike = {k: p for k, p in several.items() if p.network.windows == sides}
    won = {k: prediction.channel for k, prediction in alike.items()}
    responses = [_responses(k, prediction) for k, prediction in alike.items()]
    shown = panels.channel_panel(_strip(first), won, responses, [f"{side:.0f}" for side in sides])
    return shown + '<p class="quiet">Window side in pixels.</p>'


def _strip(prediction: PhotoPrediction) -> str:
    """Render all patches side by side as one image."""
    patches, network = prediction.patches, prediction.network
    strip = patches.permute(1, 2, 0, 3).flatten(2)
    names = ", ".join(f"{side:.0f}" for side in network.windows)
    drawn = _colours(strip, network.recipe)
    return panels.image(drawn, f"patches of the windows of {names} pixels", "jpeg")


def _colours(pixels: Tensor, recipe: Recipe) -> Image.Image:
    """Convert normalised pixels (C, H, W) back to an image."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    values = (255 * (pixels * std + mean)).round().clamp(0, 255).byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())


def _responses(k: int, prediction: PhotoPrediction) -> str:
    network, label = prediction.network, prediction.network.classes[prediction.label]
    caption = f"{network.title}: logit of “{label}” in each channel"
    names = [f"window of {side:.0f} pixels" for side in network.windows]
    return panels.response_bars(k, caption, prediction.strengths, prediction.channel, names)
