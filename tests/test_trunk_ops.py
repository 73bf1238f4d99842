"""The kernels of the first blocks equal their formulas, in Triton's interpreter or on a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, load
from torch.nn.grad import conv2d_input, conv2d_weight

from foveate.execution import trunk_ops, windows
from foveate.models.backbone import ConvNet

triton_trunk = load("foveate.execution.triton_trunk")

# Sums are accumulated in float32, on a GPU possibly with truncation. The error of each of the
# additions is at most 2^-23 of the sum of absolute terms, and the terms are summed in three
# stages: in a block, over the blocks of a program, and over the programs.
ADDITION = 2.0**-23
BIASES = ("0.bias", "3.bias", "6.bias")
HALF = 2.0**-8  # rounding to bf16
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def bf16(*shape):
    return torch.randn(shape, device=DEVICE).bfloat16()


def last(*shape):
    return bf16(*shape).contiguous(memory_format=torch.channels_last)


def within(found, exact, bound):
    assert found.shape == exact.shape
    error = (found.double() - exact).abs()
    assert torch.all(error <= bound), f"{(error / bound).max():.3g} times the bound"


@pytest.fixture
def few_programs(monkeypatch):
    """Let programs add several blocks of few positions, and add several parts."""
    for name in ("KERNEL", "PAIR"):
        launch = getattr(triton_trunk, name)
        monkeypatch.setattr(triton_trunk, name, launch._replace(block=32, programs=5))
    monkeypatch.setattr(triton_trunk, "PARTS", 2)


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize(("channels", "filters"), [(1, 64), (2, 32), (3, 64)])
def test_the_first_block_is_rounded_once(count, channels, filters):
    rows = torch.randn(count, 16 * channels, device=DEVICE) + 3
    weight = torch.randn(filters, 16 * channels, device=DEVICE)
    shift = torch.randn(filters, device=DEVICE)
    found = trunk_ops.first_block(rows, weight, shift)
    exact = F.relu(F.linear(rows.double(), weight.double(), shift.double()))
    size = F.linear(rows.double().abs(), weight.double().abs(), shift.double().abs())
    # Each factor is a sum of two TF32 values, truncated: its error is at most 2^-20, and the
    # product of the two small parts, 2^-20, is left out.
    bound = HALF * exact + (3 * 2.0**-20 + (16 * channels + 1) * ADDITION) * size
    assert found.dtype == torch.bfloat16
    within(found, exact, bound)


def test_the_first_block_keeps_what_rounded_weights_would_lose():
    # Weights that add to zero on a bright background: rounding them to bf16 would give 0.1 to 1.
    weight = torch.randn(64, 16, device=DEVICE).double()
    weight = (weight - weight.mean(1, keepdim=True)).float()
    rows = torch.full((40, 16), 100.0, device=DEVICE)
    found = trunk_ops.first_block(rows, weight, torch.zeros(64, device=DEVICE))
    size = 100 * weight.double().abs().sum(1)
    lost = (100 * weight.bfloat16().double().sum(1)).abs()
    bound = (4 * 2.0**-20 + 17 * ADDITION) * size
    assert torch.all(found.double() <= bound) and lost.max() > 100 * bound.max()


def test_values_that_are_not_finite_stay_so():
    rows = torch.ones(3, 16, device=DEVICE)
    rows[1, 2] = float("nan")
    found = trunk_ops.first_block(
        rows, torch.ones(64, 16, device=DEVICE), torch.zeros(64, device=DEVICE)
    )
    assert found.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize(
    ("shape", "filters"), [((1, 16, 5, 7), 32), ((2, 64, 5, 5), 16), ((5, 24, 3, 3), 8)]
)
def test_the_gradient_of_a_convolution(side, shape, filters):
    images = last(*shape)
    count, _, height, width = shape
    slopes = last(count, filters, height - side + 1, width - side + 1)
    sums = trunk_ops.kernel_gradient(images, slopes, side).double()
    exact = reference(images, slopes, side, joined=True)
    size = reference(images.abs(), slopes.abs(), side, joined=True)
    # Products of bf16 values are exact in float32.
    within(sums, exact, (slopes.numel() / filters + 10) * ADDITION * size)


def reference(images, slopes, side, joined):
    """The gradients in float64, in the order of the kernel."""
    shape = (slopes.shape[1], images.shape[1], side, side)
    weight = conv2d_weight(images.double(), shape, slopes.double())
    weight = weight.permute(3, 1, 2, 0) if joined else weight.permute(1, 2, 3, 0)
    return torch.cat([weight.flatten(), slopes.double().sum((0, 2, 3))])


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("filters", "above"), [(64, 16), (32, 8)])
def test_the_gradients_of_two_blocks(channels, filters, above):
    check_two_blocks((3, 5, 4), channels, filters, above)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="compilers are at fault, not the formula")
@pytest.mark.parametrize("count", [3, 51, 544, 2176])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_compiled_gradients_of_two_blocks(count, stages, monkeypatch):
    monkeypatch.setattr(triton_trunk, "PAIR", triton_trunk.PAIR._replace(stages=stages))
    check_two_blocks((count, 13, 13), channels=1, filters=64, above=16)


def check_two_blocks(shape, channels, filters, above):
    count, height, width = shape
    rows = torch.randn(count * height * width, 16 * channels, device=DEVICE)
    active = F.relu(last(count, filters, height, width))
    slopes, weight = last(count, above, height - 1, width - 1), last(above, filters, 2, 2)
    sums = trunk_ops.pair_gradient(rows, active, slopes, weight)
    second = weight.numel() + above
    taps = reference(active, slopes, 2, joined=False)
    size = reference(active, slopes.abs(), 2, joined=False)
    within(sums[:second], taps, (len(rows) + 10) * ADDITION * size)
    passed = conv2d_input(active.shape, weight.double(), slopes.double()) * (active > 0)
    largest = conv2d_input(active.shape, weight.double().abs(), slopes.double().abs())
    exact, size = (row_sums(rows.double(), passed), row_sums(rows.double().abs(), passed.abs()))
    # The gradient of an activation is accumulated from 4 `above` products and rounded to bf16, and
    # a pixel is the sum of two bf16 values.
    loose = row_sums(rows.double().abs(), largest)
    additions = (4 * above + len(rows) + 10) * ADDITION
    within(sums[second:], exact, (HALF + HALF**2) * size + additions * loose)


def row_sums(rows, slopes):
    """The gradients of the first block's weight and shift from slopes (N, O, H, W)."""
    flat = slopes.permute(0, 2, 3, 1).flatten(0, 2)
    return torch.cat([(flat.mT @ rows).flatten(), flat.sum(0)])


