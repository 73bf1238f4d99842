"""Train a network, or several side by side on one device."""

from contextlib import nullcontext, suppress
from functools import lru_cache
from pathlib import Path

import torch

from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.execution.captured import wake_compiler
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import Load
from foveate.training.distributed import Team
from foveate.training.photos import default_workers
from foveate.training.session import ALONE, Session, Shared, Watch
from foveate.training.skipped import Bad, check_bad
from foveate.training.state import deterministic as repeatable


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
    changed_data: bool = False,
    deterministic: bool = True,
    workers: int | None = None,
    bad: Bad = "stop",
) -> RunFolder:
    """Train a network in `folder`, going on where an earlier call was interrupted.

    `recompute` is how many scale channels to train at a time where the activations of all do not
    fit in memory. `watch` is told after every step and every epoch how far the run is, and of how
    many steps an epoch has. Ctrl-C saves before it raises KeyboardInterrupt, and
    so does SIGTERM where a handler raises that or SystemExit. All processes of a
    `team` (see `foveate.training.distributed.joined`) call this alike; the first one writes.

    An interrupted run whose source changed since it was started is refused, unless `changed_data`
    says to go on with the source as it is now.

    `workers` is the number of processes that read pictures by the recipe `photo`; 0 reads them in
    this process, and None takes as many as there are cores. With `bad` "skip", pictures that cannot
    be used are left out and named in skipped.csv; otherwise the first one stops the run.

    On a GPU the same configuration gives the same weights to the bit, on the same kind of GPU and
    version of PyTorch. `deterministic=False` gives that up for speed.
    """
    shared = Shared(find_device(device), stream, compiled, watch, load, {}, recompute, team)
    shared = shared._replace(changed_data=changed_data, deterministic=deterministic)
    shared = shared._replace(workers=workers, bad=check_bad(bad, config, team.count))
    return _train([(config, folder)], shared)[0]


def train_together(
    runs: list[tuple[TrainConfig, Path]],
    *,
    device: str = "cpu",
    stream: bool = False,
    compiled: bool = True,
    watch: Watch = lambda config, progress, steps: None,
    load: Load = load_source,
    deterministic: bool = True,
    bad: Bad = "stop",
) -> list[RunFolder]:
    """Train several networks side by side on one device, some steps of each in turn.

    `bad` is for those of them that have the recipe `photo`; the other arguments are as in `train`.

    On a GPU every run has a stream and random states of its own, so that together they fill the
    GPU and each ends with the weights that it would have alone.
    """
    shared = Shared(find_device(device), stream, compiled, watch, load, {})
    workers = default_workers(len(runs))
    return _train(runs, shared._replace(deterministic=deterministic, workers=workers, bad=bad))


def _train(runs: list[tuple[TrainConfig, Path]], shared: Shared) -> list[RunFolder]:
    if shared.compiled and shared.device.type == "cuda":
        wake_compiler()
    shared = shared._replace(load=lru_cache(maxsize=1)(shared.load))
    sessions = [Session(config, RunFolder(folder), shared) for config, folder in runs]
    active = [session.steps() for session in sessions]
    fixed = shared.deterministic and shared.device.type == "cuda"
    others = any(config.backbone for config, _ in runs)
    with repeatable(strict=others) if fixed else nullcontext():
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
