"""Random zooms in training: images shown as if they had been magnified or reduced.

By covariance, a network with the scales S has the same response to an image magnified by z as a
network with the scales S / z to the image itself. Magnifying therefore only divides the scales by z
and crops the frame to 1 / z of its side. Networks without scale channels, which have the same zooms
in comparisons, receive resampled frames.

A reduced image has fewer pixels, so windows that magnify it look blurred. To show this in training,
a reduced image is resampled to the pixels of its frame, with antialiasing only if the recipe does
so: `mnist-large-scale` smooths images in proportion to their scale instead.

`mnist-large-scale` stretches the values of every frame to the full range, and repeats the border in
a larger frame; `mirrored` fills frames of any size with mirror images. docs/log.md has
measurements.
"""
# Shape letters: B batch, C image channel, H W pixels.

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from foveate.data.large_scale import send, stretch_contrast
from foveate.execution.plan import Prepared, prepare, prepare_patches
from foveate.execution.precision import Precision
from foveate.models.channels import ScaleChannels
from foveate.resampling.definition import PatchSpec, resample

STEPS = 16  # distinct factors in an epoch; images with the same factor are resampled together
TOGETHER = 64  # frames to stretch at once; more of them leave the cache of a processor
Group = tuple[float, Tensor]  # a factor and its images (B, C, H, W)


@dataclass(frozen=True, kw_only=True)
class Zooms:
    """The zooms of a run: the `limits` of the factor, and what zoomed frames show.

    Images show `margin` pixels more than their frame on each side. With `stretch`, the values of
    cropped and reduced frames are stretched to the full range; without it, reduced frames are
    antialiased.
    """

    limits: tuple[float, ...]
    margin: int = 0
    stretch: bool = True


@lru_cache(maxsize=32)  # one entry for each of several concurrent runs
def draw_zooms(limits: tuple[float, ...], count: int, seed: tuple[int, int]) -> Tensor:
    """Draw a log-uniform factor within `limits` for each image, from the seed and the epoch.

    An epoch has `STEPS` distinct factors, equally spaced in the logarithm from a random start.
    """
    random = np.random.default_rng([*seed, STEPS])
    place = (random.integers(STEPS, size=count) + random.random()) / STEPS
    low, high = np.log(limits)
    return torch.from_numpy(np.exp(low + place * (high - low)))


def prepare_zoomed(
    net: nn.Module, images: Tensor, factors: Tensor, precision: Precision, zooms: Zooms
) -> Prepared:
    """Prepare images (B, C, H, W), each magnified about its centre by one of `factors` (B,)."""
    order = factors.argsort(stable=True)
    moved = bool((order.diff() < 0).any())
    images = images[send(order, images.device)] if moved else images
    found, counts = factors.unique(return_counts=True)
    groups = list(zip(found.tolist(), images.split(counts.tolist()), strict=True))
    if isinstance(net, ScaleChannels):
        inputs = _cut_patches(net, groups, len(images), zooms)
    else:
        inputs = _resample_frames(groups, zooms)
    inputs = inputs[send(order.argsort(), images.device)] if moved else inputs
    if isinstance(net, ScaleChannels):
        return prepare_patches(net, inputs)
    return prepare(net, inputs, precision)


def _cut_patches(net: ScaleChannels, groups: list[Group], count: int, zooms: Zooms) -> Tensor:
    """Cut the patches (B, S, C, P, P) of the `count` images in groups of increasing factor."""
    shape = (count, len(net.scales), groups[0][1].shape[1], net.size, net.size)
    patches = groups[0][1].new_empty(shape)
    reduced = [group for group in groups if group[0] < 1]
    begin = sum(len(part) for _, part in reduced)
    spec = PatchSpec(net.scales, net.size, net.padding, net.antialias)
    if reduced:
        resample(_resample_frames(reduced, zooms), spec, out=patches[:begin])
    for zoom, part in groups[len(reduced) :]:
        scales = tuple(scale / zoom for scale in net.scales)
        out = patches[begin : (begin := begin + len(part))]
        resample(_show(part, zoom, zooms), spec._replace(scales=scales), out=out)
    return patches


def _resample_frames(groups: list[Group], zooms: Zooms) -> Tensor:
    """Return the frames (B, C, H, W) of images in groups of increasing factor."""
    side, count = groups[0][1].shape[-1] - 2 * zooms.margin, sum(len(part) for _, part in groups)
    frames, end, reduced = groups[0][1].new_empty(count, groups[0][1].shape[1], side, side), 0, 0
    for zoom, part in groups:
        begin, end = end, end + len(part)
        spec = PatchSpec((1 / zoom,), side, antialias=not zooms.stretch)
        resample(_show(part, zoom, zooms), spec, out=frames[begin:end, None])
        reduced = end if zoom < 1 else reduced
    for some in frames[:reduced].split(TOGETHER) if zooms.stretch else ():
        some.copy_(stretch_contrast(some))
    return frames


def _show(images: Tensor, zoom: float, zooms: Zooms) -> Tensor:
    """Crop images to what their frames show, with the contrast of a whole frame."""
    shown = crop_frame(images, zoom, zooms.margin)
    stretched = zooms.stretch and shown.shape != images.shape
    return stretch_contrast(shown) if stretched else shown


def crop_frame(images: Tensor, zoom: float, margin: int = 0) -> Tensor:
    """Crop images to the part that the frame shows when they are magnified by `zoom`.

    At zoom 1 the frame is the image without a `margin` on each side. The centre does not move.
    """
    tops = []
    for length in images.shape[-2:]:
        side = length - 2 * margin  # of the frame
        tops.append(min((length - 1) // 2, margin + round(side * (1 - 1 / zoom) / 2)))
    (y, x), (height, width) = (max(0, top) for top in tops), images.shape[-2:]
    return images[..., y : height - y, x : width - x].contiguous()
