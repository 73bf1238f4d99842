"""Perform jobs as tasks of a Ray cluster; every job ends once, also if workers or nodes die.

Where a worker can reach the study's folder, a task trains in it and resumes from the checkpoint of
a worker that died. Elsewhere it trains in a temporary folder of its node, from the start after a
death, and sends the finished run to the driver, which stores it.
"""

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from foveate.data.sources import Source, load_source
from foveate.errors import ConfigError, FoveateError
from foveate.files import reason_of as first_line
from foveate.files import replacing, write_text
from foveate.sweeps.jobs import OUTCOME, Job, outcome_of, perform
from foveate.sweeps.runner import Done, Ended, Failure, reason_of
from foveate.training.checkpoint import BusyError, RunFolder
from foveate.training.skipped import TABLE, Bad
from foveate.trust import ALONE

IN_FLIGHT = 256  # tasks that Ray knows of at a time; more than 64 GPUs with three runs on each
LOOK_EVERY = 120.0  # seconds without a result after which the nodes are looked at
CONNECT = 10.0  # seconds for the cluster to answer
GRACE = 20.0  # seconds for cancelled runs to save
FILES = ("config.json", "metrics.jsonl", TABLE, "weights.safetensors", OUTCOME)  # in this order


class TaskFolder(NamedTuple):
    """Where a task trains: `mark` is a file in `folder` that only the study's own folder has."""

    folder: Path
    mark: str
    current: Path
    patience: float


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """The Ray cluster at `address`; by default the one that Ray finds, or a new one here.

    A run gets `cpus` threads, 0 for as many as torch has here, and a part `gpus` of a GPU. A run
    whose worker dies is tried again `retries` times. `shared=False` keeps the tasks out of the
    study's folder, as for storage that is too slow for checkpoints. `patience` is how many seconds
    a task waits for a run that a process on a lost node may still hold. Ray stays connected.
    """

    device: str = "cpu"
    address: str | None = None
    cpus: int = 0
    gpus: float = 0.0
    retries: int = 5
    shared: bool = True
    patience: float = 60.0
    bad: Bad = "stop"

    def check(self) -> None:
        """Connect, and raise a ConfigError if no node has what a run asks for."""
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"Ray itself chooses among GPUs: use cpu or cuda, not {self.device}")
        nodes = [node["Resources"] for node in self._ray().nodes() if node["Alive"]]
        asked = {"CPU": float(self._threads), **({"GPU": self.gpus} if self.gpus else {})}
        if any(all(node.get(key, 0) >= asked[key] for key in asked) for node in nodes):
            return
        most = {key: max((node.get(key, 0) for node in nodes), default=0) for key in asked}
        raise ConfigError(
            f"a run asks for {_words(asked)}, and no node of the cluster has that (at most "
            f"{_words(most)}); lower the study's resources, or OMP_NUM_THREADS without a study"
        )

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[Ended]:
        """Perform each job as a task; results come in the order in which runs end."""
        self.check()
        ray, left, pending = self._ray(), iter(jobs), dict[Any, Job]()
        options = {"num_cpus": self._threads, "num_gpus": self.gpus, "max_retries": self.retries}
        task = ray.remote(work).options(name="foveate", **options)
        at_once = round(1 / self.gpus) if self.gpus else 1
        how = {"device": self.device, "threads": self._threads, "at_once": at_once}
        how["bad"] = self.bad
        with _marked(folder.resolve(), self.shared) as mark:
            place = TaskFolder(folder.resolve(), mark, Path.cwd(), self.patience)
            try:
                while True:
                    for job in islice(left, IN_FLIGHT - len(pending)):
                        pending[task.remote(job, place, how)] = job
                    if not pending:
                        return
                    ended, _ = ray.wait(list(pending), timeout=LOOK_EVERY)
                    if not ended:
                        self.check()  # the only node with enough may be gone for good
                    for one in ended:
                        yield self._collect(one, pending.pop(one), folder)
            finally:
                self._cancel(pending)

    @property
    def _threads(self) -> int:
        """On a GPU the CPU has little to do."""
        return self.cpus or (torch.get_num_threads() if self.device == "cpu" else 1)

    def _collect(self, reference: Any, job: Job, folder: Path) -> Ended:
        ray = self._ray()
        try:
            ended, files = ray.get(reference)
            if files:
                _store(files, RunFolder(folder / job.folder))
            return ended  # type: ignore[no-any-return]
        except ray.exceptions.RayTaskError as error:  # `work` itself catches all that runs raise
            why = str(error).strip().splitlines()[-1]
            return Failure(job, f"no worker can do it ({why}); install this foveate on every node")
        except ray.exceptions.RayError as error:
            return Failure(job, f"its worker died {self.retries + 1} times ({first_line(error)})")
        except (OSError, FoveateError) as error:
            return Failure(job, f"its result cannot be stored ({reason_of(error)})")

    def _cancel(self, pending: Iterable[Any]) -> None:
        """Stop what is under way, as Ctrl-C would, so that it is saved."""
        ray, references = self._ray(), list(pending)
        for reference in references:
            ray.cancel(reference)
        if references:
            ray.wait(references, num_returns=len(references), timeout=GRACE)

    def _ray(self) -> Any:
        """Ray, connected."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise ConfigError("Ray is not installed: pip install 'foveate[ray]'") from None
        if not ray.is_initialized():
            _look_for(self.address or "")
            try:
                quiet: Any = {"log_to_driver": False, "logging_level": logging.ERROR}
                asked = signal.getsignal(signal.SIGTERM)
                with chdir(ALONE):  # Ray puts the folder that it is started in on workers' paths
                    ray.init(self.address, include_dashboard=False, **quiet)
                if callable(asked) and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, asked)  # Ray's own would exit with 15
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise FoveateError(
                    f"cannot connect to Ray ({first_line(error)}); a cluster's version of Ray, "
                    "RAY_AUTH_MODE and RAY_AUTH_TOKEN must be the same here"
                ) from None
        return ray


def work(job: Job, place: TaskFolder, how: dict[str, Any]) -> tuple[Ended, dict[str, bytes]]:
    """Perform one job in a worker; returns how it ended, and the files that the driver stores."""
    try:
        if place.current.is_dir():  # relative paths and the user's backbones start there
            os.chdir(place.current)
        if place.mark and (place.folder / place.mark).exists():
            _wait_for(RunFolder(place.folder / job.folder), place.patience)
            known = outcome_of(job, place.folder)
            (outcome,) = [known] if known else perform([job], place.folder, load=_load, **how)
            return Done(job, outcome), {}
        with tempfile.TemporaryDirectory(prefix="foveate-") as made:
            (outcome,) = perform([job], Path(made), load=_load, **how)
            paths = [Path(made) / job.folder / name for name in FILES]
            files = {path.name: path.read_bytes() for path in paths if path.exists()}
            return Done(job, outcome), files
    except Exception as error:  # a user's backbone may raise anything
        return Failure(job, reason_of(error)), {}


@lru_cache(maxsize=2)
def _load(name: str) -> Source:
    """Keep images from one run of a worker to its next."""
    return load_source(name)


def _wait_for(run: RunFolder, patience: float) -> None:
    """Wait until no other process is at that run, as one may be on a node that was given up."""
    end = time.monotonic() + patience
    while True:
        try:
            with run.locked():
                return
        except BusyError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


@contextmanager
def _marked(folder: Path, shared: bool) -> Iterator[str]:
    """Put a file into the folder while the block runs; its name, or "" if it is not shared."""
    mark = folder / f".driver-{uuid4()}"
    if not shared:
        yield ""
        return
    write_text(mark, "")
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def _store(files: dict[str, bytes], run: RunFolder) -> None:
    """Put a finished run into its folder, in the place of one that is not."""
    with run.locked():
        for name, content in files.items():
            with replacing(run.path / name) as temporary:
                temporary.write_bytes(content)
        run.resume.unlink(missing_ok=True)


def _words(asked: dict[str, float]) -> str:
    return " and ".join(f"{value:g} {key}" for key, value in asked.items())


def _look_for(address: str) -> None:
    """Knock at host:port first: Ray itself would knock for two minutes."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:  # auto, or ray://...: Ray looks itself
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except OSError as error:
        raise FoveateError(
            f"no Ray cluster at {address} ({error.strerror or error}); start one with "
            "'ray start --head'"
        ) from None
