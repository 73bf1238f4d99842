"""Figure of foveated processing in README and docs."""

import math
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.models.channels import PAPER_SCALES
from foveate.resampling import foveate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

FRAME = 112  # image side in pixels
SIZE = 28  # patch size in pixels


def foveated(digit: int = 2, scale: float = 4.0) -> Figure:
    """Draw a digit with the nested windows of all channels, and the patch of each channel."""
    image = rescale(load_source("mnist-5k").train.images[[digit]], scale, size=FRAME)
    patches = foveate(image, PAPER_SCALES, SIZE)[0, :, 0]
    figure = Figure(figsize=(10, 3.75), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3.7, 6.3), squeeze=False)[0]
    _windows(left.subplots(), image)
    grid = right.subplots(3, 6)
    for axes, patch, channel, colour in zip(
        grid.flat, patches, PAPER_SCALES, _colours(len(patches)), strict=False
    ):
        _patch(axes, patch, colour)
        axes.set_title(f"{channel:.3g}" if channel > 0.5 else "1/2", fontsize=9, pad=3)
    for axes in grid.flat[len(patches) :]:
        axes.set_axis_off()
    return figure


def _windows(axes: "Axes", image: "Tensor") -> None:
    """Draw the area of the largest window, and all windows on it."""
    whole = math.ceil(SIZE * max(PAPER_SCALES))
    around = foveate(image, [1.0], whole)[0, 0, 0]
    low, high = FRAME / 2 - whole / 2, FRAME / 2 + whole / 2
    axes.imshow(around.numpy(), cmap="gray", extent=(low, high, high, low))
    for channel, colour in zip(PAPER_SCALES, _colours(len(PAPER_SCALES)), strict=True):
        side = SIZE * channel
        corner = ((FRAME - side) / 2,) * 2
        axes.add_patch(Rectangle(corner, side, side, fill=False, ec=colour, lw=1.2))
    axes.set_axis_off()
    axes.set_xlim(low - 2, high + 2)
    axes.set_ylim(high + 2, low - 2)


def _patch(axes: "Axes", patch: "Tensor", colour: Any) -> None:
    axes.imshow(patch.numpy(), cmap="gray", vmin=-0.77, vmax=0.77)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=colour, lw=2.5)


def _colours(count: int) -> list[Any]:
    """Return one colour per channel, lighter for larger scales, safe for colour-blind readers."""
    return [colormaps["plasma"](0.25 + 0.7 * k / (count - 1)) for k in range(count)]
