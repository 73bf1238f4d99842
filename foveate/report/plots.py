"""Pictures of data and results, drawn with matplotlib and written as PNG or SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from foveate.errors import ConfigError
from foveate.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")


def sample_grid(images: Sequence[Tensor], titles: Sequence[str]) -> "Figure":
    """Draw a column of samples under each title; every entry of `images` is (N, C, H, W)."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows, columns = len(images[0]), len(images)
    tight = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    figure = Figure(figsize=(0.85 * columns + 0.1, 0.85 * rows + 0.35), layout=tight)
    grid = figure.subplots(rows, columns, squeeze=False)
    for column, (batch, title) in enumerate(zip(images, titles, strict=True)):
        grid[0, column].set_title(title, fontsize=9)
        for row, image in enumerate(batch):
            axes = grid[row, column]
            axes.set_axis_off()
            pixels = image.movedim(0, -1).float().numpy()
            low, high = float(pixels.min()), float(pixels.max())
            axes.imshow((pixels - low) / max(high - low, 1e-9), cmap="gray", vmin=0, vmax=1)
    return figure


def save(figure: "Figure", path: Path) -> Path:
    """Write the figure in the format that the name of `path` ends in."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"picture must end in .png, .svg or .pdf, got {path.name!r}")
    with replacing(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)
    return path
