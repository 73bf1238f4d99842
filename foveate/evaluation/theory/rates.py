"""How fast the errors fall: with the resolution of the image, and with the density of channels."""

import math

import torch
from torch import Tensor

from foveate.evaluation.theory.blobs import Blobs, blob, centred, scene
from foveate.evaluation.theory.bounds import Finding, fitted_order, order_uncertainty
from foveate.evaluation.theory.probes import (
    KERNEL_SIZE,
    LAPLACIAN,
    SIGMA,
    KernelNet,
    response_error,
)
from foveate.models.channels import ScaleChannels
from foveate.resampling import foveate

REFINEMENTS = (1, 2, 4, 8)  # pixels per pixel of the coarsest frame
COARSE = 128  # pixels of that frame
PATCH = 25  # odd: its samples fall midway between pixels at every refinement
FACTOR = 2.0
DENSITIES = (1, 2, 4)  # channels per octave
WIDTH = 48.0  # deviation of the blob, in pixels
FRAME = 800  # eight deviations to each side


def resolution_order(seed: int = 0) -> list[Finding]:
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


def _covariance_error(image: Blobs, refinement: int) -> Tensor:
    """The largest difference between channel s·t of the scaled image and channel s."""
    frame = COARSE * refinement
    one = foveate(image.scaled(FACTOR).sampled(frame), [FACTOR * refinement], PATCH)
    other = foveate(image.sampled(frame), [float(refinement)], PATCH)
    return (one - other).abs().max()


def _laplacian(image: Blobs) -> Tensor:
    """The largest |f_yy + f_xx| over the points that the patch samples."""
    at = centred(PATCH)
    return (image.values(at, at, (2, 0)) + image.values(at, at, (0, 2))).abs().max()


def _fourth_order(image: Blobs) -> float:
    """A bound on what Taylor's formula leaves beyond the Laplacian, midway between pixels.

    Two pixels on a diagonal average to f + f''/8 + f''''/384 along it.
    """
    terms = [math.comb(4, n) * image.steepness(0, n) * image.steepness(1, 4 - n) for n in range(5)]
    return float(image.amplitudes.abs().sum()) * sum(terms) / 384


def density_order(seed: int = 0) -> list[Finding]:
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


def _loss(width: float, density: int) -> tuple[float, float]:
    """By how much the pooled response to a blob halfway between channels is lower, and ±."""
    top = width / SIGMA
    scales = [top * 2 ** (k / density) for k in (-1, 0, 1)]
    net = ScaleChannels(KernelNet(LAPLACIAN, sign=-1), scales, KERNEL_SIZE)
    on, between = blob(width), blob(width * 2 ** (0.5 / density))
    values = [float(net(b.sampled(FRAME))) for b in (on, between)]
    errors = [
        max(response_error(b, s, LAPLACIAN, FRAME) for s in scales[1:]) for b in (on, between)
    ]
    return values[0] - values[1], sum(errors)
