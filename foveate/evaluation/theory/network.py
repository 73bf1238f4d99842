"""A random base network, its layers one by one, and bounds on how it passes an error on."""
# Shape letters: N patches, C image channel, P patch pixels, K classes.

from __future__ import annotations

import torch
from torch import Tensor, nn

from foveate.models.backbone import ConvNet

SIZE = 28  # patch pixels, as in the paper
LAYERS = ("block 1", "block 2", "block 3", "block 4", "hidden layer", "logits")


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


def activations(net: ConvNet, patches: Tensor) -> list[Tensor]:
    """What each of LAYERS gives for patches (N, C, P, P)."""
    outputs, parts = [patches], affine_parts(net)
    for part in parts[:-1]:
        outputs.append(part(outputs[-1]).relu())
    return [*outputs[1:], parts[-1](outputs[-1])]


def layer_bounds(net: ConvNet, one: Tensor, other: Tensor, error: Tensor) -> list[Tensor]:
    """How far each unit of LAYERS may differ for two patches that differ by at most `error`.

    All three are (1, C, P, P); the result has the shapes of `activations`.

    Between two given patches the network is linear: a ReLU passes on the share
    (relu(a) - relu(b)) / (a - b) of a difference. So every pixel's error is followed to every
    unit, and the absolute values are added. The product of the Lipschitz constants of the layers
    is a bound as well, but larger than any signal: it forgets all cancellation between weights.
    """
    spread = error.flatten().diag().reshape(-1, *one.shape[1:])
    bounds = []
    for part, share in zip(affine_parts(net), _shares(net, one, other), strict=True):
        spread = share * _linear(part, spread)
        bounds.append(spread.abs().sum(0, keepdim=True))
    return bounds


def logit_bounds(net: ConvNet, one: Tensor, other: Tensor, error: Tensor) -> Tensor:
    """`layer_bounds` for the logits only and N pairs of (N, C, P, P) patches at once: (N, K)."""
    with torch.enable_grad():
        pixels = torch.zeros_like(one).requires_grad_()
        value = pixels
        for part, share in zip(affine_parts(net), _shares(net, one, other), strict=True):
            value = share * _linear(part, value)
        totals = value.sum(0)
        slopes = [torch.autograd.grad(t, pixels, retain_graph=True)[0] for t in totals]
    return torch.stack([(slope.abs() * error).sum((1, 2, 3)) for slope in slopes], 1)


def _linear(part: nn.Module, x: Tensor) -> Tensor:
    """An affine map without its constant."""
    return part(x) - part(torch.zeros_like(x[:1]))  # type: ignore[no-any-return]


def _shares(net: ConvNet, one: Tensor, other: Tensor) -> list[Tensor]:
    """For each layer, the share of a difference between the two inputs that its ReLU passes on."""
    shares, parts = [], affine_parts(net)
    for part in parts[:-1]:
        a, b = part(one), part(other)
        one, other = a.relu(), b.relu()
        shares.append(torch.where(a == b, (a > 0).to(a), (one - other) / (a - b)))
    return [*shares, torch.ones((), dtype=one.dtype)]
