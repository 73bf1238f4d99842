"""A CPU evaluates as many patches at a time as its cache holds activations of."""

import pytest
import torch
from torch import nn

from foveate.models import chunks
from foveate.models.channels import ScaleChannels
from foveate.models.chunks import patches_at_once


class Noting(nn.Module):
    """A backbone that notes what it is given, with an activation of `width` times a patch."""

    def __init__(self, width=1, classes=3):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3 * width, 1), nn.Linear(3 * width, classes)
        self.given = []

    def forward(self, patches):
        self.given.append(len(patches))
        return self.head(self.conv(patches).mean((2, 3)))


class Outside(Noting):
    """A backbone that needs the values of its patches."""

    def forward(self, patches):
        assert patches.sum().item() == patches.sum().item()
        return super().forward(patches)


PATCHES = torch.zeros(100, 3, 64, 64)
ONE = 4 * 3 * 64 * 64  # bytes of a patch


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(chunks, "VALUES", 10 * 3 * 64 * 64)
    monkeypatch.setattr(chunks, "BYTES", 32 * ONE)


@pytest.mark.parametrize(("width", "groups"), [(1, 5), (2, 7), (4, 10), (1000, 10)])
def test_backbones_with_small_activations_take_more_patches(width, groups):
    """At most 20, 16, 10 and 10 at a time: twice the usual number, or as many as fit."""
    assert len(PATCHES.split(patches_at_once(Noting(width), PATCHES))) == groups


def test_large_weights_are_not_activations():
    net = Noting()
    net.head = nn.Sequential(nn.Linear(3, 5000), nn.Linear(5000, 3000))  # weights of 60 MB
    assert patches_at_once(net, PATCHES) == patches_at_once(Noting(), PATCHES)


def test_few_patches_are_evaluated_together_without_a_trial(monkeypatch):
    monkeypatch.setattr(chunks, "_try_out", None)
    assert patches_at_once(Noting(1000), PATCHES[:10]) == 10
    assert patches_at_once(Noting(), PATCHES[:0]) == 1


def test_the_trial_is_one_and_changes_nothing(monkeypatch):
    net, before = Noting(), torch.get_rng_state()
    assert patches_at_once(net, PATCHES) == 20
    assert net.given == [] and torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(chunks, "_try_out", None)
    assert patches_at_once(net, PATCHES) == 20


def test_hooks_do_not_see_a_trial():
    net, seen = Noting(), []
    net.conv.register_forward_hook(lambda module, given, output: seen.append(output))
    assert patches_at_once(net, PATCHES) == 10 and seen == []


def test_backbones_without_shapes_alone_use_the_size_of_a_patch():
    assert patches_at_once(Outside(), PATCHES) == 10


def test_the_network_splits_its_patches_so():
    backbone = Noting(2)
    net = ScaleChannels(backbone, [0.5, 1, 2], 64).eval()
    images = torch.randn(10, 3, 80, 80)
    with torch.no_grad():
        found = net(images)
    assert backbone.given == [15, 15]
    torch.testing.assert_close(found, net(images).detach())
    assert backbone.given == [15, 15, 30]
