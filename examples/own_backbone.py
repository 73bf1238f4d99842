"""Train a backbone of your own in scale channels with the training loop of foveate.

    python examples/own_backbone.py [FOLDER]

The data are the 5,000 digits that come with foveate. Training takes a minute on two cores; after an
interruption the same command resumes it. Requires foveate[photos]. The equivalent command, run in
the folder of this file, is

    foveate train fovavg --source mnist-5k --backbone own_backbone:backbone --out FOLDER

with the settings of ``CONFIG`` as options.
"""

import sys
from pathlib import Path

import timm
from torch import nn

from foveate.data.sources import load_source
from foveate.evaluation.curve import accuracy_over_scale
from foveate.models.zoo import model_config
from foveate.scales import ScaleGrid
from foveate.training.checkpoint import Progress
from foveate.training.config import TrainConfig
from foveate.training.loop import train


def backbone(channels: int, classes: int) -> nn.Module:
    """Create a small network."""
    net: nn.Module = timm.create_model("resnet10t", in_chans=channels, num_classes=classes)
    return net


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
