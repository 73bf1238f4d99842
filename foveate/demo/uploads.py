"""Picture files that the page accepts, and how one becomes a digit as MNIST has them."""
# Shape letters: H W pixels.

import base64
import binascii
import io
import warnings

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from foveate.data.decoding import Behind, Pixels, read_picture
from foveate.errors import DataError
from foveate.evaluation.predict import edge, is_light

BYTES = 8 * 2**20  # of a file
PIXELS = 25_000_000  # of a picture; decoded it takes four bytes each
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
SIDE, BOX = 28, 20  # pixels of MNIST's images, and of the box that their digits fill
LARGEST = 512  # pixels along a side that are looked at; more are averaged
INK = 0.25  # of the strongest stroke: what is weaker does not count as part of the digit


class Upload(io.BytesIO):
    """The bytes of a file, which error messages call by its name."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.shown = name

    def __str__(self) -> str:
        return self.shown


def read_upload(text: str, name: str) -> tuple[Tensor, str]:
    """Turn a file (base64) into a digit (1, 1, 28, 28), and say what was done to it."""
    pixels, note = decode(text, name, "contrast")
    try:
        return as_digit(pixels), note
    except DataError as error:
        raise DataError(f"{name} {error}") from None


def decode(text: str, name: str, behind: Behind) -> tuple[Pixels, str]:
    """Decode a picture file, its bytes in base64, to (H, W, 1 or 3), and say what was done to it.

    The kind of a picture goes by its content. Its size is known before a pixel is decoded.
    """
    if len(text) > 4 * (BYTES // 3 + 1):
        raise DataError(f"{name} is larger than {BYTES >> 20} MiB; choose a smaller file")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{name} did not arrive whole; try again") from None
    note = _check(data, name)
    return read_picture(Upload(data, name), behind), note


def as_digit(pixels: Pixels) -> Tensor:
    """Bring a picture (H, W, 1 or 3) of one digit to MNIST's form: (1, 1, 28, 28), 0 to 255.

    Light on dark, the strokes 20 pixels high (or wide), their centre of mass in the middle.
    """
    ink = _ink(pixels)
    rows, columns = (np.flatnonzero((ink > INK).any(axis)) for axis in (1, 0))
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    factor = BOX / max(cut.shape)
    height, width = (max(1, round(length * factor)) for length in cut.shape)
    image = Image.fromarray(cut).resize((width, height), Image.Resampling.BICUBIC)
    small = np.asarray(image).clip(0, 1)
    digit = np.zeros((SIDE, SIDE), np.float32)
    top, left = (_start(small.sum(1 - axis)) for axis in (0, 1))
    digit[top : top + height, left : left + width] = small / small.max()
    return torch.from_numpy(np.rint(255 * digit).astype(np.uint8))[None, None]


def pack(digit: Tensor) -> str:
    """Write a digit (1, 1, 28, 28) as text, for the page to keep."""
    return base64.b64encode(digit.numpy().tobytes()).decode()


def unpack(text: str) -> Tensor:
    """Read what `pack` wrote."""
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
        return torch.from_numpy(values.reshape(1, 1, SIDE, SIDE).copy())
    except (binascii.Error, ValueError, TypeError):
        raise DataError("the page sent no digit; draw, upload or pick one") from None


def _check(data: bytes, name: str) -> str:
    """Refuse what is no picture, or too large to decode; say of an animation what is taken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                moving = getattr(image, "is_animated", False)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{name} has more than {PIXELS:,} pixels; make it smaller") from None
    except Exception:  # decoders raise anything from SyntaxError to struct.error
        kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise DataError(f"{name} is no picture in the format {kinds}") from None
    if width * height > PIXELS:
        raise DataError(
            f"{name} has {width:,} × {height:,} pixels, more than {PIXELS:,}; make it smaller"
        )
    return f"{name} is an animation: its first picture was taken." if moving else ""


def _ink(pixels: Pixels) -> npt.NDArray[np.float32]:
    """How much of a stroke there is at each pixel (H, W), 0 to 1."""
    picture = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    blocks = max(1, max(picture.size) // LARGEST)
    grey = np.asarray(picture.convert("L").reduce(blocks))[None]
    light = 255 - grey if is_light(grey) else grey
    ground = float(np.median(edge(light)))
    above: npt.NDArray[np.float32] = (light[0].astype(np.float32) - ground).clip(0)
    if above.max() < 16:  # of 255
        raise DataError("has no digit that stands out from its background")
    above /= above.max()
    return above


def _start(mass: npt.NDArray[np.float32]) -> int:
    """Where to put a line of pixels so that its centre of mass is in the middle, all inside."""
    centre = float((mass * (np.arange(len(mass)) + 0.5)).sum() / mass.sum())
    return int(np.clip(round(SIDE / 2 - centre), 0, SIDE - len(mass)))
