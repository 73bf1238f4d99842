"""Scale channels trained a few at a time: the numbers of all at once, in less memory."""

import copy
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import MODEL, tiny
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from foveate.cli.app import run
from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels
from foveate.models.recompute import batch_norm
from foveate.training.loop import train

SCALES = (1.0, 1.5, 2.0, 3.0, 4.0)
SIZE = 12


class Odd(nn.Module):
    """One norm called twice, one that keeps no statistics, a cumulative one, a branch, a layer
    whose answer nobody uses, and a frozen convolution in front."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3).requires_grad_(False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3)
        self.forgetful = nn.BatchNorm2d(4, track_running_stats=False)
        self.flat = nn.BatchNorm1d(4, momentum=None, affine=False)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, patches):
        maps = F.relu(self.norm(self.first(patches)))
        maps = F.relu(self.norm(self.second(maps)))
        maps = maps + self.forgetful(maps**2)
        return self.head(self.flat(maps.mean((2, 3))))


def conv_net(**changes):
    return lambda: ConvNet((4, 8), SIZE, classes=3, hidden=8, **{"dropout": 0.0, **changes})


class Active(nn.BatchNorm2d):
    """A subclass of batch norm that does more, as timm's `BatchNormAct2d`."""

    def forward(self, values):
        return F.silu(super().forward(values)) + self.weight.mean()


class Extended(nn.Sequential):
    """A subclass of batch norm, a parametrised convolution with buffers of its own, a hook."""

    def __init__(self):
        conv = parametrizations.spectral_norm(nn.Conv2d(1, 4, 3))
        head = nn.Linear(400, 3)
        super().__init__(conv, Active(4), nn.Flatten(), head)
        head.register_forward_hook(Doubling())


class InPlace(ConvNet):
    """A backbone that changes its patches in place."""

    def forward(self, patches, mask=None):
        patches -= 0.5
        return super().forward(patches, mask)


