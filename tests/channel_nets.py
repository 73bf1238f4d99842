"""Small networks of scale channels for the tests, and what their errors say."""

from formulas import shake

from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels

FEW = (0.5, 1.0, 3.0)


def small_net(scales=FEW, pool="max", *, size=16, channels=1, classes=5, seed=0, **changes):
    backbone = ConvNet((4, 4), size, channels=channels, classes=classes, hidden=8)
    return shake(ScaleChannels(backbone, scales, size, pool, classes=classes, **changes), seed)


def one_line(error):
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message
