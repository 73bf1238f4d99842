"""A job, one run to train and to test over scale, and its outcome, stored in the run folder."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

import torch

from foveate.checks import check_fields
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.curve import AtScale
from foveate.evaluation.test_sets import open_test_set
from foveate.files import parse_json, read_text, write_text
from foveate.sweeps.records import Record, Winners
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import Load, is_photo
from foveate.training.loop import train_together
from foveate.training.session import Callback
from foveate.training.skipped import Bad, add_skipped

OUTCOME = "outcome.json"
MAX_SEEDS = 1000  # per configuration


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, and the scales at which its network is tested afterwards.

    Args:
        name: Name of the configuration; jobs that differ only in their seed share it.
        config: Training configuration, which includes the seed.
        scales: Test scales.
        rows: Rows of the results, as (table, row), to which the job contributes its seed.

    Examples:
        >>> from foveate.training.presets import preset
        >>> rows = (("pooling", "fovmax"),)
        >>> job = Job(name="fovmax", config=preset("fovmax"), scales=(0.5, 1.0, 2.0), rows=rows)
        >>> job.folder
        'fovmax-s0'
    """

    name: str
    config: TrainConfig
    scales: tuple[float, ...]
    rows: tuple[tuple[str, str], ...]

    @property
    def folder(self) -> str:
        """Name of the run folder inside the folder of the study."""
        return f"{self.name}-s{self.config.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a finished job.

    Attributes:
        name: Name of the job.
        seed: Random seed of the run.
        config: Digest of the training configuration.
        validation: Validation accuracy, 0 to 1.
        seconds: Training and test time in seconds, including the time before an interruption. For
            runs trained side by side it is the run's share of the time.
        memory: Peak memory of the process in MiB; 0 on Windows, which has no `resource` module.
        version: Version of foveate.
        commit: Commit of foveate.
        hardware: Name of the device.
        scales: Test results, one per scale.
    """

    name: str
    seed: int
    config: str
    validation: float
    seconds: float
    memory: int
    version: str
    commit: str
    hardware: str
    scales: tuple[AtScale, ...]

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """Read the outcome.json of a run."""
        try:
            values = parse_json(read_text(path))
            outcome = cls(**{**values, "scales": tuple(map(AtScale.from_dict, values["scales"]))})
            check_fields(outcome)
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            remedy = "remove it to test the run again"
            raise DataError(f"{path} is damaged ({error}); {remedy}") from None
        return outcome


def perform(
    jobs: Sequence[Job],
    folder: Path,
    *,
    device: str = "cpu",
    threads: int = 0,
    at_once: int = 1,
    callback: Callback = lambda config, progress, steps: None,
    load: Load = load_source,
    bad: Bad = "stop",
) -> list[Outcome]:
    """Train runs side by side, test them, and write outcome.json into each run folder.

    Args:
        jobs: The jobs.
        folder: Folder of the study, which contains the run folders.
        device: Device to train and test on.
        threads: CPU threads of torch, or 0 for the default of torch. The number of threads changes
            rounding errors.
        at_once: Number of processes that share the GPU, including this one.
        callback: Function called after every training step.
        load: Function that loads a source by name.
        bad: "stop" to stop at a photograph that cannot be read, or "skip" to leave it out of
            training and test and list it in skipped.csv of the run.

    Returns:
        The outcomes, in the order of `jobs`.
    """
    load = lru_cache(maxsize=1)(load)
    with _using_threads(threads):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        runs = [(job.config, folder / job.folder) for job in jobs]
        trained = train_together(runs, device=device, callback=callback, load=load, bad=bad)
        return [
            _finish(job, run, device, at_once, load, bad)
            for job, run in zip(jobs, trained, strict=True)
        ]


@contextmanager
def _using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finish(job: Job, run: RunFolder, device: str, at_once: int, load: Load, bad: Bad) -> Outcome:
    """Test a trained run and write its outcome."""
    begun, last = time.perf_counter(), run.metrics()[-1]
    if (accuracy := run.validation()) is None:
        raise DataError(f"{run.path} has no validation accuracy; remove the folder and train again")
    scales = _test(job, run, device, load, bad)
    seconds = (last["share"] + time.perf_counter() - begun) / at_once
    outcome = Outcome(
        name=job.name,
        seed=job.config.seed,
        config=job.config.digest(),
        validation=accuracy,
        seconds=round(seconds, 3),
        memory=_peak_memory(device),
        scales=scales,
        **run.provenance(),
    )
    write_text(run.path / OUTCOME, json.dumps(asdict(outcome)) + "\n")
    return outcome


def find_outcome(job: Job, folder: Path) -> Outcome | None:
    """Return the outcome of a job, or None if it is not finished at all of its scales.

    Raises:
        ConfigError: If the folder contains a run of the same name with another configuration.
    """
    run = RunFolder(folder / job.folder)
    path = run.path / OUTCOME
    found = Outcome.read(path) if path.exists() else None
    digests = {found.config} if found else set()
    if (run.path / "config.json").exists():
        digests.add(run.config().digest())
    if digests - {job.config.digest()}:
        raise ConfigError(
            f"{run.path} contains a run named {job.name} with other settings; choose another --out"
        )
    tested = {at.scale for at in found.scales} if found else set()
    return found if tested >= set(job.scales) else None


def make_records(job: Job, outcome: Outcome) -> list[Record]:
    """Return the records of a finished job, one per row and scale."""
    shared = {f.name for f in fields(Record)} & vars(outcome).keys()
    how = {name: getattr(outcome, name) for name in shared}
    return [
        Record(table=table, row=row, scale=at.scale, accuracy=at.accuracy, **how)
        for table, row in job.rows
        for at in outcome.scales
    ]


def make_winners(job: Job, outcome: Outcome) -> list[Winners]:
    """Return how often each scale channel won at each test scale; empty without channels."""
    channels = tuple(job.config.model.scales)
    return [
        Winners(row=job.name, seed=outcome.seed, scale=at.scale, channel=channel, count=count)
        for at in outcome.scales
        for channel, count in zip(channels, at.winners, strict=False)
    ]


def _test(job: Job, run: RunFolder, device: str, load: Load, bad: Bad) -> tuple[AtScale, ...]:
    # Trusted: training has checked that config.json is the configuration of this job.
    net = run.net(trust=bool(job.config.backbone)).to(device)
    tests = open_test_set(run, load, bad=bad if is_photo(job.config) else "stop")
    found = tests.measure(net, job.scales)
    add_skipped(run.path, tests.skipped)
    return found


def _peak_memory(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() >> 20
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)  # bytes on macOS, KiB on Linux
