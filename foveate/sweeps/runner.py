"""A study: its folder of runs with one table of results, and the engines that perform its jobs."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

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
from foveate.training.skipped import Bad

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


def reason_of(error: Exception) -> str:
    """The reason why a run failed, in one line."""
    words = " ".join(str(error).split())
    return words if isinstance(error, FoveateError) else f"{type(error).__name__}: {words}"


class Engine(Protocol):
    """Performs jobs, in any order and on any machine."""

    def check(self) -> None:
        """Raise a ConfigError if a run asks for more than any machine has."""

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[Ended]:
        """Perform all jobs in the study's `folder`; each ends once, in `Done` or `Failure`."""


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """Performs jobs in this process on one device: side by side on a GPU, one by one on the CPU.

    `cpus` is the number of threads, 0 for torch's own choice.
    """

    device: str = "cpu"
    together: int = 0
    cpus: int = 0
    watch: Watch = field(default=lambda config, progress, steps: None)
    load: Load = load_source
    bad: Bad = "stop"

    def check(self) -> None:
        """Raise a ConfigError if the device or the cores are not there."""
        find_device(self.device)
        there = os.cpu_count() or 1
        if self.cpus > there:
            asked = f"a run asks for {self.cpus} CPUs"
            raise ConfigError(f"{asked}, and this machine has {there}; lower resources.cpus")

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[Ended]:
        """Perform the jobs in groups; a group that fails is tried again run by run."""
        together = self.together or (SIDE_BY_SIDE if self.device.startswith("cuda") else 1)
        for first in range(0, len(jobs), together):
            group = jobs[first : first + together]
            ended = self._perform(group, folder)
            yield from ended or replace(self, together=1).run(group, folder)

    def _perform(self, group: Sequence[Job], folder: Path) -> Sequence[Ended]:
        """How a group ended; nothing if some run of several failed, and any could be the one."""
        shown: dict[str, Any] = {"watch": self.watch, "load": self.load, "bad": self.bad}
        try:
            found = perform(group, folder, device=self.device, threads=self.cpus, **shown)
        except Exception as error:  # a backbone of one's own may fail in any way
            return [Failure(group[0], reason_of(error))] if len(group) == 1 else []
        return [Done(job, outcome) for job, outcome in zip(group, found, strict=True)]


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
    """Make the engine `local`, this process, or `ray`, a Ray cluster.

    Args:
        name: `local` or `ray`.
        device: Where runs train.
        together: Runs side by side on one GPU, 0 for the default.
        address: Address of the Ray cluster.
        cpus: Threads of a run, 0 for torch's own choice.
        gpus: The part of a GPU that a run gets; 0 leaves it to `together`.
        bad: What to do with photographs that cannot be used, see `perform`.
        local: `watch` and `load` of the local engine.
    """
    on_gpu = device.startswith("cuda")
    together = round(1 / gpus) if gpus and on_gpu else together
    if name == "local":
        if address is not None:
            raise ConfigError("--address is of a Ray cluster; add --engine ray")
        return LocalEngine(device=device, together=together, cpus=cpus, bad=bad, **local)
    if name == "ray":
        from foveate.sweeps.ray_engine import RayEngine

        part = gpus or 1 / (together or SIDE_BY_SIDE)
        part = part if on_gpu else 0.0
        return RayEngine(device=device, address=address, cpus=cpus, gpus=part, bad=bad)
    raise ConfigError(f"engine must be local or ray, got {name!r}")


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
