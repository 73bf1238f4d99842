"""Backbones that others wrote, by name: of timm, torchvision and MONAI, with random weights."""

from importlib.util import find_spec

import timm
from torchvision import models

CLASSES, SIZE = 5, 32


def of_timm(name, **changes):
    return lambda: timm.create_model(name, num_classes=CLASSES, **changes)


def monai_resnet():
    from monai.networks import nets

    sizes = {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [8, 16, 16, 32]}
    return nets.ResNet(**sizes, spatial_dims=2, n_input_channels=3, num_classes=CLASSES)


def monai_efficientnet():
    from monai.networks import nets

    blocks = ["r1_k3_s11_e1_i32_o8_se0.25", "r1_k3_s22_e3_i8_o12_se0.25"]
    return nets.EfficientNet(blocks, 2, 3, CLASSES, depth_coefficient=1.0)


OTHERS = {
    "timm resnet18": of_timm("resnet18"),
    "timm efficientnet_b0": of_timm("efficientnet_b0"),
    "timm mobilenetv3_small_100": of_timm("mobilenetv3_small_100"),
    "timm convnext_atto": of_timm("convnext_atto"),
    "timm vit_tiny": of_timm("vit_tiny_patch16_224", img_size=SIZE),
    "timm swin_tiny": of_timm("swin_tiny_patch4_window7_224", img_size=SIZE, window_size=4),
    "timm regnetx_002": of_timm("regnetx_002"),
    "timm densenet121": of_timm("densenet121"),
    "timm tf_efficientnet_lite0": of_timm("tf_efficientnet_lite0"),
    "torchvision resnet18": lambda: models.resnet18(num_classes=CLASSES),
    "torchvision mobilenet_v3_small": lambda: models.mobilenet_v3_small(num_classes=CLASSES),
}
if find_spec("monai"):  # a GPU machine may be without it
    OTHERS |= {"monai resnet": monai_resnet, "monai efficientnet": monai_efficientnet}
SWIN = {"img_size": SIZE, "window_size": 4, "depths": (1, 1, 1, 1)}
# The same with fewer blocks, where time grows with their number or its square: an export takes 20 s
# of a whole densenet121, recomputing it 244 passes.
SHALLOW = {
    **OTHERS,
    "timm convnext_atto": of_timm("convnext_atto", depths=(1, 1, 1, 1)),
    "timm vit_tiny": of_timm("vit_tiny_patch16_224", img_size=SIZE, depth=2),
    "timm swin_tiny": of_timm("swin_tiny_patch4_window7_224", **SWIN),
    "timm densenet121": of_timm("densenet121", block_config=(2, 1, 1, 1)),
}


def quiet(net):
    """Switch off all that draws random numbers in training: dropout of units and of blocks."""
    for module in net.modules():
        for name in ("p", "drop_prob", "drop_rate", "_drop_connect_rate", "drop_connect_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return net
