"""The compiled trunk gives the numbers of the plain one, and steps aside where it cannot."""

import copy
import os
import platform
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from foveate.models import native, native_ops
from foveate.models.backbone import ConvNet

CNN = (16, 16, 16, 16, 32, 32, 32, 32)


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
    if "without" not in request.node.name and native.library() is None:
        pytest.skip("no C compiler")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [1, 3, 17, 544])
def test_it_agrees_for_every_number_of_images(count, training):
    assert_agrees(made().train(training), torch.randn(count, 1, 28, 28) * 0.5 + 0.3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("features", "size", "changes"),
    [
        (CNN, 112, {}),
        ((16, 16), 28, {"channels": 3}),
        ((32, 48, 64), 15, {"channels": 2}),
        ((48, 16, 16, 32, 16), 37, {}),
        ((16, 16, 32, 32), 28, {"batch_norm": False}),
        ((16, 32), 5, {}),
    ],
)
def test_it_agrees_for_every_shape_of_network(features, size, changes, training):
    net = made(features, size, **changes).train(training)
    assert_agrees(net, torch.randn(3, changes.get("channels", 1), size, size))


@pytest.mark.parametrize("shape", [(30, 41), (64, 28), (29, 27)])
def test_it_agrees_for_images_that_are_not_square(shape):
    assert_agrees(made(), torch.randn(2, 1, *shape))


def test_norms_may_differ_in_mode():
    net = made().train()
    net.trunk[1].eval()
    net.trunk[7].eval()
    assert_agrees(net, torch.randn(5, 1, 28, 28))


def test_images_far_from_zero_lose_little():
    net, images = made(), torch.randn(32, 1, 28, 28) * 0.5 + 100
    exact = copy.deepcopy(net).double().trunk(images.double()).detach()
    # A pixel of 100 is known to 4e-6, and its spread is 0.5: 200 times the error of others.
    assert_near(native_ops.run(net.trunk, images).detach(), exact, 200 * tolerance(net, images))


def test_moments_are_those_of_all_windows():
    images = torch.randn(5, 2, 9, 12) + torch.randn(2, 9, 12)
    windows = images.double().unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).flatten(3)
    rows = windows.flatten(0, 2)
    found = native_ops.window_moments(images)
    torch.testing.assert_close(found.mean.double(), rows.mean(0), atol=1e-6, rtol=0)
    right = rows.T.cov(correction=0)
    torch.testing.assert_close(found.covariance.double(), right, atol=1e-5, rtol=0)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
@pytest.mark.parametrize("target", ["-march=x86-64", "-march=haswell"])
def test_it_agrees_for_every_length_of_vectors(target, monkeypatch, tmp_path):
    if target == "-march=haswell" and "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("this processor lacks AVX2")
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "TARGETS", (target,))
    with forgotten():
        assert native.library().lanes() == {"-march=x86-64": 4, "-march=haswell": 8}[target]
        for features, size in (((16, 16, 32, 32), 28), ((48, 16, 16, 32), 33)):
            for training in (True, False):
                assert_agrees(made(features, size).train(training), torch.randn(9, 1, size, size))


@contextmanager
def forgotten():
    """Look for the compiler again, and once more afterwards."""
    native._library.cache_clear()
    try:
        yield
    finally:
        native._library.cache_clear()


def outcome(net, images):
    net = copy.deepcopy(net)
    features = net.features(images)
    return [features.detach(), *gradients(net.trunk, features), *net.trunk.buffers()]


def test_the_same_bits_for_any_number_of_threads_and_any_schedule(monkeypatch):
    net, images = made().train(), torch.randn(100, 1, 28, 28)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads, team in ((1, True), (2, True), (3, True), (2, True), (2, False), (5, False)):
            if not team:
                monkeypatch.setattr(native, "_team", lambda: None)
            torch.set_num_threads(threads)
            runs.append(outcome(net, images))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


def test_graphs_that_live_at_the_same_time_do_not_share_their_maps():
    net, one, other = made(), torch.randn(8, 1, 28, 28), torch.randn(8, 1, 28, 28)
    expected = [outcome(net, one)[1:], outcome(net, other)[1:]]
    nets = [copy.deepcopy(net), copy.deepcopy(net)]
    features = [n.features(i) for n, i in zip(nets, (one, other), strict=True)]
    slope = torch.randn(features[0].shape, generator=torch.Generator().manual_seed(3))
    for n, f in zip(nets, features, strict=True):
        for _ in range(2):
            n.zero_grad()
            (f * slope).sum().backward(retain_graph=True)
    for n, right in zip(nets, expected, strict=True):
        for parameter, gradient in zip(n.trunk.parameters(), right, strict=False):
            assert torch.equal(parameter.grad, gradient)


