"""The compiled trunk steps aside for what it does not know."""

import copy

import native_trunks
import pytest
import torch
from native_trunks import made, steps_aside
from torch.autograd import forward_ad

from foveate.execution import convnet, windows
from foveate.execution.native import trunk as native_ops
from foveate.execution.plan import logits, predict, prepare

_needs_a_compiler = native_trunks._needs_a_compiler  # a fixture for every test


def test_it_steps_aside_for_what_it_does_not_know():
    net, images = made(), torch.randn(3, 1, 28, 28)
    assert native_ops.applies(net.trunk, images)
    assert steps_aside(net.trunk, images.double())
    assert steps_aside(net.trunk, images.bfloat16())
    assert steps_aside(net.trunk, images.clone().requires_grad_())
    assert steps_aside(net.trunk, images[:0])
    assert steps_aside(net.trunk, images[:, :, :9])
    assert steps_aside(net.trunk, torch.randn(3, 2, 28, 28))
    assert steps_aside(copy.deepcopy(net).double().trunk, images)
    assert steps_aside(made((16, 24)).trunk, images)
    assert steps_aside(made((16,)).trunk, images)
    assert steps_aside(made((16, 16)).trunk[:-1], images)  # no rectifier at the end
    assert steps_aside(torch.nn.Sequential(torch.nn.Conv2d(1, 16, 5), *net.trunk[1:]), images)
    with torch.autocast("cpu", torch.bfloat16):
        assert steps_aside(net.trunk, images)
    with torch.no_grad():
        assert native_ops.applies(net.trunk, images.clone().requires_grad_())
    with forward_ad.dual_level():
        assert steps_aside(net.trunk, images)
    for name in ("momentum", "running_mean", "num_batches_tracked", "bias"):
        other = copy.deepcopy(net)
        setattr(other.trunk[1], name, None)
        assert steps_aside(other.trunk, images) and not windows.applies(other.trunk, images)
    net.trunk[1].running_var = torch.ones(32)[::2]
    assert steps_aside(net.trunk, images)


def test_hooks_see_every_layer():
    net, seen = made(), []
    net.trunk[4].register_forward_hook(lambda *_: seen.append(1))
    net.eval().trunk(torch.randn(1, 1, 28, 28))
    assert steps_aside(net.trunk, torch.randn(1, 1, 28, 28)) and seen


def test_one_value_per_channel_is_refused_as_by_the_plain_trunk():
    with pytest.raises(ValueError, match="more than 1 value"):
        predict(made((16, 16), 5), torch.randn(1, 1, 5, 5))


def test_images_that_want_gradients_get_them():
    net, images = made(), torch.randn(3, 1, 28, 28, requires_grad=True)
    logits(net, prepare(net, images)).sum().backward()
    assert float(images.grad.abs().sum()) > 0


def test_compilers_and_transforms_see_the_plain_operations():
    net, images = made().eval(), torch.randn(3, 1, 28, 28)

    def run(images):
        return logits(net, prepare(net, images))

    right = run(images)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), right, atol=1e-4, rtol=0)
    parameters = dict(net.named_parameters())

    class Door(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, images):
            return logits(self.net, prepare(self.net, images))

    def loss(values):
        given = {f"net.{name}": value for name, value in values.items()}
        return torch.func.functional_call(Door(), given, (images,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    net(images).square().sum().backward()
    for name, parameter in parameters.items():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4 * scale, rtol=0)


def test_no_second_derivatives():
    net = made()
    out = convnet.features(net, torch.randn(2, 1, 28, 28)).square().sum()
    (slope,) = torch.autograd.grad(out, net.trunk[3].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
