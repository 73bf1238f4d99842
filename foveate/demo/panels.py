"""Draw the panels of the page as small strings of HTML and SVG: a picture takes under 1 ms."""
# Shape letters: S scale channel, P patch pixels.

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape

import torch
from PIL import Image
from torch import Tensor

from foveate.data.large_scale import BACKGROUND
from foveate.demo.networks import Answer, Contender, Seen, channel_scales

LOW, HIGH = 0.5, 8.0  # of the zoom, and of the curves' scale axis
TICKS = {0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
CURVE = (100, 40)  # units of the drawing in which curves are given; stretched to the panel
DASH = 7  # pixels, as in page.css: windows of two networks that coincide alternate
LEAST = 3  # percent of its height that a bar has at least, to be seen


def picture(pixels: Tensor, alt: str = "", kind: str = "") -> str:
    """An <img> of grey pixels (H, W) from the data set's black to its white."""
    grey = ((pixels - BACKGROUND) * (255 / (-2 * BACKGROUND))).clamp(0, 255).to(torch.uint8)
    return image(Image.fromarray(grey.numpy()), alt, kind)


def image(drawn: Image.Image, alt: str = "", kind: str = "") -> str:
    """An <img> that carries its own data; decoded at once, so that nothing flickers."""
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG", compress_level=1)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<img class="{kind}" alt="{escape(alt)}" decoding="sync" '
        f'src="data:image/png;base64,{data}">'
    )


def frame(seen: Seen, contenders: Sequence[Contender]) -> str:
    """The digit in its frame, with the window in which each network saw it best."""
    size = seen.frame.shape[-1]
    windows = []
    for k, (contender, answer) in enumerate(zip(contenders, seen.answers, strict=True)):
        if answer.channel is not None:
            side = contender.window * contender.network.scales[answer.channel]
            side = min(side, size - 1.0)  # a larger one is drawn at the edge of the frame
            corner = (size - side) / 2
            windows.append(
                f'<rect class="net{k}" stroke-dashoffset="{DASH * k}" x="{corner:.1f}" '
                f'y="{corner:.1f}" width="{side:.1f}" height="{side:.1f}"/>'
            )
    shown = picture(seen.frame, f"the digit at scale {seen.zoom:.2f}")
    return f'{shown}<svg viewBox="0 0 {size} {size}" aria-hidden="true">{"".join(windows)}</svg>'


def cards(seen: Seen, contenders: Sequence[Contender], label: int | None) -> str:
    """A card for each network: its answer, how sure it is, and the probability of each class."""
    pairs = enumerate(zip(contenders, seen.answers, strict=True))
    return "".join(_card(k, c, answer, label) for k, (c, answer) in pairs)


def _card(k: int, contender: Contender, answer: Answer, label: int | None) -> str:
    sure = max(answer.probabilities)
    verdict = ""
    if label is not None:
        right = answer.label == label
        verdict = (
            f'<span class="{"right" if right else "wrong"}">{"right" if right else "wrong"}</span>'
        )
    bars = "".join(
        f'<i class="{"best" if n == answer.label else ""}" style="--h:{_bar(share)}%" '
        f'title="{n}: {100 * share:.1f} %"><b>{n}</b></i>'
        for n, share in enumerate(answer.probabilities)
    )
    seen_at = "sees the whole frame"
    if answer.scale is not None:
        seen_at = f"strongest at scale {answer.scale:.2f}"
    return (
        f'<article class="card net{k}"><h3>{escape(contender.title)}</h3>'
        f'<p class="said"><output>{answer.label}</output>'
        f"<span>{100 * sure:.1f} %{verdict}</span></p>"
        f'<div class="classes">{bars}</div><p class="quiet">{seen_at}</p></article>'
    )


def _bar(share: float) -> str:
    return f"{max(LEAST, 100 * share):.0f}"


def channels(seen: Seen, contenders: Sequence[Contender]) -> str:
    """What each channel sees, and below how strongly it said each network's answer."""
    scales = channel_scales(contenders)
    if seen.patches is None:
        return '<p class="quiet">None of these networks has scale channels.</p>'
    pairs = enumerate(zip(contenders, seen.answers, strict=True))
    alike = [(k, c, answer) for k, (c, answer) in pairs if c.network.scales == scales]
    won = {k: answer.channel for k, _, answer in alike if answer.channel is not None}
    rows = [_patches(seen.patches, scales, won)]
    rows += [_responses(k, contender, answer, scales) for k, contender, answer in alike]
    axis = "".join(f"<span>{TICKS.get(scale, '')}</span>" for scale in scales)
    rows.append(f'<div class="line axis" style="--s:{len(scales)}">{axis}</div>')
    return "".join(rows)


