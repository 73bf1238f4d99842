"""How the time of an evaluation of FovAvg grows, against a plain loop: measurement and figure."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from cases import Setup, evaluating
from channels import fovavg, loop_over_channels
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from timing import Cell, Factory, alternate

from foveate.execution.plan import predict
from foveate.report.plots import COLOURS, DASHED, MARKERS, panel_grid
from foveate.scales import ScaleGrid

BATCH = {"cpu": 32, "cuda": 128}
LABELS = {
    "channels": "scale channels",
    "pixels": "pixels of an image (width × height)",
    "batch": "images of a batch",
    "images": "images, in batches of {batch}",
}
Panel = dict[str, Any]
"""``at`` with ``names``, and the cells of ``ours`` and ``loop`` at each of these."""


def points(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Return the values of each quantity; sides of images for `pixels`."""
    if setup.quick:
        return {"channels": (1, 3), "pixels": (56, 112), "batch": (1, 2), "images": (2, 4)}
    batch = BATCH[setup.device.type]
    return {
        "channels": (1, 3, 5, 9, 17, 33),
        "pixels": (56, 112, 224, 448),
        "batch": tuple(2**k for k in range(0, 13 if setup.gpu else 8, 2 if setup.gpu else 1)),
        "images": tuple(batch * 2**k for k in range(0, 6, 1 if setup.gpu else 2)),
    }


def measure(setup: Setup) -> dict[str, Panel]:
    """Return the times of all panels; quantities that do not vary have their usual values."""
    return {name: panel(setup, name, at) for name, at in points(setup).items()}


def panel(setup: Setup, name: str, at: tuple[int, ...]) -> Panel:
    found: dict[str, list[Cell]] = {"ours": [], "loop": []}
    for value in at:
        batch = 2 if setup.quick else BATCH[setup.device.type]
        usual = {"channels": 17, "pixels": 112, "batch": batch, "images": 0}
        cells = alternate(
            candidates(setup, **{**usual, name: value}), setup.device, 2 if setup.quick else 5, 3
        )
        for way, cell in cells.items():
            found[way].append(cell)
    if name == "pixels":
        return {"at": [side**2 for side in at], "names": [f"{side}²" for side in at], **found}
    return {"at": list(at), "names": [f"{value:,}" for value in at], **found}


def candidates(
    setup: Setup, channels: int, pixels: int, batch: int, images: int
) -> dict[str, Factory]:
    net = fovavg(setup.device).eval()
    per_octave = 4 if channels <= 17 else 8
    net.scales = ScaleGrid(0.5, 0.5 * 2 ** ((channels - 1) / per_octave), per_octave=per_octave)
    torch.manual_seed(0)
    shown = torch.randn(max(images, batch), 1, pixels, pixels, device=setup.device)

    def batches() -> Iterator[torch.Tensor]:
        yield from shown.split(batch)

    def ours() -> None:
        for part in batches():
            predict(net, part, setup.precision)

    def loop() -> torch.Tensor:
        return torch.cat([loop_over_channels(net, part) for part in batches()])

    return {"ours": lambda: ours, "loop": lambda: evaluating(setup, loop)}


def draw(growth: dict[str, Panel], device: str) -> Figure:
    """Plot one panel per quantity, on logarithmic axes; whiskers are the range of the rounds."""
    figure, panels, _ = panel_grid(len(LABELS), 3.1, 2.9, columns=len(LABELS))
    ways = {"ours": "foveate", "loop": "loop over channels"}
    for axes, (name, label) in zip(panels, LABELS.items(), strict=True):
        for index, (way, title) in enumerate(ways.items()):
            found = zip(growth[name]["at"], growth[name][way], strict=True)
            draw_times(
                axes, {x: sorted(cell["ms"]) for x, cell in found if "ms" in cell}, index, title
            )
        set_axes(axes, growth[name])
        axes.set_xlabel(label.format(batch=BATCH[device]), fontsize=9)
    panels[0].set_ylabel("time of the evaluation (ms)", fontsize=9)
    lines, titles = panels[0].get_legend_handles_labels()
    figure.legend(lines, titles, frameon=False, fontsize=9, loc="outside upper center", ncols=2)
    return figure


def draw_times(axes: Axes, times: dict[float, list[float]], index: int, title: str) -> None:
    """Plot the median of sorted times, with their range."""
    if not times:
        return
    middle = [median(ms) for ms in times.values()]
    below = [m - ms[0] for m, ms in zip(middle, times.values(), strict=True)]
    above = [ms[-1] - m for m, ms in zip(middle, times.values(), strict=True)]
    axes.errorbar(
        list(times), middle, (below, above), label=title, elinewidth=0.8, ms=4, lw=1.6,
        color=COLOURS[index], marker=MARKERS[index], linestyle=("-", DASHED)[index],
    )  # fmt: skip


def set_axes(axes: Axes, panel: Panel) -> None:
    """Set logarithmic axes with plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(panel["at"], panel["names"])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
