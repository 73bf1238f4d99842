"""Gaussian derivatives: what a learned kernel is in every channel, and the scales it selects."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from foveate.evaluation.theory.blobs import Blobs, blob, scene
from foveate.evaluation.theory.bounds import EPS, Finding, compare
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
from foveate.scale_space import directional_derivative, gaussian_derivative, hermite
from foveate.scales import ScaleGrid

ORDERS: list[Orders] = [(a, n - a) for n in range(5) for a in range(n + 1)]
DIRECTIONS = ((1.0, 0.0), (0.6, -0.8), (-1.0, 2.5))
SCALES = (0.5, 2**0.25, 2.0, 5.0)
FRAME = 640
GRID = ScaleGrid(4, 64, per_octave=2)
NOTE = "interpolation under the kernel, and the sum over pixels in place of the integral"
ROUNDED = "float64 rounding: eps times the operations times the largest partial sum"
# Arguments of a derivative, and the weights with which partial derivatives enter its rounding.
Choice = tuple[tuple[Any, ...], dict[tuple[int, ...], int]]


def kernel_scaling(seed: int = 0) -> list[Finding]:
    """Scaling a normalised Gaussian derivative gives the normalised derivative of that scale.

    h(x) = sigma^n d^n g(x; sigma) has h(x / s) / s^N = (s sigma)^n d^n g(x; s sigma).
    """
    random = torch.Generator().manual_seed(seed)
    points = 4 * SIGMA * (2 * torch.rand(200, 2, generator=random, dtype=torch.float64) - 1)
    line: list[Choice] = [(((n,),), {(n,): 1}) for n in range(5)]
    plane: list[Choice] = [((orders,), {orders: 1}) for orders in ORDERS]
    along: list[Choice] = [  # a direction, by the multinomial expansion
        ((e, n), {(a, n - a): 2 * math.comb(n, a) for a in range(n + 1)})
        for e in DIRECTIONS
        for n in range(5)
    ]
    name = "scaled Gaussian derivatives"
    return [
        _scaling(f"{name}, orders to 4 in 1-D", points[:, :1], gaussian_derivative, line),
        _scaling(f"{name}, orders to 4 in 2-D", points, gaussian_derivative, plane),
        _scaling(f"{name} along any direction", points, directional_derivative, along),
    ]


def _scaling(
    statement: str, points: Tensor, derivative: Callable[..., Tensor], choices: Iterable[Choice]
) -> Finding:
    """Compare scaled kernels with the kernels of that scale, within the rounding between them."""
    cases = []
    for arguments, weights in choices:
        for scale in SCALES:
            scaled = derivative(points / scale, SIGMA, *arguments, normalised=True)
            direct = derivative(points, scale * SIGMA, *arguments, normalised=True)
            parts = [w * _rounding(points, scale * SIGMA, o) for o, w in weights.items()]
            cases.append((scaled / scale ** points.shape[1], direct, torch.stack(parts).sum(0)))
    return compare(statement, *cases, note=ROUNDED)


def _rounding(points: Tensor, sigma: float, orders: tuple[int, ...]) -> Tensor:
    """How far rounding can part two ways to compute a derivative of the Gaussian.

    |He_n(z)| is summed without its signs, i^-n He_n(i z); a relative error of eps in z moves it
    by n eps and the exponential by z² eps; 3 n operations and 10 factors are rounded.
    """
    z = (points / sigma).abs()
    size = torch.exp(-(z**2).sum(-1) / 2) / (math.sqrt(2 * math.pi) * sigma) ** len(orders)
    for axis, order in enumerate(orders):
        size = size * (hermite(order, 1j * z[:, axis]) * (-1j) ** order).real
    return 2 * EPS * (10 + 4 * sum(orders) + 2 * (z**2).sum(-1)) * size


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
