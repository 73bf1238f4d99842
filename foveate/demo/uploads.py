"""Request fields, and uploaded image files, also as digits in the format of MNIST."""
# Shape letters: H W pixels.

import base64
import binascii
import io
import warnings
from reprlib import repr as shorten

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from foveate.data.decoding import Background, Pixels, read_picture
from foveate.errors import DataError
from foveate.evaluation.predict import edge_pixels, has_light_background
from foveate.files import NamedBytes

MAX_FILE_BYTES = 8 * 2**20  # maximum file size
PIXELS = 25_000_000  # maximum image size; a decoded pixel takes four bytes
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
SIDE, BOX = 28, 20  # side in pixels of an MNIST image and of the bounding box of its digit
LARGEST = 512  # longer side in pixels; larger images are averaged down
INK = 0.25  # strokes weaker than this fraction of the strongest are not part of the digit


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return a field after checking that it is an integer in a range."""
    if type(value) is not int or not low <= value <= high:
        raise DataError(f"{name} must be an integer from {low} to {high}, got {shorten(value)}")
    return value


def check_number(name: str, value: object, low: float, high: float) -> float:
    """Return a field after checking that it is a number in a range."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{name} must be a number from {low:g} to {high:g}, got {shorten(value)}")
    return float(value)


def read_upload(text: str, name: str) -> tuple[Tensor, str]:
    """Convert an image file (base64) to a digit (1, 1, 28, 28) and a note for the user."""
    pixels, note = decode(text, name, "contrast")
    try:
        return to_mnist_digit(pixels), note
    except DataError as error:
        raise DataError(f"{name} {error}") from None


def decode(text: str, name: str, background: Background) -> tuple[Pixels, str]:
    """Decode an image file (base64) to pixels (H, W, 1 or 3), and return a note for the user."""
    if len(text) > 4 * (MAX_FILE_BYTES // 3 + 1):
        raise DataError(f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB; choose a smaller file")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{name} was not transmitted completely; try again") from None
    note = _check(data, name)
    return read_picture(NamedBytes(data, name), background), note


def to_mnist_digit(pixels: Pixels) -> Tensor:
    """Convert an image (H, W, 1 or 3) of one digit to MNIST's format: (1, 1, 28, 28), 0 to 255."""
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


def encode_digit(digit: Tensor) -> str:
    """Encode a digit (1, 1, 28, 28) as base64 text for the page."""
    return base64.b64encode(digit.numpy().tobytes()).decode()


def decode_digit(text: str) -> Tensor:
    """Decode a digit encoded by `encode_digit`."""
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
        return torch.from_numpy(values.reshape(1, 1, SIDE, SIDE).copy())
    except (binascii.Error, ValueError, TypeError):
        raise DataError("the request contains no digit; draw, upload or pick one") from None


def _check(data: bytes, name: str) -> str:
    """Raise if the file is not an image or too large to decode; return a note on animations."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                moving = getattr(image, "is_animated", False)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{name} has more than {PIXELS:,} pixels; choose a smaller image") from None
    except Exception:  # decoders raise anything from SyntaxError to struct.error
        kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise DataError(f"{name} is not an image; choose a {kinds} file") from None
    if width * height > PIXELS:
        raise DataError(
            f"{name} has {width:,} × {height:,} pixels, more than {PIXELS:,}; choose a "
            "smaller image"
        )
    return f"{name} is an animation; only its first frame is used." if moving else ""


def _ink(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Return the stroke intensity of each pixel (H, W), 0 to 1."""
    picture = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    blocks = max(1, max(picture.size) // LARGEST)
    grey = np.asarray(picture.convert("L").reduce(blocks))[None]
    light = 255 - grey if has_light_background(grey) else grey
    ground = float(np.median(edge_pixels(light)))
    above: npt.NDArray[np.float32] = (light[0].astype(np.float32) - ground).clip(0)
    if above.max() < 16:  # of 255
        raise DataError("shows no digit that stands out from its background; use more contrast")
    above /= above.max()
    return above


def _start(mass: npt.NDArray[np.float32]) -> int:
    """Return the offset that centres the centre of mass and keeps all pixels inside."""
    centre = float((mass * (np.arange(len(mass)) + 0.5)).sum() / mass.sum())
    return int(np.clip(round(SIDE / 2 - centre), 0, SIDE - len(mass)))