def test_strided_slopes_and_images_are_read_rightly():
    images, slopes = bf16(3, 16, 6, 6), bf16(3, 16, 8, 4)[:, :, ::2]
    close = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(
        trunk_ops.kernel_gradient(images, slopes, 3),
        trunk_ops.kernel_gradient(last_copy(images), last_copy(slopes), 3),
        **close,
    )


def last_copy(tensor):
    return tensor.clone(memory_format=torch.channels_last)


@pytest.mark.usefixtures("few_programs")
def test_sums_depend_on_nothing_but_their_terms():
    rows = torch.randn(400, 16, device=DEVICE)
    images, above = last(4, 16, 8, 8), last(4, 32, 6, 6)
    weight = last(16, 64, 2, 2)
    grid, more = last(4, 64, 10, 10), last(4, 16, 9, 9)
    both = trunk_ops.pair_gradient(rows, grid, more, weight)
    second = trunk_ops.kernel_gradient(images, above, 3)
    torch.full((10**6,), float("nan"), device=DEVICE)  # what memory held before is not added
    for _ in range(2):
        assert torch.equal(both, trunk_ops.pair_gradient(rows, grid, more, weight))
        assert torch.equal(second, trunk_ops.kernel_gradient(images, above, 3))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_captured_graph_computes_the_same_bits_for_new_values():
    rows, weight, shift = (torch.randn(s, device=DEVICE) for s in ((845, 16), (64, 16), (64,)))
    slopes, second = last(5, 16, 12, 12), last(16, 64, 2, 2)

    def work():
        active = trunk_ops.first_block(rows, weight, shift)
        grid = active.view(5, 13, 13, 64).permute(0, 3, 1, 2)
        return active, trunk_ops.pair_gradient(rows, grid, slopes, second)

    work()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for tensor in (rows, weight, slopes):
        tensor.normal_()
    graph.replay()
    for one, other in zip(captured, work(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_may_be_on_another_device_than_the_current_one():
    given = [torch.randn(s, device="cuda:0") for s in ((845, 16), (64, 16), (64,))]
    expected = trunk_ops.first_block(*given)
    found = trunk_ops.first_block(*(tensor.to("cuda:1") for tensor in given))
    assert torch.equal(found.to("cuda:0"), expected)


@pytest.fixture
def kernels_used(monkeypatch):
    """Apply the kernels on this device, and count the calls of each."""
    monkeypatch.setattr(trunk_ops, "KERNEL_DEVICES", (DEVICE,))
    calls = []
    for name in ("first_block", "kernel_gradient", "pair_gradient"):
        plain = getattr(triton_trunk, name)
        counted = lambda *given, name=name, plain=plain: (calls.append(name), plain(*given))[1]  # noqa: E731
        monkeypatch.setattr(triton_trunk, name, counted)
    return calls


def pair(**changes):
    torch.manual_seed(1)
    net = ConvNet(size=12, features=(16, 16, 32), dropout=0.0, **changes).to(DEVICE)
    return net, copy.deepcopy(net).double()


def gradients(net, forward, images):
    """The gradients of a sum of the features with positive factors, so that they do not cancel."""
    features = forward(net.trunk, images).double()
    factors = torch.linspace(0, 1, features[0].numel(), device=DEVICE).view_as(features[0])
    (features * factors).sum().backward()
    return [p.grad.double() for p in net.trunk.parameters()]


def errors(channels, batch_norm, forward, kernels_used, monkeypatch):
    """The errors of each gradient with and without kernels, and its size, all as norms."""
    net, plain = pair(channels=channels, batch_norm=batch_norm)
    images = torch.randn(5, channels, 12, 12, device=DEVICE)
    without = copy.deepcopy(net)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = gradients(net, forward, images)
        assert sorted(kernels_used) == ["first_block", "kernel_gradient", "pair_gradient"]
        monkeypatch.setattr(trunk_ops, "KERNEL_DEVICES", ())
        expected = gradients(without, windows.run, images)
    exact = gradients(plain, lambda trunk, x: trunk(x), images.double())
    for (name, _), one, other, third in zip(
        net.trunk.named_parameters(), found, expected, exact, strict=True
    ):
        # The gradient of a bias before a batch norm is zero but for roundings.
        if not (batch_norm and name in BIASES):
            yield (one - third).norm(), (other - third).norm(), third.norm()


# Two more roundings are allowed in both tests: of the gradients of activations and of weights.


@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_are_as_close_to_the_plain_trunk_as_without_kernels(
    channels, kernels_used, monkeypatch
):
    for error, usual, size in errors(channels, False, windows.run, kernels_used, monkeypatch):
        assert error <= usual + 2 * HALF * size
        assert error <= 0.1 * size  # wrong taps or masks change all of it


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("channels", [1, 3])
def test_compiled_gradients_with_batch_norm_are_as_close_as_without_kernels(
    channels, kernels_used, monkeypatch
):
    """Batch norm amplifies roundings, and the compiler rounds at other places than eager mode."""
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(windows.run, backend=backend, dynamic=False)
    for error, usual, size in errors(channels, True, compiled, kernels_used, monkeypatch):
        assert error <= 2 * usual + 2 * HALF * size


def test_float32_and_odd_shapes_use_the_operators_of_pytorch(kernels_used):
    net, plain = pair(batch_norm=True)
    images = torch.randn(4, 1, 12, 12, device=DEVICE)
    gradients(net, windows.run, images)
    gradients(plain, windows.run, images.double())
    with torch.autocast(DEVICE, torch.bfloat16):
        small = ConvNet(size=12, features=(3, 5, 7), dropout=0.0).to(DEVICE)
        gradients(small, windows.run, images)
    assert not kernels_used
