"""Train a timm, torchvision or MONAI backbone on flowers of one size and test it on other sizes.

    python examples/any_backbone.py

The flowers are generated; the classes are the numbers of petals: 3, 4, 5 and 6. The program takes
ten seconds on two cores.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.models.channels import ScaleChannels
from foveate.scales import ScaleGrid


def backbone() -> tuple[str, nn.Module]:
    """Create a classifier for RGB images from the first library that can be imported."""
    try:
        from timm import create_model

        return "timm's resnet10t", create_model("resnet10t", num_classes=4)
    except Exception:  # not installed, or built for another version of torch
        pass
    try:
        from torchvision.models import resnet18

        return "torchvision's resnet18", resnet18(num_classes=4)
    except Exception:
        from monai.networks.nets.densenet import DenseNet

        return "MONAI's DenseNet", DenseNet(
            2, 3, 4, init_features=16, growth_rate=8, block_config=(2, 2)
        )


def flowers(size: float, count: int) -> tuple[Tensor, Tensor]:
    """Draw flowers `size` pixels wide, slightly rotated: images (B, 3, 192, 192) and labels."""
    labels = torch.randint(4, (count,))
    turn, depth = 0.4 * torch.rand(count, 1, 1), 0.1 + 0.05 * torch.rand(count, 1, 1)
    at = (torch.arange(192) + 0.5 - 96) / size
    angle, radius = torch.atan2(at[:, None], at), torch.hypot(at[:, None], at)
    edge = 0.33 + depth * torch.cos((labels.view(-1, 1, 1) + 3) * (angle + turn))
    shape = (0.5 + 8 * (edge - radius)).clamp(0, 1).unsqueeze(1)
    return shape * (0.3 + torch.rand(count, 3, 1, 1)), labels


def main() -> None:
    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # ten times faster on a CPU: most pixels are 0
    name, inner = backbone()
    net = ScaleChannels(inner, ScaleGrid(0.5, 4, per_octave=2), size=32, pool="max")
    print(f"{name} in {net.extra_repr()}; training on flowers of 48 pixels")
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(100):
        images, labels = flowers(48, 16)
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    net.eval()
    net.scales = ScaleGrid(0.5, 8, per_octave=4)  # a wider and denser grid than in training
    for size in (24, 48, 96):
        images, labels = flowers(size, 64)
        with torch.no_grad():
            correct, scales = (net(images).argmax(1) == labels).sum(), net.select_scale(images)
        print(f"{size:3d} pixels: {correct} of 64 correct, median scale {scales.median():.2f}")


if __name__ == "__main__":
    main()
