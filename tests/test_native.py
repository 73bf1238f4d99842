"""The compiled trunk gives the numbers of the plain one."""

import copy
import platform

import native_trunks
import pytest
import torch
from native_trunks import (
    assert_agrees,
    assert_near,
    assert_same_bits,
    forgotten,
    gradients,
    made,
    tolerance,
)

from foveate.execution import convnet
from foveate.execution.native import stages as native_stages
from foveate.execution.native import trunk as native_ops
from foveate.execution.native.passes import fold
from foveate.execution.native.stages import Buffers
from foveate.native import build

_needs_a_compiler = native_trunks._needs_a_compiler  # a fixture for every test
CNN = (16, 16, 16, 16, 32, 32, 32, 32)


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


def on_background(shape, boxes):
    """Noise in a box (top, left, high, wide) per image, on a background of its own colours.

    With this seed, no value is so close to zero that rounding decides whether ReLU is active.
    """
    seeded = torch.Generator().manual_seed(4)
    images = torch.randn(len(boxes), shape[0], 1, 1, generator=seeded).repeat(1, 1, *shape[1:])
    for image, (top, left, high, wide) in zip(images, boxes, strict=True):
        part = image[:, top : top + high, left : left + wide]
        part.copy_(torch.randn(part.shape, generator=seeded))
    return images


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("features", "shape", "changes"),
    [
        (CNN, (1, 112, 112), {}),
        ((16, 16, 32, 32), (1, 60, 50), {}),
        ((16, 32, 16, 16), (2, 45, 53), {"batch_norm": False}),
        ((32, 48, 64), (3, 37, 40), {}),
    ],
)
def test_it_agrees_on_a_constant_background(features, shape, changes, training):
    height, width = shape[1:]
    boxes = [
        (9, 14, 8, 5), (0, 0, 9, 7), (height - 6, width - 5, 6, 5), (0, width - 4, height, 4),
        (5, 0, 11, width), (height - 1, 3, 1, 1), (20, 21, 1, 12), (0, 0, 0, 0),
        (0, 0, height, width), (1, 1, height - 2, width - 2),
    ]  # fmt: skip
    net = made(features, min(height, width), channels=shape[0], **changes).train(training)
    assert_agrees(net, on_background(shape, boxes))


def test_a_background_is_computed_once(monkeypatch):
    """A map stores the pixels that see the object and one more; the rest is not written."""
    net, maps, real = made(CNN, 112).eval(), [], Buffers.allocate

    def allocate(self, *sizes):
        maps.append(real(self, *sizes).fill_(torch.nan))
        return maps[-1]

    monkeypatch.setattr(Buffers, "allocate", allocate)
    images = on_background((1, 112, 112), [(50, 40, 8, 12)])
    assert bool(native_ops.run(net.trunk, images).isfinite().all())
    seen = (images != images[..., :1, :1]).double()
    for at, layer in enumerate(net.trunk[::3]):
        ones = torch.ones(1, 1, 3, 3, dtype=seen.dtype)
        seen = (torch.nn.functional.conv2d(seen, ones, stride=layer.stride) > 0).double()
        if 0 < at < 5:  # later maps have few other pixels
            assert int((~maps[at - 1].isnan()).all(3).sum()) == int(seen.sum()) + 1


def test_images_far_from_zero_lose_little():
    net, images = made(), torch.randn(32, 1, 28, 28) * 0.5 + 100
    exact = copy.deepcopy(net).double().trunk(images.double()).detach()
    # A pixel of 100 is known to 4e-6, and its spread is 0.5: 200 times the error of others.
    assert_near(native_ops.run(net.trunk, images).detach(), exact, 200 * tolerance(net, images))


def test_moments_are_those_of_all_windows():
    images = torch.randn(5, 2, 9, 12) + torch.randn(2, 9, 12)
    windows = images.double().unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).flatten(3)
    rows = windows.flatten(0, 2)
    mean, *covariance = fold((torch.nn.Conv2d(2, 16, 3), torch.nn.BatchNorm2d(16)), images).moments
    torch.testing.assert_close(mean, rows.mean(0), atol=1e-6, rtol=0)
    right = rows.T.cov(correction=0)
    torch.testing.assert_close(torch.stack(covariance), right, atol=1e-5, rtol=0)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
@pytest.mark.parametrize("target", ["-march=x86-64", "-march=haswell"])
def test_it_agrees_for_every_length_of_vectors(target, monkeypatch, tmp_path):
    if target == "-march=haswell" and "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("this processor lacks AVX2")
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "TARGETS", (target,))
    with forgotten():
        assert build.library().lanes() == {"-march=x86-64": 4, "-march=haswell": 8}[target]
        for features, size in (((16, 16, 32, 32), 28), ((48, 16, 16, 32), 33)):
            for training in (True, False):
                assert_agrees(made(features, size).train(training), torch.randn(9, 1, size, size))


