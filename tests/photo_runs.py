"""Small runs on the photographs of tests/data, in this process and as a command."""

import sys
from pathlib import Path

from torchvision_ops import declare_missing

PHOTOGRAPHS = Path(__file__).parent / "data" / "photographs"
SOURCE = f"folder:{PHOTOGRAPHS}"
MODEL = {"model.size": "16", "model.features": "[4,8]", "model.hidden": "8"}
SETTINGS = {**MODEL, "model.scales": "1:4:1", "recipe": "photo", "recipe.base": "48"}
SETTINGS |= {"recipe.shift": "6", "batch": "10", "epochs": "3", "source": SOURCE}


def photo_config(**changes):
    """Three windows of 16 to 64 pixels in pictures with a short side of 48: 3 steps an epoch."""
    from foveate.data.sources import load_source
    from foveate.training.data import adapt_to_source
    from foveate.training.presets import preset

    changes = {key.replace("__", "."): value for key, value in changes.items()}
    given = {**SETTINGS, **changes}
    return adapt_to_source(preset("fovavg").changed(given), load_source, given)


def backbone(channels, classes):
    """A network of one's own, for --backbone photo_runs:backbone."""
    from torch import nn

    convolution = nn.Conv2d(channels, 6, 3, stride=2)
    return nn.Sequential(
        convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes)
    )


def command(out, *options):
    """The arguments of `foveate train` for the same run."""
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    return ["train", "fovavg", *settings, "--device", "cpu", "--out", str(out), *options]


if __name__ == "__main__":
    declare_missing()
    from foveate.cli import main

    sys.argv[1:] = command(*sys.argv[1:])
    main()
