"""The GPU kernel equals the definition; runs where there is a GPU."""

import pytest
import torch

from foveate.models.zoo import create_model
from foveate.resampling import foveate, foveate_plain
from foveate.scales import ScaleGrid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GRID = ScaleGrid(0.5, 8, per_octave=4)


@pytest.mark.parametrize("padding", ["border", "reflect", 0.0, -0.7629])
@pytest.mark.parametrize("shape", [(3, 1, 112, 112), (2, 3, 57, 90), (2, 2, 5, 4), (1, 1, 1, 1)])
@pytest.mark.parametrize("size", [1, 28, 33])
@pytest.mark.parametrize("centred", [True, False])
def test_it_equals_the_definition(padding, shape, size, centred):
    images = torch.randn(shape, device="cuda")
    centres = None
    if not centred:
        centres = torch.rand(shape[0], 2, device="cuda") * torch.tensor(shape[2:], device="cuda")
    patches = foveate(images, GRID, size, padding=padding, centres=centres)
    exact = foveate_plain(images.double(), GRID, size, padding=padding, centres=centres)
    torch.testing.assert_close(patches.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    images = torch.randn(4, 1, 112, 112, device="cuda", dtype=dtype)
    exact = foveate_plain(images.double(), GRID, 28)
    patches = foveate(images, GRID, 28).double()
    torch.testing.assert_close(patches, exact, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_strided_images_are_read_rightly():
    images = torch.randn(4, 1, 112, 224, device="cuda")[..., ::2]
    expected = foveate(images.contiguous(), GRID, 28)
    torch.testing.assert_close(foveate(images, GRID, 28), expected)
    assert not torch.equal(expected, foveate(images.mT.contiguous(), GRID, 28))


def test_gradients_take_the_other_path_and_agree():
    images = torch.randn(2, 1, 112, 112, device="cuda", requires_grad=True)
    patches = foveate(images, GRID, 28)
    torch.testing.assert_close(
        patches.detach(), foveate(images.detach(), GRID, 28), atol=1e-5, rtol=0
    )
    patches.square().sum().backward()
    assert float(images.grad.abs().sum()) > 0


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


def test_peak_memory_is_input_output_and_no_more_than_one_output():
    images = torch.randn(512, 1, 112, 112, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    patches = foveate(images, GRID, 28)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 2 * patches.numel() * 4
