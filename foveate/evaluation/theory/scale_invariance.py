"""Scale invariance of whole networks: pooling over scale, local pooling, and the limits."""
# Shape letters: S scale channel, K classes.

from collections.abc import Callable

import torch
from torch import Tensor

from foveate.evaluation.theory.blobs import ORIGIN, Blobs, ring
from foveate.evaluation.theory.bounds import Finding, compare
from foveate.evaluation.theory.probes import SIZE, Patches, logit_bounds, random_network
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.pooling import Mixing, pool_scales
from foveate.scales import ScaleGrid

GRID = ScaleGrid(0.5, 1024, per_octave=1)
FRAME = 1024
FACTOR = 2.0
NARROW = ScaleGrid(8, 16, per_octave=1)  # covers the ring, but not a ring twice as large
CUT = 288  # side of a frame in pixels that excludes the blob centres of the larger ring
POINTS = ((25.0, -14.0), (-18.5, 6.25), (3.0, 31.0))
NOTE = (
    "error of bilinear interpolation in both images, propagated through the layers; largest over "
    "the channels"
)
INSIDE = "the bound that applies where invariance holds"
# Pooling of outputs (S, K) over channels; each changes by at most the largest change of an output.
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "multiset of channel outputs": lambda outputs: outputs.sort(0).values,
    "max pooling": lambda outputs: pool_scales(outputs[None], "max"),
    "avg pooling": lambda outputs: pool_scales(outputs[None], "avg"),
    "logsumexp pooling": lambda outputs: pool_scales(outputs[None], "logsumexp"),
    "root mean square pooling": lambda outputs: outputs.square().mean(0).sqrt(),
}


def pooled_invariance(seed: int = 0) -> list[Finding]:
    """Scaling the image permutes the channel outputs, so symmetric pooling is invariant."""
    ours, theirs, limit = _measure(_network(seed), seed)
    mixed = _mixing(ours, theirs)
    breaks = mixed(ours[None])[0], mixed(theirs[None])[0], limit
    return [
        *(
            compare(f"scale invariance: {name}", (pool(ours), pool(theirs), limit), note=NOTE)
            for name, pool in POOLS.items()
        ),
        compare("breaks: concatenation", breaks, note=INSIDE, breaks=True),
    ]


def _mixing(ours: Tensor, theirs: Tensor) -> Mixing:
    """Return a `Mixing` layer that outputs only the channel that changes most.

    Concatenation assigns weights per channel, so it is not symmetric; this is the simplest case.
    """
    changes = (ours - theirs).abs().amax(1)
    mixing = Mixing(*ours.shape).double().requires_grad_(False)
    mixing.bias.zero_()
    mixing.weight.zero_().view(-1, *ours.shape)[:, int(changes.argmax())].fill_diagonal_(1)
    return mixing


def invariance_ends(seed: int = 0) -> list[Finding]:
    """Invariance fails outside the scale range of the channels and at the border of the frame."""
    net, few = _network(seed), _network(seed, NARROW)
    image, larger = ring(seed), ring(seed).scaled(FACTOR)
    *_, bound = _measure(net, seed)
    pixels, more, cut = image.sampled(FRAME), larger.sampled(FRAME), larger.sampled(CUT)
    outside, border = (few(pixels), few(more), bound), (net(pixels), net(cut), bound)
    return [
        compare(
            "breaks: object outside the range of the channels", outside, note=INSIDE, breaks=True
        ),
        compare("breaks: object cut by the frame", border, note=INSIDE, breaks=True),
    ]


def local_invariance(seed: int = 0) -> list[Finding]:
    """The pooled response about x0 is invariant to scaling the image about x0."""
    net, local, whole = _network(seed), [], []
    for i, point in enumerate(POINTS):
        ours, theirs, bound = _measure(net, seed + 1000 * i, point)
        local.append((ours.amax(0), theirs.amax(0), bound))
        image = ring(seed + 1000 * i).transform(1.0, ORIGIN, point)
        views = [picture.sampled(FRAME) for picture in (image, image.scaled(FACTOR, point))]
        whole.append((*net(torch.cat(views)), bound))
    return [
        compare("local invariance: response about x0", *local, note=NOTE),
        compare(
            "breaks: response about the centre instead of x0", *whole, note=INSIDE, breaks=True
        ),
    ]


def _network(seed: int, scales: ScaleGrid = GRID) -> ScaleChannels:
    return ScaleChannels(random_network(seed), scales, SIZE, "max")


def _measure(
    net: ScaleChannels, seed: int, about: tuple[float, float] = ORIGIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs (S, K) for a ring about a point and for the enlarged ring, with the bound.

    Channel s of the image is paired with channel s·t of the enlarged image. The remaining coarsest
    channels of the image are paired with the finest of the enlarged one: both see only background.
    The bound (K,) is the largest over these pairs.
    """
    centre = torch.tensor([about], dtype=torch.float64) + FRAME / 2
    outputs, seen = [], []
    for image in (ring(seed), ring(seed).scaled(FACTOR)):
        patches = net.patches(image.transform(1.0, ORIGIN, about).sampled(FRAME), centre)
        outputs.append(net.forward_patches(patches)[0])
        seen.append(Patches(patches[0], _pixel_error(image)))
    steps = sum(scale * FACTOR > GRID.high for scale in GRID)
    paired = Patches(*(part.roll(-steps, 0) for part in seen[1]))
    assert isinstance(net.backbone, ConvNet)
    return outputs[0], outputs[1], logit_bounds(net.backbone, seen[0], paired).amax(0)


def _pixel_error(image: Blobs) -> Tensor:
    """Bound the error of each pixel of each patch, as (S, 1, P, P).

    The bound is the interpolation error plus twice the tails of the blobs in channels that see only
    background. A sample uses pixels less than sqrt(2) away, and the edge pixels are repeated
    outside the frame.
    """
    near = GRID.low * SIZE / 2 * 2**0.5 + 2**0.5
    farthest = max(abs(coordinate) for point in POINTS for coordinate in point)
    far = min(GRID.high / 2**0.5, FRAME / 2 - farthest) - 2**0.5
    grids = [image.patch_error(scale, SIZE) for scale in GRID]
    return torch.stack(grids).unsqueeze(1) + 2 * image.tail_bound(near, far)
