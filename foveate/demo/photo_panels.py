"""Draw the panels of the page for photographs as small strings of HTML and SVG."""
# Shape letters: S scale channel, C image channel, P patch pixels.

from collections.abc import Sequence
from html import escape

import torch
from PIL import Image
from torch import Tensor

from foveate.data.recipes import Recipe
from foveate.demo.panels import DASH, image, least
from foveate.demo.photo_networks import PhotoPrediction

TOP = 5  # classes of a card


def windows(predictions: Sequence[PhotoPrediction], frame: float) -> str:
    """Draw the window of each network's strongest channel into the frame."""
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
    """Draw a card for each network: its prediction, and its most probable classes."""
    return "".join(_card(k, prediction, truth) for k, prediction in enumerate(predictions))


def _card(k: int, prediction: PhotoPrediction, truth: str | None) -> str:
    network, verdict = prediction.network, ""
    if truth in network.classes:
        word = "right" if network.classes[prediction.label] == truth else "wrong"
        verdict = f'<span class="{word}">{word}</span>'
    shares, labels = prediction.probabilities.topk(min(TOP, len(prediction.probabilities)))
    rows = "".join(
        f"<li><span>{escape(network.classes[label])}</span><b>{100 * share:.1f}</b>"
        f'<i style="--w:{least(share)}%"></i></li>'
        for share, label in zip(shares.tolist(), labels.tolist(), strict=True)
    )
    window = network.windows[prediction.channel]
    seen = f"window of {window:.0f} pixels"
    seen = f"strongest in its {seen}" if len(network.windows) > 1 else f"sees one {seen}"
    return (
        f'<article class="card net{k}"><h3>{escape(network.title)}</h3>'
        f'<p class="said"><output>{escape(network.classes[prediction.label])}</output>'
        f"<span>{100 * shares[0]:.1f} %{verdict}</span></p>"
        f'<ol class="top">{rows}</ol><p class="quiet">{seen}</p></article>'
    )


def channels(predictions: Sequence[PhotoPrediction]) -> str:
    """Draw the patch of each channel, and how strongly the channels of each network respond.

    The patches are those of the first network with several channels; others are shown with it if
    their windows are the same.
    """
    several = {k: p for k, p in enumerate(predictions) if len(p.network.windows) > 1}
    if not several:
        return '<p class="quiet">These networks have one channel each.</p>'
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
        + '<p class="quiet">Side of the window in pixels.</p>'
    )


def _strip(prediction: PhotoPrediction) -> str:
    """All patches side by side as one picture."""
    patches, network = prediction.patches, prediction.network
    strip = patches.permute(1, 2, 0, 3).flatten(2)
    names = ", ".join(f"{side:.0f}" for side in network.windows)
    drawn = _colours(strip, network.recipe)
    return image(drawn, f"the patches of windows of {names} pixels", "jpeg")


def _colours(pixels: Tensor, recipe: Recipe) -> Image.Image:
    """Normalised pixels (C, H, W) in the colours that they had."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    values = (255 * (pixels * std + mean)).round().clamp(0, 255).byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())


def _responses(k: int, prediction: PhotoPrediction) -> str:
    network, strengths = prediction.network, prediction.strengths
    low, span = min(strengths), max(max(strengths) - min(strengths), 1e-9)
    bars = "".join(
        f'<i class="{"best" if n == prediction.channel else ""}" '
        f'style="--h:{least((strength - low) / span)}%" '
        f'title="window of {side:.0f} pixels: {strength:.1f}"></i>'
        for n, (strength, side) in enumerate(zip(strengths, network.windows, strict=True))
    )
    name = escape(network.classes[prediction.label])
    return (
        f'<p class="quiet">{escape(network.title)}: logit of “{name}” in each channel</p>'
        f'<div class="line bars net{k}" style="--s:{len(strengths)}">{bars}</div>'
    )
