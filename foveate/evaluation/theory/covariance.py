"""Covariance of patches, feature maps and logits under scaling and translation of the image."""
# Shape letters: N patches or windows, K classes, P patch pixels, h w positions of a map.

from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.evaluation.theory.blobs import Blobs, scene
from foveate.evaluation.theory.bounds import Case, Finding, compare
from foveate.evaluation.theory.probes import (
    LAYER_NAMES,
    SIZE,
    Patches,
    layer_cases,
    logit_bounds,
    random_network,
)
from foveate.models.backbone import ConvNet
from foveate.resampling import foveate

FRAME = 320  # pixels; contains every window below, so that padding has no effect
STEP = 2**0.25
CASES = ((STEP, 4.0), (STEP**2, STEP**5), (2.0, STEP**3))  # factor t and scale s
INTERPOLATED = (
    "error of bilinear interpolation, (max|f_yy| + max|f_xx|) / 8 around each sample, summed over "
    "both images"
)
CARRIED = INTERPOLATED + " and propagated through the layers"


def scale_covariance(seed: int = 0, cases: Sequence[tuple[float, float]] = CASES) -> list[Finding]:
    """Channel s·t of the image scaled by t equals channel s of the image, in every layer.

    Each layer reports the case (t, s) with the largest ratio of error to bound.
    """
    image, net = scene(seed), random_network(seed)
    pairs = [(_cut(image.scaled(t), s * t), _cut(image, s)) for t, s in cases]
    layers = zip(*(layer_cases(net, *pair) for pair in pairs), strict=True)
    return [
        compare(f"scale covariance: {name}", *rows, note=CARRIED if k else INTERPOLATED)
        for k, (name, rows) in enumerate(zip(("patches", *LAYER_NAMES), layers, strict=True))
    ]


def translation_covariance(seed: int = 0) -> list[Finding]:
    """Scaling with translation: h(x') = f(x) for x' = t (x - x1) + x2.

    Channel s·t of h about any point c equals channel s of f about x1 + (c - x2) / t.
    """
    image, net, (t, s) = scene(seed), random_network(seed), CASES[1]
    x1, x2 = torch.tensor([7.3, -4.1]).double(), torch.tensor([-9.2, 12.7]).double()
    moved = image.transform(t, x1.tolist(), x2.tolist())
    at = torch.tensor([[0, 0], [11.5, -6.25], [-8.75, 14.0]]).double()
    ours, found = _cut(moved, s * t, about=at), []
    for statement, points, breaks in (
        ("scaling + translation: logits about any point", x1 + (at - x2) / t, False),
        ("breaks: translation with the wrong sign", (at + x2) / t - x1, True),
        # The theorem is printed with S_t x2, but its proof has S_s x2; here S_s is 1 / (s t).
        ("breaks: S_t x2 instead of S_s x2", at / t + s * (x1 / s - t * x2), True),
    ):
        theirs = _cut(image, s, about=points)
        case = net(ours.pixels), net(theirs.pixels), logit_bounds(net, ours, theirs)
        found.append(compare(statement, case, note=CARRIED, breaks=breaks))
    return found


def shifted_maps(seed: int = 0) -> list[Finding]:
    """Scaling with translation shifts the feature maps by (x1 - x2 / t) / s patch pixels."""
    image, net, (t, s) = scene(seed), random_network(seed), CASES[1]
    x1, shift = torch.tensor([5.2, -3.4]).double(), torch.tensor([8, -12])
    x2 = t * (x1 - s * shift)
    moved = image.transform(t, x1.tolist(), x2.tolist())
    size = SIZE + 5 * net.stride
    pair, by = (_cut(moved, s * t, size), _cut(image, s, size)), shift // net.stride
    same, wrong = _maps(net, *pair, by), _maps(net, *pair, -by)
    return [
        compare("scaling + translation: feature maps shift", same, note=CARRIED),
        compare("breaks: feature maps shift with the wrong sign", wrong, note=CARRIED, breaks=True),
    ]


def translation_per_channel(seed: int = 0) -> list[Finding]:
    """Translating the image by d shifts the maps of channel s by d / s patch pixels."""
    image, net = scene(seed), random_network(seed)
    distance = 2 * STEP * torch.tensor([8, -16]).double()
    moved = image.transform(1.0, (0, 0), distance.tolist())
    size, found = SIZE + 6 * net.stride, []
    for scale in (2 * STEP, 4 * STEP):
        by = -(distance / scale / net.stride).round().long()
        case = _maps(net, _cut(moved, scale, size), _cut(image, scale, size), by)
        statement = f"translation by d: channel {scale:.3g} shifts by d / {scale:.3g}"
        found.append(compare(statement, case, note=CARRIED))
    return found


def _maps(net: ConvNet, one: Patches, other: Patches, by: Tensor) -> Case:
    """Return two logit maps, the second shifted by `by` positions, and the bound."""
    ours, seen = _overlap(net, one, -by)
    theirs, others = _overlap(net, other, by)
    return ours, theirs, logit_bounds(net, seen, others)


def _overlap(net: ConvNet, view: Patches, by: Tensor) -> tuple[Tensor, Patches]:
    """Return logits (N, K) and windows at the positions that stay on the map after a shift."""
    parts = [x[0, 0].unfold(0, SIZE, net.stride).unfold(1, SIZE, net.stride) for x in view]
    parts = [net.dense(view.pixels)[0].movedim(0, -1), *(part.unsqueeze(2) for part in parts)]
    for axis, n in enumerate(by.tolist()):  # position axes (h, w)
        parts = [part.narrow(axis, max(n, 0), part.shape[axis] - abs(n)) for part in parts]
    logits, *windows = (part.flatten(0, 1) for part in parts)
    return logits, Patches(*windows)


def _cut(image: Blobs, scale: float, size: int = SIZE, about: Tensor | None = None) -> Patches:
    """Extract the patches of one channel about the image centre, or about (N, 2) points."""
    points = torch.zeros(1, 2, dtype=torch.float64) if about is None else about
    pixels = image.sampled(FRAME).expand(len(points), -1, -1, -1)
    centres = None if about is None else about + FRAME / 2
    errors = [image.patch_error(scale, size, point) for point in points.tolist()]
    patches = foveate(pixels, [scale], size, centres=centres)[:, 0]
    return Patches(patches, torch.stack(errors).unsqueeze(1))
