"""The backbones of the theory, random networks and fixed kernels, with bounds on their errors."""
# Shape letters: N patches, C image channel, P patch pixels, K classes.

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foveate.evaluation.theory.blobs import CRAMER, Blobs, centred
from foveate.evaluation.theory.bounds import Case, grid_error, product_error, product_norms
from foveate.models.backbone import ConvNet
from foveate.scale_space import gaussian_derivative

SIZE = 28  # patch pixels, as in the paper
SIGMA = 2.0  # of the Gaussian kernels, in patch pixels
RADIUS = 18  # 9 deviations: what is left out is below 1e-15
KERNEL_SIZE = 2 * RADIUS + 1
TERMS = 30  # derivatives tried in the bound on sampling
LAPLACIAN = ((2, 0), (0, 2))
Orders = tuple[int, int]
LAYERS = ("block 1", "block 2", "block 3", "block 4", "hidden layer", "logits")


class Patches(NamedTuple):
    """Patches (N, C, P, P) of images, and how far each pixel may be from the image itself."""

    pixels: Tensor
    error: Tensor


def random_network(seed: int) -> ConvNet:
    """The paper's base network in float64, frozen, with random weights and statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ConvNet(size=SIZE)
        for norm in (layer for layer in net.trunk if isinstance(layer, nn.BatchNorm2d)):
            for tensor in (norm.weight.data, norm.get_buffer("running_var")):
                tensor.uniform_(0.5, 1.5)
            for tensor in (norm.bias.data, norm.get_buffer("running_mean")):
                tensor.normal_(0, 0.1)
    return net.double().eval().requires_grad_(False)


def affine_parts(net: ConvNet) -> list[nn.Module]:
    """The affine part of each of LAYERS; a ReLU follows all but the last."""
    layers = list(net.trunk)
    blocks = [nn.Sequential(*layers[i : i + 2]) for i in range(0, len(layers), 3)]
    return [*blocks, nn.Sequential(nn.Flatten(), net.hidden), net.head]


def layer_cases(net: ConvNet, one: Patches, other: Patches) -> list[Case]:
    """The two patches, then the outputs of each of LAYERS for them, with bounds on each unit.

    Both are single patches (1, C, P, P). Between them the network is linear: a ReLU passes on the
    share (relu(a) - relu(b)) / (a - b) of a difference. So every pixel's error is followed to
    every unit, and the absolute values are added. The product of the Lipschitz constants of the
    layers is a bound as well, but larger than any signal: it ignores that weights cancel.
    """
    error = one.error + other.error
    spread = error.flatten().diag().reshape(-1, *error.shape[1:])
    cases: list[Case] = [(one.pixels, other.pixels, error)]
    for part, ours, theirs, share in _layers(net, one.pixels, other.pixels):
        spread = share * _linear(part, spread)
        cases.append((ours, theirs, spread.abs().sum(0, keepdim=True)))
    return cases


def logit_bounds(net: ConvNet, one: Patches, other: Patches) -> Tensor:
    """The bounds of `layer_cases` for the logits only and N pairs of patches at once: (N, K)."""
    with torch.enable_grad():
        pixels = torch.zeros_like(one.pixels).requires_grad_()
        value = pixels
        for part, _, _, share in _layers(net, one.pixels, other.pixels):
            value = share * _linear(part, value)
        totals = value.sum(0)
        slopes = [torch.autograd.grad(t, pixels, retain_graph=True)[0] for t in totals]
    error = one.error + other.error
    return torch.stack([(slope.abs() * error).sum((1, 2, 3)) for slope in slopes], 1)


def _layers(
    net: ConvNet, one: Tensor, other: Tensor
) -> Iterator[tuple[nn.Module, Tensor, Tensor, Tensor]]:
    """For each layer its affine part, both outputs, and the share of their difference it keeps."""
    *hidden, last = affine_parts(net)
    for part in hidden:
        a, b = part(one), part(other)
        one, other = a.relu(), b.relu()
        yield part, one, other, torch.where(a == b, (a > 0).to(a), (one - other) / (a - b))
    yield last, last(one), last(other), torch.ones((), dtype=one.dtype)


def _linear(part: nn.Module, x: Tensor) -> Tensor:
    """An affine map without its constant."""
    return part(x) - part(torch.zeros_like(x[:1]))  # type: ignore[no-any-return]


class KernelNet(nn.Module):
    """Convolve patches (N, 1, P, P) with a kernel (P, P) and give its value in the middle, (N, 1).

    The kernel is `sign` times the sum of scale-normalised derivatives of a Gaussian.
    """

    kernel: Tensor

    def __init__(self, orders: Sequence[Orders], sign: float = 1.0) -> None:
        super().__init__()
        at = centred(KERNEL_SIZE)
        points = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)
        parts = [gaussian_derivative(points, SIGMA, pair, normalised=True) for pair in orders]
        self.register_buffer("kernel", sign * torch.stack(parts).sum(0))

    def forward(self, patches: Tensor) -> Tensor:
        """Weigh each patch with the mirrored kernel, as a convolution does."""
        return (patches * self.kernel.flip(0, 1)).sum((2, 3))


def closed_form(image: Blobs, scale: float, orders: Orders) -> float:
    """The scale-normalised derivative of the image at the origin, at scale · SIGMA."""
    origin = torch.zeros(1, dtype=torch.float64)
    value = image.smoothed(scale * SIGMA).values(origin, origin, orders)
    return float((scale * SIGMA) ** sum(orders) * value)


def response_error(image: Blobs, scale: float, orders: Sequence[Orders], frame: int) -> float:
    """How far the response of channel `scale` can be from `closed_form`.

    Interpolation under the kernel, what is left of the blobs at the border of the frame, and the
    sum over patch pixels in place of the integral.
    """
    kernel = KernelNet(orders).kernel.abs()
    pixels = image.patch_error(scale, KERNEL_SIZE)
    if scale * RADIUS > frame / 2 - 1:
        pixels = pixels + 2 * image.beyond(-math.inf, frame / 2 - 1)
    sampling = sum(_sampling_error(image, scale, pair) for pair in orders)
    return float((kernel * pixels).sum()) + sampling


def _sampling_error(image: Blobs, scale: float, orders: Orders) -> float:
    """The distance of the sum over the whole patch grid, cut at RADIUS, from the integral."""
    norms = [_norms(image, axis, scale, order) for axis, order in enumerate(orders)]
    errors = [grid_error(1.0, n) + _cut(order) for n, order in zip(norms, orders, strict=True)]
    return float(image.amplitudes.abs().sum()) * product_error([n[0] for n in norms], errors)


def _norms(image: Blobs, axis: int, scale: float, order: int) -> list[float]:
    """Bounds on the integrals of the derivatives of f(scale v) h(v) along one axis.

    By Cramér's bound, the integral of |g^(n)| is at most 1.0865 sqrt(2 n!) / sigma^n.
    """
    sups = [scale**p * image.steepness(axis, p) for p in range(TERMS)]
    integrals = [CRAMER * math.sqrt(2 * math.factorial(order + p)) / SIGMA**p for p in range(TERMS)]
    return product_norms(sups, integrals)


@cache
def _cut(order: int) -> float:
    """What the kernel of one axis holds beyond RADIUS; beyond four times that, below e^-600."""
    tail = torch.arange(RADIUS + 1, 4 * RADIUS, dtype=torch.float64)[:, None]
    return 2 * float(gaussian_derivative(tail, SIGMA, [order], normalised=True).abs().sum())
