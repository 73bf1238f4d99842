"""Many runs: what is done is kept, what is left goes to an engine, and each result counts once."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.sweeps.jobs import Job, Outcome, outcome_of, perform, records_of, winners_of
from foveate.sweeps.records import (
    Record,
    Winners,
    merge_records,
    read_records,
    read_winners,
    write_results,
)
from foveate.training.checkpoint import RunFolder
from foveate.training.data import Load
from foveate.training.loop import find_device
from foveate.training.session import Watch

SIDE_BY_SIDE = 3  # runs that fill a GPU: one step at batch 32 cannot
SPARE = 20  # writes of the table take a twentieth of the time; for 1,000 runs one takes 2 s


class Failure(NamedTuple):
    """A run that ended with an error."""

    job: Job
    reason: str


class Done(NamedTuple):
    """A run that ended well."""

    job: Job
    outcome: Outcome


Ended: TypeAlias = Done | Failure


class ResourceError(ConfigError):
    """A run asks for more of `key`, cpus or gpus, than any machine here has."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def reason_of(error: Exception) -> str:
    """Why a run failed, in one line."""
    words = " ".join(str(error).split())
    return words if isinstance(error, FoveateError) else f"{type(error).__name__}: {words}"


class Engine(Protocol):
    """Something that performs jobs, in any order, anywhere; `folder` is where runs are kept."""

    def check(self) -> None:
        """Refuse, before anything starts, runs that ask for more than any machine here has."""

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[Ended]:
        """Perform all jobs; each ends once, well or not."""


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """This process and one device: on a GPU runs go side by side, on the CPU one by one.

    `cpus` is the number of threads, 0 for as many as torch takes by itself.
    """

    device: str = "cpu"
    together: int = 0
    cpus: int = 0
    watch: Watch = field(default=lambda config, progress, steps: None)
    load: Load = load_source

    def check(self) -> None:
        """Look whether the device and the cores are there."""
        try:
            find_device(self.device)
        except ConfigError as error:
            raise ResourceError("gpus", str(error)) from None
        there = os.cpu_count() or 1
        if self.cpus > there:
            asked = f"a run asks for {self.cpus} CPUs"
            raise ResourceError("cpus", f"{asked}, and this machine has {there}; ask for fewer")

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[Ended]:
        """Perform the jobs in groups; a group that fails is tried again run by run."""
        together = self.together or (SIDE_BY_SIDE if self.device.startswith("cuda") else 1)
        for group in _groups(jobs, together):
            ended = self._perform(group, folder)
            yield from ended or replace(self, together=1).run(group, folder)

    def _perform(self, group: Sequence[Job], folder: Path) -> Sequence[Ended]:
        """How a group ended; nothing if some run of several failed, and any could be the one."""
        place, threads = self.device, self.cpus
        try:
            found = perform(
                group, folder, device=place, threads=threads, watch=self.watch, load=self.load
            )
        except Exception as error:  # a backbone of one's own may fail in any way
            return [Failure(group[0], reason_of(error))] if len(group) == 1 else []
        return [Done(job, outcome) for job, outcome in zip(group, found, strict=True)]


class Study:
    """A folder of runs with one table of results, and the jobs that belong into it."""

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self.jobs, self.folder = list(jobs), folder
        self.records: list[Record] = read_records(folder)
        self.winners: list[Winners] = read_winners(folder)
        self._unwritten, self._due = False, 0.0
        self._collect()

    @property
    def left(self) -> list[Job]:
        """The jobs without a result."""
        there = {(r.table, r.row, r.seed, r.config, r.scale) for r in self.records}
        return [job for job in self.jobs if not self._keys(job) <= there]

    def run(self, engine: Engine) -> Iterator[Ended]:
        """Let the engine do what is left; results are written as they come.

        A table that takes long to write is written now and then, and at the end; what a killed
        process did not write is taken up by the next one.
        """
        with RunFolder(self.folder).locked():
            try:
                for ended in engine.run(self.left, self.folder):
                    if isinstance(ended, Done):
                        self._add([ended])
                        if time.monotonic() >= self._due:
                            self._write()
                    yield ended
            finally:
                if self._unwritten:
                    self._write()

    def _collect(self) -> None:
        """Take up what an interrupted process finished and did not write into the table."""
        found = ((job, outcome_of(job, self.folder)) for job in self.left)
        done = [Done(job, outcome) for job, outcome in found if outcome is not None]
        if done:
            self._add(done)
            self._write()

    def _add(self, ended: Sequence[Done]) -> None:
        new = [record for job, outcome in ended for record in records_of(job, outcome)]
        self.records = merge_records([self.records, new])
        self.winners += [line for job, outcome in ended for line in winners_of(job, outcome)]
        self._unwritten = True

    def _write(self) -> None:
        begun = time.monotonic()
        once = {line.key: line for line in reversed(self.winners)}  # the first one counts
        self.winners = list(once.values())
        write_results(self.folder, self.records, self.winners)
        self._unwritten, now = False, time.monotonic()
        self._due = now + SPARE * (now - begun)

    @staticmethod
    def _keys(job: Job) -> set[tuple[str, str, int, str, float]]:
        seed, digest = job.config.seed, job.config.digest()
        return {(table, row, seed, digest, s) for table, row in job.rows for s in job.scales}


def estimate(jobs: Iterable[Job], known: Iterable[Record]) -> float | None:
    """Seconds that the jobs will take, if runs of all their rows are among the known results."""
    taken: dict[str, list[float]] = {}
    for record in known:
        taken.setdefault(record.row, []).append(record.seconds)
    try:
        return sum(sum(taken[job.name]) / len(taken[job.name]) for job in jobs)
    except KeyError:
        return None


def _groups(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """Cut the jobs into groups that go side by side."""
    left = iter(jobs)
    while group := list(islice(left, size)):
        yield group
