"""Many runs: what is done is kept, what is left goes to an engine, and each result counts once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from foveate.data.sources import load_source
from foveate.errors import FoveateError
from foveate.experiments.jobs import Job, Outcome, outcome_of, perform, records_of, winners_of
from foveate.experiments.records import (
    Record,
    Winners,
    merge_records,
    read_records,
    read_winners,
    write_results,
)
from foveate.training.data import Load
from foveate.training.loop import Watch

SIDE_BY_SIDE = 3  # runs that fill a GPU: one step at batch 32 cannot


class Failure(NamedTuple):
    """A run that ended with an error."""

    job: Job
    reason: str


class Done(NamedTuple):
    """A run that ended well."""

    job: Job
    outcome: Outcome


Ended: TypeAlias = Done | Failure


class Engine(Protocol):
    """Something that performs jobs, in any order, anywhere; `folder` is where runs are kept."""

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[Ended]:
        """Perform all jobs; each ends once, well or not."""


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """This process and one device: on a GPU runs go side by side, on the CPU one by one."""

    device: str = "cpu"
    together: int = 0
    watch: Watch = field(default=lambda config, progress, steps: None)
    load: Load = load_source

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[Ended]:
        """Perform the jobs in groups; a group that fails is tried again run by run."""
        together = self.together or (SIDE_BY_SIDE if self.device.startswith("cuda") else 1)
        for group in _groups(jobs, together):
            try:
                yield from self._perform(group, folder)
            except FoveateError as error:
                if len(group) == 1:
                    yield Failure(group[0], str(error))
                else:
                    yield from LocalEngine(
                        device=self.device, together=1, watch=self.watch, load=self.load
                    ).run(group, folder)

    def _perform(self, group: Sequence[Job], folder: Path) -> list[Done]:
        found = perform(group, folder, device=self.device, watch=self.watch, load=self.load)
        return [Done(job, outcome) for job, outcome in zip(group, found, strict=True)]


class Study:
    """A folder of runs with one table of results, and the jobs that belong into it."""

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self.jobs, self.folder = list(jobs), folder
        self.records: list[Record] = read_records(folder)
        self.winners: list[Winners] = read_winners(folder)
        self._collect()

    @property
    def left(self) -> list[Job]:
        """The jobs without a result."""
        there = {(r.table, r.row, r.seed, r.config) for r in self.records}
        return [job for job in self.jobs if not self._keys(job) <= there]

    def run(self, engine: Engine) -> Iterator[Ended]:
        """Let the engine do what is left; results are written as they come."""
        for ended in engine.run(self.left, self.folder):
            if isinstance(ended, Done):
                self._add([ended])
            yield ended

    def _collect(self) -> None:
        """Take up what an interrupted process finished and did not write into the table."""
        found = ((job, outcome_of(job, self.folder)) for job in self.left)
        self._add([Done(job, outcome) for job, outcome in found if outcome is not None])

    def _add(self, ended: Sequence[Done]) -> None:
        if not ended:
            return
        new = [record for job, outcome in ended for record in records_of(job, outcome)]
        self.records = merge_records([self.records, new])
        won = [line for job, outcome in ended for line in winners_of(job, outcome)]
        self.winners = list({line.key: line for line in [*won, *self.winners]}.values())
        write_results(self.folder, self.records, self.winners)

    @staticmethod
    def _keys(job: Job) -> set[tuple[str, str, int, str]]:
        seed, digest = job.config.seed, job.config.digest()
        return {(table, row, seed, digest) for table, row in job.rows}


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
