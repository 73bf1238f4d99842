"""How far a network is from what the theory promises when its images change in scale.

`rescale` gives the images at a relative scale: a formula, a renderer, or else `zoomed(images)`.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes.

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels
from foveate.scales import ScaleGrid, as_scales

Rescale = Callable[[float], Tensor]
SAME = 1e-6  # relative difference up to which two scales are the same
SEARCH = 64  # lengths that `zoomed` tries: factors to 3e-4; to 4e-3 for even ones of odd sides


@dataclass(frozen=True, kw_only=True)
class CovarianceError:
    """Differences between the answers of `channels` pairs, in units of the answers' spread."""

    mean: float
    max: float
    channels: int


@dataclass(frozen=True, kw_only=True)
class InvarianceError:
    """How logits differ from those at scale 1: the mean of |difference| in units of their spread,
    and the part of the images that keep their predicted class."""

    scale: float
    difference: float
    agreement: float


def covariance_error(net: ScaleChannels, rescale: Rescale, factor: float) -> CovarianceError:
    """Compare channel s · factor of the rescaled images with channel s of the original ones.

    The theory says that they are equal, whatever the weights; what is left is discretisation
    (and, for `zoomed` images, its interpolation). Channels without a partner are left out.
    """
    pairs = _partners(net.scales, factor)
    with measuring(net):
        before, after = net.channels(rescale(1.0)), net.channels(rescale(factor))
    before, after = before[:, [i for i, _ in pairs]], after[:, [j for _, j in pairs]]
    error = (after - before).abs().double() / _spread(before)
    return CovarianceError(mean=float(error.mean()), max=float(error.max()), channels=len(pairs))


def invariance_error(
    model: Callable[[Tensor], Tensor], rescale: Rescale, scales: ScaleGrid | Sequence[float]
) -> list[InvarianceError]:
    """Compare the logits (B, K) of any model at each of `scales` with those at scale 1."""
    with measuring(model):
        before = model(rescale(1.0))
        unit, label = _spread(before), before.argmax(1)
        errors = []
        for scale in as_scales(scales):
            after = model(rescale(scale))
            change = float((after - before).abs().double().mean() / unit)
            same = float((after.argmax(1) == label).double().mean())
            errors.append(InvarianceError(scale=scale, difference=change, agreement=same))
    return errors


def zoomed(images: Tensor) -> Rescale:
    """Make a `rescale` from plain images (B, C, H, W): zoomed about their centre, same frame.

    Bicubic with antialiasing (torch's `interpolate`); what comes into view repeats the border.
    """
    if images.ndim != 4 or not images.is_floating_point():
        got = f"{images.dtype} {tuple(images.shape)}"
        raise ConfigError(f"images must be floats of the shape (B, C, H, W), got {got}")
    height, width = images.shape[-2:]

    def rescale(scale: float) -> Tensor:
        as_scales([scale])  # refuses what is not a positive number
        if scale == 1:
            return images
        (rows, tall), (columns, wide) = (_lengths(side, scale) for side in (height, width))
        source = _framed(images, rows, columns)
        zoom = F.interpolate(source, (tall, wide), mode="bicubic", antialias=True)
        return _framed(zoom, height, width)

    return rescale


def _partners(scales: tuple[float, ...], factor: float) -> list[tuple[int, int]]:
    """Indices (i, j) of the scales with scales[j] = scales[i] · factor."""
    pairs = [
        (i, j)
        for i, scale in enumerate(scales)
        for j, other in enumerate(scales)
        if math.isclose(scale * factor, other, rel_tol=SAME)
    ]
    if not pairs:
        raise ConfigError(f"no two of the scales {scales} are a factor of {factor:g} apart")
    return pairs


def _lengths(side: int, scale: float) -> tuple[int, int]:
    """How many pixels to take and how many to turn them into, for a zoom close to `scale`.

    Both have the parity of `side`, so that all three share their centre, and cover the frame with
    room for the kernel.
    """
    least = math.ceil(side / scale + 4 * max(1.0, 1 / scale))
    least += (least - side) % 2
    takes = range(least, least + 2 * SEARCH, 2)
    pairs = [(take, side + 2 * round((take * scale - side) / 2)) for take in takes]
    return min(pairs, key=lambda pair: abs(pair[1] / pair[0] / scale - 1))


def _framed(images: Tensor, height: int, width: int) -> Tensor:
    """Crop about the centre, or pad with the border, to `height` by `width` pixels."""
    y, x = (height - images.shape[-2]) // 2, (width - images.shape[-1]) // 2
    if y < 0:
        images = images[..., -y : images.shape[-2] + y, :]
    if x < 0:
        images = images[..., -x : images.shape[-1] + x]
    return F.pad(images, (max(x, 0), max(x, 0), max(y, 0), max(y, 0)), mode="replicate")


def _spread(answers: Tensor) -> Tensor:
    """The standard deviation of all answers; the unit of every error here."""
    return answers.double().std(correction=0).clamp_min(torch.finfo(torch.float32).tiny)


@contextmanager
def measuring(model: object) -> Iterator[None]:
    """No gradients, and modules in eval mode; afterwards in the mode they were in."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