class Averaging(nn.Module):
    """A backbone that assigns its buffers instead of changing them in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm2d(4)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), self.inner, nn.Flatten(), nn.Linear(400, 3))
        self.register_buffer("steps", torch.zeros(()))
        self.inner.register_buffer("history", torch.zeros(0))

    def forward(self, patches):
        self.steps = self.steps + 1
        self.inner.history = torch.cat([self.inner.history, self.steps.view(1)])
        return self.net(patches) * self.steps


class Doubling:
    """A hook that changes the output."""

    def __call__(self, module, given, output):
        return 2 * output


BACKBONES = {
    "ConvNet": conv_net(),
    "without norm": conv_net(batch_norm=False),
    "odd": Odd,
    "extended": Extended,
    "in place": lambda: InPlace((4, 8), SIZE, classes=3, hidden=8, dropout=0.0),
    "assigning": Averaging,
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3)
    ),
}


def shaken(make, dtype=torch.float64, pool="avg"):
    """A network whose weights and statistics are all different from how they begin."""
    torch.manual_seed(1)
    net = ScaleChannels(make(), SCALES, SIZE, pool, classes=3)
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point():
            tensor.data += 0.3 * torch.rand_like(tensor)
    return net.to(dtype)


def data(dtype=torch.float64, count=6):
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 1, 24, 24, generator=generator, dtype=torch.float64)
    return images.to(dtype), torch.arange(count) % 3


def everything(net, images, labels):
    """Logits, gradients and buffers of one step."""
    leaf = images.clone().requires_grad_()
    logits = net(leaf)
    F.cross_entropy(logits, labels).backward()
    gradients = {f"of {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "of images": leaf.grad, **gradients, **net.state_dict()}


def assert_same_step(whole, channels=2):
    grouped, (images, labels) = copy.deepcopy(whole), data()
    grouped.recompute = channels
    expected, got = everything(whole, images, labels), everything(grouped, images, labels)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, atol=1e-12, rtol=1e-9, msg=key)


@pytest.mark.parametrize("channels", [1, 2, 5, 9])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_step_is_that_of_all_channels_at_once(name, channels):
    assert_same_step(shaken(BACKBONES[name]), channels)


@pytest.mark.parametrize("pool", ["max", "concat"])
def test_other_pools(pool):
    assert_same_step(shaken(conv_net(), pool=pool))


def test_a_step_in_float32_is_as_near_to_float64_as_the_plain_one():
    images, labels = data()
    exact = everything(shaken(conv_net()), images, labels)

    def distance(recompute):
        net = shaken(conv_net(), torch.float32)
        net.recompute = recompute
        got = everything(net, images.float(), labels)
        return max(float((got[key] - exact[key]).abs().max()) for key in exact)

    assert distance(1) < 4 * distance(0)


def test_gradients_that_cancel_are_as_near_to_zero_as_the_plain_ones():
    """The bias before a norm changes nothing. With nearly constant patches, its gradient is a sum
    of large terms, and rounding alone remains: as much in both, up to chance."""
    generator = torch.Generator().manual_seed(6)
    levels = torch.randn(8, 6, 1, 1, 1, generator=generator)
    images = levels + 1e-3 * torch.randn(8, 6, 1, 24, 24, generator=generator)

    def error(recompute):
        torch.manual_seed(1)
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        net = ScaleChannels(nn.Sequential(*layers, nn.Linear(8, 3)), SCALES, SIZE, "avg")
        net.recompute = recompute
        losses = (F.cross_entropy(net(batch), torch.arange(6) % 3) for batch in images)
        gradients = (torch.autograd.grad(loss, layers[3].bias)[0] for loss in losses)
        return sum(float(gradient.norm()) for gradient in gradients)

    assert error(2) < 2 * error(0)


def test_an_offset_does_not_increase_the_rounding_error_of_a_norm():
    generator, offset, count = torch.Generator().manual_seed(5), 2.0**20, 64
    values = torch.randint(-8, 9, (count, 3), generator=generator, dtype=torch.float64)
    values[1::2] = -values[::2]  # the mean is the offset, and all deviations are exact in float32
    slope = torch.randn(count, 3, generator=generator)

    def step(values, norm):
        weight = torch.ones(3, dtype=values.dtype, requires_grad=True)
        outputs = norm(values, None, None, weight, training=True)
        (outputs * slope).sum().backward()
        return outputs.detach(), weight.grad

    exact, gradient = step(values, F.batch_norm)
    shifted = (values + offset).float()
    outputs, shifted_gradient = step(shifted, partial(batch_norm, all_reduce_sum=lambda sums: sums))
    # Each term of the sum is rounded a few times, and at most `count` times while it is added.
    eps = torch.finfo(torch.float32).eps
    assert ((outputs - exact).abs() <= 4 * eps * exact.abs()).all()
    assert ((shifted_gradient - gradient).abs() <= count * eps * (exact * slope).abs().sum(0)).all()


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_the_gradient_is_of_the_dropout_that_was_drawn(pool):
    """Against the slope of the loss itself, along a direction, with the same draw."""
    net, (images, labels) = shaken(conv_net(dropout=0.5), pool=pool), data()
    net.recompute = 2

    def loss():
        torch.manual_seed(5)
        return F.cross_entropy(net(images), labels)

    parameters = list(net.parameters())
    gradients = torch.autograd.grad(loss(), parameters)
    direction = [torch.randn_like(p) for p in parameters]
    slope = float(sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)))
    ends, step = [], 1e-6
    for sign in (1, -2):
        for parameter, along in zip(parameters, direction, strict=True):
            parameter.data += sign * step * along
        ends.append(float(loss().detach()))
    # The error of a central difference is of the order step^2, its rounding 1e-16 / step.
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-5)


def test_dropout_draws_anew_in_every_step_and_group():
    net, (images, _) = shaken(conv_net(dropout=0.5), pool="max"), data()
    net.recompute = 1
    torch.manual_seed(0)
    first, second = net(images), net(images)
    assert not torch.equal(first, second)
    same = torch.ones(1, 1, 1, SIZE, SIZE, dtype=torch.float64).expand(6, 5, -1, -1, -1)
    answers = net.forward_patches(same)  # the same patch to every channel of every image
    assert len(answers.detach().flatten(0, 1).unique(dim=0)) > 6
    torch.manual_seed(0)
    assert torch.equal(net(images), first)


def test_evaluation_and_bf16_take_the_same_way():
    net, (images, _) = shaken(conv_net(), torch.float32).eval(), data(torch.float32)
    plain = net(images)
    net.recompute = 2
    torch.testing.assert_close(net(images), plain)
    with torch.no_grad():
        torch.testing.assert_close(net(images), plain)
    net.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(images).float().logsumexp(1).mean()
    loss.backward()
    near = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    net(images).logsumexp(1).mean().backward()
    for name, parameter in net.named_parameters():
        if "trunk.0.bias" not in name and "trunk.3.bias" not in name:  # nothing but rounding
            cosine = F.cosine_similarity(near[name].flatten(), parameter.grad.flatten(), 0)
            assert cosine > 0.99, name


class Kept:
    """Bytes that autograd keeps for the way back: how many at most."""

    def __init__(self):
        self.now = self.peak = 0

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        class Box:
            pass

        box, size = Box(), tensor.numel() * tensor.element_size()
        box.tensor = tensor
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(box, self.release, size)
        return box

    def release(self, size):
        self.now -= size


def test_one_group_of_activations_is_kept_at_a_time():
    images, labels = data(torch.float32, count=20)

    def peak(recompute):
        net = shaken(conv_net(), torch.float32)
        net.recompute = recompute
        patches = net.patches(images)
        with Kept() as kept:
            F.cross_entropy(net.combine(net.forward_patches(patches)), labels).backward()
        assert kept.now == 0
        fixed = 4 * (patches.numel() + sum(p.numel() for p in net.parameters()))
        return kept.peak, fixed

    whole, fixed = peak(0)
    grouped, _ = peak(1)
    # What a group keeps, and what is kept for all. A group may keep twice its part of the whole:
    # its layers run one by one, while those of the whole are merged (`execution.windows`).
    assert grouped < 2 * whole / len(SCALES) + fixed < whole / 2


def test_a_run_trains_as_without(tmp_path):
    config = tiny(model=replace(MODEL, dropout=0.0))
    plain = train(config, tmp_path / "a").metrics()
    grouped = train(config, tmp_path / "b", recompute=1).metrics()
    for one, other in zip(plain, grouped, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


def test_what_cannot_be_recomputed_is_said(tmp_path, capsys):
    with pytest.raises(
        ConfigError, match="recompute must be a number of channels from 0 to 1,000, got -1"
    ):
        ScaleChannels(conv_net()(), SCALES, SIZE, recompute=-1)
    options = ["--source", "mnist-5k", "--device", "cpu", "--out"]
    assert run(["train", "cnn", "--recompute", "1", *options, str(tmp_path / "a")]) == 2
    assert "use fovmax, fovavg or fovconc" in capsys.readouterr().err
    assert run(["train", "fovavg", "--recompute", "-1", *options, str(tmp_path / "b")]) == 2
    assert "recompute must be a number of channels" in capsys.readouterr().err
    wrong = ScaleChannels(nn.Flatten(), SCALES, SIZE, recompute=1)
    assert wrong(data()[0]).shape == (6, SIZE**2)
    wrong.backbone = nn.Identity()
    with pytest.raises(ConfigError, match="the backbone must map"):
        wrong(data()[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # in the compiler itself
def test_a_compiled_backbone_is_recomputed_as_it_was_written():
    net = shaken(BACKBONES["odd"])
    net.backbone = torch.compile(net.backbone, backend="eager")
    assert_same_step(net)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_random_numbers_are_drawn_only_if_the_backbone_draws(training, grad):
    for dropout in (0.0, 0.5):
        net, (images, _) = shaken(conv_net(dropout=dropout), pool="max").train(training), data()
        net.recompute = 2
        before = torch.get_rng_state()
        with torch.set_grad_enabled(grad):
            net(images)
        drew = training and dropout > 0
        assert torch.equal(torch.get_rng_state(), before) == (not drew)


class ByHand(nn.BatchNorm2d):
    """A batch norm whose statistics nobody else can see."""

    def forward(self, values):
        return values - values.mean((0, 2, 3), keepdim=True)


class Segments(nn.Module):
    """A backbone that recomputes a part of itself."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(400, 3)

    def forward(self, patches):
        return self.head(checkpoint(self.part, patches, use_reentrant=False).flatten(1))


