"""Covariance: how the feature maps move when the image is scaled and translated."""
# Shape letters: N patches or windows, K classes, P patch pixels, h w positions of a map.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.evaluation.theory.finding import Finding, compare
from foveate.evaluation.theory.images import Blobs, scene
from foveate.evaluation.theory.network import (
    LAYERS,
    SIZE,
    activations,
    layer_bounds,
    logit_bounds,
    random_network,
)
from foveate.models.backbone import ConvNet
from foveate.resampling import foveate

FRAME = 320  # pixels; every window below stays inside, so that padding plays no part
STEP = 2**0.25
CASES = ((STEP, 4.0), (STEP**2, STEP**5), (2.0, STEP**3))  # factor t and scale s
View = tuple[Tensor, Tensor]  # a patch, and how far each of its pixels may be off
INTERPOLATED = "bilinear error (max|f_yy| + max|f_xx|) / 8 about each sample, of both images"
CARRIED = INTERPOLATED + ", followed through the layers"


def scale_covariance(seed: int = 0, cases: Sequence[tuple[float, float]] = CASES) -> list[Finding]:
    """Channel s·t of the image scaled by t is channel s of the image, in every layer.

    Each layer reports the one of the `cases` (t, s) that comes closest to its bound.
    """
    image, net = scene(seed), random_network(seed)
    worst: dict[str, Finding] = {}
    for factor, scale in cases:
        for found in _layer_findings(net, image, factor, scale):
            name = found.statement
            if name not in worst or not found.ratio <= worst[name].ratio:
                worst[name] = found
    return list(worst.values())


def _layer_findings(net: ConvNet, image: Blobs, factor: float, scale: float) -> list[Finding]:
    """Each layer's finding for one factor t and one scale s."""
    larger = image.scaled(factor)
    one, other = _patch(larger, scale * factor), _patch(image, scale)
    error = _error(larger, scale * factor) + _error(image, scale)
    names = ("patches", *LAYERS)
    pairs = [(one, other), *zip(activations(net, one), activations(net, other), strict=True)]
    limits = [error, *layer_bounds(net, one, other, error)]
    return [
        compare(
            f"scale covariance: {name}",
            pair,
            limit,
            note=INTERPOLATED if name == "patches" else CARRIED,
            test="test_scale_covariance_of_every_layer",
        )
        for name, pair, limit in zip(names, pairs, limits, strict=True)
    ]


def translation_covariance(seed: int = 0) -> list[Finding]:
    """The general form: h(x') = f(x) with x' = t (x - x1) + x2, about any point c.

    Channel s·t of h about c is channel s of f about x1 + (c - x2) / t.
    """
    image, net, (t, s) = scene(seed), random_network(seed), CASES[1]
    x1, x2 = torch.tensor([7.3, -4.1]).double(), torch.tensor([-9.2, 12.7]).double()
    moved = image.transform(t, x1.tolist(), x2.tolist())
    at = torch.tensor([[0, 0], [11.5, -6.25], [-8.75, 14.0]]).double()
    ours, error = _patch(moved, s * t, about=at), _error(moved, s * t, about=at)
    test = "test_scaling_and_translation_together"
    found = []
    for statement, points, breaks in (
        ("scaling + translation: logits about any point", x1 + (at - x2) / t, False),
        ("breaks: translated the wrong way", (at + x2) / t - x1, True),
        # The printed theorem has S_t x2 where its proof has S_s x2; here S_s is 1 / (s t).
        ("breaks: S_t x2 in place of S_s x2", at / t + s * (x1 / s - t * x2), True),
    ):
        theirs = _patch(image, s, about=points)
        bound = logit_bounds(net, ours, theirs, error + _error(image, s, about=points))
        pair = net(ours), net(theirs)
        found.append(compare(statement, pair, bound, note=CARRIED, test=test, breaks=breaks))
    return found


