"""The kernels of a training step equal the loss and gradients of the network itself."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, load
from torch import nn

from foveate import ScaleChannels, ScaleGrid
from foveate.execution import canvas, canvas_search, fused, fused_layout, windows
from foveate.execution.captured import Batch, CapturedStep
from foveate.execution.fused_layout import LAUNCHES
from foveate.execution.fused_winners import find_winners
from foveate.execution.plan import Prepared, prepare
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES
from foveate.models.sliding import SlidingChannels
from foveate.training.optimiser import PiecewiseAdam

head, _ = load("foveate.execution.triton_head"), load("foveate.execution.triton_canvas")
step, trunk = (importlib.import_module(f"foveate.execution.triton_{n}") for n in ("step", "trunk"))
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SMALL = ScaleGrid(0.5, 1, per_octave=1)
MEASURED = dict(LAUNCHES)  # the launches of a training step, which the tests replace


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """Let the kernels run where the tests do, with several blocks and parts per program."""
    for module in (fused, canvas_search):
        monkeypatch.setattr(module, "KERNEL_DEVICES", (DEVICE,))
    few = {"convolve": 3, "input": 3, "weight": 2, "pair": 3, "product": 2}
    for name, programs in few.items():
        launch = LAUNCHES[name]._replace(block=32, programs=programs)
        monkeypatch.setitem(LAUNCHES, name, launch)
    monkeypatch.setitem(LAUNCHES, "classify", LAUNCHES["classify"]._replace(block=32))
    monkeypatch.setattr(fused_layout, "PARTS", 16)


@pytest.fixture
def in_float32(monkeypatch):
    """Let the kernels round to float32 instead of bf16; only Triton's interpreter can do this."""
    if DEVICE == "cuda":
        pytest.skip("compiled kernels have fixed types")
    for module in (trunk, step, head):
        monkeypatch.setattr(module, "LOW", module.tl.constexpr(module.tl.float32))
    monkeypatch.setattr(fused_layout, "bf16", lambda like, size: like.new_empty(size))


def channels(pool, features=(16, 16, 32, 32), scales=SMALL, hidden=20):
    backbone = ConvNet(features, 28, hidden=hidden, classes=7)
    return ScaleChannels(backbone, scales, 28, pool, classes=7)


NETWORKS = {
    "avg": lambda: channels("avg"),
    "max": lambda: channels("max"),
    "logsumexp": lambda: channels("logsumexp"),
    "concat": lambda: channels("concat"),
    "one channel": lambda: channels("max", scales=ScaleGrid(1, 1, per_octave=1)),
    "wide": lambda: channels("avg", features=(8, 16, 48, 40), hidden=33),
    "two blocks": lambda: ConvNet((4, 8), 12, hidden=9, classes=3),
    "plain": lambda: ConvNet((16, 16, 16, 24, 32, 32), 42, hidden=20),
}


def problem(name, images=6):
    """Return a network with other than its initial norms, prepared images, labels and indices."""
    torch.manual_seed(1)
    net = NETWORKS[name]().to(DEVICE)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            nn.init.uniform_(module.running_mean)
    side = net.size if isinstance(net, ConvNet) else 40
    pictures = 3 * torch.rand(images, 1, side, side, device=DEVICE)
    labels = torch.randint(0, 3, (images,), device=DEVICE)
    indices = (5 * torch.arange(images - 1, device=DEVICE) + 4) % images
    indices[-1] = indices[1]
    return net, pictures, labels, indices


def ready(net, pictures):
    """Return the images as the plan `windows` prepares them, also on a CPU."""
    return Prepared(windows, windows.prepare(net, pictures, torch.float32))


def mask_of(net, count, dtype):
    """Draw the same dropout mask as a training step with the same random state."""
    backbone = net if isinstance(net, ConvNet) else net.backbone
    shared = getattr(net, "pool", "") == "avg" or isinstance(net, ConvNet)
    patches = count if shared else count * len(net.scales)
    ones = torch.ones(patches, backbone.hidden.out_features, device=DEVICE)
    return backbone.dropout(ones).to(dtype)


def definition(net, pictures, labels, mask, smoothing):
    """Compute loss and gradients as the definition does, with a given dropout mask."""
    if isinstance(net, ConvNet):
        logits = net(pictures, mask)
    else:
        patches = net.patches(pictures)
        outputs = net.backbone(patches.flatten(0, 1), mask)
        logits = net.combine(outputs.unflatten(0, patches.shape[:2]))
    loss = F.cross_entropy(logits.to(pictures.dtype), labels, label_smoothing=smoothing)
    loss.backward()
    return loss.detach()


def in_double(net, pictures, labels, indices, smoothing):
    exact = copy.deepcopy(net).double()
    torch.manual_seed(3)
    mask = mask_of(exact.float(), len(indices), torch.float64)
    exact.double()
    loss = definition(exact, pictures[indices].double(), labels[indices], mask, smoothing)
    return exact, loss


