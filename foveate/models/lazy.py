"""Lazy evaluation of scale channels: evaluate only as many as the predicted class depends on.

Every fourth channel of an image is evaluated first. An image is decided if the pooled logit of the
best class leads by more than a tolerance. For the others, the channels two steps from the strongest
one are evaluated, then every other channel, then all. The more channels are known, the less the
remaining ones can change, so that a smaller lead decides. Decided images are left out of later
rounds, and the result of an image does not depend on the other images in its batch. On a CPU, only
the patches that are evaluated are cut.

This suits pools to which a channel without a strong response contributes little: `max` and
`logsumexp`. Both leave out channels whose logits are minus infinity.
"""
# Shape letters: B batch, S scale channel, N patches, C image channel, H W pixels, P patch pixels,
# K classes.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foveate.errors import ConfigError
from foveate.models.pooling import Pool, class_logits, pool_scales
from foveate.models.recompute import uses_batch_statistics
from foveate.resampling import foveate
from foveate.tracing import is_traced

if TYPE_CHECKING:
    from foveate.models.channels import ScaleChannels

POOLS = ("max", "logsumexp")
COARSE = 4  # distance of the channels that are evaluated for every image
# Share of the tolerance by which an image must lead after each round, and the distance of the
# channels that are evaluated otherwise; None for the neighbours of the strongest channel. For a
# disagreement of 0.05 %, the digit networks need 4.9 to 5.0 channels, and 5.3 to 5.7 with rounds of
# every other and all channels and equal shares.
ROUNDS = ((1.0, None), (0.7, 2), (0.5, 1))
Forward = Callable[[Tensor], Tensor]


def check_lazy(tolerance: float | None, pool: Pool) -> None:
    """Raise a ConfigError unless channels pooled by `pool` can be evaluated with this tolerance."""
    if tolerance is None:
        return
    if type(tolerance) not in (int, float) or not tolerance >= 0:
        raise ConfigError(f"lazy must be a tolerance of at least 0 or None, got {tolerance!r}")
    if pool not in POOLS:
        raise ConfigError(
            f"pool={pool!r} depends on all channels; lazy evaluation requires pool='max' or "
            "pool='logsumexp'"
        )


def is_lazy(net: ScaleChannels) -> bool:
    """Whether `forward` can leave out channels.

    Subclasses can define channels that depend on each other, or another pool.
    """
    from foveate.models.channels import ScaleChannels

    own = ("channels", "forward_patches", "combine")
    functions = ((getattr(net, n), getattr(ScaleChannels, n)) for n in own)
    usual = all(getattr(method, "__func__", None) is function for method, function in functions)
    return net.lazy is not None and usual


def is_separable(backbone: nn.Module, patches: Tensor) -> bool:
    """Whether patches can be evaluated separately: no gradient and no batch statistics."""
    if torch.is_grad_enabled() or is_traced(patches):
        return False
    modules = backbone.modules()
    return not any(module.training or uses_batch_statistics(module) for module in modules)


def lazy_inputs(net: ScaleChannels, images: Tensor) -> Tensor:
    """Return the images (B, C, H, W) if their patches are cut as needed, otherwise all patches.

    A GPU cuts all patches at once, 4,096 images in 0.17 ms. Subclasses can define other patches.
    """
    from foveate.models.channels import ScaleChannels

    usual = type(net).patches is ScaleChannels.patches and images.ndim == 4
    lazy = net.lazy is not None and not net.training and images.device.type == "cpu"
    return images if usual and lazy else net.patches(images)


def all_patches(net: ScaleChannels, inputs: Tensor) -> Tensor:
    """Return all patches (B, S, C, P, P), given the result of `lazy_inputs`."""
    return net.patches(inputs) if inputs.ndim == 4 else inputs


class UncutPatches:
    """The patches (B, S, C, P, P) of images, cut when a mask selects them.

    The first round cuts only the channels that all images need. Later rounds cut more channels of
    the few images left. Keeping the patches of earlier rounds saved nothing: 250 digits at nine
    scales took 384 and 401 ms, and without it 387 and 399 ms.
    """

    def __init__(self, net: ScaleChannels, images: Tensor) -> None:
        self.net, self.images = net, images
        self.shape, self.device = (len(images), len(net.scales)), images.device

    def __getitem__(self, mask: Tensor) -> Tensor:
        """Return the patches (N, C, P, P) at the N true entries of a mask (B, S).

        All channels in the mask are cut from all images in it, in one call.
        """
        needed, channels = mask.any(1), mask.any(0).nonzero().flatten()
        images = self.images if needed.all() else self.images[needed]
        net, scales = self.net, [self.net.scales[i] for i in channels.tolist()]
        options: dict[str, Any] = {"padding": net.padding, "antialias": net.antialias}
        cut = foveate(images, scales, net.size, **options)
        chosen = mask[needed][:, channels]
        return cut.flatten(0, 1) if chosen.all() else cut[chosen]