def _patches(patches: Tensor, scales: Sequence[float], won: Mapping[int, int]) -> str:
    """All patches as one picture, quicker than 17; `won` is the channel of each network."""
    count, size = patches.shape[0], patches.shape[-1]
    strip = patches.movedim(0, 1).reshape(size, count * size)
    names = ", ".join(f"{scale:.2g}" for scale in scales)
    shown = picture(strip, f"the patches of the channels of scale {names}")
    marks = "".join(
        f'<i class="net{k}" style="--at:{channel};--k:{place}"></i>'
        for place, (k, channel) in enumerate(won.items())
    )
    return f'<div class="strip" style="--s:{count}">{shown}{marks}</div>'


def _responses(k: int, contender: Contender, answer: Answer, scales: Sequence[float]) -> str:
    low, high = min(answer.strengths), max(answer.strengths)
    span = max(high - low, 1e-9)
    bars = "".join(
        f'<i class="{"best" if n == answer.channel else ""}" '
        f'style="--h:{_bar((strength - low) / span)}%" title="scale {scale:.3g}: {strength:.1f}">'
        "</i>"
        for n, (strength, scale) in enumerate(zip(answer.strengths, scales, strict=True))
    )
    assert answer.channel is not None
    title = escape(contender.title)
    told = f"{title}: “{answer.label}”, strongest in channel {scales[answer.channel]:.3g}"
    return (
        f'<p class="quiet">{told}</p>'
        f'<div class="line bars net{k}" style="--s:{len(scales)}">{bars}</div>'
    )


def curves(contenders: Sequence[Contender]) -> str:
    """Accuracy over scale of all networks, to be put below the cursor of `cursor`."""
    width, height = CURVE
    lines = []
    for k, contender in enumerate(contenders):
        points = " ".join(
            f"{width * _across(scale):.2f},{height * (1 - share):.2f}"
            for scale, share in contender.accuracy.items()
        )
        lines.append(f'<polyline class="net{k}" points="{points}"/>')
    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(lines)}</svg>"
    )


def accuracy(zoom: float, contenders: Sequence[Contender], drawn: str) -> str:
    """The panel of accuracy over scale, `drawn` by `curves`, with a cursor at the zoom."""
    if not any(contender.accuracy for contender in contenders):
        return (
            '<p class="quiet">Not known: these networks were not tested yet '
            "(<code>foveate evaluate</code> does that).</p>"
        )
    marks = "".join(
        f'<span class="tick" style="left:{100 * _across(scale):.1f}%">{name}</span>'
        for scale, name in TICKS.items()
    )
    levels = "".join(
        f'<span class="level" style="bottom:{share}%">{share}</span>' for share in (0, 50, 100)
    )
    cursor = f'<div class="cursor" style="left:{100 * _across(zoom):.1f}%"></div>'
    values = "".join(_value(k, c, zoom) for k, c in enumerate(contenders))
    tested = " and ".join(dict.fromkeys(c.tested for c in contenders if c.tested))
    return (
        f'<div class="plot">{levels}{drawn}{cursor}{marks}</div><ul class="values">{values}</ul>'
        f'<p class="quiet">At the tested scale nearest to the zoom, in % of {escape(tested)}.</p>'
    )


def _value(k: int, contender: Contender, zoom: float) -> str:
    """The accuracy at the tested scale that is nearest to the zoom."""
    title = f'<li class="net{k}"><b>{escape(contender.title)}</b>'
    if not contender.accuracy:
        return f"{title} not tested</li>"
    nearest = min(contender.accuracy, key=lambda scale: abs(math.log(scale / zoom)))
    return f"{title} {100 * contender.accuracy[nearest]:.1f} at {nearest:.3g}</li>"


def _across(scale: float) -> float:
    """Where a scale lies on the axis, from 0 to 1."""
    octaves = math.log2(scale / LOW) / math.log2(HIGH / LOW)
    return min(1.0, max(0.0, octaves))