def small(norm):
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(400, 3))


class Direct(nn.Module):
    """Batch norm by another name."""

    def forward(self, values):
        return torch.native_batch_norm(values, None, None, None, None, True, 0.1, 1e-5)[0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: small(ByHand(4)), r"cannot split 1 \(ByHand\), which does not call F.batch_norm"),
        (lambda: small(nn.InstanceNorm2d(4, track_running_stats=True)), "split instance_norm"),
        (lambda: small(Direct()), "split native_batch_norm"),
    ],
)
def test_what_joins_a_batch_in_another_way_is_refused(make, says):
    net, (images, labels) = shaken(make), data()
    everything(net, images, labels)
    net.recompute = 2
    with pytest.raises(ConfigError, match=says) as error:
        everything(net, images, labels)
    assert "\n" not in str(error.value)


def test_checkpoints_around_a_norm_are_refused_by_torch():
    net, (images, labels) = shaken(Segments), data()
    everything(net, images, labels)
    net.recompute = 2
    with pytest.raises(RuntimeError):
        everything(net, images, labels)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused():
    script = torch.jit.trace(
        nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), torch.zeros(2, 1, 12, 12)
    )
    net = ScaleChannels(script, SCALES, SIZE, recompute=1)
    with pytest.raises(ConfigError, match="recompute does not support TorchScript"):
        net(data(torch.float32)[0])


