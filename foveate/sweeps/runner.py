"""A study, which is a folder of runs with one table of results, and the engines that run it."""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from filelock import FileLock

from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.sweeps.jobs import Job, Outcome, find_outcome, make_records, make_winners, perform
from foveate.sweeps.records import (
    RESULTS,
    Record,
    Winners,
    merge_records,
    read_records,
    read_winners,
    write_results,
)
from foveate.training.checkpoint import BusyError, RunWriter
from foveate.training.data import Load
from foveate.training.loop import find_device
from foveate.training.session import Callback
from foveate.training.skipped import Bad

# Runs trained at once on a GPU. On one H200, the steps of a run of FovAvg take 6.0 s with three at
# once and 4.5 s with six. The images of two rows, which six runs usually have, take about 22 GB.
RUNS_PER_GPU, MORE_RUNS, MUCH_MEMORY = 3, 6, 40e9
# Writing the table takes at most 1/20 of the time; for 1,000 runs a write takes 2 s.
WRITE_INTERVAL_FACTOR = 20
TABLE_LOCK = ".results.lock"  # held to write the table
CLAIMS = ".claims"  # folder of the locks on runs that a local process works on
LOOK_EVERY = 1.0  # seconds between looks at the runs of other processes


class Failure(NamedTuple):
    """A job that ended with an error."""

    job: Job
    reason: str


class Done(NamedTuple):
    """A job that finished."""

    job: Job
    outcome: Outcome


JobResult: TypeAlias = Done | Failure


def describe_failure(error: Exception) -> str:
    """Return the reason why a run failed, as one line."""
    message = " ".join(str(error).split())
    return message if isinstance(error, FoveateError) else f"{type(error).__name__}: {message}"


class Engine(Protocol):
    """Performs jobs, in any order and on any machine."""

    def check(self) -> None:
        """Raise a ConfigError if a run requires more resources than any machine has."""

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[JobResult]:
        """Perform all jobs in `folder`, and yield one `Done` or `Failure` for each."""


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """Performs jobs in this process on one device: in parallel on a GPU, one by one on a CPU.

    Several processes can share the jobs of a folder. Each of them claims the jobs that it performs,
    and yields the results of all. If one is killed, the others perform its jobs.
    """

    device: str = "cpu"
    together: int = 0
    cpus: int = 0
    callback: Callback = field(default=lambda config, progress, steps: None)
    load: Load = load_source
    bad: Bad = "stop"

    def check(self) -> None:
        """Raise a ConfigError if the machine lacks the device or the CPU cores."""
        find_device(self.device)
        there = os.cpu_count() or 1
        if self.cpus > there:
            asked = f"a run requires {self.cpus} CPUs"
            raise ConfigError(f"{asked}, but this machine has {there}; lower resources.cpus")

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[JobResult]:
        """Perform the jobs in groups; the runs of a failed group are retried one by one."""
        engine = replace(self, load=lru_cache(maxsize=1)(self.load))  # groups use the same images
        left, place, due = dict(enumerate(jobs)), 0, 0.0
        while left:
            if time.monotonic() >= due:
                for number, job in list(left.items()):
                    if outcome := find_outcome(job, folder):  # of another process
                        yield Done(left.pop(number), outcome)
                due = time.monotonic() + LOOK_EVERY
            together = self.together or _runs_at_once(self.device, jobs[place : place + MORE_RUNS])
            with ExitStack() as claims:
                numbers = range(place, place + together)
                group = [n for n in numbers if n in left and _claim(jobs[n], folder, claims)]
                if group:
                    yield from engine._perform([left.pop(n) for n in group], folder)
            place += together
            if not group and left:
                place, due = _free_place(left, folder), 0.0

    def _perform(self, group: Sequence[Job], folder: Path) -> Iterator[JobResult]:
        shown: dict[str, Any] = {"callback": self.callback, "load": self.load, "bad": self.bad}
        try:
            found = perform(group, folder, device=self.device, threads=self.cpus, **shown)
        except Exception as error:  # a custom backbone can raise anything
            reason = describe_failure(error)
        else:
            yield from map(Done, group, found)
            return
        # Not in the handler: the traceback would keep the networks of the failed runs in memory.
        if len(group) == 1:
            yield Failure(group[0], reason)
        else:  # it is not known which one failed
            for job in group:
                yield from self._perform([job], folder)


