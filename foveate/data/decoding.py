"""Decode an image file of any format to 8-bit pixels, or read only its size."""
# Shape letters: C image channel, H W pixels.

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, ImageStat
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from foveate.errors import DataError
from foveate.files import check_regular

Pixels: TypeAlias = npt.NDArray[np.uint8]
Background: TypeAlias = Literal["black", "contrast"]


def read_picture(path: Path | BinaryIO, background: Background = "black") -> Pixels:
    """Read an image as uint8 (H, W, C), where C is 1 or 3.

    EXIF orientation is applied. An image with a palette, such as a GIF, is grey if all its pixels
    are. 16-bit grey is reduced to its upper 8 bits. An animation yields its first frame.
    Transparent pixels are blended with a background, which is black by default. With
    `background="contrast"`, it is white if the visible pixels are dark on average.
    """
    with _opened(path) as image:
        ImageOps.exif_transpose(image, in_place=True)  # otherwise Pillow copies every image
        pixels = _pixels(image, background)
    return pixels.reshape(*pixels.shape[:2], -1)


def read_size(path: Path | BinaryIO) -> tuple[int, int]:
    """Read height and width of an image after EXIF rotation, without decoding its pixels."""
    with _opened(path) as image:
        width, height = image.size
        if isinstance(image, TiffImageFile):  # versions of Pillow differ in the size of turned ones
            width, height = (image.tag_v2[tag] for tag in (IMAGEWIDTH, IMAGELENGTH))
        # `getexif` decodes such a PNG to find tags after its pixels.
        decodes = image.format == "PNG" and "exif" not in image.info
        tags = {} if decodes else image.getexif()
        turned = tags.get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        return (width, height) if turned else (height, width)


def is_colour(path: Path) -> bool:
    """Whether `read_picture` returns three channels; decodes only images with a palette."""
    with _opened(path) as image:
        mode = image.mode
    if mode in ("P", "PA"):
        return bool(read_picture(path).shape[2] == 3)
    return mode not in ("1", "L", "LA", "F") and not mode.startswith("I")


@contextmanager
def _opened(path: Path | BinaryIO) -> Iterator[Image.Image]:
    """Open an image, and turn every error within the block into a DataError with the file name."""
    if isinstance(path, Path):
        check_regular(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of damaged tags that affect no pixel
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Pillow 12.3 maps an uncompressed TIFF that it opens by name, and then scrambles the
            # pixels of a grey or transparent one whose orientation swaps rows and columns.
            opened = path.open("rb") if isinstance(path, Path) else nullcontext(path)
            with opened as file, Image.open(file) as image:
                if image.format == "EPS":  # Pillow would run the file in Ghostscript
                    raise DataError("is a PostScript program; save it as PNG")
                yield image
    except DataError as error:
        raise DataError(f"image {path} {error}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"image {path} has more than {Image.MAX_IMAGE_PIXELS} pixels; resize it"
        ) from error
    except Exception as error:  # decoders raise anything from SyntaxError to struct.error
        said = str(getattr(error, "strerror", None) or error)
        reason = " ".join(said.split()) or type(error).__name__
        unopened = isinstance(error, FileNotFoundError | IsADirectoryError)
        remedy = "pass the path of a file" if unopened else "replace or remove it"
        raise DataError(f"cannot read image {path} ({reason}); {remedy}") from error


def _pixels(image: Image.Image, background: Background) -> Pixels:
    if image.mode.startswith("I"):
        return _upper_byte(np.asarray(image))
    if image.mode == "F":
        raise DataError("has floating-point pixels of unknown range; save it with 8 or 16 bits")
    flat = _flatten(image, background) if image.has_transparency_data else image
    if image.mode in ("1", "L", "LA"):
        return np.asarray(_converted(flat, "L"))
    pixels = np.asarray(_converted(flat, "RGB"))
    if image.mode in ("P", "PA") and (pixels == pixels[..., :1]).all():
        return pixels[..., :1]
    return pixels


def _converted(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)  # `convert` always copies


def _upper_byte(values: npt.NDArray[np.integer]) -> Pixels:
    """Reduce 16-bit grey to 8 bits; some decoders return it as 32-bit integers."""
    if values.min() < 0 or values.max() > 0xFFFF:
        raise DataError("has pixels of more than 16 bits; save it with 8 or 16 bits")
    return (values >> 8).astype(np.uint8)


def _flatten(image: Image.Image, background: Background) -> Image.Image:
    drawn = image.convert("RGBA")
    white = background == "contrast" and _is_dark(drawn)
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255) if white else (0, 0, 0, 255))
    return Image.alpha_composite(ground, drawn)


def _is_dark(drawn: Image.Image) -> bool:
    visible = ImageStat.Stat(drawn.convert("L"), mask=drawn.getchannel("A"))
    return visible.count[0] > 0 and visible.mean[0] < 128
