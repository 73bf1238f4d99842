"""Fixed filters at several scales, of which scale-steerable convolutions learn the weights.

`hermite_basis` follows Sosnovik, Szmaja and Smeulders, "Scale-Equivariant Steerable Networks"
(SESN, ICLR 2020): products of Hermite polynomials and Gaussians, sampled at each scale.
`discrete_basis` follows Sosnovik, Moskalev and Smeulders, "DISCO: accurate Discrete Scale
Convolutions" (BMVC 2021): filters on the pixel grid for which rescaling the image and convolving
commute, exactly for integer factors, and as nearly as possible for others.
"""
# Shape letters: F functions of a basis, P filter pixels, Q image pixels.

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from foveate.data.large_scale import keys_kernel

ORDER = 4  # highest total order of the Hermite polynomials, as in both papers
COUNT = 49  # functions of a basis: as many as a filter of 7 × 7 pixels has (both papers)
RATIO = 1.5  # of the standard deviations of functions of the same order (SESN)
WIDTH = 7  # width and height in pixels of the filters at scale 1 (DISCO)
SIGMA = 1.9  # standard deviation of the widest Gaussian at scale 1, and their ratio (DISCO)
CUBIC = -0.75  # slope of the kernel with which PyTorch interpolates
PHASES = 64  # positions of an output pixel between two input pixels; 256 change filters by 3e-8


class Filters(NamedTuple):
    """Functions of a basis at one scale, in float64: values (F, P, P), `step` pixels apart."""

    values: Tensor
    step: int = 1


def hermite_functions(size: int, sigma: float, ratio: float) -> Tensor:
    """Sample 49 products of Hermite polynomials and a Gaussian: (49, P, P), in float64.

    Along one axis the functions are He_n(x / sigma) exp(-x^2 / (2 sigma^2)) / sigma: up to a
    constant, Gaussian derivatives of order n, scale-normalised. All pairs with a total order of at
    most 4 are followed by the same pairs for sigma / ratio, sigma / ratio^2 and so on, until there
    are 49 of them. P = `size` is odd, and `sigma` is in pixels.
    """
    x = torch.arange(size, dtype=torch.float64) - size // 2
    found: list[Tensor] = []
    while len(found) < COUNT:
        lines = _hermite_gaussians(x / sigma) / sigma
        pairs = [(m, n) for n in range(ORDER + 1) for m in range(ORDER + 1 - n)]
        found += [torch.outer(lines[m], lines[n]) for m, n in pairs]
        sigma /= ratio
    return torch.stack(found[:COUNT])


def _hermite_gaussians(x: Tensor) -> Tensor:
    """Return He_n(x) exp(-x^2 / 2) for n = 0 to 4, by He_n+1 = x He_n - n He_n-1."""
    values = [torch.ones_like(x), x]
    for n in range(1, ORDER):
        values.append(x * values[n] - n * values[n - 1])
    return torch.stack(values) * torch.exp(-x.square() / 2)


