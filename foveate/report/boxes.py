"""A picture with the window that a network chose, and the class that it predicted there."""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from foveate.data.pictures import Pixels
from foveate.evaluation.predict import Prediction

SMALL = 320  # pixels of the longer side below which a picture is enlarged, so that text fits
LINE = 200  # the part of the longer side that a line is wide
TEXT = 22  # the part of the longer side that the text is high
INK, EDGE = (255, 170, 0), (0, 0, 0)  # orange between black lines shows on any picture


def draw_prediction(pixels: Pixels, prediction: Prediction) -> Image.Image:
    """Draw the winning window and the predicted class into a picture.

    The box is clipped to the picture. Pictures whose longer side is below 320 pixels are enlarged
    by a whole factor.

    Args:
        pixels: The picture, shape ``(H, W, 1 or 3)``, as `read_picture` returns it.
        prediction: A prediction for that picture; without a window only its class is drawn.

    Returns:
        The picture in RGB.
    """
    zoom = math.ceil(SMALL / max(pixels.shape[:2]))
    colour = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
    picture = Image.fromarray(np.ascontiguousarray(colour))
    picture = picture.resize(
        (zoom * picture.width, zoom * picture.height), Image.Resampling.NEAREST
    )
    draw, line = ImageDraw.Draw(picture), max(2, max(picture.size) // LINE)
    text = f"{prediction.label}  {prediction.confidence:.0%}"
    if prediction.centre is None or prediction.window is None:
        _caption(draw, (0, 0), text)
        return picture
    y, x = (zoom * place for place in prediction.centre)
    half = zoom * prediction.window / 2
    left, right = (_clipped(at, picture.width, line) for at in (x - half, x + half))
    top, bottom = (_clipped(at, picture.height, line) for at in (y - half, y + half))
    corners = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))
    draw.line(corners, EDGE, 3 * line, joint="curve")
    draw.line(corners, INK, line, joint="curve")
    _caption(draw, (left - line, top - 2 * line), text)
    return picture


def _clipped(at: float, length: int, line: int) -> int:
    """A coordinate moved so far into the picture that a line there can be seen."""
    return max(0, min(max(round(at), line), length - 1 - line))


def _caption(draw: ImageDraw.ImageDraw, corner: tuple[int, int], text: str) -> None:
    """Write on a black ground above `corner`, or as near to it as the picture allows."""
    width, height = draw.im.size
    size = max(12, max(width, height) // TEXT)
    font = ImageFont.load_default(size)
    text = " ".join(text.split())
    while len(text) > 4 and draw.textlength(text, font) > width - size / 2:
        text = f"{text[:-4]}..."
    length, tall = math.ceil(draw.textlength(text, font) + size / 2), round(1.4 * size)
    x = max(0, min(corner[0], width - length))
    y = max(0, min(corner[1] - tall, height - tall))
    draw.rectangle((x, y, x + length, y + tall), fill=EDGE)
    draw.text((x + size // 4, y + tall // 2), text, INK, font, anchor="lm")
