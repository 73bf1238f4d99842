"""Every network equals its definition by every plan that fits it, and hooks fire."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from foveate.errors import ConfigError
from foveate.execution import canvas, convnet, definition, patches, windows
from foveate.execution.captured import loss_of
from foveate.execution.plan import PLANS, Prepared, choose, local_maps, logits, predict, prepare
from foveate.models import sliding
from foveate.models.channels import ScaleChannels
from foveate.models.sliding import SlidingChannels
from foveate.models.zoo import ZOO, create_model
from foveate.scales import ScaleGrid

NAMES = sorted(ZOO)
SCALES = ScaleGrid(1, 2, per_octave=1)
SHAPES = {"cnn": [(112, 112)]}  # of the images; a plain CNN takes those of its size alone
TERMS = 9 * 32 * 8 + 28 * 28  # of the dot products of 8 layers, and of the mean over a map
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
EXPECTED = {  # by network: the plans that must fit it in training
    "cnn": {windows, convnet},
    "fovavg": {windows, convnet, patches},
    "fovconc": {windows, convnet, patches},
    "fovmax": {windows, convnet, patches},
    "swmax": {canvas, convnet},
}


def made(name, dtype=torch.float32, **changes):
    torch.manual_seed(3)
    net = create_model(name, scales=SCALES, **changes)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):  # nothing at its default
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)
    return net.to(dtype)


def trunk_of(net):
    return getattr(net, "backbone", net).trunk


def step(net, images, compute, cast=False):
    """Everything that a training step changes, with `compute(images)` as the logits."""
    torch.manual_seed(5)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=cast):
        found = compute(images)
    labels = torch.arange(len(images), device=images.device)
    F.cross_entropy(found.to(images.dtype), labels).backward()
    on_gpu = images.is_cuda
    random = (torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()).double()
    gradients = {f"of {n}": p.grad for n, p in net.named_parameters()}
    return {"logits": found.detach(), "random": random, **gradients, **net.state_dict()}


def distances(found, exact):
    """By name, the largest difference in units of the largest gradient or value."""
    assert found.keys() == exact.keys()
    slopes = max(float(v.abs().max()) for key, v in exact.items() if key.startswith("of "))
    return {
        key: float((found[key].double() - value.double()).abs().max())
        / (slopes if key.startswith("of ") else max(1.0, float(value.abs().max())))
        for key, value in exact.items()
    }


def new_images(shape, dtype=torch.float32, count=3):
    return torch.randn(count, 1, *shape).to(dtype)  # fresh ones each time


def by(plan, net, precision=torch.float32):
    """The logits as a plan computes them, whether or not it would be chosen."""

    def compute(images):
        assert plan.fits(net, images)
        with torch.no_grad():
            inputs = plan.prepare(net, images, precision)
        return logits(net, Prepared(plan, inputs))

    return compute


def cases():
    for name in NAMES:
        for plan in sorted(EXPECTED[name], key=lambda plan: plan.__name__):
            for shape in SHAPES.get(name, [(61, 90), (40, 37)]):
                for training in (True, False):
                    if plan is not canvas or training:  # on a CPU for training alone
                        label = f"{name}-{plan.__name__.split('.')[-1]}-{shape[0]}-{training}"
                        yield pytest.param(name, plan, shape, training, id=label)


@pytest.fixture
def full_precision(monkeypatch):
    """Float32 convolutions on a GPU in float32: by default cuDNN rounds factors to 10 bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", NAMES)
