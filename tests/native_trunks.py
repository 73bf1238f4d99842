"""Trunks to compile, how near they must come to the plain ones, and the need of a compiler."""

import copy
from contextlib import contextmanager

import pytest
import torch

from foveate.execution.native import trunk as native_ops
from foveate.models.backbone import ConvNet
from foveate.native import build, calls


def made(features=(16, 16, 32, 32), size=28, **changes):
    torch.manual_seed(1)
    net = ConvNet(features, size, dropout=0.0, **changes)
    for layer in net.trunk:
        if isinstance(layer, torch.nn.BatchNorm2d):  # nothing at its default
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
            layer.momentum, layer.eps = 0.3, 1e-3
    return net


def tolerance(net, images):
    """Rounding errors relative to the largest value: one for each term that is added to another.

    Forward and back, an error passes through every dot product of the trunk. Gradients of weights
    add up the pixels of a map, then the images. Errors of single values are larger only where a
    norm divides by a small deviation, which these nets do not have.
    """
    terms = 2 * sum(c.weight[0].numel() for c in net.trunk if isinstance(c, torch.nn.Conv2d))
    return (terms + images.shape[2:].numel() + len(images)) * torch.finfo(torch.float32).eps


def gradients(trunk, features):
    """Gradients of all parameters, for a fixed random slope of the features."""
    slope = torch.randn(features.shape, generator=torch.Generator().manual_seed(3))
    trunk.zero_grad()
    (features * slope.to(features.dtype)).sum().backward()
    return [p.grad for p in trunk.parameters()]


def assert_near(found, exact, bound, scale=None):
    assert found.dtype == torch.float32
    scale = float(exact.abs().max()) if scale is None else scale
    torch.testing.assert_close(found.double(), exact, atol=bound * scale, rtol=0)


def assert_agrees(net, images):
    """Features, gradients and running statistics, against the plain trunk in float64."""
    exact = copy.deepcopy(net).double()
    assert native_ops.applies(net.trunk, images)
    quick, slow = native_ops.run(net.trunk, images), exact.trunk(images.double())
    bound = tolerance(net, images)
    assert_near(quick.detach(), slow.detach(), bound)
    pairs = zip(gradients(net.trunk, quick), gradients(exact.trunk, slow), strict=True)
    scales = {}
    for (name, _), (found, right) in zip(net.trunk.named_parameters(), pairs, strict=True):
        layer = name.split(".")[0]
        # A bias before a norm has the gradient zero, made of terms as large as its weight's.
        scale = max(float(right.abs().max()), scales.get(layer, 0.0))
        scales[layer] = scale
        assert_near(found, right, bound, scale)
    for found, right in zip(net.trunk.buffers(), exact.trunk.buffers(), strict=True):
        if found.dtype == torch.float32:
            assert_near(found, right, bound)
        else:
            assert torch.equal(found, right)


@pytest.fixture(autouse=True)
def _needs_a_compiler(request):
    if "without" not in request.node.name and build.library() is None:
        pytest.skip("no C compiler")


@contextmanager
def forgotten():
    """Look for the compiler again, and once more afterwards."""
    build._library.cache_clear()
    try:
        yield
    finally:
        build._library.cache_clear()


def assert_same_bits(compute, monkeypatch):
    """Tensors are equal for any number of threads, with those of OpenMP and without."""
    before, runs = torch.get_num_threads(), []
    try:
        for threads, team in ((1, True), (2, True), (3, True), (5, True), (2, False), (5, False)):
            if not team:
                monkeypatch.setattr(calls, "_team", lambda: None)
            torch.set_num_threads(threads)
            runs.append(compute())
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


def steps_aside(trunk, images):
    return not native_ops.applies(trunk, images)
