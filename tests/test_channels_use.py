"""The ways a network of scale channels is used: trained, rounded, compiled, exported, copied."""

import copy

import pytest
import torch
import torch.nn.functional as F
from channel_nets import FEW, small_net
from made_images import random_images
from torch import nn

from foveate.models import chunks
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES, ScaleChannels


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "concat"])
def test_training_moves_weights_and_shares_batch_norm(pool):
    net = small_net(pool=pool).train()
    images = random_images(4, 1, 24, 24, dtype=torch.float64).requires_grad_()
    first = net.backbone.trunk[1]
    first.momentum = 1.0  # the running mean becomes that of the last batch
    F.cross_entropy(net(images), torch.tensor([0, 1, 2, 3])).backward()
    assert images.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert net.backbone.head.weight.grad.abs().sum() > 0
    maps = net.backbone.trunk[0](net.patches(images).flatten(0, 1))
    torch.testing.assert_close(first.running_mean, maps.mean((0, 2, 3)))


def test_answering_patches_that_were_cut_before_is_the_same():
    net, images = small_net(), random_images(3, 1, 24, 30, dtype=torch.float64)
    torch.testing.assert_close(net.combine(net.forward_patches(net.patches(images))), net(images))


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "concat"])
def test_batches_of_one_and_of_none(pool):
    net, images = small_net(pool=pool), random_images(3, 1, 24, 24, dtype=torch.float64)
    torch.testing.assert_close(net(images[:1]), net(images)[:1])
    assert net(images[:0]).shape == (0, 5)
    assert net.channels(images[:0]).shape == (0, 3, 5)
    assert net.select_scale(images[:0]).shape == (0,)
    assert net.select_scale(images).shape == (3,)


def test_float32_equals_float64_to_rounding():
    net, images = small_net(), random_images(2, 1, 24, 24)
    exact = net(images.double())
    rounded = net.float()(images)
    assert (exact.dtype, rounded.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(rounded.double(), exact, atol=1e-5, rtol=1e-5)


def test_autocast_to_bfloat16_stays_near():
    net, images = small_net().float(), random_images(2, 1, 24, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net.patches(images).dtype == torch.float32
        half = net(images)
    assert half.dtype == torch.bfloat16
    # Four layers, each rounding its input and its output to 8 bits of values of size 1.
    torch.testing.assert_close(half.float(), net(images), atol=8 * 2**-8, rtol=0)


def test_compiled_equals_eager():
    net = small_net()
    images = random_images(2, 1, 24, 24, dtype=torch.float64).requires_grad_()
    inputs = [images, *net.parameters()]
    eager, compiled = net(images), torch.compile(net, fullgraph=True, backend="aot_eager")(images)
    torch.testing.assert_close(compiled, eager)
    gradients = [torch.autograd.grad(logits.sum(), inputs) for logits in (compiled, eager)]
    torch.testing.assert_close(*gradients)


def test_exported_equals_eager_for_every_batch_size():
    net, images = small_net(), random_images(7, 1, 24, 24, dtype=torch.float64)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (images[:2],), dynamic_shapes=({0: batch},))
    for size in (1, 2, 7):
        torch.testing.assert_close(program.module()(images[:size]), net(images[:size]))


def test_a_copy_is_its_own_network():
    net, images = small_net(), random_images(2, 1, 24, 24, dtype=torch.float64)
    twin, before = copy.deepcopy(net), net(images)
    twin.scales = [1.0]
    nn.init.zeros_(twin.backbone.head.weight)
    torch.testing.assert_close(net(images), before, rtol=0, atol=0)
    assert net.scales == FEW


def test_print_says_what_the_network_is():
    assert "17 scales 0.5 to 8, size=28, pool=max" in repr(ScaleChannels(ConvNet()))
    assert ScaleChannels(ConvNet()).scales == tuple(PAPER_SCALES)


class Counting(nn.Module):
    """A backbone that notes how many patches it is given."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.given = norm, []

    def forward(self, patches):
        self.given.append(len(patches))
        return self.norm(patches).flatten(1)


def test_evaluation_on_a_cpu_takes_as_many_patches_at_a_time_as_fit_the_cache(monkeypatch):
    monkeypatch.setattr(chunks, "VALUES", 4 * 64 + 1)  # four patches of 8 x 8 pixels
    images = random_images(3, 1, 24, 24)
    net = ScaleChannels(Counting(nn.BatchNorm2d(1)), FEW, 8).eval()
    whole = net(images)  # with gradients
    with torch.no_grad():
        assert torch.equal(net(images), whole)  # one product for each pixel: equal bits
        net.train()(images)
    assert net.backbone.given == [9, 3, 3, 3, 9]  # in equal groups
    joined = ScaleChannels(Counting(nn.BatchNorm2d(1, track_running_stats=False)), FEW, 8).eval()
    with torch.no_grad():
        joined(images)  # a norm over the batch in evaluation too
    assert joined.backbone.given == [9]
