"""MNIST Large Scale: rescale small images over a factor of 16 into one frame size.

The recipe, in the order of the paper's appendix, with every convention it leaves open:

1. Bicubic rescale by s about the image centre (Keys' kernel, a = -1/2). Pixel i covers [i, i + 1),
   so source and frame share their centre whatever their sizes, odd or even, and the rescaled image
   keeps its exact size of 28 s pixels: nothing is rounded to whole pixels. When shrinking, the
   kernel is widened by 1/s (antialiasing). Beyond its border the source repeats its edge pixel.
2. Clip to [0, 256].
3. Embed in the frame: a frame pixel whose centre lies outside the rescaled image is 0 (on its
   very edge is inside); what lies outside the frame is cut off.
4. Smooth with the discrete Gaussian of sigma = 7 s / 8. What the kernel meets outside the frame is
   `border`, which matters where strokes reach the frame, hardly before s = 4. The default repeats
   the edge pixels: of the four readings it comes closest to the paper's CNN trained on scale 4 and
   tested on 8 (47.6 %; replicate 48.5, whole 46.1, reflect 44.9, zero 39.5; one seed each).
5. Rescale each image linearly to [0, 255] (a constant image becomes 0).
6. (2 / pi) atan(0.02 (I - 128)), so the background is -0.7629, not 0.
"""
# Shape letters: N images, C channels, h w source pixels, F frame pixels, E frame pixels plus what
# the smoothing kernel reaches beyond them.

import math
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from foveate.checks import check_memory
from foveate.errors import ConfigError, DataError
from foveate.scale_space import discrete_gaussian, gaussian_radius
from foveate.scales import LARGEST as LARGEST
from foveate.scales import SMALLEST as SMALLEST
from foveate.scales import check_scale as check_scale

RECIPE = 1  # raise it when the same options give other pixels
Border = Literal["replicate", "reflect", "zero", "whole"]
MAX_SIZE = 4096  # pixels of a side
BACKGROUND = 2 / math.pi * math.atan(0.02 * (0 - 128))


def rescale(
    images: Tensor, scales: float | Tensor, *, size: int = 112, border: Border = "replicate"
) -> Tensor:
    """Turn (N, C, h, w) images of 0 to 255 into (N, C, size, size) float32 images of the data set.

    `scales` is one factor for all images or a tensor of N factors. Runs where the images are.
    """
    factors = _check(images, scales, size, border)
    if not images.is_cuda:  # the result, and the two products on the way to it
        needed = 12 * len(images) * images.shape[1] * size**2
        check_memory(needed, f"{len(images)} images of {size} pixels", "use a smaller size")
    radius = _reach(factors, border)
    down = bicubic_matrices(factors, images.shape[2], size, radius)
    across = bicubic_matrices(factors, images.shape[3], size, radius)
    smooth = smoothing_matrices(factors, size, border)
    if len(factors) > 1:
        rescaled = _apply(down, images.float(), across).clamp_(0, 256)
        return _finish(_apply(smooth, rescaled, smooth), reaches_all=True)
    return _one_scale(images, down[0], across[0], smooth[0])


def _one_scale(images: Tensor, down: Tensor, across: Tensor, smooth: Tensor) -> Tensor:
    """Do all images at one scale, leaving out the frame pixels that the digit does not reach."""
    rows, columns = _reached(down), _reached(across)
    smooth_rows, smooth_columns = smooth[:, rows], smooth[:, columns]
    # Less than 1e-9 of a stroke changes no float32 of the result.
    lines, places = _reached(smooth_rows, 1e-9), _reached(smooth_columns, 1e-9)
    rescaled = _apply(down[rows], images.float(), across[columns]).clamp_(0, 256)
    smoothed = _apply(smooth_rows[lines], rescaled, smooth_columns[places])
    frame = images.new_full(
        (*images.shape[:2], *[len(smooth)] * 2), BACKGROUND, dtype=torch.float32
    )
    whole = smoothed.shape[2:] == frame.shape[2:]
    frame[:, :, lines, places] = _finish(smoothed, reaches_all=whole)
    return frame


