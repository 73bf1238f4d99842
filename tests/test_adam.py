"""Adam in pieces and without the compiler: the same bits and state as PyTorch's Adam."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from foveate.training.optimiser import PiecewiseAdam, PlainAdam

TESTS = Path(__file__).parent
SHAPES = [(100, 512), (3,), (16, 1, 3, 3), (5000,), (), (70_000,), (24, 32, 3, 3)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def parameters(device):
    made = [nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
    made[-1].data = made[-1].data.to(memory_format=torch.channels_last)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [8, 2048])
@pytest.mark.parametrize("kind", [PiecewiseAdam, PlainAdam])
def test_pieces_have_the_bits_of_the_whole(kind, device, decay, size, monkeypatch):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr("foveate.training.optimiser.SMALLEST_PIECE", size)
    torch.manual_seed(0)
    ours = parameters(device)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 1e-2, "weight_decay": decay, "decoupled_weight_decay": bool(decay)}
    pair = [
        adam_of(given, fused=True, **options)
        for adam_of, given in ((kind, ours), (torch.optim.Adam, theirs))
    ]
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimiser in pair:
            optimiser.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
    found, expected = (optimiser.state_dict() for optimiser in pair)
    assert found["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(found["state"][index][name], value)


def test_large_parameters_come_in_pieces_and_hooks_run(monkeypatch):
    seen, hooks = [], []
    plain = torch._fused_adam_

    def watched(tensors, *rest, **options):
        seen.extend(len(tensor.view(-1)) for tensor in tensors)
        return plain(tensors, *rest, **options)

    monkeypatch.setattr(torch, "_fused_adam_", watched)
    weight, still = nn.Parameter(torch.ones(51_200)), nn.Parameter(torch.ones(3))
    weight.grad = torch.ones_like(weight)
    optimiser = PiecewiseAdam([weight, still], lr=0.1, fused=True)
    optimiser.register_step_pre_hook(lambda *_: hooks.append(1))
    optimiser.step()
    assert seen == [2048] * 25 and hooks == [1]
    assert torch.equal(still, torch.ones(3))  # no gradient


def test_training_imports_no_compiler(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from tiny_runs import tiny
from foveate.training.loop import train
train(tiny(), Path({str(tmp_path)!r}))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