@pytest.mark.parametrize(("name", "smoothing"), [("max", 0.0), *((n, 0.2) for n in NETWORKS)])
def test_loss_gradients_and_statistics_equal_the_definition(name, smoothing, in_float32):
    net, pictures, labels, indices = problem(name)
    exact, wanted = in_double(net, pictures, labels, indices, smoothing)
    prepared = ready(net, pictures)
    found = fused.find_fused(net, prepared, 8)
    torch.manual_seed(3)
    loss = found(prepared, labels, indices, smoothing)
    assert abs(loss - wanted) < 1e-5
    for (label, ours), other in zip(net.named_parameters(), exact.parameters(), strict=True):
        # The bias before a norm has no effect: its gradient is 0, up to rounding in the other.
        size = other.grad.norm() + 1e-6
        assert (ours.grad - other.grad).norm() < 2e-4 * size, label
    for (label, ours), other in zip(net.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(ours.double(), other.double(), rtol=1e-4, atol=1e-5, msg=label)


@pytest.mark.parametrize("name", NETWORKS if DEVICE == "cuda" else ["avg", "two blocks"])
def test_errors_in_bf16_are_those_of_autocast(name):
    check_errors_in_bf16(name, images=6)


def check_errors_in_bf16(name, images):
    net, pictures, labels, indices = problem(name, images)
    exact, wanted = in_double(net, pictures, labels, indices, 0.1)
    other = copy.deepcopy(net)
    torch.manual_seed(3)
    mask = mask_of(other, len(indices), torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        definition(other, pictures[indices], labels[indices], mask, 0.1)
    prepared = ready(net, pictures)
    found = fused.find_fused(net, prepared, images)
    torch.manual_seed(3)
    loss = found(prepared, labels, indices, 0.1)
    assert abs(loss - wanted) < 0.02
    assert error_of(net, exact) < 1.5 * error_of(other, exact)


@pytest.mark.skipif(DEVICE == "cpu", reason="compilers are at fault, not the formula")
@pytest.mark.parametrize("images", [4, 33, 129])
def test_compiled_gradients_of_whole_batches_have_the_errors_of_autocast(images, monkeypatch):
    for kernel, launch in MEASURED.items():
        monkeypatch.setitem(LAUNCHES, kernel, launch)
    monkeypatch.setitem(NETWORKS, "paper", lambda: channels("max", hidden=100, scales=PAPER_SCALES))
    check_errors_in_bf16("paper", images)


def test_a_second_call_overwrites_the_gradients():
    net, pictures, labels, indices = problem("max")
    prepared = ready(net, pictures)
    found = fused.find_fused(net, prepared, 8)
    torch.manual_seed(3)
    found(prepared, labels, indices, 0.0)
    first = [p.grad.clone() for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    found(prepared, labels, indices, 0.0)
    assert all(map(torch.equal, first, (p.grad for p in net.parameters())))
    found(prepared, labels, indices[:2], 0.0)  # a smaller batch
    assert not torch.equal(first[0], next(net.parameters()).grad)


def test_without_indices_all_images_are_used():
    net, pictures, labels, _ = problem("avg")
    other, prepared = copy.deepcopy(net), ready(net, pictures)
    torch.manual_seed(3)
    loss = fused.find_fused(net, prepared, 8)(prepared, labels, None, 0.0)
    torch.manual_seed(3)
    every = torch.arange(len(labels), device=DEVICE)
    assert loss == fused.find_fused(other, prepared, 8)(prepared, labels, every, 0.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
def test_losses_that_are_not_finite_stay_so():
    net, pictures, labels, indices = problem("max")
    pictures[4] = float("nan")
    prepared = ready(net, pictures)
    assert fused.find_fused(net, prepared, 8)(prepared, labels, indices, 0.0).isnan()


def hooked(net):
    net.backbone.head.register_forward_hook(lambda *_: None)


def frozen(net):
    net.backbone.trunk[1].eval()


def fixed(net):
    net.backbone.head.weight.requires_grad_(False)


def double(net):
    net.backbone.head.double()


def averaged(net):
    net.backbone.trunk[1].momentum = None


def replaced(net):
    net.backbone.trunk[2] = nn.LeakyReLU(0.0)


@pytest.mark.parametrize("change", [hooked, frozen, fixed, double, averaged, replaced])
def test_other_modules_are_declined(change):
    net, pictures, _, _ = problem("max")
    prepared = ready(net, pictures)
    assert fused.find_fused(net, prepared, 8) is not None
    change(net)
    assert fused.find_fused(net, prepared, 8) is None


def test_other_networks_are_declined():
    pictures = torch.rand(2, 1, 40, 40, device=DEVICE)
    single = ScaleGrid(1, 1, per_octave=1)
    others = (channels("probabilities"), channels("max", hidden=200))
    for net in (*others, channels("concat", scales=single)):
        net = net.to(DEVICE)
        assert fused.find_fused(net, ready(net, pictures), 8) is None
    net = channels("max").to(DEVICE)
    assert fused.find_fused(net, ready(net, pictures), 200_000) is None  # offsets of 32 bits
    assert fused.find_fused(net, ready(net.eval(), pictures), 8) is None
    bare = ScaleChannels(ConvNet(batch_norm=False), SMALL, 28, "max").to(DEVICE)
    assert fused.find_fused(bare, ready(bare, pictures), 8) is None


def sliding(pool="max", classes=5, batch_norm=False):
    torch.manual_seed(2)
    options = {"hidden": 20, "classes": classes, "batch_norm": batch_norm}
    net = SlidingChannels(ConvNet((16, 16, 32, 32), 28, **options), (0.7, 1.0), pool)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):  # biases are initialised with 0
            nn.init.uniform_(layer.bias, -0.1, 0.1)
    return net.to(DEVICE)


def shown(net, count=4):
    """Return images with off-centre content as the plan `canvas` prepares them, and labels."""
    torch.manual_seed(5)
    pictures = torch.zeros(count, 1, 44, 40, device=DEVICE)
    pictures[:, :, 6:30, 9:31] = torch.randn(count, 1, 24, 22, device=DEVICE)
    labels = torch.arange(count, device=DEVICE) % 5
    given, *others = canvas.prepare(net, pictures, torch.bfloat16)
    return Prepared(canvas, (given.bfloat16(), *others)), labels


def all_windows(net, prepared, labels, indices, dtype):
    """Compute loss and gradients from all windows of the canvas, which is rounded to bf16."""
    other, (given, size, _) = copy.deepcopy(net), prepared.inputs
    torch.manual_seed(3)
    mask = other.backbone.dropout(torch.ones(len(indices), 20, device=DEVICE)).to(dtype)
    layout = canvas.layout_of(other, *size.shape[2:])
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.float32):
        maps = other.to(dtype).backbone.dense(given[indices].to(dtype), mask)
    parts = canvas.split_maps(maps.to(dtype), layout, 28, 4)
    logits = torch.cat([part.flatten(2) for part in parts], 2).amax(2)
    loss = F.cross_entropy(logits, labels[indices], label_smoothing=0.2)
    loss.backward()
    return other, loss.detach()


def error_of(those, exact):
    pairs = zip(those.parameters(), exact.parameters(), strict=True)
    return sum(float((p.grad - q.grad).square().sum()) for p, q in pairs) ** 0.5


def winning(net):
    """Return loss and gradients by the kernels, in float64 and with autocast."""
    prepared, labels = shown(net)
    indices = torch.tensor([2, 0, 3], device=DEVICE)
    exact, wanted = all_windows(net, prepared, labels, indices, torch.float64)
    other, _ = all_windows(net, prepared, labels, indices, torch.float32)
    torch.manual_seed(3)
    loss = find_winners(net, prepared, 8)(prepared, labels, indices, 0.2)
    return abs(float(loss - wanted)), exact, other


def test_the_strongest_windows_have_the_gradients_of_the_maximum(in_float32):
    difference, exact, _ = winning(net := sliding())
    assert difference < 1e-5
    for (label, ours), other in zip(net.named_parameters(), exact.parameters(), strict=True):
        assert (ours.grad - other.grad).norm() < 2e-4 * other.grad.norm(), label


def test_errors_of_a_maximum_in_bf16_are_those_of_autocast():
    difference, exact, other = winning(net := sliding())
    assert difference < 0.02
    assert error_of(net, exact) < 1.5 * error_of(other, exact)


def test_other_sliding_networks_are_declined():
    for net in (sliding("avg"), sliding(batch_norm=True), sliding(classes=1)):
        assert find_winners(net, shown(net)[0], 8) is None
    net = sliding()
    prepared = shown(net)[0]
    assert find_winners(net, prepared, 8) is not None
    assert find_winners(net, prepared, 2_000_000) is None
    net.backbone.head.bias.requires_grad_(False)
    assert find_winners(net, prepared, 8) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
@pytest.mark.parametrize("make", [lambda: channels("avg"), sliding])
def test_a_captured_step_has_these_kernels(make):
    torch.manual_seed(0)
    net = make().cuda()
    pictures = torch.rand(8, 1, 40, 40, device="cuda")
    labels = torch.arange(8, device="cuda") % 5
    adam = PiecewiseAdam(net.parameters(), 3e-3, fused=True, capturable=True)
    with torch.no_grad():
        prepared = prepare(net, pictures, "bf16")
    captured = CapturedStep(net, adam, "bf16", batch=8, compiled=True)
    order = torch.arange(8, device="cuda")
    losses = [float(captured(Batch(prepared, labels, order))) for _ in range(150)]
    assert captured.fused is not None
    assert losses[-1] < losses[0] / 2
    assert float(captured(Batch(prepared, labels, order[:3]))) < losses[0]  # not captured