def test_the_plans_that_fit_are_those_expected(name):
    images = new_images(SHAPES.get(name, [(61, 90)])[0])
    found = {plan for plan in PLANS["cuda"] if plan.fits(made(name).train(), images)}
    assert found == EXPECTED[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_has_no_logits(name, training):
    net, images = made(name).train(training), new_images(SHAPES.get(name, [(61, 90)])[0], count=0)
    assert predict(net, images).logits.shape == net(images).shape == (0, 10)
    whole = prepare(net.eval(), new_images(SHAPES.get(name, [(61, 90)])[0]))
    assert logits(net, whole[torch.arange(0)]).shape == (0, 10)


@pytest.mark.parametrize("name", NAMES)
def test_the_device_meta_computes_shapes(name):
    net, images = made(name).to("meta"), new_images(SHAPES.get(name, [(61, 90)])[0])
    assert net(images.to("meta")).shape == (3, 10)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_depends_on_the_device(name):
    net, images = made(name), new_images(SHAPES.get(name, [(61, 90)])[0])
    assert choose(net.eval(), images) is convnet
    assert choose(net.train(), images) is (canvas if name == "swmax" else convnet)
    assert choose(net, images.to("meta")) is definition


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "plan", "shape", "training"), list(cases()))
def test_a_step_is_that_of_the_definition(name, plan, shape, training, dtype, device):
    """Logits, gradients, buffers and the random state; dropout draws the same."""
    net = made(name, dtype).train(training).to(device)
    twin, images = copy.deepcopy(net), new_images(shape, dtype).to(device)
    found, expected = step(net, images, by(plan, net, dtype)), step(twin, images, twin)
    bound = TERMS * torch.finfo(dtype).eps
    for key, distance in distances(found, expected).items():
        assert distance <= bound, key
    with torch.no_grad():
        torch.manual_seed(5)
        again = by(plan, net, dtype)(images)
        torch.manual_seed(5)
        slow = twin(images)
    assert float((again - slow).abs().max()) <= bound * max(1.0, float(slow.abs().max()))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name in NAMES for plan in PLANS["cuda"] if plan in EXPECTED[name]],
)
@pytest.mark.parametrize("training", [True, False])
def test_bf16_is_as_near_to_float32_as_the_definition_in_bf16(name, plan, training, device):
    shape = SHAPES.get(name, [(61, 90)])[0]
    net = made(name, dropout=0.0).train(training).to(device)
    if plan is canvas and not training and device == "cpu":
        pytest.skip("on a CPU the canvas is for training")
    plain, exact = copy.deepcopy(net), copy.deepcopy(net)
    images = new_images(shape, count=10).to(device)
    right = step(exact, images, exact)

    def distance(found, keys):
        """In the mean: of single values one that crosses the edge of a ReLU is the farthest."""
        pairs = [(found[key].double(), right[key].double()) for key in keys]
        return sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5

    quick = step(net, images, by(plan, net, torch.bfloat16), cast=True)
    slow = step(plain, images, plain, cast=True)
    for keys in (["logits"], [key for key in right if key.startswith("of ")], net.state_dict()):
        assert distance(quick, keys) <= 2 * distance(slow, keys)
    assert torch.equal(quick["random"], slow["random"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize(
    ("name", "plan"),
    [(n, p) for n in ("fovmax", "swmax") for p in PLANS["cuda"] if p in EXPECTED[n]],
)
def test_a_training_step_is_compiled_as_one_graph(name, plan):
    """A GPU would run the parts of a graph with breaks one by one, without an error."""
    net, images = made(name, dropout=0.0).train(), new_images((61, 90))
    prepared = Prepared(plan, plan.prepare(net, images, torch.float32))
    given = (net, prepared, torch.arange(3), "float32", 0.1)
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*given), loss_of(*given))


@pytest.mark.parametrize("name", ["fovavg", "fovconc", "fovmax"])
@pytest.mark.parametrize("training", [True, False])
def test_recomputed_steps_are_those_of_the_definition(name, training):
    dropout = 0.15 if name == "fovavg" else 0.0
    net = made(name, torch.float64, dropout=dropout).train(training)
    plain = copy.deepcopy(net)
    net.recompute = 1
    images = new_images((61, 90), torch.float64)
    assert choose(net, images) is patches
    found = step(net, images, lambda images: logits(net, prepare(net, images)))
    for key, distance in distances(found, step(plain, images, plain)).items():
        assert distance <= TERMS * torch.finfo(torch.float64).eps, key


@pytest.mark.parametrize("name", NAMES)
def test_the_door_gives_the_logits_and_channels_of_the_network(name):
    net = made(name, torch.float64).eval()
    images = new_images(SHAPES.get(name, [(61, 90)])[0], torch.float64)
    found = predict(net, images)
    torch.testing.assert_close(found.logits, net(images).detach())
    if name == "cnn":
        assert found.channels is None
    else:
        torch.testing.assert_close(found.channels, net.channels(images).detach())


def test_prepared_images_can_be_picked():
    net, images = made("fovmax").eval(), new_images((61, 90))
    chosen = torch.tensor([2, 0])
    with torch.no_grad():
        picked = logits(net, prepare(net, images)[chosen])
    torch.testing.assert_close(picked, net(images[chosen]).detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("grad", [True, False])
def test_prepared_images_can_be_used_again_after_a_backbone_changed_its_input(grad):
    class Centred(nn.Flatten):
        def forward(self, patches):
            return super().forward(patches.sub_(0.5))

    net = ScaleChannels(nn.Sequential(Centred(), nn.Linear(64, 3)), SCALES, 8)
    images = new_images((20, 24))
    with torch.set_grad_enabled(grad):
        prepared = prepare(net, images)
        found = [logits(net, prepared) for _ in range(2)]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], net(images))


