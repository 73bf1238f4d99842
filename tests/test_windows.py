"""The fast form of the first two blocks gives the numbers of the plain form."""

import copy

import pytest
import torch
import torch.nn.functional as F

from foveate.execution import windows
from foveate.models.backbone import ConvNet


def pair(**changes):
    torch.manual_seed(1)
    net = ConvNet(**{"dropout": 0.0, **changes}).double()
    for layer in net.trunk:
        if isinstance(layer, torch.nn.BatchNorm2d):  # nothing at its default
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return net, copy.deepcopy(net)


def fast(net, images):
    return net.classify(windows.run(net.trunk, images))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_running_statistics_agree(channels, batch_norm, training):
    quick, slow = (n.train(training) for n in pair(channels=channels, batch_norm=batch_norm))
    images = torch.randn(7, channels, 28, 28).double() * 0.3 - 0.7
    labels = torch.randint(0, 10, (7,))
    for step in (lambda i: fast(quick, i), slow):
        F.cross_entropy(step(images), labels).backward()
    torch.testing.assert_close(fast(quick, images), slow(images), atol=1e-10, rtol=0)
    for one, other in zip(quick.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-10, rtol=1e-8)
    for one, other in zip(quick.buffers(), slow.buffers(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [10, 28, 34])
def test_any_even_size_and_non_square_maps(size):
    quick, _ = pair(size=28)
    images = torch.randn(2, 1, size, size + 4).double()
    made = windows.run(quick.trunk[:6], images)
    torch.testing.assert_close(made, quick.trunk[:6](images), atol=1e-10, rtol=0)


def test_images_far_from_zero_lose_no_precision_in_float32():
    net, reference = pair()
    net = net.float()
    images = torch.randn(32, 1, 28, 28) * 0.5 + 100
    exact = reference.trunk[:3](images.double())
    made = windows.run(net.trunk[:4], images)
    expected = reference.trunk[3](exact)
    # A pixel of 100 is known to 4e-6, a hundred-thousandth of its spread of 0.5; batch norm
    # divides by that spread and two convolutions of 9 and 144 weights add such errors up.
    torch.testing.assert_close(made.double(), expected, atol=5e-3, rtol=0)


def test_it_steps_aside_when_images_want_gradients_or_are_odd():
    net, _ = pair()
    assert windows.applies(net.trunk, torch.zeros(1, 1, 28, 28))
    assert not windows.applies(net.trunk, torch.zeros(1, 1, 27, 28))
    assert not windows.applies(net.trunk, torch.zeros(1, 1, 28, 28, requires_grad=True))
