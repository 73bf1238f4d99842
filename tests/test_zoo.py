"""Every named network: a new one is tested the day it is added."""

import json

import pytest
import torch
import torch.nn.functional as F

from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels
from foveate.models.sliding import SlidingChannels
from foveate.models.zoo import ZOO, ModelConfig, create_model, model_config
from foveate.scales import ScaleGrid

NAMES = sorted(ZOO)
SMALL = ScaleGrid(1, 4, per_octave=1)


def quick(name, **changes):
    """The network with few scales, for speed."""
    return create_model(name, **{"scales": SMALL, **changes})


def test_the_five_of_the_paper_are_there():
    assert {"cnn", "fovmax", "fovavg", "fovconc", "swmax"} <= set(ZOO)
    assert isinstance(create_model("fovmax"), ScaleChannels)
    assert isinstance(create_model("swmax"), SlidingChannels)
    assert [create_model(name).pool for name in ("fovmax", "fovavg", "fovconc")] == [
        "max",
        "avg",
        "concat",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_from_images_of_112_pixels(name):
    torch.manual_seed(0)
    net, images = create_model(name), torch.rand(2, 1, 112, 112)
    logits = net(images)
    assert logits.shape == (2, 10)
    F.cross_entropy(logits, torch.tensor([3, 5])).backward()
    for parameter, values in net.named_parameters():
        assert values.grad is not None, parameter
        assert values.grad.isfinite().all(), parameter
    assert sum(float(p.grad.abs().sum()) for p in net.parameters()) > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_config_survives_json(name):
    for config in (ZOO[name], model_config(name, classes=3, dropout=0.0, padding="reflect")):
        again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again == config
        assert again.to_dict() == config.to_dict()
    with pytest.raises(AttributeError):
        ZOO[name].size = 3


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_weights(name):
    states = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        states.append(create_model(name).state_dict())
    first, same, other = states
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_importing_and_building_leaves_the_random_state_to_the_user(name):
    torch.manual_seed(3)
    create_model(name)
    after = torch.rand(1)
    torch.manual_seed(3)
    create_model(name)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("name", NAMES)
def test_colour_other_classes_and_another_size(name):
    size = 128 if name == "cnn" else 32
    net = quick(name, channels=3, classes=7, size=size, hidden=20).eval()
    assert net(torch.rand(2, 3, 128, 128)).shape == (2, 7)


@pytest.mark.parametrize("name", NAMES)
def test_changes_are_applied(name):
    config = model_config(name, hidden=31, batch_norm=False, dropout=0.5)
    assert (config.hidden, config.batch_norm, config.dropout) == (31, False, 0.5)
    net = config.build()
    backbone = getattr(net, "backbone", net)
    assert backbone.hidden.out_features == 31
    assert backbone.dropout.p == 0.5
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in net.modules())
    assert ZOO[name].hidden != 31
    if config.form != "plain":
        assert quick(name).scales == (1.0, 2.0, 4.0)
        assert quick(name, padding="reflect").padding == "reflect"
        assert quick(name, antialias=True).antialias is True


@pytest.mark.parametrize("name", NAMES)
def test_weights_go_into_a_second_network(name):
    torch.manual_seed(0)
    first, second = quick(name).eval(), quick(name).eval()
    second.load_state_dict(first.state_dict())
    images = torch.rand(1, 1, 112, 112)
    assert torch.equal(first(images), second(images))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: create_model("resnet"), ["'resnet'", *NAMES]),
        (lambda: create_model("fovmax", colour=3), ["'colour'", "channels", "classes", "scales"]),
        (lambda: create_model("fovmax", form="round"), ["plain, foveated, sliding", "'round'"]),
        (lambda: create_model("fovmax", pool="median"), ["max, avg, logsumexp, concat"]),
        (
            lambda: create_model("swmax", pool="concat"),
            ["pool of sliding windows", "max, avg", "'concat'"],
        ),
        (
            lambda: create_model("swmax", padding=0.0),
            ["padding of sliding windows", "border, reflect", "0.0"],
        ),
        (lambda: create_model("fovmax", size=0), ["size", "0"]),
        (lambda: create_model("fovmax", classes=0), ["classes", "0"]),
        (lambda: create_model("fovmax", dropout=1.0), ["dropout", "1"]),
        (lambda: create_model("fovmax", size=9), ["9", "too small"]),
        (lambda: create_model("fovmax", features=()), ["features", "()"]),
        (lambda: create_model("fovmax", scales=[1.0, 2.0]), ["ScaleGrid", "[1.0, 2.0]"]),
        (
            lambda: ModelConfig.from_dict({**ZOO["fovmax"].to_dict(), "colour": 3}),
            ["'colour'", "channels"],
        ),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_choices(make, says):
    with pytest.raises(ConfigError) as error:
        make()
    message = str(error.value)
    assert "\n" not in message
    for words in says:
        assert words in message
