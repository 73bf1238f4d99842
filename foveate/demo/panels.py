"""Render the panels of the pages as HTML and SVG; an image takes less than 1 ms."""
# Shape letters: S scale channel, C image channel, P patch pixels.

import base64
import io
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from foveate.data.large_scale import BACKGROUND
from foveate.demo.networks import PageNetwork, View, recipe_of

MIN_ZOOM, MAX_ZOOM = 0.5, 8.0  # range of the zoom and of the scale axis
TICKS = {0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
CURVE = (100, 40)  # size of the SVG view box of the curves; stretched to the panel
# CSS class and text of a prediction that is correct, incorrect, or of an unknown class.
VERDICTS = {True: ("right", "correct"), False: ("wrong", "incorrect"), None: ("", "")}
DASH = 7  # pixels, as in page.css: dashes of coinciding windows alternate
TOP = 5  # classes per card of a photograph
NO_CHANNELS = '<p class="quiet">None of these networks has several channels.</p>'
MIN_BAR_HEIGHT = 3  # minimum height of a bar in percent, so that it is visible


def to_greyscale(pixels: Tensor, light: float = 1.0) -> Image.Image:
    """Convert pixels (H, W) to greyscale, from the dataset background to `light` times white."""
    values = ((pixels - BACKGROUND) * (255 * light / (-2 * BACKGROUND))).clamp(0, 255)
    return Image.fromarray(values.byte().numpy())


def image(drawn: Image.Image, alt: str, kind: Literal["png", "jpeg"] = "png") -> str:
    """Return an <img> with inline data; synchronous decoding avoids flicker."""
    buffer = io.BytesIO()
    drawn.save(buffer, kind, compress_level=1, quality=90)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(alt)}" decoding="sync" src="data:image/{kind};base64,{data}">'


def frame(pixels: Tensor, views: Sequence[View], zoom: float) -> str:
    """Render the digit in its frame (H, W), with the windows of the networks."""
    shown = image(to_greyscale(pixels), f"digit at scale {zoom:.2f}")
    return shown + windows(views, pixels.shape[-1])


def windows(views: Sequence[View], frame: float) -> str:
    """Draw the window of each network's strongest channel about the centre of the frame."""
    drawn = []
    for k, view in enumerate(views):
        if view.window is None:
            continue
        side = min(view.window, 0.995 * frame)  # larger windows are drawn along the edge
        corner = (frame - side) / 2
        drawn.append(
            f'<rect class="net{k}" stroke-dashoffset="{DASH * k}" x="{corner:.1f}" '
            f'y="{corner:.1f}" width="{side:.1f}" height="{side:.1f}"/>'
        )
    return f'<svg viewBox="0 0 {frame:.1f} {frame:.1f}" aria-hidden="true">{"".join(drawn)}</svg>'


def cards(views: Sequence[View], truth: str | None, detail: Callable[[View], str]) -> str:
    """Render one card per network: its class, whether it is right, and its `detail`."""
    return "".join(_card(k, view, truth, detail(view)) for k, view in enumerate(views))


def _card(k: int, view: View, truth: str | None, detail: str) -> str:
    network, prediction = view.network, view.prediction
    right = prediction.label == truth if truth in network.model.classes else None
    kind, word = VERDICTS[right]
    return (
        f'<article class="card net{k}"><h3>{escape(network.title)}</h3>'
        f'<p class="prediction"><output>{escape(prediction.label)}</output>'
        f'<span>{100 * prediction.confidence:.1f} %<span class="{kind}">{word}</span></span></p>'
        f"{detail}</article>"
    )


def digit_detail(view: View) -> str:
    """Render the probability of each class, and the scale of the strongest channel."""
    label, scale = view.prediction.label, view.prediction.scale
    bars = "".join(
        f'<i class="{"best" if str(n) == label else ""}" '
        f'style="--h:{bar_height(share)}%" title="{n}: {100 * share:.1f} %"><b>{n}</b></i>'
        for n, share in enumerate(view.prediction.probabilities)
    )
    seen_at = "input: whole frame" if scale is None else f"estimated scale {scale:.2f}"
    return f'<div class="classes">{bars}</div><p class="quiet">{seen_at}</p>'


def photo_detail(view: View) -> str:
    """Render the most probable classes, and the window of the strongest channel."""
    shares = zip(view.prediction.probabilities, view.network.model.classes, strict=True)
    rows = "".join(
        f"<li><span>{escape(name)}</span><b>{100 * share:.1f}</b>"
        f'<i style="--w:{bar_height(share)}%"></i></li>'
        for share, name in sorted(shares, key=lambda pair: -pair[0])[:TOP]
    )
    kind = "strongest window" if len(view.network.windows) > 1 else "input window"
    seen = f"{kind}: {view.window:.0f} pixels"
    return f'<ol class="top">{rows}</ol><p class="quiet">{seen}</p>'


def bar_height(share: float) -> str:
    """Return a share in percent, raised to the smallest visible height."""
    return f"{max(MIN_BAR_HEIGHT, 100 * share):.0f}"


def _with_channels(views: Sequence[View]) -> View | None:
    return next((view for view in views if len(view.network.windows) > 1), None)


def digit_channels(views: Sequence[View]) -> str:
    """Render the patch of each channel, and below it the response of each network."""
    first = _with_channels(views)
    if first is None or first.patches is None:
        return NO_CHANNELS
    scales = first.network.model.scales
    strip = first.patches[:, 0].movedim(0, 1).flatten(1)  # one image is faster than 17
    listed = ", ".join(f"{scale:.2g}" for scale in scales)
    shown = image(to_greyscale(strip), f"patches of the channels with scales {listed}")
    names = [f"scale {scale:.3g}" for scale in scales]
    ticks = [TICKS.get(scale, "") for scale in scales]
    return channels(views, first, shown, names, ticks)


