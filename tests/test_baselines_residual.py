"""The small residual network: its resolutions, its sums, and how it trains."""

import torch
from baseline_checks import assert_one_graph, assert_trains, images

from foveate.baselines.residual import Residual, network


def test_three_stages_halve_the_resolution_and_double_the_filters():
    net, shapes = network(channels=3, classes=7, width=4).eval(), []
    for module in net:
        if isinstance(module, torch.nn.MaxPool2d | Residual):
            module.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[1:])))
    assert net(images(2, 3, 32)).shape == (2, 7)
    assert shapes == [(8, 16, 16), (8, 16, 16), (16, 8, 8), (32, 4, 4), (32, 4, 4)]


def test_a_residual_block_adds_its_input():
    pixels = images(2, 3, 8)
    double = Residual(torch.nn.Conv2d(3, 3, 1, bias=False), torch.nn.ReLU(inplace=True))
    with torch.no_grad():
        double.change[0].weight.copy_(torch.eye(3)[:, :, None, None])
        assert torch.equal(double(pixels), 2 * pixels)


def test_it_trains_and_compiles():
    torch.manual_seed(0)
    assert_trains(network(channels=1, classes=10, width=4), 32)
    assert_one_graph(network(channels=1, classes=10, width=4), 32)