def test_nan_spoils_its_own_image_only():
    net, images = made().eval(), torch.randn(6, 1, 28, 28)
    clean = net.features(images)
    images[2, 0, 11, 13] = torch.nan
    found, plain = net.features(images), net.trunk(images)
    assert torch.equal(found.isnan(), plain.isnan()) and bool(found[2].isnan().any())
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])
    infinite = images.nan_to_num(torch.inf)
    assert torch.equal(net.features(infinite).isfinite(), net.trunk(infinite).isfinite())


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_it_gives_the_same(training, monkeypatch):
    if native.library() is None:
        pytest.skip("no C compiler")
    net, images = made().train(training), torch.randn(7, 1, 28, 28)
    right = outcome(net, images)
    monkeypatch.setattr(native_ops, "CHUNK", 2)
    with torch.no_grad():
        found = net.features(images)
    assert torch.equal(found, right[0]) and not found.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(net.trunk.buffers(), right[17:], strict=True))


def test_frozen_weights_get_no_gradient():
    net = made()
    net.trunk[3].weight.requires_grad_(False)
    net.trunk[0].weight.requires_grad_(False)
    net.features(torch.randn(3, 1, 28, 28)).sum().backward()
    assert net.trunk[3].weight.grad is None and net.trunk[0].weight.grad is None
    assert net.trunk[6].weight.grad is not None


def steps_aside(trunk, images):
    return not native_ops.applies(trunk, images)


def test_it_steps_aside_for_what_it_does_not_know(monkeypatch):
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
    monkeypatch.setattr(net.trunk[1], "momentum", None)
    assert steps_aside(net.trunk, images)


def test_hooks_see_every_layer():
    net, seen = made(), []
    net.trunk[4].register_forward_hook(lambda *_: seen.append(1))
    net.eval().trunk(torch.randn(1, 1, 28, 28))
    assert steps_aside(net.trunk, torch.randn(1, 1, 28, 28)) and seen


def test_one_value_per_channel_is_refused_as_by_the_plain_trunk():
    with pytest.raises(ValueError, match="more than 1 value"):
        made((16, 16), 5)(torch.randn(1, 1, 5, 5))


def test_images_that_want_gradients_get_them():
    images = torch.randn(3, 1, 28, 28, requires_grad=True)
    made()(images).sum().backward()
    assert float(images.grad.abs().sum()) > 0


def test_compilers_and_transforms_see_the_plain_operations():
    net, images = made().eval(), torch.randn(3, 1, 28, 28)
    right = net(images)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), right, atol=1e-4, rtol=0)
    exported = torch.export.export(net, (images,)).module()
    torch.testing.assert_close(exported(images), right, atol=1e-4, rtol=0)
    parameters = dict(net.named_parameters())

    def loss(values):
        return torch.func.functional_call(net, values, (images,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    net(images).square().sum().backward()
    for name, parameter in parameters.items():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4 * scale, rtol=0)


def test_no_second_derivatives():
    net = made()
    out = net.features(torch.randn(2, 1, 28, 28)).square().sum()
    (slope,) = torch.autograd.grad(out, net.trunk[3].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def assert_plain_path_works():
    net, images = made().eval(), torch.randn(2, 1, 28, 28)
    assert native.library() is None and steps_aside(net.trunk, images)
    torch.testing.assert_close(net.features(images), net.trunk(images), atol=1e-5, rtol=0)


def test_without_because_it_was_switched_off(monkeypatch):
    monkeypatch.setenv("FOVEATE_NATIVE", "0")
    assert_plain_path_works()


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with forgotten():
        assert_plain_path_works()


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        'case "$*" in *-dM*) exit 0;; esac; exit 1',  # knows the processor, cannot compile
        'while [ "$1" != -o ]; do [ $# = 0 ] && exit 0; shift; done; echo no > "$2"',
    ],
)
def test_without_a_compiler_that_works(script, monkeypatch, tmp_path):
    for name in native.COMPILERS:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path / "cache"))
    with forgotten():
        assert_plain_path_works()


def test_the_library_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    with forgotten():
        assert native.library() is not None
    (kept,) = (tmp_path / "native").iterdir()
    assert kept.suffix == ".so"
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    with forgotten():
        assert native.library() is not None


def test_a_damaged_library_in_the_cache_does_not_matter(monkeypatch, tmp_path):
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    _, _, name = native._identify()
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / name).write_bytes(b"half a library")
    with forgotten():
        assert native.library() is not None


def test_a_cache_that_cannot_be_written_does_not_matter(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path / "file"))
    with forgotten():
        assert native.library() is not None
        assert_agrees(made(), torch.randn(2, 1, 28, 28))


def test_two_processes_may_compile_at_once(tmp_path):
    code = "from foveate.models import native; print(native.library().lanes())"
    environment = {**os.environ, "FOVEATE_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert said[0] == said[1] == f"{native.library().lanes()}\n"
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]


def test_importing_compiles_nothing(tmp_path):
    code = "import foveate.models.native_ops as n; n.native._library.cache_info().misses and 1 / 0"
    environment = {**os.environ, "FOVEATE_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not (tmp_path / "cache").exists()