def lazy_logits(
    net: ScaleChannels, inputs: Tensor, forward: Forward | None = None
) -> Tensor | None:
    """Compute the logits (B, K) of images (B, C, H, W) or patches (B, S, ...) by lazy evaluation.

    `forward` replaces the backbone, for example by a faster function with equal results. The result
    is None if all channels must be evaluated: without a tolerance, with gradients, in training mode
    and under tracers.
    """
    if net.lazy is None or net.pool not in POOLS or net.training:
        return None
    if not is_separable(net.backbone, inputs) or not len(inputs):  # an export has any batch size
        return None
    patches = UncutPatches(net, inputs) if inputs.ndim == 4 else inputs

    def run_backbone(flat: Tensor) -> Tensor:
        return net.forward_patches(flat.unsqueeze(1)).squeeze(1)

    channels = evaluate(patches, forward or run_backbone, net.pool, net.lazy)
    return pool_scales(channels, net.pool)


def evaluate(
    patches: Tensor | UncutPatches, forward: Forward, pool: Pool, tolerance: float
) -> Tensor:
    """Evaluate as many channels of each image as its class needs; return logits (B, S, K).

    Logits of other channels are minus infinity. `patches` (B, S, ...) are those of all channels, or
    what `forward` takes instead, which maps (N, ...) to logits (N, K). An image is decided if the
    best class leads the second by more than the `tolerance`, in pooled logits; with infinity, all
    channels are evaluated.
    """
    evaluated = _every(COARSE, patches)
    coarse = forward(patches[evaluated])
    logits = coarse.new_full((*evaluated.shape, coarse.shape[1]), -math.inf)
    logits[evaluated] = coarse
    for share, distance in ROUNDS:
        # A margin of NaN leaves the image undecided, so that its result is the definition's.
        undecided = ~(margins(pool_scales(logits, pool)) / share > tolerance)
        if not undecided.any():
            break
        wanted = _next(distance, logits, pool) & ~evaluated & undecided[:, None]
        if wanted.any():
            logits[wanted] = forward(patches[wanted]).to(logits.dtype)
            evaluated |= wanted
    return logits


def leads(channels: Tensor, pool: Pool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the class (B,) after each round, its lead (B,) and the evaluated channels (B,).

    The lead is the largest tolerance that decides for the class. `channels` are the logits
    (B, S, K) of all channels. No image is decided in an earlier round.
    """
    evaluated = _every(COARSE, channels)
    for share, distance in ROUNDS:
        logits = channels.masked_fill(~evaluated[..., None], -math.inf)
        pooled = pool_scales(logits, pool)
        yield pooled.argmax(1), margins(pooled) / share, evaluated.sum(1)
        evaluated = evaluated | _next(distance, logits, pool)


def margins(pooled: Tensor) -> Tensor:
    """Return the lead (B,) of the best over the second class in logits (B, K).

    A single class has nothing to lead over: its margin is NaN, and it depends on all channels.
    """
    if pooled.shape[1] < 2:
        return torch.full_like(pooled[:, 0], math.nan)
    best, second = pooled.topk(2, 1).values.unbind(1)
    return best - second


def _every(distance: int, patches: Tensor | UncutPatches) -> Tensor:
    """Return a mask (B, S) of channels at a distance of 4, 2 or 1; each contains the one before."""
    count, scales = patches.shape[:2]
    mask = torch.zeros(count, scales, dtype=torch.bool, device=patches.device)
    mask[:, min(COARSE // 2, scales // 2) % distance :: distance] = True
    return mask


def _next(distance: int | None, logits: Tensor, pool: Pool) -> Tensor:
    """Return a mask (B, S) of the channels of a round, given the logits of those before."""
    if distance is not None:
        return _every(distance, logits)
    strongest = class_logits(logits, pool_scales(logits, pool).argmax(1)).argmax(1)
    place = torch.arange(logits.shape[1], device=logits.device)
    return (place - strongest[:, None]).abs() == COARSE // 2
