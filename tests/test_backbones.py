"""Scale channels around backbones that others wrote, in every use that PyTorch has for a module."""
# Shape letters: B batch, S scale channel, C image channel, P patch pixels, K classes.

import copy

import pytest
import torch
import torch.nn.functional as F
from formulas import blobs, sensitivity
from invariance import covariance_error
from others_backbones import CLASSES, OTHERS, SHALLOW, SIZE, quiet
from torch import nn

from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels
from foveate.models.export import export
from foveate.scales import ScaleGrid

GRID = ScaleGrid(1, 2, per_octave=1)
LABELS = torch.arange(2)
# Two ways to sum the same terms differ by their number times eps: dot products here have up to
# 5,000 terms, and errors of up to 200 layers add up. In float64 that is 2e-10, in float32 0.1.
EXACT = 200 * 5000 * torch.finfo(torch.float64).eps
ROUNDED = 200 * 5000 * torch.finfo(torch.float32).eps
every = pytest.mark.parametrize("name", OTHERS)
gpu = pytest.mark.gpu


def wrapped(name, made=OTHERS, pool="max", **changes):
    torch.manual_seed(0)
    return quiet(ScaleChannels(made[name](), GRID, SIZE, pool, classes=CLASSES, **changes))


def images(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(2, 3, 48, 56, generator=generator, dtype=torch.float64).to(device, dtype)


def step(net, images):
    """Logits, gradients and buffers of one training step, and the random state behind it."""
    torch.manual_seed(7)
    leaf = images.clone().requires_grad_()
    logits = net(leaf)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    F.cross_entropy(wide, LABELS.to(images.device)).backward()
    random = torch.get_rng_state().double()
    gradients = {f"of {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
    seen = {"logits": logits.detach(), "of images": leaf.grad, "random state": random}
    return {**seen, **gradients, **net.state_dict()}


def obvious(net, images):
    """The definition: the backbone on one patch after the other, then the pool."""
    outputs = [net.backbone(net.patches(images)[:, s]) for s in range(len(GRID))]
    return net.combine(torch.stack(outputs, 1))


def assert_near(found, expected, bound):
    """Within `bound` of the largest gradient, or of activations, which are of the order of 1.

    A bias before a norm has the gradient zero, made of terms as large as those of others, and a
    mean behind a norm is zero, made of terms of the order of 1.
    """
    assert found.keys() == expected.keys()
    slopes = [float(v.abs().max()) for key, v in expected.items() if key.startswith("of ")]
    for key, value in expected.items():
        scale = max(slopes) if key.startswith("of ") else max(1.0, float(value.abs().max()))
        torch.testing.assert_close(
            found[key].to(value),
            value,
            atol=bound * scale,
            rtol=0,
            msg=lambda m, k=key: f"{k}: {m}",
        )


@every
def test_logits_and_gradients_are_those_of_a_loop_over_scales(name):
    net = wrapped(name).double().eval()
    plain = copy.deepcopy(net)
    plain.forward = lambda images: obvious(plain, images)
    pixels = images(torch.float64)
    found = step(net, pixels)
    assert_near(found, step(plain, pixels), EXACT)
    with torch.no_grad():  # a few patches at a time
        torch.testing.assert_close(net(pixels), found["logits"], atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("name", SHALLOW)
def test_recomputing_takes_the_same_step(name):
    plain = wrapped(name, SHALLOW, "avg").double()
    grouped = copy.deepcopy(plain)
    grouped.recompute = 1
    pixels = images(torch.float64)
    expected = step(plain, pixels)
    assert_near(step(grouped, pixels), expected, EXACT)
    before = copy.deepcopy(grouped.state_dict())
    grouped.eval(), plain.load_state_dict(before), plain.eval()
    assert_near(step(grouped, pixels), step(plain, pixels), EXACT)
    assert all(torch.equal(value, before[key]) for key, value in grouped.state_dict().items())


@every
def test_compiled(name):
    torch.compiler.reset()
    net = wrapped(name, SHALLOW).eval()
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), net(images()), atol=ROUNDED, rtol=ROUNDED)


def test_compiled_training_through_aot():
    torch.compiler.reset()
    plain = wrapped("timm densenet121", SHALLOW).double()
    net = copy.deepcopy(plain)
    net.forward = torch.compile(net.forward, backend="aot_eager")
    pixels = images(torch.float64)
    assert_near(step(net, pixels), step(plain, pixels), EXACT)


@every
def test_autocast_is_that_of_the_loop(name):
    """Both round to 8 bits in each layer, so neither may be much farther from float32."""
    net = wrapped(name).eval()
    exact = obvious(net, images()).detach()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, slow = net(images()), obvious(net, images())
    assert (found - exact).abs().max() <= 2 * (slow - exact).abs().max() + 2**-8 * exact.abs().max()


@every
def test_channels_last(name):
    net = wrapped(name).eval()
    with torch.no_grad():
        right = net(images())
        found = net.to(memory_format=torch.channels_last)(
            images().to(memory_format=torch.channels_last)
        )
    torch.testing.assert_close(found, right, atol=ROUNDED, rtol=ROUNDED)


@every
def test_copies_and_state_dicts(name):
    net = wrapped(name).eval()
    twin = copy.deepcopy(net)
    fresh = ScaleChannels(OTHERS[name](), GRID, SIZE, classes=CLASSES).eval()
    assert set(net.state_dict()) == {f"backbone.{key}" for key in net.backbone.state_dict()}
    fresh.backbone.load_state_dict(net.backbone.state_dict())
    with torch.no_grad():
        right = net(images())
        assert torch.equal(twin(images()), right)
        assert torch.equal(fresh(images()), right)


@every
def test_exported_to_onnx(name, tmp_path):
    """`export` compares the file with the network on new images, and raises if they differ."""
    done = export(wrapped(name, SHALLOW), tmp_path / "net.onnx", shape=(3, 40, 40))
    assert done.outputs == ("logits", "channels")
    assert done.difference <= done.allowed


@every
def test_a_twice_larger_image_shifts_the_channels(name):
    """Patches differ by two interpolation errors, answers by the Lipschitz constant times that."""
    net = wrapped(name).eval()
    f = blobs(10, 15, channels=3, batch=1)
    before, after = (net.patches(f.image(160, 160, t).float()) for t in (1.0, 2.0))
    constant = sensitivity(net.backbone, before[:, :-1].flatten(0, 1), after[:, 1:].flatten(0, 1))
    error = f.interpolation_error() + f.interpolation_error(2.0)
    with torch.no_grad():
        change = (net.forward_patches(after)[:, 1:] - net.forward_patches(before)[:, :-1]).abs()
    assert (change <= constant.unflatten(0, change.shape[:2]) * error[:, None, None]).all()
    assert covariance_error(net, lambda t: f.image(160, 160, t).float(), 2.0).channels == 1


def test_a_backbone_that_gives_more_than_logits_is_named():
    class Pair(nn.Flatten):
        def forward(self, patches):
            return super().forward(patches), None

    with pytest.raises(ConfigError, match="got tuple"):
        ScaleChannels(Pair(), GRID, 8)(torch.rand(1, 1, 16, 16))


@gpu
@every
def test_on_a_gpu(name):
    """Float64 as on the CPU; recomputed; bf16 near the loop's; one captured step as the plain."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here = wrapped(name, SHALLOW, "avg").double()
    there, grouped = (copy.deepcopy(here).cuda() for _ in range(2))
    grouped.recompute = 1
    pixels = images(torch.float64)
    expected = step(here, pixels)
    on_gpu = step(there, pixels.cuda())
    # CUDA's hardswish rounds 1/6 to float32 in float64 too: on an H200 it differs by 1.2e-7.
    rounds = any("ardswish" in type(module).__name__ for module in here.modules())
    bound = ROUNDED if rounds else EXACT
    assert_near({k: v.cpu() for k, v in on_gpu.items()}, expected, bound)
    assert_near(step(grouped, pixels.cuda()), on_gpu, EXACT)
    net = copy.deepcopy(here).float().cuda().eval()
    exact = obvious(net, images(device="cuda")).detach()
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        found, slow = net(images(device="cuda")), obvious(net, images(device="cuda"))
    assert (found - exact).abs().max() <= 2 * (slow - exact).abs().max() + 2**-8 * exact.abs().max()
    assert torch.allclose(captured(net, images(device="cuda")), exact, atol=ROUNDED, rtol=ROUNDED)


def captured(net, images):
    """The logits of a forward pass that was captured as a CUDA graph and replayed."""
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                net(images)
        torch.cuda.synchronize()
        graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(images)
        with torch.cuda.graph(graph):
            logits = net(given)
        given.copy_(images)
        graph.replay()
        torch.cuda.synchronize()
    return logits
