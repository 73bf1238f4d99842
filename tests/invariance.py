"""Measured errors of covariance and invariance: a network against what the theory promises.

`rescale` gives the images (B, C, H, W) at a relative scale: a formula, a renderer, or
``lambda scale: zoom(images, scale)`` with `foveate.evaluation.audit.images.zoom`.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.errors import ConfigError
from foveate.evaluation.curve import eval_mode
from foveate.models.channels import ScaleChannels
from foveate.scales import ScaleGrid, as_scales

Rescale = Callable[[float], Tensor]
SAME = 1e-6  # relative difference up to which two scales are the same


@dataclass(frozen=True, kw_only=True)
class CovarianceError:
    """Differences between the logits of `channels` pairs, in units of their standard deviation."""

    mean: float
    max: float
    channels: int


@dataclass(frozen=True, kw_only=True)
class InvarianceError:
    """Difference from the logits at scale 1: mean absolute difference in units of their standard
    deviation, and the share of images whose predicted class stays."""

    scale: float
    difference: float
    agreement: float


def covariance_error(net: ScaleChannels, rescale: Rescale, factor: float) -> CovarianceError:
    """Compare channel s · factor of the rescaled images with channel s of the original ones.

    By the theory they are equal, whatever the weights; the remainder is discretisation. Channels
    without a partner are left out.

    Raises:
        ConfigError: If no two scales of the network are `factor` apart.
    """
    pairs = [
        (i, j)
        for i, scale in enumerate(net.scales)
        for j, other in enumerate(net.scales)
        if math.isclose(scale * factor, other, rel_tol=SAME)
    ]
    if not pairs:
        raise ConfigError(f"no two of the scales {net.scales} are a factor of {factor:g} apart")
    with eval_mode(net):
        before, after = net.channels(rescale(1.0)), net.channels(rescale(factor))
    before, after = before[:, [i for i, _ in pairs]], after[:, [j for _, j in pairs]]
    error = (after - before).abs().double() / _spread(before)
    return CovarianceError(mean=float(error.mean()), max=float(error.max()), channels=len(pairs))


def invariance_error(
    model: Callable[[Tensor], Tensor], rescale: Rescale, scales: ScaleGrid | Sequence[float]
) -> list[InvarianceError]:
    """Compare the logits (B, K) of any model at each of `scales` with those at scale 1."""
    with eval_mode(model):
        before = model(rescale(1.0))
        unit, label = _spread(before), before.argmax(1)
        errors = []
        for scale in as_scales(scales):
            after = model(rescale(scale))
            change = float((after - before).abs().double().mean() / unit)
            same = float((after.argmax(1) == label).double().mean())
            errors.append(InvarianceError(scale=scale, difference=change, agreement=same))
    return errors


def _spread(logits: Tensor) -> Tensor:
    """The standard deviation of all logits, the unit of every error here."""
    return logits.double().std(correction=0).clamp_min(torch.finfo(torch.float32).tiny)