@pytest.mark.parametrize("name", NAMES)
def test_what_others_watch_takes_the_definition(name):
    net, images = made(name).eval(), new_images(SHAPES.get(name, [(61, 90)])[0])
    assert choose(net, images) is not definition
    assert choose(net, images.requires_grad_()) is definition
    with torch.no_grad():
        assert choose(net, images) is not definition
    plans = []
    torch.func.vmap(lambda one: plans.append(choose(net, one[None])) or one)(images.detach())
    assert plans == [definition]


@pytest.mark.parametrize("name", NAMES)
def test_a_network_that_changed_after_its_images_were_prepared_is_refused(name):
    net = made(name).train()
    images = new_images(SHAPES.get(name, [(61, 90)])[0])
    ready = [plan.prepare(net, images, torch.float32) for plan in EXPECTED[name] - {patches}]
    trunk_of(net)[0].register_forward_hook(lambda *_: None)
    for plan, inputs in zip(EXPECTED[name] - {patches}, ready, strict=True):
        with pytest.raises(ConfigError, match="call prepare again"):
            logits(net, Prepared(plan, inputs))


def test_images_that_do_not_fit_are_refused_as_by_the_definition():
    for net, images in (
        (made("fovmax"), torch.zeros(1, 3, 61, 90)),
        (ScaleChannels(made("fovmax").backbone, SCALES, 32), torch.zeros(1, 1, 61, 90)),
    ):
        with pytest.raises(ConfigError, match="rejected patches"):
            predict(net, images)


def test_local_maps_are_those_of_the_definition():
    net, images = made("fovmax", torch.float64).eval(), new_images((61, 90), torch.float64)
    with torch.no_grad():
        found, right = local_maps(net, images, 8), sliding.local_maps(net, images, 8)
    torch.testing.assert_close(found.logits, right.logits)
    assert torch.equal(found.scales, right.scales)


class Doubled(nn.BatchNorm2d):
    """A subclass that does more than batch norm."""

    def forward(self, images):
        return 2 * super().forward(images)


def replace_first(net, kind):
    trunk = trunk_of(net)
    at = next(i for i, layer in enumerate(trunk) if type(layer) is kind[0])
    trunk[at] = kind[1](trunk[at])


TOUCHED = {
    "forward hook": lambda net: trunk_of(net)[0].register_forward_hook(lambda m, i, o: 2 * o),
    "pre-hook": lambda net: trunk_of(net)[0].register_forward_pre_hook(lambda m, i: (2 * i[0],)),
    "hook on the trunk": lambda net: trunk_of(net).register_forward_hook(lambda m, i, o: 2 * o),
    "backward hook": lambda net: trunk_of(net)[0].register_full_backward_hook(
        lambda m, i, o: (None if i[0] is None else 2 * i[0],)
    ),
    "prune": lambda net: prune.l1_unstructured(trunk_of(net)[0], "weight", 0.5),
    "prune hidden": lambda net: prune.l1_unstructured(
        getattr(net, "backbone", net).hidden, "weight", 0.5
    ),
    "weight norm": lambda net: parametrizations.weight_norm(trunk_of(net)[0]),
    "spectral norm": lambda net: parametrizations.spectral_norm(trunk_of(net)[0]),
    "subclass": lambda net: replace_first(net, (nn.Conv2d, lambda conv: WithBias(conv))),
    "other layer": lambda net: replace_first(net, (nn.ReLU, lambda _: nn.Tanh())),
}


class WithBias(nn.Conv2d):
    """A convolution of a type of its own, with the weights of another."""

    def __init__(self, conv):
        super().__init__(conv.in_channels, conv.out_channels, 3, stride=conv.stride)
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, images):
        return super().forward(images) + 1


def by_modules(backbone, images):
    """A `ConvNet` written down once more, each module called as it is."""
    hidden = F.relu(backbone.hidden(backbone.trunk(images).flatten(1)))
    return backbone.head(backbone.dropout(hidden))


@pytest.mark.parametrize("touch", TOUCHED)
@pytest.mark.parametrize("name", NAMES)
def test_what_was_done_to_modules_counts(name, touch):
    """Weights change after the touch, so that what was derived from them is stale."""
    net = made(name, torch.float32, dropout=0.0)
    TOUCHED[touch](net)
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if "orig" in key or "trunk" in key:
                parameter += 0.1 * torch.randn_like(parameter)
    net.eval()
    images = new_images(SHAPES.get(name, [(61, 90)])[0])
    assert choose(net, images) in (definition, patches)
    with torch.no_grad():
        found, backbone = predict(net, images).logits, getattr(net, "backbone", net)
        if isinstance(net, ScaleChannels):
            cut = net.patches(images)
            outputs = [by_modules(backbone, cut[:, s]) for s in range(len(SCALES))]
            right = net.combine(torch.stack(outputs, 1))
        elif isinstance(net, SlidingChannels):
            outputs = [highest(backbone, grid) for grid in net.grids(images)]
            right = net.combine(torch.stack(outputs, 1))
        else:
            right = by_modules(net, images)
    bound = TERMS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, right, atol=bound * float(right.abs().max()), rtol=0)


