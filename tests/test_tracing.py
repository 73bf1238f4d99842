"""What recording a function is taken for."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from foveate.tracing import exporting, is_traced


class Marked(nn.Module):
    def forward(self, values):
        return values + 1 if exporting() else values - 1


def test_only_an_export_is_an_export():
    net, values = Marked(), torch.zeros(2)
    assert torch.equal(net(values), values - 1)
    assert torch.equal(torch.compile(net, backend="eager")(values), values - 1)
    assert torch.equal(torch.export.export(net, (values,)).module()(values), values + 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_whoever_must_see_each_operation_is_noticed():
    values, seen = torch.zeros(2, 3), []

    def look(values):
        seen.append(is_traced(values))
        return values + 1

    look(values)
    with torch.no_grad():
        look(values)
    assert seen == [False, False]
    torch.vmap(look)(values)
    torch.func.jvp(look, (values,), (values,))
    torch.jit.trace(look, values, check_trace=False)
    with forward_ad.dual_level():
        look(forward_ad.make_dual(values, values))
    with FlopCounterMode(display=False):
        look(values)
    look(nn.Parameter(values))
    assert len(seen) >= 8 and all(seen[2:])


def test_a_compiler_is_noticed():
    class Net(nn.Module):
        def forward(self, values):
            return values + 1 if is_traced(values) else values - 1

    values = torch.zeros(2)
    assert torch.equal(Net()(values), values - 1)
    compiled = torch.compile(Net(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(values), values + 1)
    assert torch.equal(torch.export.export(Net(), (values,)).module()(values), values + 1)
