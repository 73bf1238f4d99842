"""Invariance of whole networks: every pool over scale, local pooling, and where it must end."""
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
NARROW = ScaleGrid(8, 16, per_octave=1)  # sees the ring, but not one twice as large as well
CUT = 288  # pixels of a frame that leaves out the centres of the larger ring's blobs
POINTS = ((25.0, -14.0), (-18.5, 6.25), (3.0, 31.0))
NOTE = "bilinear error of both images, followed through the layers; largest over the channels"
INSIDE = "threshold: the bound that holds inside"
# Pools of outputs (S, K); none of them can enlarge the largest change of an output.
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "multiset of channel outputs": lambda outputs: outputs.sort(0).values,
    "max pooling": lambda outputs: pool_scales(outputs[None], "max"),
    "avg pooling": lambda outputs: pool_scales(outputs[None], "avg"),
    "logsumexp pooling": lambda outputs: pool_scales(outputs[None], "logsumexp"),
    "root mean square pooling": lambda outputs: outputs.square().mean(0).sqrt(),
}


def pooled_invariance(seed: int = 0) -> list[Finding]:
    """The outputs of all channels are the same multiset, so pools that forget order agree."""
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
    """A mixture knows which channel is which: the simplest reads the one that changes most."""
    changes = (ours - theirs).abs().amax(1)
    mixing = Mixing(*ours.shape).double().requires_grad_(False)
    mixing.bias.zero_()
    mixing.weight.zero_().view(-1, *ours.shape)[:, int(changes.argmax())].fill_diagonal_(1)
    return mixing


def invariance_ends(seed: int = 0) -> list[Finding]:
    """Invariance ends with the range of the channels, and at the border of the frame."""
    net, few = _network(seed), _network(seed, NARROW)
    image, larger = ring(seed), ring(seed).scaled(FACTOR)
    *_, bound = _measure(net, seed)
    pixels, more, cut = image.sampled(FRAME), larger.sampled(FRAME), larger.sampled(CUT)
    beyond, border = (few(pixels), few(more), bound), (net(pixels), net(cut), bound)
    return [
        compare("breaks: object beyond the range of channels", beyond, note=INSIDE, breaks=True),
        compare("breaks: object cut by the frame", border, note=INSIDE, breaks=True),
    ]


def local_invariance(seed: int = 0) -> list[Finding]:
    """Pooled about x0, the response does not change when the image is scaled about x0."""
    net, local, whole = _network(seed), [], []
    for i, point in enumerate(POINTS):
        ours, theirs, bound = _measure(net, seed + 1000 * i, point)
        local.append((ours.amax(0), theirs.amax(0), bound))
        image = ring(seed + 1000 * i).transform(1.0, ORIGIN, point)
        views = [picture.sampled(FRAME) for picture in (image, image.scaled(FACTOR, point))]
        whole.append((*net(torch.cat(views)), bound))
    return [
        compare("local invariance: response about x0", *local, note=NOTE),
        compare("breaks: response about the centre, not x0", *whole, note=INSIDE, breaks=True),
    ]


def _network(seed: int, scales: ScaleGrid = GRID) -> ScaleChannels:
    return ScaleChannels(random_network(seed), scales, SIZE, "max")


def _measure(
    net: ScaleChannels, seed: int, about: tuple[float, float] = ORIGIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (S, K) about a point for a ring about it and for the ring scaled up, and the bound.

    Channel s of the image is paired with channel s·t of the larger one; the coarsest channels of
    the image, left over, with the finest of the larger one: both see nothing but background. The
    bound (K,) is the largest over these pairs.
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
    """How far each pixel of each channel's patch may be off: (S, 1, P, P).

    Interpolation, and twice what is left of the blobs where a channel sees only background: a
    sample takes from pixels less than sqrt(2) away, and beyond the frame it repeats the edge.
    """
    near = GRID.low * SIZE / 2 * 2**0.5 + 2**0.5
    farthest = max(abs(coordinate) for point in POINTS for coordinate in point)
    far = min(GRID.high / 2**0.5, FRAME / 2 - farthest) - 2**0.5
    grids = [image.patch_error(scale, SIZE) for scale in GRID]
    return torch.stack(grids).unsqueeze(1) + 2 * image.beyond(near, far)
