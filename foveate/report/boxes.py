"""Draw a prediction into its image: the winning window and the predicted class."""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from foveate.data.pictures import Pixels
from foveate.evaluation.predict import Prediction

SMALL = 320  # images with a longer side below this many pixels are enlarged, so that text fits
LINE = 200  # line width as a fraction of the longer side: 1 / LINE
TEXT = 22  # text height as a fraction of the longer side: 1 / TEXT
INK, EDGE = (255, 170, 0), (0, 0, 0)  # orange between black lines is visible on any image


def draw_prediction(pixels: Pixels, prediction: Prediction) -> Image.Image:
    """Draw the winning window, the predicted class and its probability into an image.

    The box is clipped to the image. Images whose longer side is below 320 pixels are enlarged by
    an integer factor.

    Args:
        pixels: Image as a uint8 array, as `foveate.data.pictures.read_picture` returns it.
        prediction: Prediction for this image. If it has no window, only the class is drawn.

    Shape:
        ``pixels``: ``(H, W, 1)`` for greyscale or ``(H, W, 3)`` for RGB.

    Returns:
        The annotated image in RGB.

    Examples:
        >>> import numpy as np
        >>> found = Prediction(
        ...     label="cat", confidence=0.93, probabilities=(0.93, 0.07), inverted=False,
        ...     centre=(120.0, 160.0), window=90.0,
        ... )
        >>> draw_prediction(np.zeros((240, 320, 3), np.uint8), found).size
        (320, 240)
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
    """Clip a coordinate so that a line drawn there lies inside the image."""
    return max(0, min(max(round(at), line), length - 1 - line))


def _caption(draw: ImageDraw.ImageDraw, corner: tuple[int, int], text: str) -> None:
    """Write text on a black background above `corner`, shifted to stay inside the image."""
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
