"""The fast path of training takes the steps of the plain one."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import MODEL

from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.execution import convnet
from foveate.execution.captured import Batch, CapturedStep, plain_step
from foveate.execution.plan import choose, prepare


def data(count=160):
    split = load_source("mnist-5k").train
    return rescale(split.images[:count], 1.0, size=24), split.labels[:count]


def fast_steps(net, images, labels):
    """Ten steps as the loop does them: prepared once, then the fast form."""
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    step = plain_step(net, optimiser, "float32")
    with torch.no_grad():
        ready = prepare(net, images)
    for chosen in torch.arange(160).split(16):
        step(Batch(ready, labels, chosen))


def obvious_steps(net, images, labels):
    """Ten steps as in a textbook, layer by layer; dropout is drawn once for an image's channels."""
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    backbone = net.backbone
    for chosen in torch.arange(160).split(16):
        patches = net.patches(images[chosen]).flatten(0, 1)
        hidden = F.relu(backbone.hidden(backbone.trunk(patches).flatten(1))).unflatten(0, (16, -1))
        kept = F.dropout(torch.ones_like(hidden[:, 0]), backbone.dropout.p)
        logits = backbone.head(hidden * kept[:, None]).mean(1)
        optimiser.zero_grad()
        F.cross_entropy(logits, labels[chosen]).backward()
        optimiser.step()


def twins(dropout, dtype, steps):
    torch.manual_seed(3)
    net = replace(MODEL, dropout=dropout).build()
    images, labels = data()
    nets = []
    for each in steps:
        twin = copy.deepcopy(net).to(dtype)
        torch.manual_seed(4)
        each(twin, images.to(dtype), labels)
        nets.append(twin.state_dict())
    return nets


def test_ten_steps_of_the_fast_path_are_ten_plain_steps_in_float64():
    fast, plain = twins(0.15, torch.float64, [fast_steps, obvious_steps])
    assert choose(MODEL.build(), data(1)[0]) is convnet
    for key in plain:
        torch.testing.assert_close(fast[key], plain[key], atol=1e-9, rtol=0)


def test_ten_steps_of_the_fast_path_are_ten_plain_steps_in_float32():
    """Both are roundings of the same steps in float64, and neither may be much farther from them.

    A bound from the rounding of one product would not do: Adam divides a gradient by its size, so
    where a gradient is nearly zero rounding decides its sign, in the plain path too. Biases before
    a batch norm, whose gradient is zero, and the running means that follow them are left out.
    """
    fast, plain = twins(0.0, torch.float32, [fast_steps, obvious_steps])
    (exact,) = twins(0.0, torch.float64, [obvious_steps])
    idle = ("trunk.0.bias", "trunk.3.bias", "running_mean")
    keys = [key for key in exact if not key.endswith((*idle, "num_batches_tracked"))]

    def distance(state):
        return math.sqrt(sum(float(((state[k] - exact[k]) ** 2).sum()) for k in keys))

    moved = math.sqrt(sum(float((exact[k] ** 2).sum()) for k in keys))
    assert distance(plain) < 1e-3 * moved
    assert distance(fast) < 2 * distance(plain)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # compiling warns of torch's own code
@pytest.mark.parametrize("compiled", [False, True])
def test_ten_captured_steps_are_ten_plain_steps(compiled):
    """As above: the captured step may not be much farther from float64 than the plain one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(3)
    start = replace(MODEL, dropout=0.0).build().cuda()
    images, labels = (t.cuda() for t in data())
    (exact,) = twins(0.0, torch.float64, [obvious_steps])

    def run(make):
        net = copy.deepcopy(start)
        rate = torch.tensor(3e-3, device="cuda")
        optimiser = torch.optim.Adam(net.parameters(), lr=rate, fused=True, capturable=True)
        step = make(net, optimiser)
        with torch.no_grad():
            ready = prepare(net, images)
        torch.cuda.synchronize()  # another stream does not wait for this one
        with torch.cuda.stream(torch.cuda.Stream()):
            for chosen in torch.arange(160, device="cuda").split(16):
                step(Batch(ready, labels, chosen))
        torch.cuda.synchronize()
        return {key: value.cpu() for key, value in net.state_dict().items()}

    plain = run(lambda net, optimiser: plain_step(net, optimiser, "float32"))
    captured = run(lambda net, optimiser: CapturedStep(net, optimiser, "float32", 16, compiled))
    idle = ("trunk.0.bias", "trunk.3.bias", "running_mean", "num_batches_tracked")
    keys = [key for key in exact if not key.endswith(idle)]

    def distance(state):
        return math.sqrt(sum(float(((state[k] - exact[k]) ** 2).sum()) for k in keys))

    assert distance(captured) < 4 * distance(plain)


@pytest.mark.gpu
def test_runs_side_by_side_do_not_disturb_each_other():
    """Alone and side by side give the same weights, up to what two runs alone differ by."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    images, labels = (t.cuda() for t in data())
    nets = [replace(MODEL, dropout=0.0, hidden=100).build().cuda() for _ in range(4)]

    def session(net):
        net = copy.deepcopy(net)
        optimiser = torch.optim.Adam(net.parameters(), lr=3e-3, fused=True, capturable=True)
        step, lane = CapturedStep(net, optimiser, "float32", 32, False), torch.cuda.Stream()
        with torch.no_grad():
            ready = prepare(net, images)
        torch.cuda.synchronize()
        for turn in range(300):
            with torch.cuda.stream(lane):
                chosen = torch.arange(32, device="cuda") * 5 + turn % 5
                step(Batch(ready[chosen], labels[chosen]))
            yield
        torch.cuda.synchronize()
        yield torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()

    def alone(net):
        return [*session(net)][-1]

    together = [*zip(*(session(net) for net in nets), strict=True)][-1]
    for net, found in zip(nets, together, strict=True):
        one, other = alone(net), alone(net)
        noise = (one - other).abs().max() + 1e-6 * one.abs().max()
        assert (found - one).abs().max() <= 10 * noise
