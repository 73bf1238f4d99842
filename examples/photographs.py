"""Fine-tune a timm backbone on a folder of photographs with a plain PyTorch loop.

    python examples/photographs.py clothes

``clothes`` has the subfolders ``train`` and ``test``, each with a subfolder of photographs per
class. The program trains the same backbone twice on photographs of one size: on the whole frame, as
usual, and in scale channels. It prints the accuracy of both at several sizes.
"""

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import foveate

SIZES = (0.25, 0.5, 1.0, 2.0)  # size of the test photographs, in units of the training size


def photographs(folder: Path, side: int, config: dict[str, Any], batch: int) -> DataLoader[Any]:
    """Load square photographs of `side` pixels, normalised as the backbone expects."""
    training = folder.name == "train"
    steps = [
        v2.RGB(),
        v2.Resize(side),
        v2.CenterCrop(side),  # images of a batch have one shape; `foveate train` does not crop
        v2.RandomHorizontalFlip(0.5 if training else 0.0),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(config["mean"], config["std"]),
    ]
    images = ImageFolder(folder, v2.Compose(steps))
    return DataLoader(images, batch, shuffle=training, drop_last=training)


def pretrained(name: str, weights: str, classes: int) -> Any:
    """Create a timm model whose new classifier is zero, so that all classes have equal logits."""
    path = "" if weights in ("imagenet", "none") else weights
    net: Any = timm.create_model(name, pretrained=weights == "imagenet", checkpoint_path=path)
    net.reset_classifier(classes)
    for parameter in net.get_classifier().parameters():
        nn.init.zeros_(parameter)
    return net.to(memory_format=torch.channels_last)


def train(net: nn.Module, batches: DataLoader[Any], epochs: int, device: torch.device) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-4, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 6e-4, total_steps=epochs * len(batches))
    for _ in range(epochs):
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            F.cross_entropy(net.train()(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(net: nn.Module, batches: DataLoader[Any], device: torch.device) -> float:
    right = [net.eval()(x.to(device)).argmax(1).cpu() == labels for x, labels in batches]
    return float(torch.cat(right).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="folder with train/ and test/")
    parser.add_argument("--backbone", default="tf_efficientnet_lite0", help="timm model")
    parser.add_argument("--weights", default="imagenet", help="imagenet (default), none or a file")
    parser.add_argument("--base", type=int, default=224, help="photograph size (default: 224)")
    parser.add_argument("--patch", type=int, default=160, help="patch size (default: 160)")
    parser.add_argument("--epochs", type=int, default=12, help="number of epochs (default: 12)")
    parser.add_argument("--batch", type=int, default=32, help="batch size (default: 32)")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classes, frame = sum(p.is_dir() for p in (given.folder / "train").iterdir()), 2 * given.base
    windows = {"whole frame": (frame, frame, frame), "channels": (frame / 8, frame, given.patch)}
    print("".join(f"{size:>8g}" for size in SIZES), " times the training size")
    for name, (smallest, largest, size) in windows.items():
        torch.manual_seed(0)
        backbone = pretrained(given.backbone, given.weights, classes)
        net = foveate.wrap(backbone, smallest, largest, size=size).to(device)
        options = (backbone.pretrained_cfg, given.batch)
        train(net, photographs(given.folder / "train", given.base, *options), given.epochs, device)
        for scale in SIZES:
            test = photographs(given.folder / "test", round(scale * given.base), *options)
            print(f"{100 * accuracy(net, test, device):8.1f}", end="", flush=True)
        print(f"  % correct, {name}: {net.extra_repr()}")


if __name__ == "__main__":
    main()
