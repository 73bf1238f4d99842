"""A job: a run to train and to test over scale, and the outcome that is stored in its folder."""

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
from foveate.training.session import Watch
from foveate.training.skipped import Bad, add_skipped

OUTCOME = "outcome.json"
MAX_SEEDS = 1000  # of one configuration


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to train, and the scales at which its network is tested afterwards.

    `rows` are the rows (table, name) of which it is one seed.
    """

    name: str
    config: TrainConfig
    scales: tuple[float, ...]
    rows: tuple[tuple[str, str], ...]

    @property
    def folder(self) -> str:
        """The folder of the run within that of the study."""
        return f"{self.name}-s{self.config.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job gave.

    `seconds` is its share of the machine's time, training and testing, also before an interruption.
    `memory` is the peak, in MiB, of the process; 0 on Windows, which has no `resource`.
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
            words = "remove it to test the run again"
            raise DataError(f"{path} is damaged ({error}); {words}") from None
        return outcome


def perform(
    jobs: Sequence[Job],
    folder: Path,
    *,
    device: str = "cpu",
    threads: int = 0,
    at_once: int = 1,
    watch: Watch = lambda config, progress, steps: None,
    load: Load = load_source,
    bad: Bad = "stop",
) -> list[Outcome]:
    """Train the runs side by side, test them, and write an outcome into the folder of each.

    Args:
        jobs: The runs.
        folder: The study's folder; each run gets a folder in it.
        device: Where to train and to test.
        threads: CPU threads of torch, 0 for its own choice. Their number changes the rounding.
        at_once: The number of processes that share the GPU, this one included.
        watch: Called after every training step.
        load: Loads a source by its name.
        bad: Whether a photograph that cannot be used stops its run, or is left out of training and
            tests and named in the run's skipped.csv.
    """
    load = lru_cache(maxsize=1)(load)
    with _using_threads(threads):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        runs = [(job.config, folder / job.folder) for job in jobs]
        trained = train_together(runs, device=device, watch=watch, load=load, bad=bad)
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
        raise DataError(f"{run.path} has no validation accuracy; remove it and train again")
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
        **run.about(),
    )
    write_text(run.path / OUTCOME, json.dumps(asdict(outcome)) + "\n")
    return outcome


def outcome_of(job: Job, folder: Path) -> Outcome | None:
    """What the job gave, if it is done; a folder with another run of that name is an error."""
    run = RunFolder(folder / job.folder)
    path = run.path / OUTCOME
    found = Outcome.read(path) if path.exists() else None
    digests = {found.config} if found else set()
    if (run.path / "config.json").exists():
        digests.add(run.config().digest())
    if digests - {job.config.digest()}:
        raise ConfigError(
            f"{run.path} has another run of the name {job.name}; choose another --out"
        )
    tested = {at.scale for at in found.scales} if found else set()
    return found if tested >= set(job.scales) else None


def records_of(job: Job, outcome: Outcome) -> list[Record]:
    """A line for every row of the job and every scale."""
    shared = {f.name for f in fields(Record)} & vars(outcome).keys()
    how = {name: getattr(outcome, name) for name in shared}
    return [
        Record(table=table, row=row, scale=at.scale, accuracy=at.accuracy, **how)
        for table, row in job.rows
        for at in outcome.scales
    ]


def winners_of(job: Job, outcome: Outcome) -> list[Winners]:
    """How often each channel won, at every scale; nothing for networks without channels."""
    channels = tuple(job.config.model.scales)
    return [
        Winners(row=job.name, seed=outcome.seed, scale=at.scale, channel=channel, count=count)
        for at in outcome.scales
        for channel, count in zip(channels, at.winners, strict=False)
    ]


def _test(job: Job, run: RunFolder, device: str, load: Load, bad: Bad) -> tuple[AtScale, ...]:
    # `claim` made sure that config.json is the job's.
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
    return peak >> (20 if sys.platform == "darwin" else 10)  # macOS counts bytes, Linux KiB
