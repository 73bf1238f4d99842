"""Perform jobs as tasks of a Ray cluster; each job ends exactly once, even if workers or nodes die.

If a worker can access the folder of the study, its task trains there and resumes from the
checkpoint of a worker that died. Otherwise it trains in a temporary folder, restarts after a death,
and sends the finished run to the driver, which stores it.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.files import reason_of as first_line
from foveate.files import write_bytes
from foveate.sweeps.jobs import OUTCOMES, Job, find_outcome, perform
from foveate.sweeps.runner import Done, Failure, JobResult, describe_failure
from foveate.training.checkpoint import RunWriter
from foveate.training.skipped import TABLE, Bad
from foveate.trust import ALONE

IN_FLIGHT = 256  # tasks submitted to Ray at a time; enough for 64 GPUs with three runs each
LOOK_EVERY = 120.0  # seconds without a result after which the nodes are checked
CONNECT = 10.0  # timeout of the connection to the cluster in seconds
GRACE = 20.0  # seconds for cancelled runs to save a checkpoint
# The files of a run, in the order in which they are stored.
FILES = ("config.json", "metrics.jsonl", TABLE, "weights.safetensors", *OUTCOMES.values())
_load = lru_cache(maxsize=2)(load_source)  # for the next runs of a worker


class TaskFolder(NamedTuple):
    """The folders that a task needs: those of the study and the current one of the driver."""

    folder: Path
    marker: str  # name of an entry that only `folder` has; empty if tasks must not use it
    current: Path
    lock_timeout: float  # seconds to wait for a run that another process may still hold


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Performs jobs as tasks of a Ray cluster. The connection to Ray stays open.

    A run whose worker died is started again up to `retries` times. Unless `shared` is False, tasks
    train in the folder of the study where they can access it. There, they wait up to `lock_timeout`
    seconds for a run that a process on a lost node may still hold.
    """

    device: str = "cpu"
    address: str | None = None
    cpus: int = 0
    gpus: float = 0.0
    retries: int = 5
    shared: bool = True
    lock_timeout: float = 60.0
    bad: Bad = "stop"

    def check(self) -> None:
        """Connect to the cluster; raise a ConfigError if no node has the resources for a run."""
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"device must be cpu or cuda, as Ray assigns the GPUs, got {self.device}"
            )
        nodes = [node["Resources"] for node in self._ray().nodes() if node["Alive"]]
        cpus, gpus = self._threads, self.gpus
        if any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            return
        most = (max((node.get(key, 0) for node in nodes), default=0) for key in ("CPU", "GPU"))
        shown = "{:g} CPU and {:g} GPU" if gpus else "{:g} CPU"
        raise ConfigError(
            f"a run requires {shown.format(cpus, gpus)}, but no node of the cluster has them (at "
            f"most {shown.format(*most)}); lower resources in the study, or set a lower "
            "OMP_NUM_THREADS"
        )

    def run(self, jobs: Sequence[Job], folder: Path) -> Iterator[JobResult]:
        """Perform each job as a task, and yield the results in the order in which runs end."""
        self.check()
        ray, left, pending = self._ray(), iter(jobs), dict[Any, Job]()
        options = {"num_cpus": self._threads, "num_gpus": self.gpus, "max_retries": self.retries}
        task = ray.remote(run_task).options(name="foveate", **options)
        at_once = round(1 / self.gpus) if self.gpus else 1
        how = {"device": self.device, "threads": self._threads, "at_once": at_once, "bad": self.bad}
        with (
            RunWriter(folder).locked(),
            TemporaryDirectory("", ".driver-", folder, ignore_cleanup_errors=True) as made,
        ):
            marker = Path(made).name if self.shared else ""
            place = TaskFolder(folder.resolve(), marker, Path.cwd(), self.lock_timeout)
            try:
                while True:
                    for job in islice(left, IN_FLIGHT - len(pending)):
                        pending[task.remote(job, place, how)] = job
                    if not pending:
                        return
                    ended, _ = ray.wait(list(pending), timeout=LOOK_EVERY)
                    if not ended:
                        self.check()  # the only suitable node may have left the cluster
                    for one in ended:
                        yield self._collect(one, pending.pop(one), folder)
            finally:
                self._cancel(pending)

    @property
    def _threads(self) -> int:
        """CPU threads per run; one suffices if the run trains on a GPU."""
        return self.cpus or (torch.get_num_threads() if self.device == "cpu" else 1)

    def _collect(self, reference: Any, job: Job, folder: Path) -> JobResult:
        ray = self._ray()
        try:
            ended, files = ray.get(reference)
            if files:
                _store(files, RunWriter(folder / job.folder))
            return ended  # type: ignore[no-any-return]
        except ray.exceptions.RayTaskError as error:  # `run_task` catches the errors of runs
            why = f"no worker can perform it ({str(error).strip().splitlines()[-1]})"
            return Failure(job, f"{why}; install this version of foveate on every node")
        except ray.exceptions.RayError as error:
            return Failure(job, f"its worker died {self.retries + 1} times ({first_line(error)})")
        except (OSError, FoveateError) as error:
            return Failure(job, f"cannot store its result ({describe_failure(error)})")

    def _cancel(self, pending: Iterable[Any]) -> None:
        """Interrupt running tasks as Ctrl-C does, so that they save a checkpoint."""
        ray, references = self._ray(), list(pending)
        for reference in references:
            ray.cancel(reference)
        if references:
            ray.wait(references, num_returns=len(references), timeout=GRACE)

    def _ray(self) -> Any:
        """Return the module ``ray``, connected to the cluster."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise ConfigError("Ray is not installed; run pip install 'foveate[ray]'") from None
        if not ray.is_initialized():
            _check_connection(self.address or "")
            try:
                quiet: Any = {"log_to_driver": False, "logging_level": logging.ERROR}
                asked = signal.getsignal(signal.SIGTERM)
                with chdir(ALONE):  # Ray adds its start folder to the path of workers
                    ray.init(self.address, include_dashboard=False, **quiet)
                if callable(asked) and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, asked)  # the handler of Ray would exit with 15
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise FoveateError(
                    f"cannot connect to Ray ({first_line(error)}); use the same version of Ray, "
                    "RAY_AUTH_MODE and RAY_AUTH_TOKEN as the cluster"
                ) from None
        return ray


def run_task(
    job: Job, place: TaskFolder, how: dict[str, Any]
) -> tuple[JobResult, dict[str, bytes]]:
    """Perform one job in a worker, and return its result and the files for the driver to store."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Of a cluster that a shell script started in the background; Ray cancels tasks by SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if place.current.is_dir():  # for relative paths and custom backbones
            os.chdir(place.current)
        if place.marker and (place.folder / place.marker).exists():
            with RunWriter(place.folder / job.folder).locked(place.lock_timeout):
                pass  # a process on a lost node may still hold the run
            known = find_outcome(job, place.folder)
            (outcome,) = [known] if known else perform([job], place.folder, load=_load, **how)
            return Done(job, outcome), {}
        with TemporaryDirectory(prefix="foveate-") as made:
            (outcome,) = perform([job], Path(made), load=_load, **how)
            paths = [Path(made) / job.folder / name for name in FILES]
            files = {path.name: path.read_bytes() for path in paths if path.exists()}
            return Done(job, outcome), files
    except Exception as error:  # a custom backbone can raise anything
        return Failure(job, describe_failure(error)), {}


def _store(files: dict[str, bytes], run: RunWriter) -> None:
    """Store a finished run in its folder, in place of an unfinished one."""
    with run.locked():
        for name, content in files.items():
            write_bytes(run.path / name, content)
        run.resume.unlink(missing_ok=True)


def _check_connection(address: str) -> None:
    """Try to connect to host:port first: Ray itself would retry for two minutes."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:  # auto or ray://...: left to Ray
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except OSError as error:
        raise FoveateError(
            f"cannot connect to a Ray cluster at {address} ({error.strerror or error}); start one "
            "with 'ray start --head'"
        ) from None
