"""Scale channels around backbones that others wrote: MONAI's; timm's and torchvision's if there."""
# Shape letters: B batch, S scale channel, C image channel, P patch pixels, K classes.

import importlib

import pytest
import torch
import torch.nn.functional as F
from formulas import blobs, sensitivity
from torch import nn

from foveate.errors import ConfigError
from foveate.evaluation.invariance import covariance_error
from foveate.models.channels import ScaleChannels
from foveate.scales import ScaleGrid

CLASSES = 6
GRID = ScaleGrid(1, 4, per_octave=1)


def need(name):
    """The module, or a skip; a broken installation (RuntimeError and worse) is skipped too."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported here ({type(error).__name__}: {error})")


def densenet(channels):
    nets = need("monai.networks.nets")
    sizes = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)}
    return nets.DenseNet(2, channels, CLASSES, **sizes)


def resnet(channels):
    nets = need("monai.networks.nets")
    return nets.ResNet(
        "basic",
        [1, 1, 1, 1],
        [8, 16, 16, 32],
        spatial_dims=2,
        n_input_channels=channels,
        num_classes=CLASSES,
    )


def efficientnet(channels):
    nets = need("monai.networks.nets")
    blocks = ["r1_k3_s11_e1_i32_o8_se0.25", "r1_k3_s22_e3_i8_o12_se0.25"]
    return nets.EfficientNet(blocks, 2, channels, CLASSES, depth_coefficient=1.0)


class FirstOfMany(nn.Module):
    """For backbones that give more than logits."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, patches):
        return self.inner(patches)[0]


def transformer(channels, size):
    need("einops")
    return need("monai.networks.nets").ViT(
        channels,
        size,
        8,
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=2,
        classification=True,
        num_classes=CLASSES,
        spatial_dims=2,
        post_activation="",
    )


BACKBONES = {
    "densenet": lambda channels, size: densenet(channels),
    "resnet": lambda channels, size: resnet(channels),
    "efficientnet": lambda channels, size: efficientnet(channels),
    "vit": lambda channels, size: FirstOfMany(transformer(channels, size)),
    "timm resnet10t": lambda channels, size: need("timm").create_model(
        "resnet10t", num_classes=CLASSES, in_chans=channels
    ),
    "timm vit": lambda channels, size: need("timm").create_model(
        "test_vit", num_classes=CLASSES, in_chans=channels, img_size=size
    ),
    "torchvision": lambda channels, size: need("torchvision").models.shufflenet_v2_x0_5(
        num_classes=CLASSES
    ),
}


@pytest.fixture(scope="module", params=list(BACKBONES))
def backbone(request):
    torch.manual_seed(0)
    return lambda size: BACKBONES[request.param](3, size)


@pytest.mark.parametrize("size", [32, 64])
def test_forward_is_the_maximum_of_the_backbone_over_the_patches(backbone, size):
    net = ScaleChannels(backbone(size), GRID, size).eval()
    images = torch.rand(2, 3, 96, 80)
    with torch.no_grad():
        logits, patches = net(images), net.patches(images)
        slow = torch.stack([net.backbone(patches[:, s]) for s in range(len(GRID))])
    assert patches.shape == (2, 3, 3, size, size)
    assert logits.shape == (2, CLASSES)
    torch.testing.assert_close(logits, slow.amax(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "concat"])
def test_it_trains(backbone, pool):
    net = ScaleChannels(backbone(32), GRID, 32, pool, classes=CLASSES).train()
    images = torch.rand(4, 3, 64, 64).requires_grad_()
    F.cross_entropy(net(images), torch.tensor([0, 1, 2, 3])).backward()
    assert images.grad.isfinite().all()
    assert images.grad.abs().sum() > 0
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert grads
    assert all(g.isfinite().all() for g in grads)


def test_a_twice_larger_image_shifts_the_channels(backbone):
    """Patches differ by two interpolation errors, answers by the Lipschitz constant times that."""
    net = ScaleChannels(backbone(32), GRID, 32).eval()
    f = blobs(10, 15, channels=3, batch=1)
    before, after = (net.patches(f.image(160, 160, t).float()) for t in (1.0, 2.0))
    constant = sensitivity(net.backbone, before[:, :-1].flatten(0, 1), after[:, 1:].flatten(0, 1))
    error = f.interpolation_error() + f.interpolation_error(2.0)
    with torch.no_grad():
        change = (net.answer(after)[:, 1:] - net.answer(before)[:, :-1]).abs()
    assert (change <= constant.unflatten(0, change.shape[:2]) * error[:, None, None]).all()
    right, wrong = (
        covariance_error(net, lambda t, p=p: f.image(160, 160, t**p).float(), 2.0) for p in (1, -1)
    )
    assert right.channels == 2
    assert right.max < wrong.max / 5


def test_the_state_dict_is_the_backbones_own(backbone):
    first, second = (ScaleChannels(backbone(32), GRID, 32).eval() for _ in range(2))
    inner = {f"backbone.{key}" for key in first.backbone.state_dict()}
    assert set(first.state_dict()) == inner
    second.load_state_dict(first.state_dict())
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(second(images), first(images), rtol=0, atol=0)
        fresh = backbone(32).eval()
        fresh.load_state_dict(first.backbone.state_dict())
        again = ScaleChannels(fresh, [1.0, 1.5, 2.0, 4.0], 32)
        torch.testing.assert_close(
            again.channels(images)[:, [0, 2, 3]], first.channels(images), atol=1e-5, rtol=1e-4
        )


def test_a_backbone_that_gives_more_than_logits_is_named():
    class Pair(nn.Flatten):
        def forward(self, patches):
            return super().forward(patches), None

    with pytest.raises(ConfigError, match="got tuple"):
        ScaleChannels(Pair(), GRID, 8)(torch.rand(1, 1, 16, 16))