def test_buffers_that_are_one_tensor_stay_so():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
            self.net[2].running_mean = self.net[1].running_mean
            self.head = nn.Linear(4, 3)

        def forward(self, patches):
            return self.head(self.net(patches).mean((2, 3)) + self.net[1].running_mean)

    assert_same_step(shaken(Tied))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_of_the_parameters_that_a_call_replaced(frozen):
    """`torch.func.functional_call` restores the parameters of the network before backward."""
    net, (images, labels) = shaken(BACKBONES["odd"]), data()

    def step(recompute):
        net.recompute = recompute
        weights = {n: (2 * p + 0.1).detach() for n, p in net.named_parameters()}
        weights = {n: p.requires_grad_(not frozen) for n, p in weights.items()}
        leaf = images.clone().requires_grad_()
        tensors = {**weights, **{n: b.clone() for n, b in net.named_buffers()}}
        F.cross_entropy(torch.func.functional_call(net, tensors, (leaf,)), labels).backward()
        return [leaf.grad, *(p.grad for p in weights.values())]

    for expected, found in zip(step(0), step(2), strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*torch.jit|.*Converting a tensor")
def test_transforms_and_tracers_use_all_channels_at_once():
    net, (images, _) = shaken(conv_net()).eval().requires_grad_(False), data()
    calls = (
        lambda: torch.func.jacrev(net)(images),
        lambda: torch.func.jvp(net, (images,), (images,))[1],
        lambda: torch.vmap(lambda image: net(image[None]))(images),
        lambda: torch.jit.trace(net, images)(images),
    )
    expected = [call() for call in calls]
    net.recompute = 1
    for call, right in zip(calls, expected, strict=True):
        torch.testing.assert_close(call(), right)


def test_another_mode_in_the_backward_pass_is_refused():
    net, (images, _) = shaken(conv_net(batch_norm=False, dropout=0.5)), data()
    net.recompute = 2
    loss = net(images).sum()
    net.eval()
    with pytest.raises(ConfigError, match=r"the mode of the forward pass; call backward before"):
        loss.backward()


def test_lazy_modules_are_refused_until_they_are_initialised():
    backbone = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(3))
    net, (images, _) = ScaleChannels(backbone, SCALES, SIZE, recompute=2), data(torch.float32)
    with pytest.raises(ConfigError, match=r"has lazy modules; call the network once without"):
        net(images)
    net.recompute = 0
    net(images)
    net.recompute = 2
    net(images).sum().backward()


def test_a_gradient_of_the_gradient_is_refused():
    net, (images, _) = shaken(conv_net()), data()
    net.recompute = 1
    leaf = images.requires_grad_()
    slope = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()
