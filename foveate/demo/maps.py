"""Draw a scene with what a network says at every place: its classes, and their scales."""
# Shape letters: K classes, h w places, H W pixels.

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from foveate.data.large_scale import BACKGROUND
from foveate.demo.networks import Contender
from foveate.demo.panels import TICKS, image, picture
from foveate.demo.scenes import Placed, said_at
from foveate.models.sliding import LocalMaps

# Ten colours that stay apart from each other on black, one for each class.
CLASSES = (
    "#4e9af1", "#ff8c2a", "#43c565", "#f25f5c", "#b388eb",
    "#c08a6e", "#f48fd0", "#b0b7bf", "#d6d640", "#36cfd6",
)  # fmt: skip
SMALL, LARGE = "#3f51d6", "#ffe14d"  # of scales: from blue to yellow, told apart by all eyes
DIM = 0.45  # of the scene's light below a map
Colours = npt.NDArray[np.float64]


def scene_panels(
    contender: Contender, scene: Tensor, placed: Sequence[Placed], maps: LocalMaps
) -> str:
    """Three pictures: the scene with the answers, the class map, and the scale map."""
    sure, window = _sure(maps), contender.window
    boxes = "".join(_box(digit, *said_at(maps, digit), window) for digit in placed)
    height, width = scene.shape[-2:]
    over = f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{boxes}</svg>'
    classes = np.stack([_rgb(colour) for colour in CLASSES])[maps.logits[0].argmax(0).numpy()]
    scales = contender.network.scales
    shades = _shade(maps.scales[0].numpy(), scales)
    figures = (
        _figure(
            picture(scene[0, 0], "the scene") + over,
            "What it says at each digit, and the window in which it saw it best",
            "",
        ),
        _figure(_overlay(scene, classes, sure), "Class, where it is sure", _class_legend()),
        _figure(
            _overlay(scene, shades, sure), "Scale of the strongest channel", _scale_legend(scales)
        ),
    )
    return f'<div class="maps">{"".join(figures)}</div>'


def _figure(shown: str, caption: str, legend: str) -> str:
    return (
        f'<figure><div class="screen">{shown}</div>'
        f"<figcaption>{escape(caption)}</figcaption>{legend}</figure>"
    )


def _box(digit: Placed, said: int, scale: float, window: int) -> str:
    side = window * scale
    x, y = digit.x - side / 2, digit.y - side / 2
    kind = "right" if said == digit.label else "wrong"
    return (
        f'<g class="{kind}"><rect x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}"/>'
        f'<text x="{digit.x - 11 * digit.scale:.1f}" y="{digit.y - 9 * digit.scale:.1f}">{said}'
        "</text></g>"
    )


def _sure(maps: LocalMaps) -> npt.NDArray[np.float32]:
    """How sure the network is (h, w), from 0 to 0.85: by the margin of the strongest class."""
    top = maps.logits[0].topk(2, 0).values
    margin = top[0] - top[1]  # a margin of 5 is a probability of 99 %
    return ((margin - 1) / 4).clamp(0, 0.85).numpy()


def _overlay(scene: Tensor, colours: Colours, sure: npt.NDArray[np.float32]) -> str:
    """The scene in grey with colours (h, w, 3) of 0 to 255 where the network is sure."""
    grey = ((scene[0, 0] - BACKGROUND) * (255 * DIM / (-2 * BACKGROUND))).clamp(0, 255).numpy()
    size = (scene.shape[-1], scene.shape[-2])
    alpha = np.asarray(Image.fromarray(sure).resize(size, Image.Resampling.BILINEAR))[..., None]
    flat = Image.fromarray(colours.astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
    mixed = alpha * np.asarray(flat) + (1 - alpha) * grey[..., None]
    return image(Image.fromarray(mixed.astype(np.uint8)), "a map over the scene")


def _shade(scales: npt.NDArray[np.float32], known: Sequence[float]) -> Colours:
    """Colours (..., 3) from the smallest to the largest of the known scales."""
    low, high = np.log2(known[0]), np.log2(known[-1])
    along = (np.log2(scales) - low) / max(high - low, 1e-9)
    small, large = _rgb(SMALL), _rgb(LARGE)
    mixed: Colours = small + along[..., None] * (large - small)
    return mixed


def _rgb(colour: str) -> Colours:
    return np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)], np.float64)


def _class_legend() -> str:
    items = "".join(
        f'<span><i style="background:{colour}"></i>{k}</span>' for k, colour in enumerate(CLASSES)
    )
    return f'<p class="legend">{items}</p>'


def _scale_legend(scales: Sequence[float]) -> str:
    ends = [TICKS.get(scale, f"{scale:.3g}") for scale in (scales[0], scales[-1])]
    bar = f'<i class="ramp" style="background:linear-gradient(90deg,{SMALL},{LARGE})"></i>'
    return f'<p class="legend"><span>{ends[0]}{bar}{ends[1]}</span></p>'
