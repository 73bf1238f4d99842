"""Gaussian derivatives: what a fixed kernel is in every channel, and the scales it selects."""

import math

import torch

from foveate.evaluation.theory.blobs import Blobs, blob, scene
from foveate.evaluation.theory.bounds import Finding, compare
from foveate.evaluation.theory.probes import (
    KERNEL_SIZE,
    LAPLACIAN,
    SIGMA,
    KernelNet,
    Orders,
    closed_form,
    response_error,
)
from foveate.models.channels import ScaleChannels
from foveate.scales import ScaleGrid

ORDERS: list[Orders] = [(a, n - a) for n in range(5) for a in range(n + 1)]
SCALES = (0.5, 2**0.25, 2.0, 5.0)
FRAME = 640
GRID = ScaleGrid(4, 64, per_octave=2)
NOTE = "interpolation under the kernel, and the sum over pixels in place of the integral"


def channel_derivatives(seed: int = 0) -> list[Finding]:
    """A fixed Gaussian derivative in channel s is the normalised derivative at scale s·sigma."""
    image, cases = scene(seed), []
    for orders in ORDERS:
        net = ScaleChannels(KernelNet([orders]), SCALES, KERNEL_SIZE)
        outputs = net.channels(image.sampled(FRAME)).flatten()
        expected = outputs.new_tensor([closed_form(image, s, orders) for s in SCALES])
        limits = [response_error(image, s, [orders], FRAME) for s in SCALES]
        cases.append((outputs, expected, outputs.new_tensor(limits)))
    return [compare("Gaussian derivative in channel s: that of scale s", *cases, note=NOTE)]


def scale_selection(seed: int = 0) -> list[Finding]:
    """The normalised Laplacian of a blob peaks at the blob's own scale, and follows it.

    Over x = log(s sigma / width) the response of a blob is sech²(x) / 2.
    """
    random = torch.Generator().manual_seed(seed)
    width = 24 * 2 ** (0.5 * float(torch.rand((), generator=random)))
    factor = 2**0.8 if seed % 2 else 2.0
    image, larger = blob(width), blob(width * factor)
    net = ScaleChannels(KernelNet(LAPLACIAN, sign=-1), GRID, KERNEL_SIZE)
    chosen = [float(net.select_scale(b.sampled(FRAME))) for b in (image, larger)]
    limits = [_selection_error(b) for b in (image, larger)]
    twice = image.scaled(2.0)  # both peaks lie inside the range, so the whole of it is invariant
    bound = _peak_error(image) + _peak_error(twice)
    heights = net(image.sampled(FRAME)), net(twice.sampled(FRAME)), bound
    return [
        Finding(
            statement="scale selection: peak at the scale of the blob",
            error=abs(math.log2(chosen[0] * SIGMA / width)),
            bound=limits[0],
            note="octaves; parabola through three samples of sech², and the response's error",
        ),
        Finding(
            statement="scale selection: peak moves with the image",
            error=abs(math.log2(chosen[1] / chosen[0]) - math.log2(factor)),
            bound=sum(limits),
            note="octaves; the bound above for both images",
        ),
        compare("scale invariance: max pooling, peak inside", heights, note=NOTE),
    ]


def _selection_error(image: Blobs) -> float:
    """How far in octaves the parabola's top may be from the peak.

    For exact samples of sech² the top is known in closed form. With samples off by e, any channel
    whose exact response is within 2 e of the best may be chosen, and a top at n / b half steps,
    n and b the first and second differences, moves by (2 + 4 |n / b|) e / (|b| - 4 e) of them.
    """
    x = [math.log2(s * SIGMA / float(image.deviations[0, 0])) for s in GRID]
    y = [0.5 / math.cosh(v * math.log(2)) ** 2 for v in x]
    error, half, limits = _peak_error(image), math.log2(GRID.spacing) / 2, []
    for i in range(1, len(y) - 1):
        if y[i] >= max(y) - 2 * error:
            top, bend = y[i - 1] - y[i + 1], y[i - 1] - 2 * y[i] + y[i + 1]
            sure = abs(bend) - 4 * error
            moved = (2 + 4 * abs(top / bend)) * error / sure if sure > 0 else math.inf
            limits.append(abs(x[i] + half * top / bend) + half * moved)
    return max(limits)


def _peak_error(image: Blobs) -> float:
    """The largest error of the responses to a blob within an octave of its peak."""
    peak = float(image.deviations[0, 0]) / SIGMA
    near = [s for s in GRID if abs(math.log2(s / peak)) <= 1]
    return max(response_error(image, s, LAPLACIAN, FRAME) for s in near)
