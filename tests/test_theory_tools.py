"""What the theory is measured with: images by formula, bounds through layers, sums, findings."""

import math

import pytest
import torch
from theory_tools import (
    blob,
    derivative,
    fitted_order,
    grid_error,
    order_uncertainty,
    smoothed,
)
from torch import nn

from foveate.data.store import cpu_threads
from foveate.evaluation.theory import Blobs, Finding
from foveate.evaluation.theory.blobs import centred, ring, scene
from foveate.evaluation.theory.bounds import compare
from foveate.evaluation.theory.probes import (
    Patches,
    affine_parts,
    layer_cases,
    logit_bounds,
    random_network,
)
from foveate.models.zoo import create_model
from foveate.resampling import foveate


@pytest.fixture(autouse=True)
def _one_thread():
    with cpu_threads(1):
        yield


def test_a_finding_with_nan_never_holds():
    for breaks in (False, True):
        finding = Finding(statement="", error=math.nan, bound=1.0, note="", breaks=breaks)
        assert not finding.holds
        assert finding.to_dict()["error"] is None


def test_the_entry_closest_to_its_bound_is_reported():
    zeros, bounds = torch.zeros(2).double(), torch.tensor([1.0, 0.5]).double()
    first = zeros + torch.tensor([0.4, 0.3]).double(), zeros, bounds  # shares 0.4 and 0.6
    second = zeros + torch.tensor([2.0, 0.0]).double(), zeros, 4.0  # shares 0.5 and 0
    found = compare("", second, first, note="")
    assert (found.error, found.bound) == (pytest.approx(0.3), 0.5) and found.holds
    assert not compare("", first, (zeros + math.nan, zeros, bounds), note="").holds


def test_blobs_are_their_formula():
    image = Blobs(*(torch.tensor(x).double() for x in ([2.0], [[1.0, -3.0]], [[2.0, 5.0]])))
    y, x = torch.tensor([4.0]).double(), torch.tensor([2.0]).double()
    assert float(image.values(y, x)) == pytest.approx(2 * math.exp(-(9 / 8) - 0.5))
    larger = image.transform(3.0, (1.0, 1.0), (-2.0, 0.5))
    assert float(larger.values(3 * (y - 1) - 2, 3 * (x - 1) + 0.5)) == pytest.approx(
        float(image.values(y, x))
    )
    step = 1e-3  # central differences are off by step²/6 times a third derivative below 1
    slope = (image.values(y, x + step) - image.values(y, x - step)) / (2 * step)
    assert float(derivative(image, y, x, (0, 1))) == pytest.approx(float(slope), abs=step**2 / 6)


def test_smoothing_a_blob_is_a_convolution():
    at = torch.arange(-60, 61, dtype=torch.float64)
    weights = torch.outer(*[torch.exp(-(at**2) / 18) / (3 * math.sqrt(2 * math.pi))] * 2)
    expected = float((weights * scene(3).values(-at, -at)).sum())
    origin = torch.zeros(1, dtype=torch.float64)
    assert float(smoothed(scene(3), 3.0).values(origin, origin)) == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_interpolation_stays_within_its_local_bound(seed):
    image = blob(4.0) if seed == 0 else scene(seed)
    patch = foveate(image.sampled(160), [0.37], 200)[0, 0, 0]
    at = 0.37 * centred(200)
    share = (patch - image.values(at, at)).abs() / image.patch_error(0.37, 200)
    assert 0.3 < float(share.max()) <= 1


def test_a_ring_is_empty_inside_and_outside():
    image, at = ring(0), torch.linspace(-400, 400, 801, dtype=torch.float64)
    values = image.values(at, at).abs()
    radius = torch.hypot(*torch.meshgrid(at, at, indexing="ij"))
    hidden = (radius < 20) | (radius > 230)
    assert float(values[hidden].max()) <= image.tail_bound(20, 230) < 1e-4 < float(values.max())


def lipschitz_bounds(net, error):
    """Sup-norm Lipschitz constants, multiplied: sum |w| of a row, |gamma| / sqrt(var + eps), 1."""
    for part in affine_parts(net):
        layers = {type(layer): layer for layer in part.modules()}
        gain = (layers.get(nn.Conv2d) or layers[nn.Linear]).weight.abs().flatten(1).sum(1)
        if norm := layers.get(nn.BatchNorm2d):
            gain = gain * norm.weight.abs() / (norm.running_var + norm.eps).sqrt()
        error = error * float(gain.max())
        yield error


def test_bounds_through_layers_are_attained_and_tighter_than_lipschitz_constants():
    net = random_network(0)
    one = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(1)).double()
    sides = Patches(one, torch.full_like(one, 1e-3)), Patches(one, torch.zeros_like(one))
    (_, _, error), *layers = layer_cases(net, *sides)
    torch.testing.assert_close(error, sides[0].error)
    followed = [bound for _, _, bound in layers]
    for ours, product in zip(followed, lipschitz_bounds(net, 1e-3), strict=True):
        assert float(ours.max()) <= product
    torch.testing.assert_close(followed[-1], logit_bounds(net, *sides))
    torch.testing.assert_close(layers[-1][0], net(one))
    # For a linear piece the worst error is that with the signs of a logit's gradient.
    pixels = one.clone().requires_grad_()
    net(pixels)[0, 4].backward()
    tiny = 1e-9 * pixels.grad.sign()
    reached = float((net(one + tiny) - net(one))[0, 4]) * 1e-3 / 1e-9
    assert reached == pytest.approx(float(followed[-1][0, 4]), rel=1e-4)


def test_the_network_is_that_of_the_zoo():
    published, ours = create_model("fovmax").backbone, random_network(0)
    assert {k: v.shape for k, v in published.state_dict().items()} == {
        k: v.shape for k, v in ours.state_dict().items()
    }
    assert not ours.training


def test_sums_over_a_grid_are_bounded_by_derivatives():
    # exp(-x²/2) and the integrals of its derivatives' absolute values, the second rounded up
    norms, step = [2.51, 2.0, 2 * 2 * math.exp(-0.5)], 3.0
    at = step * torch.arange(-10, 11, dtype=torch.float64) + 0.4
    error = abs(float(step * torch.exp(-(at**2) / 2).sum()) - math.sqrt(2 * math.pi))
    assert 1e-3 < error <= grid_error(step, norms)


def test_orders_are_fitted_with_their_uncertainty():
    steps = torch.tensor([1.0, 0.5, 0.25]).double()
    assert fitted_order(steps, 7 * steps**3) == pytest.approx(3)
    off = torch.tensor([0.9, 1.0, 1.1]).double()
    moved = abs(fitted_order(steps, off * steps**3) - 3)
    assert 0 < moved <= order_uncertainty(steps, steps**3, 0.1 * steps**3)
    assert order_uncertainty(steps, steps, steps) == math.inf