def bicubic_matrices(scales: Tensor, source: int, size: int, margin: int = 0) -> Tensor:
    """Weights (N, size + 2 margin, source) that rescale a line of pixels into the frame."""
    frame = torch.arange(-margin, size + margin, dtype=torch.float64, device=scales.device)
    position = (frame + 0.5 - size / 2) / scales[:, None] + source / 2
    width = (1 / scales).clamp_min(1)[:, None, None]
    beyond = math.ceil(2 * float(width.max()))
    pixel = torch.arange(-beyond, source + beyond, dtype=torch.float64, device=scales.device)
    weights = keys((position[:, :, None] - (pixel + 0.5)) / width)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(0.5)
    inside = (position - source / 2).abs() <= source / 2 + 1e-9  # both ends in: mirror symmetric
    return fold(weights * inside[:, :, None], pixel.long(), source, "replicate")


def smoothing_matrices(scales: Tensor, size: int, border: Border) -> Tensor:
    """Weights (N, F, F) that smooth a line of the frame, or (N, F, E) for the border `whole`."""
    variance = (7 / 8 * scales) ** 2
    radius = gaussian_radius(float(variance.max()))
    kernel = discrete_gaussian(variance, radius)
    pixel = torch.arange(-radius, size + radius, device=scales.device)
    offset = pixel - torch.arange(size, device=scales.device)[:, None] + radius
    weights = kernel[:, offset.clamp(0, 2 * radius)]
    weights = weights * ((offset >= 0) & (offset <= 2 * radius))
    return weights if border == "whole" else fold(weights, pixel, size, border)


def _check(images: Tensor, scales: float | Tensor, size: int, border: str) -> Tensor:
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise DataError(f"images must be (N, C, h, w) with pixels, got {tuple(images.shape)}")
    check_size(size)
    check_border(border)
    factors = torch.as_tensor(scales, dtype=torch.float64, device=images.device).reshape(-1)
    if factors.numel() not in (1, len(images)):
        raise ConfigError(f"give one scale or one per image, got {factors.numel()}")
    for factor in (factors.min(), factors.max()) if factors.numel() else ():
        check_scale(float(factor))
    return factors


def check_size(size: int) -> None:
    """Raise a ConfigError for a frame of fewer or more pixels than images can have."""
    if not 1 <= size <= MAX_SIZE:
        raise ConfigError(f"size must be 1 to {MAX_SIZE:,} pixels, got {size}")


def check_border(border: str) -> Border:
    """Return `border`, or say which there are."""
    if border not in get_args(Border):
        raise ConfigError(f"border must be one of {', '.join(get_args(Border))}, got {border!r}")
    return cast(Border, border)


def _reach(scales: Tensor, border: Border) -> int:
    return gaussian_radius(float(((7 / 8 * scales) ** 2).max())) if border == "whole" else 0


def keys(x: Tensor) -> Tensor:
    """Keys' cubic kernel, a = -1/2."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def fold(weights: Tensor, pixel: Tensor, length: int, border: Border) -> Tensor:
    """Give the weights of pixels outside [0, length) to those inside that stand for them."""
    if border == "zero":
        return weights[..., (pixel >= 0) & (pixel < length)]
    if border == "replicate":
        target = pixel.clamp(0, length - 1)
    else:
        period = max(2 * (length - 1), 1)
        target = (pixel % period - (length - 1)).abs().neg() + length - 1
    folded = weights.new_zeros(*weights.shape[:-1], length)
    return folded.index_add_(-1, target, weights)


def _reached(matrix: Tensor, least: float = 0.0) -> slice:
    """The rows of a matrix that have any weight to speak of."""
    rows = (matrix.abs().sum(-1) > least).nonzero()
    return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 1)


def _apply(rows: Tensor, images: Tensor, columns: Tensor) -> Tensor:
    """Take (N, C, h, w) images to rows @ image @ columns' transpose."""
    left, right = rows.float(), columns.float()
    if left.ndim == 3:  # matrices of its own for each image
        left, right = left[:, None], right[:, None]
    return left @ (images @ right.mT)


def _finish(images: Tensor, reaches_all: bool) -> Tensor:
    """Stretch each image from its darkest and lightest value to 0 and 255, and threshold it.

    Where part of the frame is left out as black, the darkest value is 0. The two linear maps are
    one pass: 0.02 (255 (I - low) / span - 128) = gain I - (gain low + 2.56).
    """
    flat = images.flatten(1)
    low, high = (flat.amin(1, keepdim=True), flat.amax(1, keepdim=True))
    low = low if reaches_all else low.clamp_max(0)
    span = high - low
    gain = torch.where(span > 0, 0.02 * 255 / span, 0.0)
    return flat.mul_(gain).sub_(gain * low + 2.56).atan_().mul_(2 / math.pi).view_as(images)