def _claim(job: Job, folder: Path, claims: ExitStack) -> bool:
    """Claim a job until `claims` is closed; False if another process has it or has finished it.

    Workers of Ray and `foveate train` make no claim, but they lock the run that they train.
    """
    run = RunWriter(folder / job.folder)
    try:
        claims.enter_context(RunWriter(folder / CLAIMS / job.folder).locked())
        with run.locked() if run.path.exists() else nullcontext():
            pass
    except BusyError:
        return False
    return find_outcome(job, folder) is None


def _free_place(left: Mapping[int, Job], folder: Path) -> int:
    """Return the number of a job that no process has; if there is none, wait, then return 0."""
    free = []
    for number, job in left.items():
        with ExitStack() as claims:
            free += [number] if _claim(job, folder, claims) else []
    if not free:
        time.sleep(LOOK_EVERY)
    return _middle_of_gap(free) if free else 0


def _middle_of_gap(free: Collection[int]) -> int:
    """Return the middle of the longest sequence of consecutive numbers.

    There, a process meets the jobs of others late. Neighbouring jobs share images and kernels.
    """
    first: dict[int, int] = {}
    for number in sorted(free):
        first[number] = first.get(number - 1, number)
    last, begin = max(first.items(), key=lambda item: item[0] - item[1])
    return (begin + last + 1) // 2


def _runs_at_once(device: str, jobs: Sequence[Job]) -> int:
    """Return the number of runs to train in parallel: fewer for SWMax and other backbones."""
    if not device.startswith("cuda"):
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    configs = [job.config for job in jobs]
    small = not any(c.backbone or c.model.form == "sliding" for c in configs)
    return MORE_RUNS if small and memory > MUCH_MEMORY else RUNS_PER_GPU


def make_engine(
    name: str,
    *,
    device: str = "cpu",
    together: int = 0,
    address: str | None = None,
    cpus: int = 0,
    gpus: float = 0.0,
    bad: Bad = "stop",
    **local: Any,
) -> Engine:
    """Make an engine that performs the jobs of a study.

    Args:
        name: ``local`` for this process, or ``ray`` for a Ray cluster.
        device: Device to train on: ``cpu``, ``cuda`` or, with ``local``, ``cuda:N``.
        together: Runs trained in parallel; 0 means 1 on a CPU and 3 on a GPU, or with ``local`` 6
            small ones on a GPU with more than 40 GB of memory.
        address: Address of the Ray cluster; by default the one that Ray finds, or a new local one.
        cpus: CPU threads per run, or 0 for the default of torch.
        gpus: Fraction of a GPU per run, 0 to 1; with 0, `together` decides.
        bad: ``stop`` to end a run at a photograph that cannot be read, or ``skip`` to leave it out.
        local: Options of the local engine: ``callback`` and ``load``, as for `train`.

    Returns:
        The engine, to be passed to `Study.run`.

    Raises:
        ConfigError: If the name is unknown, or `address` is given without ``ray``.

    Examples:
        >>> engine = make_engine("local", device="cpu", cpus=1)
        >>> engine.check()  # raises if this machine cannot perform the runs
    """
    on_gpu = device.startswith("cuda")
    together = round(1 / gpus) if gpus and on_gpu else together
    if name == "local":
        if address is not None:
            raise ConfigError("--address requires a Ray cluster; add --engine ray")
        return LocalEngine(device=device, together=together, cpus=cpus, bad=bad, **local)
    if name == "ray":
        from foveate.sweeps.ray_engine import RayEngine

        part = gpus or 1 / (together or RUNS_PER_GPU)
        part = part if on_gpu else 0.0
        return RayEngine(device=device, address=address, cpus=cpus, gpus=part, bad=bad)
    raise ConfigError(f"engine must be local or ray, got {name!r}")


