"""Invariance of whole networks: every pool over scale, local pooling, and where it must end."""
# Shape letters: S scale channel, K classes.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.evaluation.theory.finding import Finding, compare
from foveate.evaluation.theory.images import ORIGIN, Blobs, ring
from foveate.evaluation.theory.network import SIZE, logit_bounds, random_network
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.pooling import Mixing, Pool, pool_scales
from foveate.scales import ScaleGrid

GRID = ScaleGrid(0.5, 1024, per_octave=1)
FRAME = 1024
FACTOR = 2.0
NARROW = ScaleGrid(8, 16, per_octave=1)  # sees the ring, but not one twice as large as well
CUT = 288  # pixels of a frame that leaves out the centres of the larger ring's blobs
POINTS = ((25.0, -14.0), (-18.5, 6.25), (3.0, 31.0))
NOTE = "bilinear error of both images, followed through the layers; largest over the channels"
INSIDE = "threshold: the bound that holds inside"


class _Pair(NamedTuple):
    """Outputs (S, K) for an image and for the same scaled up, and how far paired ones may differ.

    Channel s of the image is paired with channel s·t of the larger one; the coarsest channels of
    the image, left over, with the finest of the larger one: both see nothing but background.
    """

    ours: Tensor
    theirs: Tensor
    bound: Tensor


def pooled_invariance(seed: int = 0) -> list[Finding]:
    """The outputs of all channels are the same multiset, so pools that forget order agree."""
    ours, theirs, bounds = _measure(_network(seed), seed)
    limit = bounds.amax(0)
    sets = [outputs.sort(0).values for outputs in (ours, theirs)]
    statement = "scale invariance: multiset of channel outputs"
    multiset = compare(statement, sets, limit, note=NOTE, test="test_pools_are_invariant")
    return [multiset, *_pool_findings(ours, theirs, limit), _concat(ours, theirs, limit)]


def _pool_findings(ours: Tensor, theirs: Tensor, bound: Tensor) -> list[Finding]:
    """One finding per pool; none of them can enlarge the largest change of an output."""
    names: tuple[Pool, ...] = ("max", "avg", "logsumexp")
    pooled = {
        f"scale invariance: {name} pooling": [pool_scales(x[None], name)[0] for x in (ours, theirs)]
        for name in names
    }
    pooled["scale invariance: root mean square pooling"] = [
        outputs.square().mean(0).sqrt() for outputs in (ours, theirs)
    ]
    test = "test_pools_are_invariant"
    return [compare(name, pair, bound, note=NOTE, test=test) for name, pair in pooled.items()]


def _concat(ours: Tensor, theirs: Tensor, bound: Tensor) -> Finding:
    """A mixture knows which channel is which: the simplest reads one channel only."""
    changes = (ours - theirs).abs().amax(1)
    mixing = Mixing(*ours.shape).double().requires_grad_(False)
    mixing.bias.zero_()
    mixing.weight.zero_().view(-1, *ours.shape)[:, int(changes.argmax())].fill_diagonal_(1)
    return compare(
        "breaks: concatenation",
        [mixing(outputs[None])[0] for outputs in (ours, theirs)],
        bound,
        note=INSIDE,
        test="test_concatenation_is_not_invariant",
        breaks=True,
    )


def invariance_ends(seed: int = 0) -> list[Finding]:
    """Invariance ends with the range of the channels, and at the border of the frame."""
    net, few = _network(seed), _network(seed, NARROW)
    image, larger = ring(seed), ring(seed).scaled(FACTOR)
    bound = _measure(net, seed).bound.amax(0)
    pixels, more = image.sampled(FRAME), larger.sampled(FRAME)
    cut = larger.sampled(CUT)
    outputs = {
        "breaks: object beyond the range of channels": (few(pixels), few(more)),
        "breaks: object cut by the frame": (net(pixels), net(cut)),
    }
    test = "test_invariance_ends_where_it_must"
    return [
        compare(name, pair, bound, note=INSIDE, test=test, breaks=True)
        for name, pair in outputs.items()
    ]


def local_invariance(seed: int = 0) -> list[Finding]:
    """Pooled about x0, the response does not change when the image is scaled about x0."""
    net, local, whole, limits = _network(seed), [], [], []
    for i, point in enumerate(POINTS):
        ours, theirs, bounds = _measure(net, seed + 1000 * i, point)
        local.append(torch.stack([ours.amax(0), theirs.amax(0)]))
        image = ring(seed + 1000 * i).transform(1.0, ORIGIN, point)
        views = [picture.sampled(FRAME) for picture in (image, image.scaled(FACTOR, point))]
        whole.append(net(torch.cat(views)))
        limits.append(bounds.amax(0))
    bound, test = torch.stack(limits), "test_local_scale_invariance"
    same = "local invariance: response about x0"
    other = "breaks: response about the centre, not x0"
    near, far = torch.stack(local, 1), torch.stack(whole, 1)
    return [
        compare(same, near, bound, note=NOTE, test=test),
        compare(other, far, bound, note=INSIDE, test=test, breaks=True),
    ]


def _network(seed: int, scales: ScaleGrid = GRID) -> ScaleChannels:
    return ScaleChannels(random_network(seed), scales, SIZE, "max")


def _measure(net: ScaleChannels, seed: int, about: tuple[float, float] = ORIGIN) -> _Pair:
    """Every channel's answer about a point, for a ring about it and for the ring scaled up."""
    image = ring(seed)
    centre = torch.tensor([about], dtype=torch.float64) + FRAME / 2
    views = [
        net.patches(picture.transform(1.0, ORIGIN, about).sampled(FRAME), centre)
        for picture in (image, image.scaled(FACTOR))
    ]
    ours, theirs = (net.forward_patches(view)[0] for view in views)
    steps = sum(scale * FACTOR > GRID.high for scale in GRID)
    error = _pixel_error(image) + _pixel_error(image.scaled(FACTOR)).roll(-steps, 0)
    backbone = net.backbone
    assert isinstance(backbone, ConvNet)
    bound = logit_bounds(backbone, views[0][0], views[1][0].roll(-steps, 0), error)
    return _Pair(ours, theirs, bound)


def _pixel_error(image: Blobs) -> Tensor:
    """How far each pixel of each channel's patch may be off: (S, 1, P, P).

    Interpolation, and twice what is left of the blobs where a channel sees only background: a
    sample takes from pixels less than sqrt(2) away, and beyond the frame it repeats the edge.
    """
    near = GRID.low * SIZE / 2 * 2**0.5 + 2**0.5
    farthest = max(abs(coordinate) for point in POINTS for coordinate in point)
    far = min(GRID.high / 2**0.5, FRAME / 2 - farthest) - 2**0.5
    offsets = torch.arange(SIZE, dtype=torch.float64) + (0.5 - SIZE / 2)
    grids = [image.interpolation_error(scale * offsets, scale * offsets) for scale in GRID]
    return torch.stack(grids).unsqueeze(1) + 2 * image.beyond(near, far)
