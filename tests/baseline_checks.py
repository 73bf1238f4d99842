"""What every baseline must do: learn, compile to one graph, and run as a command."""

import torch
import torch.nn.functional as F

from foveate.cli.app import run
from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.training.checkpoint import RunFolder

torch.set_num_threads(1)  # on shared cores two threads wait for each other more than they work


def images(*shape):
    """Noise (N, C, size, size)."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(*shape, shape[-1], generator=generator)


def digits(count, size):
    """Digits as in MNIST Large Scale that fill the frame, as many of each class, and labels."""
    pixels, labels = load_source("mnist-5k").read_batch("train", torch.arange(count))
    return rescale(pixels, size / 32, size=size), labels


def assert_trains(net, size, steps=15, least=0.5):
    """The loss of a few digits falls below `least` of that of a guess; every weight takes part."""
    pixels, labels = digits(10, size)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(net(pixels), labels)
        optimiser.zero_grad()
        loss.backward()
        dead = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.any()]
        assert not dead
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < least * losses[0], losses


def assert_one_graph(net, size, roundings=16, channels=1):
    """It compiles to one graph, and its logits are those in channels_last and in bf16.

    Under autocast a logit sums terms that have been rounded, by 2^-9 each time.
    """
    net.eval()
    pixels = digits(2, size)[0].expand(-1, channels, -1, -1)
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad():
        plain = net(pixels)
        torch.testing.assert_close(compiled(pixels), plain, atol=0, rtol=0)
        net.to(memory_format=torch.channels_last)
        last = net(pixels.contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(last, plain)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = net(pixels)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - plain).abs().max() < roundings * 2**-9 * plain.abs().max()


def assert_runs_as_command(factory, size, folder):
    """`foveate train` takes a step with the factory on whole frames; loading needs no trust."""
    command = ["train", "fovavg", "--source", "mnist-5k", "--scales", "0.5", "--samples", "16"]
    command += ["--batch", "16", "--epochs", "1", "--backbone", factory, "--device", "cpu"]
    for change in (f"size={size}", f"model.size={size}", "model.scales=1:1:1"):
        command += ["--set", change]
    assert run([*command, "--out", str(folder)]) == 0
    net = RunFolder(folder).net().eval()
    assert type(net.backbone).__module__ == factory.partition(":")[0]
    pixels, _ = digits(2, size)
    with torch.no_grad():  # the only window is the frame itself
        torch.testing.assert_close(net(pixels), net.backbone(pixels), atol=1e-5, rtol=1e-5)
