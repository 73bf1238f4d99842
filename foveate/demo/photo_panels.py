"""Render the panels of the photograph page as HTML and SVG."""
# Shape letters: S scale channel, C image channel, P patch pixels.

from collections.abc import Sequence
from html import escape

import torch
from PIL import Image
from torch import Tensor

from foveate.data.recipes import Recipe
from foveate.demo import panels
from foveate.demo.photo_networks import PhotoView, recipe_of

TOP = 5  # classes per card


def windows(views: Sequence[PhotoView], frame: float) -> str:
    """Render the window of each network's strongest channel over the frame."""
    return panels.windows({k: _window(view) for k, view in enumerate(views)}, frame)


def _window(view: PhotoView) -> float:
    """Return the window of the strongest channel."""
    assert view.prediction.channel is not None
    return view.network.windows[view.prediction.channel]


def cards(views: Sequence[PhotoView], truth: str | None) -> str:
    """Render one card per network: its prediction, and its most probable classes."""
    return "".join(_card(k, view, truth) for k, view in enumerate(views))


def _card(k: int, view: PhotoView, truth: str | None) -> str:
    network, prediction = view.network, view.prediction
    names = network.model.classes
    right = prediction.label == truth if truth in names else None
    best = sorted(zip(prediction.probabilities, names, strict=True), key=lambda pair: -pair[0])
    rows = "".join(
        f"<li><span>{escape(name)}</span><b>{100 * share:.1f}</b>"
        f'<i style="--w:{panels.bar_height(share)}%"></i></li>'
        for share, name in best[:TOP]
    )
    kind = "strongest window" if len(network.windows) > 1 else "input window"
    seen, top = f"{kind}: {_window(view):.0f} pixels", f'<ol class="top">{rows}</ol>'
    answer = (prediction.label, prediction.confidence)
    return panels.card(k, network.title, answer, right, top, seen)


def channels(views: Sequence[PhotoView]) -> str:
    """Render the patch of each channel, and its response in each network.

    The patches belong to the first network with several channels. Other networks are included if
    they have the same windows.
    """
    several = {k: view for k, view in enumerate(views) if len(view.network.windows) > 1}
    if not several:
        return '<p class="quiet">These networks have only one channel each.</p>'
    first = next(iter(several.values()))
    sides = first.network.windows
    alike = {k: view for k, view in several.items() if view.network.windows == sides}
    won = {k: view.prediction.channel for k, view in alike.items()}
    names = [f"window of {side:.0f} pixels" for side in sides]
    bars = [panels.responses(k, *view[:2], names, name_best=False) for k, view in alike.items()]
    shown = panels.channel_panel(_strip(first), won, bars, [f"{side:.0f}" for side in sides])
    return shown + '<p class="quiet">Window side in pixels.</p>'


def _strip(view: PhotoView) -> str:
    """Render all patches side by side as one image."""
    strip = view.patches.permute(1, 2, 0, 3).flatten(2)
    names = ", ".join(f"{side:.0f}" for side in view.network.windows)
    drawn = _colours(strip, recipe_of(view.network))
    return panels.image(drawn, f"patches of the windows of {names} pixels", "jpeg")


def _colours(pixels: Tensor, recipe: Recipe) -> Image.Image:
    """Convert normalised pixels (C, H, W) back to an image."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    values = (255 * (pixels * std + mean)).round().clamp(0, 255).byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())
