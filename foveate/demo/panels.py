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
from foveate.demo.networks import DigitView, PageNetwork
from foveate.evaluation.predict import Prediction

MIN_ZOOM, MAX_ZOOM = 0.5, 8.0  # range of the zoom and of the scale axis
TICKS = {0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
CURVE = (100, 40)  # size of the SVG view box of the curves; stretched to the panel
# CSS class and text of a prediction that is correct, incorrect, or of an unknown class.
VERDICTS = {True: ("right", "correct"), False: ("wrong", "incorrect"), None: ("", "")}
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
    sides = {
        k: network.windows[prediction.channel]
        for k, (network, prediction) in enumerate(view.predictions)
        if prediction.channel is not None
    }
    shown = image(to_greyscale(view.frame), f"digit at scale {view.zoom:.2f}")
    return shown + windows(sides, view.frame.shape[-1])


def windows(sides: Mapping[int, float], frame: float) -> str:
    """Draw the window of each network as a square about the centre of the frame."""
    drawn = []
    for k, side in sides.items():
        side = min(side, 0.995 * frame)  # larger windows are drawn along the edge of the frame
        corner = (frame - side) / 2
        drawn.append(
            f'<rect class="net{k}" stroke-dashoffset="{DASH * k}" x="{corner:.1f}" '
            f'y="{corner:.1f}" width="{side:.1f}" height="{side:.1f}"/>'
        )
    return f'<svg viewBox="0 0 {frame:.1f} {frame:.1f}" aria-hidden="true">{"".join(drawn)}</svg>'


def cards(view: DigitView, label: int | None) -> str:
    """Render one card per network: its prediction, and the probability of each class."""
    return "".join(_card(k, *pair, label) for k, pair in enumerate(view.predictions))


def _card(k: int, network: PageNetwork, prediction: Prediction, label: int | None) -> str:
    right = None if label is None else prediction.label == str(label)
    bars = "".join(
        f'<i class="{"best" if str(n) == prediction.label else ""}" '
        f'style="--h:{bar_height(share)}%" title="{n}: {100 * share:.1f} %"><b>{n}</b></i>'
        for n, share in enumerate(prediction.probabilities)
    )
    scale = prediction.scale
    seen_at = "input: whole frame" if scale is None else f"strongest at channel scale {scale:.2f}"
    shares, answer = f'<div class="classes">{bars}</div>', (prediction.label, prediction.confidence)
    return card(k, network.title, answer, right, shares, seen_at)


def card(
    k: int, title: str, answer: tuple[str, float], right: bool | None, shares: str, note: str
) -> str:
    """Render the card of a network: its class and probability, whether it is `right`, and `shares`.

    `right` is None if the true class is unknown; `shares` is HTML.
    """
    label, confidence = answer
    kind, word = VERDICTS[right]
    return (
        f'<article class="card net{k}"><h3>{escape(title)}</h3>'
        f'<p class="prediction"><output>{escape(label)}</output>'
        f'<span>{100 * confidence:.1f} %<span class="{kind}">{word}</span></span></p>'
        f'{shares}<p class="quiet">{note}</p></article>'
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
    names = [f"scale {scale:.3g}" for scale in view.scales]
    bars = [responses(k, c, p, names, name_best=True) for k, (c, p) in alike.items()]
    won = {k: p.channel for k, (_, p) in alike.items()}
    strip = view.patches.movedim(0, 1).flatten(1)  # one image is faster than 17
    listed = ", ".join(f"{scale:.2g}" for scale in view.scales)
    shown = image(to_greyscale(strip), f"patches of the channels with scales {listed}")
    return channel_panel(shown, won, bars, [TICKS.get(scale, "") for scale in view.scales])


def channel_panel(
    shown: str, won: Mapping[int, int | None], bars: Sequence[str], ticks: Sequence[str]
) -> str:
    """Render the patches with marks at the channels `won`, the responses, and the axis below."""
    marks = "".join(
        f'<i class="net{k}" style="--at:{channel};--k:{place}"></i>'
        for place, (k, channel) in enumerate(won.items())
    )
    axis = "".join(f"<span>{tick}</span>" for tick in ticks)
    return (
        f'<div class="strip" style="--s:{len(ticks)}">{shown}{marks}</div>{"".join(bars)}'
        f'<div class="line axis" style="--s:{len(ticks)}">{axis}</div>'
    )


def responses(
    k: int, network: PageNetwork, prediction: Prediction, names: Sequence[str], name_best: bool
) -> str:
    """Render the logit of the predicted class in each channel as bars, and mark the strongest.

    `names` are those of the channels; with `name_best`, the caption names the strongest.
    """
    best, label = prediction.channel, prediction.probabilities.index(prediction.confidence)
    assert best is not None
    strengths = [logits[label] for logits in prediction.channels]
    caption = f"{network.title}: logit of “{prediction.label}” in each channel"
    caption += f", strongest at {names[best]}" if name_best else ""
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
