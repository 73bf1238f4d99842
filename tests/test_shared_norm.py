"""Batch norms that share their statistics, here with processes that are parts of one batch."""
# What holds between real processes is in team_facts.py.

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foveate.errors import ConfigError
from foveate.training.shared_norm import set_local_statistics, share_norms


class Active(nn.BatchNorm2d):
    """A subclass that does more than batch norm, as timm's `BatchNormAct2d`."""

    def forward(self, values):
        return F.silu(super().forward(values))


class ByHand(nn.BatchNorm2d):
    """A batch norm whose statistics nobody else can see."""

    def forward(self, values):
        return values - values.mean((0, 2, 3), keepdim=True)


class Meeting:
    """Two threads that add up tensors as two processes do."""

    def __init__(self):
        self.barrier, self.given = threading.Barrier(2, timeout=20), {}

    def all_reduce_sum(self, tensor):
        self.given[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(sum(self.given.values()))
        self.barrier.wait()
        return tensor


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Active])
def test_two_halves_are_normed_as_the_whole(kind):
    torch.manual_seed(0)
    alone, values = nn.Sequential(kind(3)).double(), torch.randn(6, 3, 4, 4, dtype=torch.float64)
    weights, meeting = torch.randn_like(values), Meeting()
    halves = [copy.deepcopy(alone) for _ in range(2)]
    parts = [part.clone().requires_grad_() for part in values.split([4, 2])]

    def step(half, part, weight):
        (half(part) ** 2 * weight).sum().backward()

    for half in halves:
        share_norms(half, meeting.all_reduce_sum)
        assert isinstance(half[0], kind) and half.state_dict().keys() == alone.state_dict().keys()
    given = zip(halves, parts, weights.split([4, 2]), strict=True)
    threads = [threading.Thread(target=step, args=args) for args in given]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    whole = values.clone().requires_grad_()
    step(alone, whole, weights)
    torch.testing.assert_close(torch.cat([part.grad for part in parts]), whole.grad)
    for half in halves:
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(half.state_dict()[key], value)
        set_local_statistics(half, True)
    with torch.no_grad():
        torch.testing.assert_close(halves[0](values), alone(values))


def test_norms_that_cannot_be_shared_are_refused():
    net = nn.Sequential(ByHand(3))
    share_norms(net, lambda sums: sums)
    with pytest.raises(ConfigError, match=r"ByHand does not call F\.batch_norm"):
        net(torch.randn(2, 3, 4, 4))
    net.eval()(torch.randn(2, 3, 4, 4))
