"""The kernel of the first block equals its formula, in Triton's interpreter or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, load

from foveate.execution import windows
from foveate.models.backbone import ConvNet

triton_trunk = load("foveate.execution.triton_trunk")

ADDITION = 2.0**-23  # error of an addition in float32, on a GPU possibly with truncation
HALF = 2.0**-8  # rounding to bf16
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize(("channels", "filters"), [(1, 64), (2, 32), (3, 64)])
def test_the_first_block_is_rounded_once(count, channels, filters):
    rows = torch.randn(count, 16 * channels, device=DEVICE) + 3
    weight = torch.randn(filters, 16 * channels, device=DEVICE)
    shift = torch.randn(filters, device=DEVICE)
    found = triton_trunk.first_block(rows, weight, shift)
    exact = F.relu(F.linear(rows.double(), weight.double(), shift.double()))
    size = F.linear(rows.double().abs(), weight.double().abs(), shift.double().abs())
    # Each factor is a sum of two TF32 values, truncated: its error is at most 2^-20, and the
    # product of the two small parts, 2^-20, is left out.
    bound = HALF * exact + (3 * 2.0**-20 + (16 * channels + 1) * ADDITION) * size
    assert found.dtype == torch.bfloat16
    assert torch.all((found.double() - exact).abs() <= bound)


def test_the_first_block_keeps_what_rounded_weights_would_lose():
    # Weights that add to zero on a bright background: rounding them to bf16 would give 0.1 to 1.
    weight = torch.randn(64, 16, device=DEVICE).double()
    weight = (weight - weight.mean(1, keepdim=True)).float()
    rows = torch.full((40, 16), 100.0, device=DEVICE)
    found = triton_trunk.first_block(rows, weight, torch.zeros(64, device=DEVICE))
    size = 100 * weight.double().abs().sum(1)
    lost = (100 * weight.bfloat16().double().sum(1)).abs()
    bound = (4 * 2.0**-20 + 17 * ADDITION) * size
    assert torch.all(found.double() <= bound) and lost.max() > 100 * bound.max()


def test_values_that_are_not_finite_stay_so():
    rows = torch.ones(3, 16, device=DEVICE)
    rows[1, 2] = float("nan")
    found = triton_trunk.first_block(
        rows, torch.ones(64, 16, device=DEVICE), torch.zeros(64, device=DEVICE)
    )
    assert found.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_may_be_on_another_device_than_the_current_one():
    given = [torch.randn(s, device="cuda:0") for s in ((845, 16), (64, 16), (64,))]
    expected = triton_trunk.first_block(*given)
    found = triton_trunk.first_block(*(tensor.to("cuda:1") for tensor in given))
    assert torch.equal(found.to("cuda:0"), expected)


@pytest.fixture
def calls(monkeypatch):
    """Apply the kernel on this device, and count its calls."""
    monkeypatch.setattr(windows, "KERNEL_DEVICES", (DEVICE,))
    found, plain = [], triton_trunk.first_block
    counted = lambda *given: (found.append(1), plain(*given))[1]  # noqa: E731
    monkeypatch.setattr(triton_trunk, "first_block", counted)
    return found


def network(features=(16, 16, 32), **changes):
    torch.manual_seed(1)
    return ConvNet(size=12, features=features, **changes).to(DEVICE).eval()


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_in_bf16_uses_the_kernel(channels, batch_norm, calls):
    net = network(channels=channels, batch_norm=batch_norm)
    images = torch.randn(5, channels, 12, 12, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        found = windows.run(net.trunk, images).double()
        usual = net.trunk(images).double()
    exact = net.double().trunk(images.double())
    assert calls
    # The kernel rounds the first weights less than autocast.
    assert (found - exact).norm() <= (usual - exact).norm() + HALF * exact.norm()
    assert (found - exact).norm() <= 0.1 * exact.norm()  # wrong taps change all of it


def test_gradients_float32_and_odd_shapes_use_the_operators_of_pytorch(calls):
    images = torch.randn(4, 1, 12, 12, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        windows.run(network().trunk, images).sum().backward()
    with torch.no_grad():
        windows.run(network().trunk, images)
        windows.run(network().double().trunk, images.double())
        with torch.autocast(DEVICE, torch.bfloat16):
            windows.run(network(features=(3, 5, 7)).trunk, images)
    assert not calls
