"""Render the panels of the photograph page as HTML and SVG."""
# Shape letters: S scale channel, C image channel, P patch pixels.

from collections.abc import Sequence
from html import escape

import torch
from PIL import Image
from torch import Tensor

from foveate.data.recipes import Recipe
from foveate.demo.panels import DASH, VERDICTS, bar_height, image
from foveate.demo.photo_networks import PhotoPrediction

TOP = 5  # classes per card


def windows(predictions: Sequence[PhotoPrediction], frame: float) -> str:
    """Render the window of each network's strongest channel over the frame."""
    drawn = []
    for k, prediction in enumerate(predictions):
        side = min(prediction.network.windows[prediction.channel], 0.995 * frame)
        corner = (frame - side) / 2
        drawn.append(
            f'<rect class="net{k}" stroke-dashoffset="{DASH * k}" x="{corner:.1f}" '
            f'y="{corner:.1f}" width="{side:.1f}" height="{side:.1f}"/>'
        )
    return f'<svg viewBox="0 0 {frame:.1f} {frame:.1f}" aria-hidden="true">{"".join(drawn)}</svg>'


def cards(predictions: Sequence[PhotoPrediction], truth: str | None) -> str:
    """Render one card per network: its prediction, and its most probable classes."""
    return "".join(_card(k, prediction, truth) for k, prediction in enumerate(predictions))


def _card(k: int, prediction: PhotoPrediction, truth: str | None) -> str:
    network, verdict = prediction.network, ""
    if truth in network.classes:
        kind, word = VERDICTS[network.classes[prediction.label] == truth]
        verdict = f'<span class="{kind}">{word}</span>'
    shares, labels = prediction.probabilities.topk(min(TOP, len(prediction.probabilities)))
    rows = "".join(
        f"<li><span>{escape(network.classes[label])}</span><b>{100 * share:.1f}</b>"
        f'<i style="--w:{bar_height(share)}%"></i></li>'
        for share, label in zip(shares.tolist(), labels.tolist(), strict=True)
    )
    window = network.windows[prediction.channel]
    kind = "strongest window" if len(network.windows) > 1 else "input window"
    seen = f"{kind}: {window:.0f} pixels"
    return (
        f'<article class="card net{k}"><h3>{escape(network.title)}</h3>'
        f'<p class="prediction"><output>{escape(network.classes[prediction.label])}</output>'
        f"<span>{100 * shares[0]:.1f} %{verdict}</span></p>"
        f'<ol class="top">{rows}</ol><p class="quiet">{seen}</p></article>'
    )


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
    axis = "".join(f"<span>{side:.0f}</span>" for side in sides)
    marks = "".join(
        f'<i class="net{k}" style="--at:{p.channel};--k:{place}"></i>'
        for place, (k, p) in enumerate(alike.items())
    )
    return (
        f'<div class="strip" style="--s:{len(sides)}">{_strip(first)}{marks}</div>'
        + "".join(_responses(k, prediction) for k, prediction in alike.items())
        + f'<div class="line axis" style="--s:{len(sides)}">{axis}</div>'
        + '<p class="quiet">Window side in pixels.</p>'
    )


def _strip(prediction: PhotoPrediction) -> str:
    """Render all patches side by side as one image."""
    patches, network = prediction.patches, prediction.network
    strip = patches.permute(1, 2, 0, 3).flatten(2)
    names = ", ".join(f"{side:.0f}" for side in network.windows)
    drawn = _colours(strip, network.recipe)
    return image(drawn, f"patches of the windows of {names} pixels", "jpeg")


def _colours(pixels: Tensor, recipe: Recipe) -> Image.Image:
    """Convert normalised pixels (C, H, W) back to an image."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    values = (255 * (pixels * std + mean)).round().clamp(0, 255).byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())


def _responses(k: int, prediction: PhotoPrediction) -> str:
    network, strengths = prediction.network, prediction.strengths
    low, span = min(strengths), max(max(strengths) - min(strengths), 1e-9)
    bars = "".join(
        f'<i class="{"best" if n == prediction.channel else ""}" '
        f'style="--h:{bar_height((strength - low) / span)}%" '
        f'title="window of {side:.0f} pixels: {strength:.1f}"></i>'
        for n, (strength, side) in enumerate(zip(strengths, network.windows, strict=True))
    )
    name = escape(network.classes[prediction.label])
    return (
        f'<p class="quiet">{escape(network.title)}: logit of “{name}” in each channel</p>'
        f'<div class="line bars net{k}" style="--s:{len(strengths)}">{bars}</div>'
    )
