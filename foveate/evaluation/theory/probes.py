"""The backbone of the theory, a random network, with bounds on its errors."""
# Shape letters: N patches, C image channel, P patch pixels, K classes.

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foveate.evaluation.theory.bounds import Case
from foveate.models.backbone import ConvNet

SIZE = 28  # patch pixels, as in the paper
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
