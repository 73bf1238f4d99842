"""The GPU kernels equal the definition; runs where there is a GPU."""

import pytest
import torch
from resampling_cases import foveate_plain

from foveate.models.zoo import create_model
from foveate.resampling import foveate
from foveate.resampling.definition import PatchSpec, scatter_plain
from foveate.scales import ScaleGrid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GRID = ScaleGrid(0.5, 8, per_octave=4)
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("padding", ["border", "reflect", 0.0, -0.7629])
@pytest.mark.parametrize("shape", [(3, 1, 112, 112), (2, 3, 57, 90), (2, 2, 5, 4), (1, 1, 1, 1)])
@pytest.mark.parametrize("size", [1, 28, 33])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("antialias", [False, True])
def test_it_equals_the_definition(padding, shape, size, centred, antialias):
    images = torch.randn(shape, device="cuda")
    centres = None
    if not centred:
        centres = torch.rand(shape[0], 2, device="cuda") * torch.tensor(shape[2:], device="cuda")
    options = {"padding": padding, "centres": centres, "antialias": antialias}
    patches = foveate(images, GRID, size, **options)
    exact = foveate_plain(images.double(), GRID, size, **options)
    torch.testing.assert_close(patches.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("antialias", [False, True])
def test_half_precision_is_rounded_once(dtype, antialias):
    images = torch.randn(4, 1, 112, 112, device="cuda", dtype=dtype)
    exact = foveate_plain(images.double(), GRID, 28, antialias=antialias)
    patches = foveate(images, GRID, 28, antialias=antialias).double()
    torch.testing.assert_close(patches, exact, atol=1e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("antialias", [False, True])
def test_strided_images_are_read_rightly(antialias):
    images = torch.randn(4, 1, 112, 224, device="cuda")[..., ::2]
    expected = foveate(images.contiguous(), GRID, 28, antialias=antialias)
    torch.testing.assert_close(foveate(images, GRID, 28, antialias=antialias), expected)
    turned = foveate(images.mT.contiguous(), GRID, 28, antialias=antialias)
    assert not torch.equal(expected, turned)


@pytest.mark.parametrize("padding", ["border", "reflect", -0.7629])
@pytest.mark.parametrize("shape", [(3, 1, 112, 112), (2, 3, 57, 90), (1, 1, 1, 1)])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("antialias", [False, True])
def test_gradients_equal_those_of_the_definition(padding, shape, centred, antialias):
    images = torch.randn(shape, device="cuda", requires_grad=True)
    centres = None
    if not centred:
        centres = torch.rand(shape[0], 2, device="cuda") * torch.tensor(shape[2:], device="cuda")
    spec = PatchSpec(GRID.values, 28, padding, antialias, centres)
    options = {"padding": padding, "centres": centres, "antialias": antialias}
    patches = foveate(images, GRID, 28, **options)
    slopes = torch.randn_like(patches)
    (found,) = torch.autograd.grad(patches, images, slopes)
    exact = scatter_plain(slopes.double(), images.shape, spec)
    size = scatter_plain(slopes.double().abs(), images.shape, spec)
    # Chunks of 16 columns and rows that hold up to 28, at 17 scales, and two rounded weights: so
    # many terms are added, each with a rounding of the sum of absolute terms.
    assert ((found - exact).abs() <= (17 * (32 + 32) + 2) * EPS / 2 * size).all()
    (again,) = torch.autograd.grad(foveate(images, GRID, 28, **options), images, slopes)
    assert torch.equal(again, found)


def test_the_second_gradient_is_the_op_itself():
    images = torch.randn(2, 3, 57, 90, device="cuda", requires_grad=True)
    slopes = torch.randn(2, 17, 3, 28, 28, device="cuda", requires_grad=True)
    patches = foveate(images, GRID, 28, padding=0.5, antialias=True)
    (first,) = torch.autograd.grad(patches, images, slopes, create_graph=True)
    (second,) = torch.autograd.grad(first, slopes, images.detach())
    expected = foveate_plain(images.detach().double(), GRID, 28, padding=0.0, antialias=True)
    torch.testing.assert_close(second.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_rounded_once(dtype):
    images = torch.randn(2, 1, 57, 90, device="cuda", dtype=dtype, requires_grad=True)
    patches = foveate(images, GRID, 28, antialias=True)
    slopes = torch.randn_like(patches)
    (found,) = torch.autograd.grad(patches, images, slopes)
    exact = scatter_plain(slopes.double(), images.shape, PatchSpec(GRID.values, 28, antialias=True))
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=torch.finfo(dtype).eps)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch's own
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_transforms_and_compilers_are_served_with_antialiasing():
    images = torch.randn(2, 1, 57, 90, device="cuda")

    def op(images):
        return foveate(images, [0.5, 2.0], 28, antialias=True)

    expected = op(images)
    torch.testing.assert_close(torch.vmap(op)(images[None])[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.compile(op)(images), expected, atol=1e-5, rtol=0)
    gradient = torch.func.grad(lambda images: op(images).square().sum())(images)
    leaf = images.clone().requires_grad_()
    op(leaf).square().sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-4, rtol=1e-4)
    leaf.grad = None
    torch.compile(op)(leaf).square().sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("antialias", [False, True])
def test_images_may_be_on_another_device_than_the_current_one(antialias):
    images = torch.randn(2, 1, 57, 90, device="cuda:1", requires_grad=True)
    with torch.cuda.device("cuda:0"):
        patches = foveate(images, GRID, 28, antialias=antialias)
        patches.square().sum().backward()
    exact = images.detach().double().cpu().requires_grad_()
    expected = foveate_plain(exact, GRID, 28, antialias=antialias)
    expected.square().sum().backward()
    torch.testing.assert_close(patches.double().cpu(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(images.grad.double().cpu(), exact.grad, atol=1e-4, rtol=0)


def test_gradients_are_captured():
    images = torch.randn(2, 1, 57, 90, device="cuda", requires_grad=True)
    slopes = torch.randn(2, 2, 1, 28, 28, device="cuda")

    def gradient():
        patches = foveate(images, [0.5, 2.0], 28, antialias=True)
        return torch.autograd.grad(patches, images, slopes)[0]

    expected, graph = gradient(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient()
    graph.replay()
    assert torch.equal(found, expected) and torch.equal(gradient(), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_and_captured_networks_give_the_same():
    net = create_model("fovmax").cuda().eval()
    images = torch.randn(8, 1, 112, 112, device="cuda")
    with torch.no_grad():
        expected = net(images)
        torch.testing.assert_close(torch.compile(net)(images), expected, atol=1e-4, rtol=1e-4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = net(images)
        images.copy_(torch.randn_like(images))
        graph.replay()
        torch.testing.assert_close(logits, net(images), atol=1e-4, rtol=1e-4)
        compiled, graph = torch.compile(net), torch.cuda.CUDAGraph()
        compiled(images)
        with torch.cuda.graph(graph):
            logits = compiled(images)
        images.copy_(torch.randn_like(images))
        graph.replay()
        torch.testing.assert_close(logits, net(images), atol=1e-4, rtol=1e-4)


def test_scales_seen_first_in_a_graph_are_right_outside_of_it_too():
    images, grid = torch.randn(8, 1, 112, 112, device="cuda"), ScaleGrid(0.61, 4.88, per_octave=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        patches = foveate(images, grid, 28)
    expected = foveate_plain(images.double(), grid, 28).float()
    torch.testing.assert_close(foveate(images, grid, 28), expected, atol=1e-5, rtol=0)
    graph.replay()
    torch.testing.assert_close(patches, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("antialias", [False, True])
def test_peak_memory_is_input_output_and_no_more_than_one_output(antialias):
    images = torch.randn(512, 1, 112, 112, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    patches = foveate(images, GRID, 28, antialias=antialias)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 2 * patches.numel() * 4
