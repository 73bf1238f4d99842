"""Train one network, or several in parallel on one device."""

from contextlib import nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import get_args

import torch

from foveate.checks import check_choice
from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.execution.captured import warm_up_compiler
from foveate.training.checkpoint import RunFolder, RunWriter
from foveate.training.config import TrainConfig
from foveate.training.data import Load
from foveate.training.distributed import Team
from foveate.training.photos import default_workers
from foveate.training.session import ALONE, Callback, Session, Shared
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
    callback: Callback = lambda config, progress, steps: None,
    load: Load = load_source,
    team: Team = ALONE,
    changed_data: bool = False,
    deterministic: bool = True,
    workers: int | None = None,
    bad: Bad = "stop",
) -> RunFolder:
    """Train a network, or resume an interrupted run.

    The run is saved in ``folder`` regularly. Ctrl-C saves the run and raises KeyboardInterrupt;
    SIGTERM does the same if its handler raises KeyboardInterrupt or SystemExit. A call with the
    same arguments then resumes the run. A finished run is not trained again.

    Args:
        config: Configuration of the run.
        folder: Folder of the run; created if missing.
        device: ``cpu``, ``cuda``, ``cuda:INDEX``, or ``auto`` for a GPU if there is one.
        stream: Whether to read images from disk on demand instead of holding them all in memory.
        compiled: Whether to compile the training step on a GPU, if the network has no kernels of
            its own for it.
        recompute: Number of scale channels to train at a time if the activations of all channels
            do not fit in memory; 0 trains all at once.
        callback: Called after every step and every epoch with the configuration, the progress, and
            the number of steps per epoch.
        load: Function that loads a source by name.
        team: The processes that train together, as `foveate.training.distributed.join_processes`
            yields them. Each calls this function with the same arguments.
        changed_data: Whether to resume a run whose data source has changed since it was started.
        deterministic: Whether a GPU computes bit-for-bit reproducible weights, for the same model
            of GPU and version of PyTorch. ``False`` is faster.
        workers: Number of processes that load images for the recipe ``photo``; 0 loads them in
            this process, ``None`` uses one per core, up to eight.
        bad: Treatment of images that cannot be used, for the recipe ``photo``: ``stop`` raises an
            error at the first one, ``skip`` leaves them out and lists them in ``skipped.csv``.

    Returns:
        The folder of the finished run.

    Raises:
        ConfigError: If an option is invalid, or the folder has a run of another configuration.
        DataError: If the data is missing, damaged, or changed since the run was started.
        FoveateError: If the loss is not finite.

    Examples:
        >>> config = TrainConfig(source="mnist-5k", samples=64, epochs=1)
        >>> run = train(config, Path("runs/first"))
        >>> run.finished
        True
        >>> net = run.net().eval()
        >>> net(torch.zeros(1, 1, 112, 112)).shape
        torch.Size([1, 10])
    """
    bad = check_bad(bad, config, team.count)
    how = (recompute, team, changed_data, deterministic, workers, bad)
    shared = Shared(find_device(device), stream, compiled, callback, load, {}, *how)
    return _train([(config, folder)], shared)[0]


def train_together(
    runs: list[tuple[TrainConfig, Path]],
    *,
    device: str = "cpu",
    stream: bool = False,
    compiled: bool = True,
    callback: Callback = lambda config, progress, steps: None,
    load: Load = load_source,
    deterministic: bool = True,
    bad: Bad = "stop",
) -> list[RunFolder]:
    """Train several networks in parallel on one device, taking a few steps of each in turn.

    On a GPU, every run has its own CUDA stream and random state. Together the runs use the GPU
    better than one alone, and each ends with the same weights as if it were trained alone.

    Args:
        runs: Configuration and folder of each run.
        device: ``cpu``, ``cuda``, ``cuda:INDEX``, or ``auto`` for a GPU if there is one.
        stream: Whether to read images from disk on demand instead of holding them all in memory.
        compiled: Whether to compile the training step on a GPU, if the network has no kernels of
            its own for it.
        callback: Called after every step and every epoch of a run with its configuration, its
            progress, and the number of steps per epoch.
        load: Function that loads a source by name.
        deterministic: Whether a GPU computes bit-for-bit reproducible weights.
        bad: Treatment of images that cannot be used, for runs with the recipe ``photo``: ``stop``
            or ``skip``.

    Returns:
        The folders of the finished runs.

    Raises:
        ConfigError: If an option is invalid, or a folder has a run of another configuration.
        DataError: If the data of a run is missing, damaged, or changed since it was started.
        FoveateError: If the loss of a run is not finite.

    Examples:
        >>> from dataclasses import replace
        >>> config = TrainConfig(source="mnist-5k", samples=64, epochs=1)
        >>> seeds = [(replace(config, seed=seed), Path(f"runs/seed{seed}")) for seed in (0, 1)]
        >>> [run.finished for run in train_together(seeds)]
        [True, True]
    """
    check_choice("bad", bad, get_args(Bad))  # only runs on photographs use it
    shared = Shared(find_device(device), stream, compiled, callback, load, {})
    workers = default_workers(len(runs))
    return _train(runs, shared._replace(deterministic=deterministic, workers=workers, bad=bad))


def _train(runs: list[tuple[TrainConfig, Path]], shared: Shared) -> list[RunFolder]:
    gpu = shared.device.type == "cuda"
    if shared.compiled and gpu and any(_is_compiled(config) for config, _ in runs):
        warm_up_compiler()
    shared = shared._replace(load=lru_cache(maxsize=1)(shared.load))
    sessions = [Session(config, RunWriter(folder), shared) for config, folder in runs]
    active = [session.steps() for session in sessions]
    others = any(config.backbone for config, _ in runs)
    with (
        torch.cuda.device(shared.device) if gpu else nullcontext(),  # new streams belong to it
        repeatable(strict=others) if gpu and shared.deterministic else nullcontext(),
    ):
        try:
            while active:
                active = [steps for steps in active if next(steps, "done") != "done"]
        finally:
            for steps in active:
                with suppress(FoveateError):  # the error being raised is more informative
                    steps.close()
    return [session.folder for session in sessions]


def _is_compiled(config: TrainConfig) -> bool:
    """Whether a run is probably compiled: most backbones are not, and `fused` needs no compiler."""
    return not config.backbone and config.precision != "bf16"


def find_device(name: str) -> torch.device:
    """Return a device by name, or raise a ConfigError if this machine does not have it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU was found; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} was not found; this machine has {torch.cuda.device_count()} GPUs, "
            "numbered from cuda:0"
        )
    return device
