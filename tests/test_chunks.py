"""A CPU evaluates as many patches at a time as its cache holds, in its memory format."""

import pytest
import torch
from torch import nn

from foveate.models import chunks
from foveate.models.channels import ScaleChannels
from foveate.models.chunks import evaluate_groups


class Noting(nn.Module):
    """A backbone of one convolution that notes how many patches it is given."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 1), nn.Linear(3, 3)
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


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(chunks, "VALUES", 10 * 3 * 64 * 64)


@pytest.mark.parametrize(
    ("count", "groups"), [(0, [0]), (1, [1]), (10, [10]), (11, [6, 5]), (32, [8, 8, 8, 8])]
)
def test_groups_have_about_the_same_size(count, groups):
    backbone = Noting()
    with torch.no_grad():
        assert len(evaluate_groups(backbone, backbone, torch.rand(count, 3, 64, 64))) == count
    assert backbone.given == groups


def test_the_network_splits_its_patches_so():
    backbone = Noting()
    net = ScaleChannels(backbone, [0.5, 1, 2], 64).eval()
    images = torch.randn(10, 3, 80, 80)
    with torch.no_grad():
        found = net(images)
    assert backbone.given == [10, 10, 10]
    torch.testing.assert_close(found, net(images).detach())
    assert backbone.given == [10, 10, 10, 30]


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
    assert given == [(10, False)] + 6 * [(10, True)]
    assert torch.equal(first, second)  # no mix of both formats
    torch.testing.assert_close(first, backbone(patches).detach())


@pytest.mark.parametrize("last", [view, as_in_memory])
def test_backbones_that_need_the_default_format_get_it(last):
    backbone = Convolutions(last)
    first, second, given, patches = evaluated(backbone)
    assert given == [(10, False), (10, True), *5 * [(10, False)]]
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
    assert given == [(10, False), (10, True), *5 * [(10, False)]]


def test_the_check_leaves_the_random_state_alone():
    torch.manual_seed(0)
    _, _, given, _ = evaluated(Convolutions(random))
    found = torch.get_rng_state()
    assert [group for group in given if group[1]] == [(10, True)]  # other random numbers
    torch.manual_seed(0)
    Convolutions(), torch.rand(30, 3, 64, 64), [torch.rand(()) for _ in range(6)]
    assert torch.equal(torch.get_rng_state(), found)


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
    assert given == [(10, False), (10, True), *5 * [(10, False)]]


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