def outcome(net, images):
    net = copy.deepcopy(net)
    features = convnet.features(net, images)
    return [features.detach(), *gradients(net.trunk, features), *net.trunk.buffers()]


def test_the_same_bits_for_any_number_of_threads_and_any_schedule(monkeypatch):
    net, images = made().train(), torch.randn(100, 1, 28, 28)
    assert_same_bits(lambda: outcome(net, images), monkeypatch)


def test_graphs_that_live_at_the_same_time_do_not_share_their_maps():
    net, one, other = made(), torch.randn(8, 1, 28, 28), torch.randn(8, 1, 28, 28)
    expected = [outcome(net, one)[1:], outcome(net, other)[1:]]
    nets = [copy.deepcopy(net), copy.deepcopy(net)]
    features = [convnet.features(n, i) for n, i in zip(nets, (one, other), strict=True)]
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
    clean = convnet.features(net, images)
    images[2, 0, 11, 13] = torch.nan
    found, plain = convnet.features(net, images), net.trunk(images)
    assert torch.equal(found.isnan(), plain.isnan()) and bool(found[2].isnan().any())
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])
    infinite = images.nan_to_num(torch.inf)
    assert torch.equal(convnet.features(net, infinite).isfinite(), net.trunk(infinite).isfinite())


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_it_gives_the_same(training, monkeypatch):
    if build.library() is None:
        pytest.skip("no C compiler")
    net, images = made().train(training), torch.randn(7, 1, 28, 28)
    right = outcome(net, images)
    monkeypatch.setattr(native_ops, "CHUNK", 2)
    with torch.no_grad():
        found = convnet.features(net, images)
    assert torch.equal(found, right[0]) and not found.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(net.trunk.buffers(), right[17:], strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_defaults_of_pytorch_do_not_matter(training):
    net, images = made().train(training), torch.randn(4, 1, 28, 28)
    right = outcome(net, images)
    slope = torch.randn(right[0].shape, generator=torch.Generator().manual_seed(3))
    Buffers._store.clear()  # which have the right type already
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            other = copy.deepcopy(net)
            features = convnet.features(other, images)
            features.backward(slope)
    finally:
        torch.set_default_dtype(torch.float32)
    found = [features, *(p.grad for p in other.trunk.parameters()), *other.trunk.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_the_layout_of_weights_does_not_matter():
    net = made(channels=2).to(memory_format=torch.channels_last)
    assert_agrees(net, torch.randn(3, 2, 28, 28))


def test_the_mode_on_the_way_forward_counts():
    net, images = made().train(), torch.randn(4, 1, 28, 28)
    right = outcome(net, images)[1:17]
    features = convnet.features(net, images)
    net.eval()
    assert all(torch.equal(*p) for p in zip(gradients(net.trunk, features), right, strict=True))


def test_autograd_hears_that_running_statistics_have_changed():
    net, images = made(), torch.randn(4, 1, 28, 28)
    plain = net.eval().trunk(images)  # keeps them for its way back
    convnet.features(net.train(), images)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.sum().backward()


def test_frozen_weights_get_no_gradient():
    net = made()
    net.trunk[3].weight.requires_grad_(False)
    net.trunk[0].weight.requires_grad_(False)
    convnet.features(net, torch.randn(3, 1, 28, 28)).sum().backward()
    assert net.trunk[3].weight.grad is None and net.trunk[0].weight.grad is None
    assert net.trunk[6].weight.grad is not None


def test_the_buffers_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(native_stages.Buffers, "_store", {})
    for size in range(1, 60):
        for _ in range(3):
            native_stages.Buffers().allocate(size * (native_stages.MAX_BUFFER // 64))
    kept = native_stages.Buffers._store
    total = sum(flat.numel() for flats in kept.values() for flat in flats)
    assert 0 < total <= native_stages.MAX_CACHED
    held = native_stages.Buffers()
    for _ in range(9):
        held.allocate(native_stages.MAX_BUFFER)
    del held
    assert (
        sum(flat.numel() for flats in kept.values() for flat in flats) <= native_stages.MAX_CACHED
    )
    for size in range(1, 60):
        native_stages.Buffers().allocate(size)
    assert len(kept) <= native_stages.SIZES + 1


def test_buffers_are_kept_while_other_threads_keep_some(monkeypatch):
    class Counted(list):
        """Buffers of one size; another thread keeps one of a new size while they are counted."""

        def __len__(self):
            store.setdefault(9, [])
            return super().__len__()

    store = {7: Counted()}
    monkeypatch.setattr(native_stages.Buffers, "_store", store)
    native_stages.Buffers()._keep(torch.zeros(8))
    assert len(store[8]) == 1