class Study:
    """A list of jobs, with a folder for their runs and one table of results.

    The constructor reads results.csv of the folder, and adds finished runs that an interrupted
    process did not record there. A study can therefore be continued by constructing it again.

    Args:
        jobs: Jobs of the study, such as those of `read_study`.
        folder: Folder for the run folders, results.csv and winners.csv; created by `run`.

    Attributes:
        records: Results so far, one per row, seed and test scale.
        winners: Number of test images per winning scale channel.

    Raises:
        ConfigError: If a run folder or results.csv has a run with another configuration.
        DataError: If a file of results is damaged.

    Examples:
        >>> from foveate.training.presets import preset
        >>> rows = (("pooling", "fovmax"),)
        >>> job = Job(name="fovmax", config=preset("fovmax"), scales=(1.0, 2.0), rows=rows)
        >>> study = Study([job], Path("runs/pooling"))
        >>> len(study.remaining), len(study.records)
        (1, 0)
    """

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self.jobs, self.folder = list(jobs), folder
        self.records: list[Record] = read_records(folder)
        self.winners: list[Winners] = read_winners(folder)
        self._unwritten, self._due = False, 0.0
        self._check_records()
        self._collect()

    @property
    def remaining(self) -> list[Job]:
        """The jobs without a complete result."""
        there = {(r.table, r.row, r.seed, r.config, r.scale) for r in self.records}
        return [job for job in self.jobs if not self._keys(job) <= there]

    def run(self, engine: Engine) -> Iterator[JobResult]:
        """Perform the remaining jobs, and write results.csv as they end.

        A table that takes long to write is written less often, and always at the end. Runs that a
        killed process finished but did not record are added when the study is constructed again.

        Args:
            engine: Engine that performs the jobs, see `make_engine`.

        Yields:
            One `Done` or `Failure` per job, as it ends.
        """
        try:
            for ended in engine.run(self.remaining, self.folder):
                if isinstance(ended, Done):
                    self._add([ended])
                    if time.monotonic() >= self._due:
                        self._write()
                yield ended
        finally:
            if self._unwritten:
                self._write()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the tables, with what other processes have added to `records`.

        Yields:
            Nothing; the lock is released at the end of the ``with`` block.
        """
        with FileLock(self.folder / TABLE_LOCK):
            self.records = merge_records([self.records, read_records(self.folder)])
            yield

    def _check_records(self) -> None:
        """Refuse a table with results of another configuration, before a run is trained."""
        made = {(r.table, r.row, r.seed): r.config for r in self.records}
        keys = (key for job in self.jobs for key in self._keys(job))
        for table, row, seed, digest, _ in keys:
            if made.get((table, row, seed), digest) != digest:
                raise ConfigError(
                    f"{self.folder / RESULTS} has results of {row} with other settings; "
                    "choose another --out"
                )

    def _collect(self) -> None:
        """Add finished runs that an interrupted process did not record in the table."""
        found = ((job, find_outcome(job, self.folder)) for job in self.remaining)
        done = [Done(job, outcome) for job, outcome in found if outcome is not None]
        if done:
            self._add(done)
            self._write()

    def _add(self, ended: Sequence[Done]) -> None:
        new = [record for job, outcome in ended for record in make_records(job, outcome)]
        self.records = merge_records([self.records, new])
        self.winners += [line for job, outcome in ended for line in make_winners(job, outcome)]
        self._unwritten = True

    def _write(self) -> None:
        """Write the tables, together with what other processes have added to them."""
        begun = time.monotonic()
        with self.locked():
            winners = [*self.winners, *read_winners(self.folder)]
            once = {line.key: line for line in reversed(winners)}  # keep the first of duplicates
            self.winners = list(once.values())
            write_results(self.folder, self.records, self.winners)
        self._unwritten, now = False, time.monotonic()
        self._due = now + WRITE_INTERVAL_FACTOR * (now - begun)

    @staticmethod
    def _keys(job: Job) -> set[tuple[str, str, int, str, float]]:
        seed, digest = job.config.seed, job.config.digest()
        rows = {row for _, rows in job.tests for row in rows}
        return {(table, row, seed, digest, s) for table, row in rows for s in job.scales}
