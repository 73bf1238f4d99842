"""Render the panels of the digit page as HTML and SVG; an image takes less than 1 ms."""
# Shape letters: S scale channel, P patch pixels.

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

from PIL import Image
from torch import Tensor

from foveate.data.large_scale import BACKGROUND
from foveate.demo.networks import DigitNetwork, DigitView
from foveate.evaluation.predict import Prediction

MIN_ZOOM, MAX_ZOOM = 0.5, 8.0  # range of the zoom and of the scale axis
TICKS = {0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
CURVE = (100, 40)  # size of the SVG view box of the curves; stretched to the panel
VERDICTS = {True: ("right", "correct"), False: ("wrong", "incorrect")}  # CSS class and text
DASH = 7  # pixels, as in page.css: dashes of coinciding windows alternate
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


def frame(view: DigitView) -> str:
    """Render the digit in its frame, with the window of each network's strongest channel."""
    size = view.frame.shape[-1]
    windows = []
    for k, (network, prediction) in enumerate(view.predictions):
        if prediction.channel is not None:
            side = network.window * network.model.scales[prediction.channel]
            side = min(side, size - 1.0)  # larger windows are drawn along the edge of the frame
            corner = (size - side) / 2
            windows.append(
                f'<rect class="net{k}" stroke-dashoffset="{DASH * k}" x="{corner:.1f}" '
                f'y="{corner:.1f}" width="{side:.1f}" height="{side:.1f}"/>'
            )
    shown = image(to_greyscale(view.frame), f"digit at scale {view.zoom:.2f}")
    return f'{shown}<svg viewBox="0 0 {size} {size}" aria-hidden="true">{"".join(windows)}</svg>'


def cards(view: DigitView, label: int | None) -> str:
    """Render one card per network: its prediction, and the probability of each class."""
    return "".join(_card(k, *pair, label) for k, pair in enumerate(view.predictions))


def _card(k: int, network: DigitNetwork, prediction: Prediction, label: int | None) -> str:
    verdict = ""
    if label is not None:
        kind, word = VERDICTS[prediction.label == str(label)]
        verdict = f'<span class="{kind}">{word}</span>'
    bars = "".join(
        f'<i class="{"best" if str(n) == prediction.label else ""}" '
        f'style="--h:{bar_height(share)}%" title="{n}: {100 * share:.1f} %"><b>{n}</b></i>'
        for n, share in enumerate(prediction.probabilities)
    )
    scale = prediction.scale
    seen_at = "input: whole frame" if scale is None else f"strongest at channel scale {scale:.2f}"
    return (
        f'<article class="card net{k}"><h3>{escape(network.title)}</h3>'
        f'<p class="prediction"><output>{prediction.label}</output>'
        f"<span>{100 * prediction.confidence:.1f} %{verdict}</span></p>"
        f'<div class="classes">{bars}</div><p class="quiet">{seen_at}</p></article>'
    )


def bar_height(share: float) -> str:
    """Return a share in percent, raised to the smallest visible height."""
    return f"{max(MIN_BAR_HEIGHT, 100 * share):.0f}"


def channels(view: DigitView) -> str:
    """Render the patch of each channel, and below it the response of each network."""
    if view.patches is None:
        return '<p class="quiet">None of these networks has scale channels.</p>'
    pairs = enumerate(view.predictions)
    alike = {k: (c, p) for k, (c, p) in pairs if c.model.scales == view.scales}
    axis = "".join(f"<span>{TICKS.get(scale, '')}</span>" for scale in view.scales)
    return (
        _patches(view.patches, view.scales, {k: p.channel for k, (_, p) in alike.items()})
        + "".join(_responses(k, *pair) for k, pair in alike.items())
        + f'<div class="line axis" style="--s:{len(view.scales)}">{axis}</div>'
    )


def _patches(patches: Tensor, scales: Sequence[float], won: Mapping[int, int | None]) -> str:
    """Render all patches as one image (faster than 17) and mark the strongest channels `won`."""
    count, size = patches.shape[0], patches.shape[-1]
    strip = patches.movedim(0, 1).reshape(size, count * size)
    names = ", ".join(f"{scale:.2g}" for scale in scales)
    shown = image(to_greyscale(strip), f"patches of the channels with scales {names}")
    marks = "".join(
        f'<i class="net{k}" style="--at:{channel};--k:{place}"></i>'
        for place, (k, channel) in enumerate(won.items())
    )
    return f'<div class="strip" style="--s:{count}">{shown}{marks}</div>'


def _responses(k: int, network: DigitNetwork, prediction: Prediction) -> str:
    scales = network.model.scales
    strengths = [logits[int(prediction.label)] for logits in prediction.channels]
    assert prediction.channel is not None
    low = min(strengths)
    span = max(max(strengths) - low, 1e-9)
    bars = "".join(
        f'<i class="{"best" if n == prediction.channel else ""}" '
        f'style="--h:{bar_height((strength - low) / span)}%" '
        f'title="scale {scale:.3g}: {strength:.1f}"></i>'
        for n, (strength, scale) in enumerate(zip(strengths, scales, strict=True))
    )
    strongest = f"strongest at scale {scales[prediction.channel]:.3g}"
    return (
        f'<p class="quiet">{escape(network.title)}: logit of “{prediction.label}” in each '
        f"channel, {strongest}</p>"
        f'<div class="line bars net{k}" style="--s:{len(scales)}">{bars}</div>'
    )


def accuracy(zoom: float, networks: Sequence[DigitNetwork]) -> str:
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


def _curves(networks: Sequence[DigitNetwork]) -> str:
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


def _value(k: int, network: DigitNetwork, zoom: float) -> str:
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
