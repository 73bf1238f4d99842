"""The three networks of the page, trained for seconds, and pictures that people might upload."""

import base64
import io
import zlib
from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw

from foveate.evaluation.curve import AtScale
from foveate.evaluation.results import RunResult, save_results
from foveate.paper.quickstart import quick_runs, train_runs

NAMES = ("cnn", "fovmax", "fovavg")
SCALES = (0.5, 2.0, 8.0)


def made_runs(folder, names=NAMES):
    """Train the paper's networks on 320 digits; give the folders as options of the demo.

    What they scored is made up: to measure it takes longer than to train them.
    """
    runs = {name: replace(quick_runs()[name], samples=320, epochs=1) for name in names}
    train_runs(runs, folder)
    for k, name in enumerate(names):
        scales = [
            AtScale(s, ((60 + 9 * k + i, 40 - 9 * k - i), (0, 0))) for i, s in enumerate(SCALES)
        ]
        result = RunResult(run=name, config=runs[name], scales=tuple(scales))
        about = {"split": "test", "sources": [{"name": "mnist-5k"}]}
        save_results([result], folder / name, about)
    return [str(folder / name) for name in names]


def seven(mode="L", size=(120, 160), ink=255, ground=0):
    """A picture of a 7."""
    image = Image.new("L", size, ground)
    width, height = size
    line = [(0.3 * width, 0.2 * height), (0.7 * width, 0.2 * height), (0.45 * width, 0.8 * height)]
    ImageDraw.Draw(image).line(line, fill=ink, width=round(0.09 * height), joint="curve")
    return image.convert(mode)


def saved(image, kind="PNG", **options):
    """The bytes of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_alpha():
    """Black strokes on nothing."""
    drawn = Image.new("RGBA", (120, 160), (0, 0, 0, 0))
    drawn.putalpha(seven())
    return saved(drawn)


def bomb():
    """The head of a PNG of 30,000 × 30,000 pixels: it says so, and has none."""
    head = bytearray(saved(Image.new("1", (8, 8))))
    head[16:24] = (30_000).to_bytes(4, "big") * 2
    head[29:33] = zlib.crc32(head[12:29]).to_bytes(4, "big")
    return bytes(head)


GOOD = {
    "grey.png": saved(seven()),
    "on-paper.jpg": saved(seven(ink=20, ground=235), "JPEG"),
    "colours.webp": saved(seven("RGB"), "WEBP"),
    "cmyk.jpg": saved(seven("CMYK"), "JPEG"),
    "sixteen-bits.png": saved(Image.fromarray(np.asarray(seven()).astype(np.uint16) * 257)),
    "alpha.png": with_alpha(),
    "moving.gif": saved(seven("P"), "GIF", save_all=True, append_images=[seven("P", ink=90)]),
}
"""Files that are pictures of a 7, in ways that are often forgotten."""
BAD = {
    "text.png": (b"this is no picture\n" * 40, "text.png is not an image"),
    "truncated.png": (GOOD["grey.png"][:200], "cannot read image truncated.png"),
    "bomb.png": (bomb(), "bomb.png has more than 25,000,000 pixels"),
    "empty.png": (b"", "empty.png is not an image"),
    "blank.png": (saved(Image.new("L", (50, 50), 40)), "blank.png shows no digit"),
    "drawing.tiff": (saved(seven(), "TIFF"), "drawing.tiff is not an image; choose a PNG"),
}
"""Files that are refused, each with what is said."""


def base64_of(data):
    return base64.b64encode(data).decode()