def photo_channels(views: Sequence[View]) -> str:
    """Render the patch of each channel, and below it the response of each network."""
    first = _with_channels(views)
    if first is None or first.patches is None:
        return NO_CHANNELS
    sides, recipe = [f"{side:.0f}" for side in first.network.windows], recipe_of(first.network)
    # The normalised patches as colours again, side by side.
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    strip = first.patches.permute(1, 2, 0, 3).flatten(2) * std + mean
    drawn = Image.fromarray((255 * strip).round().clamp(0, 255).byte().permute(1, 2, 0).numpy())
    shown = image(drawn, f"patches of the windows of {', '.join(sides)} pixels", "jpeg")
    names = [f"window of {side} pixels" for side in sides]
    rendered = channels(views, first, shown, names, sides)
    return f'{rendered}<p class="quiet">Window side in pixels.</p>'


def channels(
    views: Sequence[View],
    first: View,
    shown: str,
    names: Sequence[str],
    ticks: Sequence[str],
) -> str:
    """Render the patches `shown` of the view `first`, and all responses with the same windows."""
    windows = first.network.windows
    alike = {k: view for k, view in enumerate(views) if view.network.windows == windows}
    marks = "".join(
        f'<i class="net{k}" style="--at:{view.prediction.channel};--k:{place}"></i>'
        for place, (k, view) in enumerate(alike.items())
    )
    bars = "".join(_responses(k, view, names) for k, view in alike.items())
    axis = "".join(f"<span>{tick}</span>" for tick in ticks)
    return (
        f'<div class="strip" style="--s:{len(ticks)}">{shown}{marks}</div>{bars}'
        f'<div class="line axis" style="--s:{len(ticks)}">{axis}</div>'
    )


def _responses(k: int, view: View, names: Sequence[str]) -> str:
    """Render the logit of the predicted class in each channel as bars, and mark the strongest."""
    prediction, best = view.prediction, view.prediction.channel
    assert best is not None
    label = prediction.probabilities.index(prediction.confidence)
    strengths = [logits[label] for logits in prediction.channels]
    caption = (
        f"{view.network.title}: logit of “{prediction.label}” in each channel, "
        f"strongest: {names[best]}"
    )
    low = min(strengths)
    span = max(max(strengths) - low, 1e-9)
    bars = "".join(
        f'<i class="{"best" if n == best else ""}" '
        f'style="--h:{bar_height((strength - low) / span)}%" title="{name}: {strength:.1f}"></i>'
        for n, (strength, name) in enumerate(zip(strengths, names, strict=True))
    )
    return (
        f'<p class="quiet">{escape(caption)}</p>'
        f'<div class="line bars net{k}" style="--s:{len(names)}">{bars}</div>'
    )


def accuracy(zoom: float, networks: Sequence[PageNetwork]) -> str:
    """Render the accuracy of all networks over scale, with a cursor at the zoom."""
    if not any(network.accuracy for network in networks):
        return (
            '<p class="quiet">No test results for these networks; run '
            "<code>foveate evaluate</code> on them.</p>"
        )
    marks = "".join(
        f'<span class="tick" style="left:{100 * _across(scale):.1f}%">{name}</span>'
        for scale, name in TICKS.items()
    )
    levels = "".join(
        f'<span class="level" style="bottom:{share}%">{share}</span>' for share in (0, 50, 100)
    )
    cursor = f'<div class="cursor" style="left:{100 * _across(zoom):.1f}%"></div>'
    values = "".join(_value(k, c, zoom) for k, c in enumerate(networks))
    tested = " and ".join(dict.fromkeys(c.tested for c in networks if c.tested))
    return (
        f'<div class="plot">{levels}{_curves(networks)}{cursor}{marks}</div>'
        f'<ul class="values">{values}</ul><p class="quiet">'
        f"Accuracy in % at the tested scale nearest to the zoom, on {escape(tested)}.</p>"
    )


def _curves(networks: Sequence[PageNetwork]) -> str:
    width, height = CURVE
    lines = []
    for k, network in enumerate(networks):
        points = " ".join(
            f"{width * _across(scale):.2f},{height * (1 - share):.2f}"
            for scale, share in network.accuracy.items()
        )
        lines.append(f'<polyline class="net{k}" points="{points}"/>')
    size = f'viewBox="0 0 {width} {height}" preserveAspectRatio="none"'
    return f'<svg {size} aria-hidden="true">{"".join(lines)}</svg>'


def _value(k: int, network: PageNetwork, zoom: float) -> str:
    """Render the accuracy at the tested scale nearest to the zoom."""
    title = f'<li class="net{k}"><b>{escape(network.title)}</b>'
    if not network.accuracy:
        return f"{title} not tested</li>"
    nearest = min(network.accuracy, key=lambda scale: abs(math.log(scale / zoom)))
    return f"{title} {100 * network.accuracy[nearest]:.1f} at scale {nearest:.3g}</li>"


def _across(scale: float) -> float:
    """Return the position of a scale on the axis, from 0 to 1."""
    octaves = math.log2(scale / MIN_ZOOM) / math.log2(MAX_ZOOM / MIN_ZOOM)
    return min(1.0, max(0.0, octaves))
