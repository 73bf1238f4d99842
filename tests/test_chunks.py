"""A CPU evaluates as many patches at a time as its cache holds activations of, in its format."""

import pytest
import torch
from torch import nn

from foveate.models import chunks
from foveate.models.channels import ScaleChannels
from foveate.models.chunks import evaluate_groups, patches_at_once


class Noting(nn.Module):
    """A backbone that notes what it is given, with an activation of `width` times a patch."""

    def __init__(self, width=1, classes=3):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3 * width, 1), nn.Linear(3 * width, classes)
        self.given = []

    def forward(self, patches):
        self.given.append(len(patches))
        return self.head(self.conv(patches).mean((2, 3)))


class Convolutions(nn.Module):
    """A backbone of two convolutions that notes whether patches are in channels_last."""

    def __init__(self, last=torch.Tensor.flatten):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.Conv2d(4, 3, 5, stride=30))
        self.last, self.given = last, []

    def forward(self, patches):
        self.given.append((len(patches), not patches.is_contiguous()))
        return self.last(self.convs(patches), 1)


def nearly_equal(features, start):
    """Results of the two formats that differ by a rounding error."""
    return features.flatten(start) + 1e-6 * features.is_contiguous()


def view(features, start):
    return features.view(len(features), -1)


def as_in_memory(features, start):
    """A wrong result for any memory format but the default."""
    return features.as_strided((len(features), 12), (12, 1))


def random(features, start):
    return features.flatten(1) + torch.rand(())


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


@pytest.mark.parametrize(("width", "groups"), [(1, 4), (2, 7), (4, 10), (1000, 10)])
def test_backbones_with_small_activations_take_more_patches(width, groups, monkeypatch):
    """At most 32, 16, 10 and 10 at a time, as many as fit, and four times the usual number."""
    assert len(PATCHES.split(patches_at_once(Noting(width), PATCHES))) == groups
    monkeypatch.setattr(chunks, "BYTES", 10_000 * ONE)
    assert len(PATCHES.split(patches_at_once(Noting(width), PATCHES))) == (10 if width > 250 else 3)


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
    assert patches_at_once(net, PATCHES) == 25
    assert net.given == [] and torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(chunks, "_try_out", None)
    assert patches_at_once(net, PATCHES) == 25


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


# Memory format


def evaluated(backbone):
    """The results of two evaluations of 30 patches, what they were given, and the patches."""
    patches = torch.rand(30, 3, 64, 64)
    with torch.no_grad():
        first, second = (evaluate_groups(backbone, backbone, patches) for _ in range(2))
    given, backbone.given = backbone.given, []
    return first, second, given, patches


def test_convolutions_get_channels_last_once_it_has_the_same_results():
    backbone = Convolutions(nearly_equal)
    first, second, given, patches = evaluated(backbone)
    assert given == [(15, False)] + 4 * [(15, True)]
    assert torch.equal(first, second)  # no mix of both formats
    torch.testing.assert_close(first, backbone(patches).detach())


@pytest.mark.parametrize("last", [view, as_in_memory])
def test_backbones_that_need_the_default_format_get_it(last):
    backbone = Convolutions(last)
    first, second, given, patches = evaluated(backbone)
    assert given == [(15, False), (15, True), *3 * [(15, False)]]
    assert torch.equal(first, second) and torch.equal(first, backbone(patches).detach())


@pytest.mark.parametrize("last", [view, as_in_memory])
def test_a_replaced_module_is_tried_again(last):
    class Last(nn.Module):
        def forward(self, features):
            return last(features, 1)

    backbone = Convolutions()
    evaluated(backbone)
    backbone.convs.append(Last().eval())
    _, _, given, _ = evaluated(backbone)
    assert given == [(15, False), (15, True), *3 * [(15, False)]]


def test_the_check_leaves_the_random_state_alone():
    torch.manual_seed(0)
    _, _, given, _ = evaluated(Convolutions(random))
    found = torch.get_rng_state()
    assert [group for group in given if group[1]] == [(15, True)]  # other random numbers
    torch.manual_seed(0)
    Convolutions(), torch.rand(30, 3, 64, 64), [torch.rand(()) for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), found)


def test_groups_in_channels_last_are_larger_unless_their_activations_are_large(monkeypatch):
    """Activations are 4 × 60 × 60 values of 4 bytes per patch."""
    monkeypatch.setattr(chunks, "BYTES", 0)
    assert patches_at_once(Convolutions(), PATCHES) == 20
    monkeypatch.setattr(chunks, "LARGE", 13 * 4 * 4 * 60 * 60)
    assert patches_at_once(Convolutions(), PATCHES) == 13
    monkeypatch.setattr(chunks, "LARGE", 0)
    assert patches_at_once(Convolutions(), PATCHES) == 10


def test_one_group_of_many_patches_gets_channels_last_too():
    backbone = Convolutions()
    with torch.no_grad():
        for _ in range(2):
            evaluate_groups(backbone, backbone, torch.rand(11, 3, 64, 64))
    assert backbone.given == [(11, False), (11, True), (11, True)]


@pytest.mark.parametrize("change", ["hook", "nan", "grey", "few"])
def test_otherwise_the_format_is_the_default(change):
    backbone, patches = Convolutions(), torch.rand(30, 3, 64, 64)
    if change == "hook":
        backbone.convs.register_forward_hook(lambda module, given, output: None)
    elif change == "nan":
        backbone.convs[0].weight.data[0, 0, 0, 0] = torch.nan
    elif change == "grey":
        backbone.convs[0], patches = nn.Conv2d(1, 4, 5), torch.rand(30, 1, 110, 110)
    else:
        patches = patches[:10]
    with torch.no_grad():
        for _ in range(2):
            evaluate_groups(backbone, backbone, patches)
    assert sum(formatted for _, formatted in backbone.given) == (change == "nan")


def test_a_hook_or_forward_that_comes_later_can_need_the_default_format():
    backbone, seen = Convolutions(), []
    evaluated(backbone)
    with backbone.convs.register_forward_hook(lambda m, i, o: seen.append(o.view(len(o), -1))):
        evaluated(backbone)
    assert len(seen) > 0
    first = backbone.convs[0].forward
    backbone.convs[0].forward = lambda patches: first(patches.view(-1).view(patches.shape))
    _, _, given, _ = evaluated(backbone)
    assert given == [(15, False), (15, True), *3 * [(15, False)]]


def test_patches_of_one_colour_do_not_decide_about_the_format():
    class InMemory(Convolutions):
        def forward(self, patches):
            strides = (3 * 64 * 64, 64 * 64, 64, 1)
            offset = patches.storage_offset()
            return super().forward(patches.as_strided(patches.shape, strides, offset))

    backbone = InMemory()
    for patches in (torch.zeros(30, 3, 64, 64), torch.rand(30, 3, 64, 64)):
        with torch.no_grad():
            found = evaluate_groups(backbone, backbone, patches)
        torch.testing.assert_close(found, backbone(patches).detach())


class Reusing(Convolutions):
    """A backbone that returns a part of one tensor, as an engine with its own memory does."""

    def forward(self, patches):
        self.kept = getattr(self, "kept", torch.zeros(30, 12))
        return self.kept[: len(patches)].copy_(super().forward(patches))


def test_a_backbone_can_reuse_the_memory_of_its_results():
    patches = torch.rand(30, 3, 64, 64)
    backbone = Reusing()
    for _ in range(2):
        with torch.no_grad():
            found = evaluate_groups(backbone, backbone, patches)
            torch.testing.assert_close(found, Convolutions.forward(backbone, patches))
