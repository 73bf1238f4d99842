"""A random backbone, and bounds on the errors that propagate through it."""
# Shape letters: N patches, C image channel, P patch pixels, K classes.

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foveate.evaluation.theory.bounds import Case
from foveate.models.backbone import ConvNet

SIZE = 28  # patch pixels, as in the paper
LAYER_NAMES = ("block 1", "block 2", "block 3", "block 4", "hidden layer", "logits")


class Patches(NamedTuple):
    """Patches (N, C, P, P) of images, with a bound on the error of each pixel."""

    pixels: Tensor
    error: Tensor


def random_network(seed: int) -> ConvNet:
    """Return the base network of the paper, frozen and float64, with random weights."""
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
    """Return the affine part of each of LAYER_NAMES; a ReLU follows all but the last."""
    layers = list(net.trunk)
    blocks = [nn.Sequential(*layers[i : i + 2]) for i in range(0, len(layers), 3)]
    return [*blocks, nn.Sequential(nn.Flatten(), net.hidden), net.head]


def layer_cases(net: ConvNet, one: Patches, other: Patches) -> list[Case]:
    """Return two patches and their outputs in each of LAYER_NAMES, with a bound per unit.

    Both are single patches (1, C, P, P). Between the two the network is linear: a ReLU passes the
    share (relu(a) - relu(b)) / (a - b) of a difference. The error of every pixel is therefore
    propagated to every unit, and the absolute values are summed. The product of the Lipschitz
    constants of the layers is also a bound, but exceeds any signal because it ignores that weights
    cancel.
    """
    error = one.error + other.error
    spread = error.flatten().diag().reshape(-1, *error.shape[1:])
    cases: list[Case] = [(one.pixels, other.pixels, error)]
    for part, ours, theirs, share in _layers(net, one.pixels, other.pixels):
        spread = share * _linear(part, spread)
        cases.append((ours, theirs, spread.abs().sum(0, keepdim=True)))
    return cases


def logit_bounds(net: ConvNet, one: Patches, other: Patches) -> Tensor:
    """Return the bounds of `layer_cases` on the logits of N pairs of patches, as (N, K)."""
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
    """Yield for each layer its affine part, both outputs, and the share passed by its ReLU."""
    *hidden, last = affine_parts(net)
    for part in hidden:
        a, b = part(one), part(other)
        one, other = a.relu(), b.relu()
        yield part, one, other, torch.where(a == b, (a > 0).to(a), (one - other) / (a - b))
    yield last, last(one), last(other), torch.ones((), dtype=one.dtype)


def _linear(part: nn.Module, x: Tensor) -> Tensor:
    """Apply an affine map without its constant."""
    return part(x) - part(torch.zeros_like(x[:1]))  # type: ignore[no-any-return]