def highest(backbone, grid):
    """The highest logits (B, K) over all windows of a grid."""
    size, stride = backbone.size, backbone.stride
    cut = grid.unfold(2, size, stride).unfold(3, size, stride).permute(0, 2, 3, 1, 4, 5)
    return by_modules(backbone, cut.flatten(0, 2)).unflatten(0, (len(grid), -1)).amax(1)


@pytest.mark.parametrize("name", NAMES)
def test_global_hooks_and_replaced_forwards_see_the_first_layers(name):
    net, seen = made(name, torch.float32), []
    images = new_images(SHAPES.get(name, [(61, 90)])[0], torch.float32)
    first = trunk_of(net)[0]
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    with handle:
        predict(net, images)
    assert first in seen
    net.register_forward_hook(lambda *_: seen.append("net"))
    predict(net, images)
    assert seen[-1] == "net"
    plain = first.forward
    first.forward = lambda values: seen.append("called") or plain(values)
    predict(net, images)
    assert "called" in seen


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_of_batch_norm_runs_as_it_is(name):
    net = made(name, torch.float64, batch_norm=True, dropout=0.0)
    images = new_images(SHAPES.get(name, [(61, 90)])[0], torch.float64)
    before = predict(net.eval(), images).logits
    trunk_of(net)[1].__class__ = Doubled
    assert not torch.allclose(predict(net, images).logits, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_pruned_network_has_the_filters_of_its_weights(name):
    """Pruning can replace the weights of a layer and not the numbers of filters it states."""
    net = made(name, torch.float32, dropout=0.0).eval()
    trunk = trunk_of(net)
    second = next(at for at, layer in enumerate(trunk) if isinstance(layer, nn.Conv2d) and at)
    for layer in trunk[:second]:
        for key, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            kept = tensor[:8].detach().clone() if tensor.ndim else tensor
            setattr(layer, key, nn.Parameter(kept) if key in ("weight", "bias") else kept)
    trunk[second].weight = nn.Parameter(trunk[second].weight[:, :8].detach().clone())
    images = new_images(SHAPES.get(name, [(61, 90)])[0])
    assert choose(net, images) in (definition, patches)
    with torch.no_grad():
        assert torch.equal(predict(net, images).logits, net(images))


@pytest.mark.parametrize(
    ("name", "method", "shape"),
    [
        ("fovmax", "channels", (3, 3, 10)),
        ("fovmax", "forward_patches", (3, 3, 10)),
        ("swmax", "channels", (3, 3, 10)),
        ("swmax", "maps", (3, 10, 1, 1)),
    ],
)
def test_a_method_replaced_on_a_network_is_called(name, method, shape):
    net, images = made(name).eval(), new_images((61, 90))
    values = torch.randn(shape)
    setattr(net, method, lambda *_: [values] if method == "maps" else values)
    with torch.no_grad():
        assert torch.equal(predict(net, images).logits, net(images))


@pytest.mark.parametrize("name", ["fovmax", "swmax"])
def test_a_method_replaced_on_a_backbone_is_called(name):
    net, images = made(name).eval(), new_images((61, 90))
    for method in ("dense", "forward"):
        values = getattr(net.backbone, method)
        setattr(net.backbone, method, lambda *a, values=values: 2 * values(*a))
    with torch.no_grad():
        torch.testing.assert_close(predict(net, images).logits, net(images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_networks_in_half_precision(name, training, dtype):
    net = made(name, dtype, dropout=0.0).train(training)
    plain, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    images = new_images(SHAPES.get(name, [(61, 90)])[0], dtype)
    right = exact(images.double()).detach()

    def distance(found):
        return float((found.detach().double() - right).norm())

    found = logits(net, prepare(net, images))
    rounding = torch.finfo(dtype).eps * float(right.norm())
    assert distance(found) <= 2 * distance(plain(images)) + rounding
    for key, value in net.state_dict().items():
        atol = 8 * torch.finfo(dtype).eps * float(value.double().abs().max())
        torch.testing.assert_close(value, plain.state_dict()[key], atol=atol, rtol=0, msg=key)


def test_scales_that_changed_after_the_canvas_was_filled_are_refused():
    net, images = made("swmax").train(), new_images((61, 90))
    prepared = prepare(net, images)
    net.scales = (1.0, 1.5, 2.0)
    with pytest.raises(ConfigError, match="call prepare again"):
        logits(net, prepared)
