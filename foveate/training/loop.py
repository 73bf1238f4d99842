"""Train a network, or several side by side on one device."""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import Load
from foveate.training.distributed import Team
from foveate.training.engine import wake_compiler
from foveate.training.session import ALONE, Session, Shared, Watch


def train(
    config: TrainConfig,
    folder: Path,
    *,
    device: str = "cpu",
    stream: bool = False,
    compiled: bool = True,
    recompute: int = 0,
    watch: Watch = lambda config, progress, steps: None,
    load: Load = load_source,
    team: Team = ALONE,
) -> RunFolder:
    """Train a network in `folder`, going on where an earlier call was interrupted.

    `recompute` is how many scale channels to train at a time where the activations of all do not
    fit in memory. `watch` is told after every step and every epoch how far the run is, and of how
    many steps an epoch has. Ctrl-C saves before it raises KeyboardInterrupt. All processes of a
    `team` (see `foveate.training.distributed.joined`) call this alike; the first one writes.
    """
    shared = Shared(find_device(device), stream, compiled, watch, load, {}, recompute, team)
    return _train([(config, folder)], shared)[0]


def train_together(
    runs: list[tuple[TrainConfig, Path]],
    *,
    device: str = "cpu",
    stream: bool = False,
    compiled: bool = True,
    watch: Watch = lambda config, progress, steps: None,
    load: Load = load_source,
) -> list[RunFolder]:
    """Train several networks side by side on one device, some steps of each in turn.

    On a GPU every run has a stream of its own, so that they fill it together.
    """
    load = lru_cache(maxsize=1)(load)
    return _train(runs, Shared(find_device(device), stream, compiled, watch, load, {}))


def _train(runs: list[tuple[TrainConfig, Path]], shared: Shared) -> list[RunFolder]:
    if shared.compiled and shared.device.type == "cuda":
        wake_compiler()
    sessions = [Session(config, RunFolder(folder), shared) for config, folder in runs]
    active = [session.steps() for session in sessions]
    try:
        while active:
            active = [steps for steps in active if next(steps, "done") != "done"]
    finally:
        for steps in active:
            with suppress(FoveateError):  # the error that is under way says more
                steps.close()
    return [session.folder for session in sessions]


def find_device(name: str) -> torch.device:
    """Check that the device is there; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"no device is called {name!r}; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"networks run on cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU was found; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no {name}, only {torch.cuda.device_count()} GPUs, from cuda:0")
    return device
