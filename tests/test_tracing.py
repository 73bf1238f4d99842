"""What recording a function is taken for."""

import torch
from torch import nn

from foveate.tracing import exporting


class Marked(nn.Module):
    def forward(self, values):
        return values + 1 if exporting() else values - 1


def test_only_an_export_is_an_export():
    net, values = Marked(), torch.zeros(2)
    assert torch.equal(net(values), values - 1)
    assert torch.equal(torch.compile(net, backend="eager")(values), values - 1)
    assert torch.equal(torch.export.export(net, (values,)).module()(values), values + 1)
