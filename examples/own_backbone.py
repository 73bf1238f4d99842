"""Train a timm, torchvision or MONAI backbone in scale channels with the training loop of foveate.

    python examples/own_backbone.py [FOLDER]

The data are the 5,000 digits that come with foveate. Training takes a minute on two cores; after an
interruption the same command resumes it. The equivalent command, run in the folder of this file, is

    foveate train fovavg --source mnist-5k --backbone own_backbone:backbone --out FOLDER

with the settings of ``CONFIG`` as options.
"""

import sys
from pathlib import Path
from typing import Any, cast

from torch import nn

from foveate.data.sources import load_source
from foveate.evaluation.curve import accuracy_over_scale
from foveate.models.zoo import model_config
from foveate.scales import ScaleGrid
from foveate.training.checkpoint import Progress
from foveate.training.config import TrainConfig
from foveate.training.loop import train


def backbone(channels: int, classes: int) -> nn.Module:
    """Create a small network with the first of timm, torchvision and MONAI that can be imported."""
    try:
        from timm import create_model

        net: nn.Module = create_model("resnet10t", in_chans=channels, num_classes=classes)
        return net
    except Exception:  # not installed, or built for another version of torch
        pass
    try:
        from torchvision.models import shufflenet_v2_x0_5

        small: Any = shufflenet_v2_x0_5(num_classes=classes)
        small.conv1[0] = nn.Conv2d(channels, 24, 3, stride=2, padding=1, bias=False)
        return cast(nn.Module, small)
    except Exception:
        from monai.networks.nets.densenet import DenseNet

        return DenseNet(2, channels, classes, init_features=16, growth_rate=8, block_config=(2, 2))


CONFIG = TrainConfig(
    model=model_config("fovavg", scales=ScaleGrid(1, 4, per_octave=1)),
    backbone="own_backbone:backbone",
    source="mnist-5k",
    scales="2",
    epochs=4,
)


def print_epoch(config: TrainConfig, progress: Progress, steps: int) -> None:
    """Print one line at the end of each epoch."""
    if progress.step == 0:
        last = progress.metrics[-1]
        print(f"epoch {progress.epoch}: loss {last['loss']:.3f}, accuracy {last['validation']:.1%}")


def main(folder: Path) -> None:
    run = train(CONFIG, folder, callback=print_epoch)
    test = load_source("mnist-5k").test
    for at in accuracy_over_scale(run.net(trust=True), test, [0.5, 1, 2, 4]):
        print(f"scale {at.scale:g}: accuracy {at.accuracy:.1%}; trained only on scale 2")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-backbone"))
