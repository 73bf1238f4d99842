"""Pictures of digits and windows: the data set, what the channels see, and which of them wins."""
# Shape letters: S scale channel, P patch pixels.

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.models.channels import PAPER_SCALES
from foveate.paper.summary import SEEDS
from foveate.paper.tables import SCALES
from foveate.report.plots import sample_grid
from foveate.resampling import foveate
from foveate.sweeps.records import Winners

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRAME = 112  # pixels of an image
SIZE = 28  # pixels of a patch
DIGITS = (2, 4, 7, 8)  # of mnist-5k, whose classes take turns
NETWORKS = {"fovmax": "FovMax", "fovavg": "FovAvg", "swmax": "SWMax"}
TRAINED = {"tr1": "trained on 1", "tr2": "trained on 2", "tr4": "trained on 4"}


def data_set() -> "Figure":
    """Some digits at the 17 scales of the data set."""
    digits = load_source("mnist-5k").train.images[list(DIGITS)]
    columns = [rescale(digits, scale, size=FRAME) for scale in SCALES]
    return sample_grid(columns, [_named(scale) for scale in SCALES])


def foveated(digit: int = 2, scale: float = 4.0) -> "Figure":
    """A digit with the nested windows of all channels, and the patch that each channel sees."""
    from matplotlib.figure import Figure

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
        axes.set_title(_named(channel), fontsize=9, pad=3)
    for axes in grid.flat[len(patches) :]:
        axes.set_axis_off()
    return figure


def winning_scales(winners: Iterable[Winners]) -> "Figure":
    """Histograms of the winning scale, one upright for each true scale, darker for more images.

    A dotted line marks where the winner moves as much as the digit, through the mean winner at
    the training scale.
    """
    from matplotlib.figure import Figure

    counted = list(winners)
    figure = Figure(figsize=(8.6, 8.2), layout="constrained")
    grid = figure.subplots(len(NETWORKS), len(TRAINED), sharex=True, sharey=True)
    for (name, label), line in zip(NETWORKS.items(), grid, strict=True):
        for (trained, words), axes in zip(TRAINED.items(), line, strict=True):
            own = [w for w in counted if w.row == f"{name}-{trained}"]
            _histogram(axes, own, float(trained[2:]))
            axes.set_title(f"{label}, {words}{_partly(own)}", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("scale of the test images")
    for axes in grid[:, 0]:
        axes.set_ylabel("scale of the winning channel")
    return figure


def _histogram(axes: "Axes", winners: Sequence[Winners], trained: float) -> None:
    octaves = [math.log2(scale) for scale in SCALES]
    for place in (axes.set_xticks, axes.set_yticks):
        place(octaves[::4], [_named(scale) for scale in SCALES[::4]])
    axes.set_xlim(octaves[0] - 0.125, octaves[-1] + 0.125)
    axes.set_ylim(octaves[0] - 0.125, octaves[-1] + 0.125)
    if not winners:
        return
    shares = _shares(winners)
    axes.pcolormesh(octaves, octaves, shares.T.numpy(), cmap="Blues", vmin=0, rasterized=True)
    means = (shares * torch.tensor(octaves)).sum(1).tolist()
    start = means[octaves.index(math.log2(trained))] - math.log2(trained)
    axes.plot(octaves, means, color="#D55E00", marker="o", ms=3, lw=1.4)
    axes.plot(octaves, [o + start for o in octaves], color="0.35", ls=":", lw=1.2)


def _partly(winners: Sequence[Winners]) -> str:
    seeds = len({w.seed for w in winners})
    if seeds >= SEEDS:
        return ""
    return f": {seeds} of {SEEDS} seeds" if seeds else ": no results yet"


def _shares(winners: Sequence[Winners]) -> Tensor:
    """Share of the images of each true scale (first axis) that each channel won, (17, 17)."""
    counts = torch.zeros(len(SCALES), len(SCALES))
    for line in winners:
        counts[_nearest(line.scale), _nearest(line.channel)] += line.count
    return counts / counts.sum(1, keepdim=True)


def _nearest(scale: float) -> int:
    return min(range(len(SCALES)), key=lambda k: abs(math.log(SCALES[k] / scale)))


def _windows(axes: "Axes", image: Tensor) -> None:
    """The image within what the largest window sees, and all windows on it."""
    from matplotlib.patches import Rectangle

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


def _patch(axes: "Axes", patch: Tensor, colour: Any) -> None:
    axes.imshow(patch.numpy(), cmap="gray", vmin=-0.77, vmax=0.77)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=colour, lw=2.5)


def _colours(count: int) -> list[Any]:
    """From dark to light with growing scale, in an order that all eyes see."""
    from matplotlib import colormaps

    return [colormaps["plasma"](0.25 + 0.7 * k / (count - 1)) for k in range(count)]


def _named(scale: float) -> str:
    return f"1/{1 / scale:g}" if scale == 0.5 else f"{scale:.3g}"
