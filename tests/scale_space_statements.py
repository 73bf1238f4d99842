"""Statements about Gaussian derivatives in channels, scale selection, and how fast errors fall."""

import math

import torch
from theory_tools import (
    KERNEL_SIZE,
    LAPLACIAN,
    SIGMA,
    KernelNet,
    blob,
    closed_form,
    derivative,
    fitted_order,
    order_uncertainty,
    response_error,
    steepness,
)

from foveate.evaluation.theory.blobs import centred, scene
from foveate.evaluation.theory.bounds import Finding, compare
from foveate.models.channels import ScaleChannels
from foveate.resampling import foveate
from foveate.scales import ScaleGrid

ORDERS = [(a, n - a) for n in range(5) for a in range(n + 1)]
SCALES = (0.5, 2**0.25, 2.0, 5.0)
FRAME = 640
GRID = ScaleGrid(4, 64, per_octave=2)
NOTE = "interpolation under the kernel, and the sum over pixels in place of the integral"
REFINEMENTS = (1, 2, 4, 8)  # pixels per pixel of the coarsest frame
COARSE = 128  # pixels of that frame
PATCH = 25  # odd: its samples fall midway between pixels at every refinement
FACTOR = 2.0
DENSITIES = (1, 2, 4)  # channels per octave
WIDTH = 48.0  # deviation of the blob, in pixels
WIDE = 800  # pixels of its frame: eight deviations to each side


def channel_derivatives(seed=0):
    """A fixed Gaussian derivative in channel s is the normalised derivative at scale s·sigma."""
    image, cases = scene(seed), []
    for orders in ORDERS:
        net = ScaleChannels(KernelNet([orders]), SCALES, KERNEL_SIZE)
        outputs = net.channels(image.sampled(FRAME)).flatten()
        expected = outputs.new_tensor([closed_form(image, s, orders) for s in SCALES])
        limits = [response_error(image, s, [orders], FRAME) for s in SCALES]
        cases.append((outputs, expected, outputs.new_tensor(limits)))
    return [compare("Gaussian derivative in channel s: that of scale s", *cases, note=NOTE)]


def scale_selection(seed=0):
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


def _selection_error(image):
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


def _peak_error(image):
    """The largest error of the responses to a blob within an octave of its peak."""
    peak = float(image.deviations[0, 0]) / SIGMA
    near = [s for s in GRID if abs(math.log2(s / peak)) <= 1]
    return max(response_error(image, s, LAPLACIAN, FRAME) for s in near)


def resolution_order(seed=0):
    """With pixels half as large, the error of covariance is a quarter."""
    image = scene(seed)
    steps = 1 / torch.tensor(REFINEMENTS, dtype=torch.float64)
    errors = torch.stack([_covariance_error(image.scaled(k), k) for k in REFINEMENTS])
    leading = (1 - FACTOR**-2) * _laplacian(image) / 8 * steps**2
    rests = [_fourth_order(image.scaled(k)) * (1 + FACTOR**-4) for k in REFINEMENTS]
    rest = torch.tensor(rests, dtype=torch.float64)
    return [
        Finding(
            statement="error falls with the pixel size squared",
            error=abs(fitted_order(steps, errors) - 2),
            bound=order_uncertainty(steps, leading, rest),
            note="distance of the order from 2; midway between pixels the error is "
            "h²/8 times the Laplacian, and the next term is bounded",
        )
    ]


def _covariance_error(image, refinement):
    """The largest difference between channel s·t of the scaled image and channel s."""
    frame = COARSE * refinement
    one = foveate(image.scaled(FACTOR).sampled(frame), [FACTOR * refinement], PATCH)
    other = foveate(image.sampled(frame), [float(refinement)], PATCH)
    return (one - other).abs().max()


def _laplacian(image):
    """The largest |f_yy + f_xx| over the points that the patch samples."""
    at = centred(PATCH)
    return (derivative(image, at, at, (2, 0)) + derivative(image, at, at, (0, 2))).abs().max()


def _fourth_order(image):
    """A bound on what Taylor's formula leaves beyond the Laplacian, midway between pixels.

    Two pixels on a diagonal average to f + f''/8 + f''''/384 along it.
    """
    terms = [
        math.comb(4, n) * steepness(image, 0, n) * steepness(image, 1, 4 - n) for n in range(5)
    ]
    return float(image.amplitudes.abs().sum()) * sum(terms) / 384


def density_order(seed=0):
    """Between two channels the pooled response loses a share that falls with their spacing².

    The response to a blob is sech²(x) / 2 over log scale: its top is a parabola, and halfway
    between channels d apart it is lower by tanh²(d / 2) / 2, about d²/8.
    """
    spacing = math.log(2) / torch.tensor(DENSITIES, dtype=torch.float64)
    width = WIDTH * (1 + 0.01 * (seed % 10))
    losses, unsure = zip(*(_loss(width, density) for density in DENSITIES), strict=True)
    expected = torch.tanh(spacing / 2) ** 2 / 2
    curve = fitted_order(spacing, expected)
    noise = order_uncertainty(spacing, expected, torch.tensor(unsure, dtype=torch.float64))
    return [
        Finding(
            statement="loss between channels falls with spacing squared",
            error=abs(fitted_order(spacing, torch.tensor(losses, dtype=torch.float64)) - 2),
            bound=abs(curve - 2) + noise,
            note="distance of the order from 2; that of the closed form, and the response's error",
        )
    ]


def _loss(width, density):
    """By how much the pooled response to a blob halfway between channels is lower, and ±."""
    top = width / SIGMA
    scales = [top * 2 ** (k / density) for k in (-1, 0, 1)]
    net = ScaleChannels(KernelNet(LAPLACIAN, sign=-1), scales, KERNEL_SIZE)
    on, between = blob(width), blob(width * 2 ** (0.5 / density))
    values = [float(net(b.sampled(WIDE))) for b in (on, between)]
    errors = [max(response_error(b, s, LAPLACIAN, WIDE) for s in scales[1:]) for b in (on, between)]
    return values[0] - values[1], sum(errors)