def shifted_maps(seed: int = 0) -> list[Finding]:
    """The general form as a shift of feature maps, by (x1 - x2 / t) / s patch pixels."""
    image, net, (t, s) = scene(seed), random_network(seed), CASES[1]
    x1, shift = torch.tensor([5.2, -3.4]).double(), torch.tensor([8, -12])
    x2 = t * (x1 - s * shift)
    moved = image.transform(t, x1.tolist(), x2.tolist())
    size = SIZE + 5 * net.stride
    views = _view(moved, s * t, size), _view(image, s, size)
    rows = (
        ("scaling + translation: feature maps shift", shift, False),
        ("breaks: feature maps shifted the wrong way", -shift, True),
    )
    test = "test_feature_maps_shift"
    return [
        _map_finding(statement, net, views, by // net.stride, test, breaks)
        for statement, by, breaks in rows
    ]


def translation_per_channel(seed: int = 0) -> list[Finding]:
    """Moving the image by d moves the maps of channel s by d / s patch pixels."""
    image, net = scene(seed), random_network(seed)
    distance = 2 * STEP * torch.tensor([8, -16]).double()
    moved = image.transform(1.0, (0, 0), distance.tolist())
    size = SIZE + 6 * net.stride
    found = []
    for scale in (2 * STEP, 4 * STEP):
        views = _view(moved, scale, size), _view(image, scale, size)
        by = -(distance / scale / net.stride).round().long()
        statement = f"translation by d: channel {scale:.3g} shifts by d / {scale:.3g}"
        test = "test_translation_depends_on_the_channel"
        found.append(_map_finding(statement, net, views, by, test))
    return found


def _map_finding(
    statement: str,
    net: ConvNet,
    views: tuple[View, View],
    by: Tensor,
    test: str,
    breaks: bool = False,
) -> Finding:
    """Compare two maps of logits, the first at a position with the second `by` further."""
    (ours, our_error), (theirs, their_error) = views
    maps = [net.dense(patch)[0].flatten(1).T for patch in (ours, theirs)]  # (h w, K)
    side = round(len(maps[0]) ** 0.5)
    index = torch.arange(side * side).reshape(side, side)
    here, there = _overlap(index, -by), _overlap(index, by)
    one, two = (_windows(x, net.stride)[here] for x in (ours, our_error))
    other, more = (_windows(x, net.stride)[there] for x in (theirs, their_error))
    bound = logit_bounds(net, one, other, two + more)
    pair = maps[0][here], maps[1][there]
    return compare(statement, pair, bound, note=CARRIED, test=test, breaks=breaks)


def _overlap(index: Tensor, by: Tensor) -> Tensor:
    """The positions (h, w) that are still on the map after a step back of `by`."""
    for axis, n in enumerate(by.tolist()):
        start, length = max(n, 0), index.shape[axis] - abs(n)
        index = index.narrow(axis, start, length)
    return index.flatten()


def _windows(patch: Tensor, stride: int) -> Tensor:
    """What the network sees at each position of its map: (1, 1, P, P) to (h w, 1, SIZE, SIZE)."""
    cut = patch[0, 0].unfold(0, SIZE, stride).unfold(1, SIZE, stride)
    return cut.flatten(0, 1).unsqueeze(1)


def _patch(image: Blobs, scale: float, size: int = SIZE, about: Tensor | None = None) -> Tensor:
    """One channel's view of the image, about its centre or (N, 2) points: (N, 1, P, P)."""
    pixels = image.sampled(FRAME)
    if about is None:
        return foveate(pixels, [scale], size)[:, 0]
    pixels = pixels.expand(len(about), -1, -1, -1)
    return foveate(pixels, [scale], size, centres=about + FRAME / 2)[:, 0]


def _error(image: Blobs, scale: float, size: int = SIZE, about: Tensor | None = None) -> Tensor:
    """How far each pixel of `_patch` may be from the image itself."""
    points = torch.zeros(1, 2, dtype=torch.float64) if about is None else about
    offsets = scale * (torch.arange(size, dtype=torch.float64) + (0.5 - size / 2))
    grids = [image.interpolation_error(y + offsets, x + offsets) for y, x in points]
    return torch.stack(grids).unsqueeze(1)


def _view(image: Blobs, scale: float, size: int) -> View:
    return _patch(image, scale, size), _error(image, scale, size)
