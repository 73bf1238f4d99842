"""Open finished runs by their folders, or pretrained networks by their names."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from foveate.models.pretrained import PretrainedInfo, pretrained_info, pretrained_names
from foveate.models.zoo import create_model
from foveate.training.checkpoint import MADE_WITH, RunFolder
from foveate.training.config import TrainConfig


class PretrainedRun(RunFolder):
    """A pretrained network of this package in place of a run folder; `path` is its name."""

    @property
    def _info(self) -> PretrainedInfo:
        return pretrained_info(str(self.path))

    def config(self) -> TrainConfig:
        """Return the configuration of the run."""
        info = self._info.to_dict()
        own = ("model", "source", "scales", "samples", "size", "seed")
        return TrainConfig.from_dict({**info["recipe"], **{key: info[key] for key in own}})

    def net(self, trust: bool = False) -> nn.Module:
        """Load the network; it runs no code, so `trust` has no effect."""
        return create_model(str(self.path), pretrained=True)

    def history(self) -> list[dict[str, str]]:
        """Return the version, commit and hardware of the run."""
        return [{key: str(getattr(self._info, key)) for key in MADE_WITH}]

    def data(self) -> dict[str, Any]:
        """Return an empty dictionary: the package has no record of the training data."""
        return {}


def open_run(ref: str | Path) -> RunFolder:
    """Open a finished run: a folder of ``foveate train``, or a pretrained network by its name.

    As in `load_model`, a folder takes precedence over a name.
    """
    known = str(ref) in pretrained_names() and not os.path.isdir(ref)
    return PretrainedRun(Path(ref)) if known else RunFolder(Path(ref))
