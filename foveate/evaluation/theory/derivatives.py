"""Gaussian derivatives: what a learned kernel is in every channel, and the scales it selects."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from foveate.evaluation.theory.finding import Finding, compare
from foveate.evaluation.theory.images import Blobs, blob, scene
from foveate.evaluation.theory.kernels import (
    LAPLACIAN,
    SIGMA,
    SIZE,
    KernelNet,
    Orders,
    closed_form,
    response_error,
)
from foveate.evaluation.theory.sums import EPS
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
Kernel = Callable[[Tensor, float], Tensor]


def kernel_scaling(seed: int = 0) -> list[Finding]:
    """Scaling a normalised Gaussian derivative gives the normalised derivative of that scale.

    h(x) = sigma^n d^n g(x; sigma) has h(x / s) / s^N = (s sigma)^n d^n g(x; s sigma).
    """
    random = torch.Generator().manual_seed(seed)
    points = 4 * SIGMA * (2 * torch.rand(200, 2, generator=random, dtype=torch.float64) - 1)
    test = "test_scaled_gaussian_derivatives"
    found = []
    for axes in (1, 2):
        orders = [o[:axes] for o in ORDERS if axes == 2 or o[1] == 0]
        pairs = [_scaled_pair(points[:, :axes], scale, o) for o in orders for scale in SCALES]
        one, other, bound = (torch.stack(column) for column in zip(*pairs, strict=True))
        statement = f"scaled Gaussian derivatives, orders to 4 in {axes}-D"
        found.append(compare(statement, (one, other), bound, note=ROUNDED, test=test))
    return [*found, _directional(points, test)]


def _scaled_pair(points: Tensor, scale: float, orders: tuple[int, ...]) -> list[Tensor]:
    """The scaled kernel, the kernel of that scale, and the rounding between them."""
    scaled = gaussian_derivative(points / scale, SIGMA, orders, normalised=True)
    direct = gaussian_derivative(points, scale * SIGMA, orders, normalised=True)
    return [scaled / scale ** len(orders), direct, _rounding(points, scale * SIGMA, orders)]


def _directional(points: Tensor, test: str) -> Finding:
    """The same for derivatives along any direction, by the multinomial expansion."""
    pairs = []
    for direction in DIRECTIONS:
        for order in range(5):
            for scale in SCALES:
                args = (direction, order)
                scaled = directional_derivative(points / scale, SIGMA, *args, normalised=True)
                direct = directional_derivative(points, scale * SIGMA, *args, normalised=True)
                parts = [_rounding(points, scale * SIGMA, (a, order - a)) for a in range(order + 1)]
                weights = [math.comb(order, a) for a in range(order + 1)]
                bound = sum(w * (p + p) for w, p in zip(weights, parts, strict=True))
                pairs.append([scaled / scale**2, direct, bound])
    one, other, bound = (torch.stack(column) for column in zip(*pairs, strict=True))
    statement = "scaled Gaussian derivatives along any direction"
    return compare(statement, (one, other), bound, note=ROUNDED, test=test)


def _rounding(points: Tensor, sigma: float, orders: tuple[int, ...]) -> Tensor:
    """How far rounding can part two ways to compute a derivative of the Gaussian.

    |He_n(z)| is summed without its signs, i^-n He_n(i z); a relative error of eps in z moves it
    by n eps and the exponential by z² eps; 3 n operations and 10 factors are rounded.
    """
    z = (points / sigma).abs()
    size = torch.exp(-(z**2).sum(-1) / 2) / (math.sqrt(2 * math.pi) * sigma) ** len(orders)
    for axis, order in enumerate(orders):
        size = size * _unsigned_hermite(order, z[:, axis])
    return 2 * EPS * (10 + 4 * sum(orders) + 2 * (z**2).sum(-1)) * size


def _unsigned_hermite(order: int, z: Tensor) -> Tensor:
    value = hermite(order, 1j * z) * (-1j) ** order
    return value.real


def channel_derivatives(seed: int = 0) -> list[Finding]:
    """A fixed Gaussian derivative in channel s is the normalised derivative at scale s·sigma."""
    image = scene(seed)
    pixels = image.sampled(FRAME)
    answers, expected, limits = [], [], []
    for orders in ORDERS:
        net = ScaleChannels(KernelNet([orders]), SCALES, SIZE)
        answers.append(net.channels(pixels).flatten())
        expected.append([closed_form(image, s, [orders]) for s in SCALES])
        limits.append([response_error(image, s, [orders], FRAME) for s in SCALES])
    return [
        compare(
            "Gaussian derivative in channel s: that of scale s",
            (torch.stack(answers), torch.tensor(expected, dtype=torch.float64)),
            torch.tensor(limits, dtype=torch.float64),
            note=NOTE,
            test="test_derivatives_through_a_channel",
        )
    ]


def scale_selection(seed: int = 0) -> list[Finding]:
    """The normalised Laplacian of a blob peaks at the blob's own scale, and follows it.

    Over x = log(s sigma / width) the response of a blob is sech²(x) / 2.
    """
    random = torch.Generator().manual_seed(seed)
    width = 24 * 2 ** (0.5 * float(torch.rand((), generator=random)))
    factor = 2**0.8 if seed % 2 else 2.0
    image, larger = blob(width), blob(width * factor)
    net = ScaleChannels(KernelNet(LAPLACIAN, sign=-1), GRID, SIZE)
    chosen = [float(net.select_scale(b.sampled(FRAME))) for b in (image, larger)]
    limits = [selection_error(b) for b in (image, larger)]
    return [
        Finding(
            statement="scale selection: peak at the scale of the blob",
            error=abs(math.log2(chosen[0] * SIGMA / width)),
            bound=limits[0],
            note="octaves; parabola through three samples of sech², and the response's error",
            test="test_scale_selection",
        ),
        Finding(
            statement="scale selection: peak moves with the image",
            error=abs(math.log2(chosen[1] / chosen[0]) - math.log2(factor)),
            bound=sum(limits),
            note="octaves; the bound above for both images",
            test="test_scale_selection",
        ),
        _peak_height(net, image),
    ]


def _peak_height(net: ScaleChannels, image: Blobs) -> Finding:
    """With the peak inside the range, max pooling over the whole of it is invariant."""
    larger = image.scaled(2.0)
    bound = sum(max(_errors(b)) for b in (image, larger))
    peaks = [net(b.sampled(FRAME)) for b in (image, larger)]
    statement = "scale invariance: max pooling, peak inside"
    return compare(statement, peaks, bound, note=NOTE, test="test_scale_selection")


def selection_error(image: Blobs) -> float:
    """How far in octaves the parabola's top may be from the peak.

    For exact samples of sech² the top is known in closed form. With samples off by e, any channel
    whose exact response is within 2 e of the best may be chosen, and a top at n / b half steps,
    n and b the first and second differences, moves by (2 + 4 |n / b|) e / (|b| - 4 e) of them.
    """
    x = [math.log2(s * SIGMA / float(image.deviations[0, 0])) for s in GRID]
    y = [0.5 / math.cosh(v * math.log(2)) ** 2 for v in x]
    error, half, limits = max(_errors(image)), math.log2(GRID.spacing) / 2, []
    for i in range(1, len(y) - 1):
        if y[i] >= max(y) - 2 * error:
            top, bend = y[i - 1] - y[i + 1], y[i - 1] - 2 * y[i] + y[i + 1]
            sure = abs(bend) - 4 * error
            moved = (2 + 4 * abs(top / bend)) * error / sure if sure > 0 else math.inf
            limits.append(abs(x[i] + half * top / bend) + half * moved)
    return max(limits)


def _errors(image: Blobs) -> list[float]:
    """The errors of the responses to a blob, in the channels within an octave of its peak."""
    peak = float(image.deviations[0, 0]) / SIGMA
    near = [s for s in GRID if abs(math.log2(s / peak)) <= 1]
    return [response_error(image, s, LAPLACIAN, FRAME) for s in near]
