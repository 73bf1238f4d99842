"""Every named network equals its definition, whichever form computes it, and hooks fire."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from foveate.execution import windows as fast
from foveate.execution.captured import answer, prepare
from foveate.execution.native import trunk as native_ops
from foveate.models.channels import ScaleChannels
from foveate.models.sliding import SlidingChannels
from foveate.models.zoo import ZOO, create_model
from foveate.native import build
from foveate.scales import ScaleGrid

NAMES = sorted(ZOO)
SCALES = ScaleGrid(1, 2, per_octave=1)
SHAPES = {"cnn": [(112, 112)]}  # of the images; a plain CNN takes those of its size alone
TERMS = 9 * 32 * 8 + 28 * 28  # of the dot products of 8 layers, and of the mean over a map


def made(name, dtype, **changes):
    torch.manual_seed(3)
    net = create_model(name, scales=SCALES, **changes)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):  # nothing at its default
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)
    return net.to(dtype)


def trunk_of(net):
    return getattr(net, "backbone", net).trunk


def defined(net):
    """A copy that runs as written, because hooks watch all layers; and the calls that they saw."""
    twin, seen = copy.deepcopy(net), []
    for layer in trunk_of(twin):
        layer.register_forward_hook(lambda layer, *_: seen.append(layer))
    return twin, seen


def step(net, images, cast=False):
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        logits = net(images)
    F.cross_entropy(logits.to(images.dtype), torch.arange(len(images))).backward()
    random = torch.get_rng_state().double()
    gradients = {f"of {n}": p.grad for n, p in net.named_parameters()}
    return {"logits": logits.detach(), "random": random, **gradients, **net.state_dict()}


def distances(found, exact):
    """By name, the largest difference in units of the largest gradient or value."""
    slopes = max(float(v.abs().max()) for key, v in exact.items() if key.startswith("of "))
    return {
        key: float((found[key].double() - value.double()).abs().max())
        / (slopes if key.startswith("of ") else max(1.0, float(value.abs().max())))
        for key, value in exact.items()
    }


def new_images(shape, dtype):
    return torch.randn(3, 1, *shape).to(dtype)  # fresh ones each time


def cases():
    for name in NAMES:
        for shape in SHAPES.get(name, [(61, 90), (40, 37)]):
            for training in (True, False):
                yield name, shape, training


@pytest.mark.parametrize(("name", "shape", "training"), list(cases()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_that_of_the_definition(name, shape, training, dtype):
    """In float64 the windows of `fast` stand in, in float32 the compiled stages if there are."""
    net = made(name, dtype).train(training)
    plain, seen = defined(net)
    images = new_images(shape, dtype)
    assert native_ops.applies(trunk_of(net), images) == (
        dtype == torch.float32 and build.library() is not None
    )
    assert not native_ops.applies(trunk_of(plain), images)
    assert not fast.applies(trunk_of(plain), images)
    bound = TERMS * torch.finfo(dtype).eps
    found, expected = step(net, images), step(plain, images)
    assert set(seen) == set(trunk_of(plain))
    assert found.keys() == expected.keys()
    for key, distance in distances(found, expected).items():
        assert distance <= bound, key
    with torch.no_grad():  # some patches at a time, and for max over a canvas one window
        torch.manual_seed(5)
        again = net(images)
        torch.manual_seed(5)
        slow = plain(images)
    assert float((again - slow).abs().max()) <= bound * max(1.0, float(slow.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_bf16_is_as_near_to_float32_as_the_definition_in_bf16(name, training):
    shape = SHAPES.get(name, [(61, 90)])[0]
    net = made(name, torch.float32, dropout=0.0).train(training)
    plain, _ = defined(net)
    exact, _ = defined(net)
    images = torch.randn(10, 1, *shape)
    right = step(exact, images)

    def distance(found, keys):
        """In the mean: of single values one that crosses the edge of a ReLU is the farthest."""
        pairs = [(found[key].double(), right[key].double()) for key in keys]
        return sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5

    quick, slow = (step(n, images, cast=True) for n in (net, plain))
    for keys in (["logits"], [key for key in right if key.startswith("of ")], net.state_dict()):
        assert distance(quick, keys) <= 2 * distance(slow, keys)
    assert torch.equal(quick["random"], slow["random"])


@pytest.mark.parametrize("name", ["fovavg", "fovconc", "fovmax"])
@pytest.mark.parametrize("training", [True, False])
def test_recomputed_steps_are_those_of_the_definition(name, training):
    net = made(name, torch.float64, dropout=0.15 if name == "fovavg" else 0.0).train(training)
    plain, _ = defined(net)
    net.recompute = 1
    images = new_images((61, 90), torch.float64)
    for key, distance in distances(step(net, images), step(plain, images)).items():
        assert distance <= TERMS * torch.finfo(torch.float64).eps, key


@pytest.mark.parametrize("name", NAMES)
def test_prepared_images_have_the_logits_of_the_images(name):
    net = made(name, torch.float64).eval()
    images = new_images(SHAPES.get(name, [(61, 90)])[0], torch.float64)
    seen = []
    with torch.no_grad():
        right = net(images)
        torch.testing.assert_close(answer(net, prepare(net, images, "float32")), right)
        net.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(answer(net, prepare(net, images, "float32")), right)
    assert seen == [1]


class Doubled(nn.BatchNorm2d):
    """A subclass that does more than batch norm."""

    def forward(self, images):
        return 2 * super().forward(images)


def replace_first(net, kind):
    trunk = trunk_of(net)
    at = next(i for i, layer in enumerate(trunk) if type(layer) is kind[0])
    trunk[at] = kind[1](trunk[at])


TOUCHED = {
    "forward hook": lambda net: trunk_of(net)[0].register_forward_hook(lambda m, i, o: 2 * o),
    "pre-hook": lambda net: trunk_of(net)[0].register_forward_pre_hook(lambda m, i: (2 * i[0],)),
    "hook on the trunk": lambda net: trunk_of(net).register_forward_hook(lambda m, i, o: 2 * o),
    "backward hook": lambda net: trunk_of(net)[0].register_full_backward_hook(
        lambda m, i, o: (None if i[0] is None else 2 * i[0],)
    ),
    "prune": lambda net: prune.l1_unstructured(trunk_of(net)[0], "weight", 0.5),
    "prune hidden": lambda net: prune.l1_unstructured(
        getattr(net, "backbone", net).hidden, "weight", 0.5
    ),
    "weight norm": lambda net: parametrizations.weight_norm(trunk_of(net)[0]),
    "spectral norm": lambda net: parametrizations.spectral_norm(trunk_of(net)[0]),
    "subclass": lambda net: replace_first(net, (nn.Conv2d, lambda conv: WithBias(conv))),
    "other layer": lambda net: replace_first(net, (nn.ReLU, lambda _: nn.Tanh())),
}


class WithBias(nn.Conv2d):
    """A convolution of a type of its own, with the weights of another."""

    def __init__(self, conv):
        super().__init__(conv.in_channels, conv.out_channels, 3, stride=conv.stride)
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, images):
        return super().forward(images) + 1


def by_modules(backbone, images):
    """A `ConvNet` written down once more, each module called as it is."""
    hidden = F.relu(backbone.hidden(backbone.trunk(images).flatten(1)))
    return backbone.head(backbone.dropout(hidden))


@pytest.mark.parametrize("touch", TOUCHED)
@pytest.mark.parametrize("name", NAMES)
def test_what_was_done_to_modules_counts(name, touch):
    """Weights change after the touch, so that what was derived from them is stale."""
    net = made(name, torch.float32, dropout=0.0)
    TOUCHED[touch](net)
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if "orig" in key or "trunk" in key:
                parameter += 0.1 * torch.randn_like(parameter)
    net.eval()
    images = new_images(SHAPES.get(name, [(61, 90)])[0], torch.float32)
    with torch.no_grad():
        found, backbone = net(images), getattr(net, "backbone", net)
        if isinstance(net, ScaleChannels):
            patches = net.patches(images)
            outputs = [by_modules(backbone, patches[:, s]) for s in range(len(SCALES))]
            right = net.combine(torch.stack(outputs, 1))
        elif isinstance(net, SlidingChannels):
            outputs = [windows(backbone, grid) for grid in net._grids(images)]
            right = net.combine(torch.stack(outputs, 1))
        else:
            right = by_modules(net, images)
    bound = TERMS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, right, atol=bound * float(right.abs().max()), rtol=0)


def windows(backbone, grid):
    """The highest logits (B, K) over all windows of a grid."""
    size, stride = backbone.size, backbone.stride
    cut = grid.unfold(2, size, stride).unfold(3, size, stride).permute(0, 2, 3, 1, 4, 5)
    return by_modules(backbone, cut.flatten(0, 2)).unflatten(0, (len(grid), -1)).amax(1)


@pytest.mark.parametrize("name", NAMES)
def test_global_hooks_and_replaced_forwards_see_the_first_layers(name):
    net, seen = made(name, torch.float32), []
    images = new_images(SHAPES.get(name, [(61, 90)])[0], torch.float32)
    first = trunk_of(net)[0]
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    with handle:
        net(images)
    assert first in seen
    plain = first.forward
    first.forward = lambda values: seen.append("called") or plain(values)
    net(images)
    assert "called" in seen


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_of_batch_norm_runs_as_it_is(name):
    net = made(name, torch.float64, batch_norm=True, dropout=0.0)
    images = new_images(SHAPES.get(name, [(61, 90)])[0], torch.float64)
    before = net.eval()(images)
    trunk_of(net)[1].__class__ = Doubled
    assert not torch.allclose(net(images), before)