def hermite_basis(sigmas: Sequence[float], size: int) -> list[Filters]:
    """Build the basis of SESN: the same 49 Hermite functions at every scale.

    A function at scale s is s^-2 f(x / s), so that convolutions of an image and of its rescaled
    copy agree at the corresponding scales. Filters are cut off at a distance proportional to their
    scale. The norm of a function at the smallest scale is 1, so that the weights of different
    functions are comparable. It is derived from the largest scale, where sampling is most accurate;
    SESN's own basis has a function that nearly vanishes on the pixels of the smallest scale, and is
    8 times stronger than the others elsewhere.

    The scales are the standard deviations `sigmas` of the widest Gaussians, in increasing order. At
    the largest scale, filters have `size` pixels along an axis, an odd number.
    """
    largest = sigmas[-1]
    sides = [max(3, int(size * sigma / largest) // 2 * 2 + 1) for sigma in sigmas]
    found = [
        hermite_functions(side, sigma, RATIO) for sigma, side in zip(sigmas, sides, strict=True)
    ]
    norm = vector_norm(found[-1], dim=(1, 2), keepdim=True) * largest / sigmas[0]
    return [Filters(values / norm) for values in found]


def discrete_basis(scales: Sequence[float]) -> list[Filters]:
    """Build the basis of DISCO: Hermite functions on a small grid, transferred to every scale.

    At scale 1, the 49 functions are those of `hermite_functions` on 7 × 7 pixels, with unit norm.
    At integer scales they are dilated; `transfer` finds the filters of other scales. The scales
    increase from 1.
    """
    functions = hermite_functions(WIDTH, SIGMA, SIGMA)
    functions = functions / vector_norm(functions, dim=(1, 2), keepdim=True)
    between = iter(transfer(scales, WIDTH))
    return [
        Filters(functions, int(scale))
        if float(scale).is_integer()
        else Filters(torch.tensordot(functions.flatten(1), next(between), 1))
        for scale in scales
    ]


def transfer(scales: Sequence[float], width: int) -> list[Tensor]:
    """Find the filters at scales between the integers that correspond to single pixels at scale 1.

    Let D downscale an image by the factor b / a of two scales. Filters k commute with it if
    convolving the downscaled image with k_a equals downscaling the convolution with k_b. At integer
    scales n, dilation by n is the exact solution for the D that keeps every n-th pixel. For the
    others, DISCO minimises the squared difference on images of white noise, with cubic
    interpolation as D, over all pairs of scales. The authors do so by gradient descent on sampled
    images. The expectation is a quadratic form in the filters, so that a linear system gives its
    minimum.

    The scales increase from 1, where filters have `width` pixels along an axis, an odd number. Each
    scale that is not an integer has filters (width * width, P, P), of which row i belongs to pixel
    i at scale 1. They reach three pixels beyond the dilated filter, for the interpolation.
    """
    steps = [int(scale) if float(scale).is_integer() else 0 for scale in scales]
    if all(steps):
        return []
    reach = [int(width // 2 * scale) + (0 if scale in steps else 3) for scale in scales]
    sides = [2 * pixels + 1 for pixels in reach]
    form = _quadratic_form(scales, sides)
    free = [index for index, step in enumerate(steps) if not step]
    known = [(index, _dilated(width, step)) for index, step in enumerate(steps) if step]
    left = torch.cat([torch.cat([form[i][j] for j in free], 1) for i in free])
    terms = [torch.stack([form[i][j] @ pixels.T for j, pixels in known]).sum(0) for i in free]
    found = torch.linalg.solve(left, -torch.cat(terms)).split([sides[i] ** 2 for i in free])
    return [p.T.unflatten(1, (sides[i], sides[i])) for p, i in zip(found, free, strict=True)]


def _dilated(width: int, step: int) -> Tensor:
    """Return a filter for each pixel of a grid, 1 at that pixel times `step`."""
    side = width // 2 * step * 2 + 1
    pixels = torch.eye(side * side, dtype=torch.float64).reshape(side, side, side, side)
    return pixels[::step, ::step].reshape(width * width, side * side)


def _quadratic_form(scales: Sequence[float], sides: Sequence[int]) -> list[list[Tensor]]:
    """Return the blocks of the expected squared difference as a form in the filters of all scales.

    Downscaling acts on rows and columns separately, and their phases are independent. So each block
    is a Kronecker product of the same average along one axis.
    """
    form = [[torch.zeros(p * p, q * q, dtype=torch.float64) for q in sides] for p in sides]
    for a, small in enumerate(scales):
        for b in range(a + 1, len(scales)):
            before, after = _responses(scales[b] / small, sides[a], sides[b])
            form[a][a] += _averaged(before, before)
            form[a][b] -= _averaged(before, after)
            form[b][a] -= _averaged(after, before)
            form[b][b] += _averaged(after, after)
    return form


def _averaged(one: Tensor, two: Tensor) -> Tensor:
    line = torch.einsum("rqk,rql->kl", one, two) / PHASES
    return torch.kron(line, line)


def _responses(factor: float, small: int, large: int) -> tuple[Tensor, Tensor]:
    """Return how much each input pixel adds to an output pixel, for each tap of a filter.

    The output pixel lies at each of `PHASES` positions from an input pixel, in turn. The weights
    (phases, Q, taps) are those of downscaling by `factor` and then convolving with the small
    filter, and of convolving with the large filter and then downscaling.
    """
    phase = (torch.arange(PHASES, dtype=torch.float64)[:, None, None] + 0.5) / PHASES
    reach = int(max(factor * small, large)) // 2 + 4
    pixel = torch.arange(-reach, reach + 1, dtype=torch.float64)[:, None]
    taps = [torch.arange(side, dtype=torch.float64) - side // 2 for side in (small, large)]
    before = keys_kernel(pixel - phase - factor * taps[0], CUBIC)
    return before, keys_kernel(pixel - phase - taps[1], CUBIC)
