"""Train one network with several processes: process group, batch partition and training step.

`torchrun --nproc-per-node=N -m foveate train ...` starts N processes (NCCL between GPUs, Gloo
between CPUs) that train one network. Up to rounding, the result does not depend on N, except with
dropout and with `local` batch norm:

- A batch has `config.batch` images over all processes, and each process takes its part. Losses are
  weighted so that the gradients, averaged by DistributedDataParallel, are those of the whole batch,
  even if the parts differ by one image. If the last batch has fewer images than there are
  processes, every process computes all of it.
- With `shared` batch norm, mean and variance are those of the whole batch. With `local`, which is
  faster, each process normalises its own part, and the running statistics are averaged.
- Each process draws its own dropout from (seed, epoch, step, rank).
- Only the first process reads and writes the run folder. A checkpoint does not depend on N.
"""

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist

# Ten functions of this module have group.WORLD as a default argument. If torch._dynamo imported it
# after the group was created, they would keep the group and its threads alive until exit.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from foveate.checks import check_choice
from foveate.errors import ConfigError, FoveateError
from foveate.execution.captured import Batch, Step, loss_of
from foveate.execution.plan import Prepared
from foveate.files import is_alive
from foveate.training.config import Precision
from foveate.training.interrupt import SIGNALS, raise_interrupt
from foveate.training.shared_norm import running_statistics, set_local_statistics, share_norms

Norms = Literal["shared", "local"]
Result = TypeVar("Result")
GRACE = 20.0  # seconds from a signal to a forced exit; torchrun itself waits for 30
TROUBLE = ("gloo", "nccl", "connection", "socket")  # parts of the errors of both backends
_PARALLEL: WeakSet[DistributedDataParallel] = WeakSet()  # modules that `_group_destroyed` clears


class LostProcessError(FoveateError):
    """Another process of this run died."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Team:
    """The group of `count` processes that train one run; `rank` is the index of this process.

    With one process, all methods leave their input unchanged.
    """

    rank: int = 0
    count: int = 1
    norms: Norms = "shared"
    store: Any = None  # key-value store of torch.distributed, which all processes can access

    @property
    def is_main(self) -> bool:
        """Whether this process reads and writes the run folder and prints messages."""
        return self.rank == 0

    def split_batches(self, order: Tensor, batch: int) -> list[tuple[Tensor, int]]:
        """Return this process's part of each batch of `order`.

        The result is a list of (order, batch size) pairs: the full batches, and the last incomplete
        one.
        """
        if self.count == 1:
            return [(order, batch)]
        whole, rest = order.split([len(order) // batch * batch, len(order) % batch])
        parts = whole.view(len(order) // batch, batch).tensor_split(self.count, 1)[self.rank]
        last = rest if len(rest) < self.count else rest.tensor_split(self.count)[self.rank]
        dealt = [(parts.flatten(), parts.shape[1]), (last, len(last))]
        return [(some, size) for some, size in dealt if len(some)]

    @property
    def description(self) -> str:
        """Description of the processes for config.json; empty for one process."""
        return f"{self.count} processes, {self.norms} batch norm" if self.count > 1 else ""

    def prepare(self, net: nn.Module, batch: int) -> None:
        """Prepare a network for training by all processes, and check the options."""
        check_choice("norms", self.norms, get_args(Norms))
        if batch < self.count:
            raise ConfigError(
                f"batch must be at least {self.count}, the number of processes, got {batch}; "
                "start fewer processes"
            )
        if self.count > 1 and self.norms == "shared":
            share_norms(net, self.all_reduce_sum)

    def device(self, name: str) -> str:
        """Return the device of this process; each process of a machine has its own GPU."""
        return f"cuda:{_local_rank()}" if name == "cuda" and self.count > 1 else name

    def part(self, order: Tensor) -> Tensor:
        """Return this process's part of `order`."""
        return order.tensor_split(self.count)[self.rank]

    def seed(self, *numbers: int) -> None:
        """Seed PyTorch's default generator from the numbers and the rank of the process."""
        if self.count > 1:
            state = np.random.SeedSequence([*numbers, self.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(state[0]))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_int(self, number: int) -> int:
        """Broadcast a number from the first process."""
        return int(
            self.all_reduce_sum(torch.tensor(number if self.is_main else 0, dtype=torch.int64))
        )

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Broadcast bytes from the first process."""
        if self.count == 1:
            return data
        buffer = np.zeros(self.broadcast_int(len(data)), np.uint8)
        if self.is_main:
            buffer[:] = np.frombuffer(data, np.uint8)
        if len(buffer):
            dist.broadcast(torch.from_numpy(buffer), 0)
        return buffer.tobytes()

    def in_turn(self, action: Callable[[], Result]) -> Result:
        """Run `action`, such as a download, first in one process of each machine."""
        first = _local_rank() == 0
        if self.count > 1 and not first:
            self.broadcast_int(0)
        done = action()
        if self.count > 1 and first:
            self.broadcast_int(0)
        return done

    def may_print(self) -> bool:
        """Whether this process is the first to report how the run ended; only one reports it."""
        if self.store is None:
            return True
        try:
            return bool(self.store.add("said", 1) == 1)
        except RuntimeError:  # the store is lost if the process that hosts it died
            return True

    @contextmanager
    def guard(self, describe_saved: Callable[[], str]) -> Iterator[None]:
        """Raise a LostProcessError if another process died, with the text of `describe_saved`."""
        try:
            yield
        except (RuntimeError, FoveateError, KeyboardInterrupt) as error:
            if self.count == 1 or isinstance(error, LostProcessError):
                raise
            # The user sends signals, but so does torchrun after a process died.
            interrupted = isinstance(error, KeyboardInterrupt)
            if not (self._one_is_gone() if interrupted else _is_of_network(error)):
                raise
            _ignore_signals()  # torchrun's SIGTERM arrives now, and would interrupt the message
            raise LostProcessError(
                f"a process of this run died; {describe_saved()}; {_remedy()}"
            ) from error

    def _one_is_gone(self) -> bool:
        try:
            processes = [self.store.get(f"process/{k}").decode().split() for k in range(self.count)]
        except RuntimeError:  # the store is lost if the process that hosts it died
            return True
        here = processes[self.rank][0]
        return not all(is_alive(int(pid)) for host, pid in processes if host == here)


@contextmanager
def join_processes(device: str, norms: str = "shared") -> Iterator[Team]:
    """Join the processes that torchrun started together; without torchrun, yield a team of one.

    `norms` is `shared` or `local`. SIGINT and SIGTERM raise KeyboardInterrupt and its subclass
    `Terminated` in the first process. The others ignore them and end with the first, so that all
    can complete the current step and the first can save the run.
    """
    norms = cast(Norms, norms)  # checked in `prepare`, where one process reports for all
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "MASTER_ADDR" not in os.environ:
        yield Team(norms=norms)
        return
    try:
        common, rank, count = next(iter(rendezvous("env://")))
        # torchrun's store survives a restart; the prefix hides entries of processes that died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"foveate/{attempt}/{count}", common)  # type: ignore[attr-defined]
        store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
        dist.init_process_group(_backend(device), store=store, rank=rank, world_size=count)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise FoveateError(
            f"the processes of this run could not connect ({reason}); start torchrun again"
        ) from None
    team = Team(rank=rank, count=count, norms=norms, store=store)
    with _ending(team), _group_destroyed(), team.guard(lambda: "saved files are unaffected"):
        yield team


@contextmanager
def _group_destroyed() -> Iterator[None]:
    """Destroy the process group after the block, and with it the threads of Gloo.

    If such a thread drops the last reference to a tensor while Python is finalizing, it cannot take
    the GIL, and the process aborts. The threads end when no reference to the group is left; the
    reducer of DistributedDataParallel and the frames in tracebacks hold such references.
    """
    try:
        yield
    except BaseException as error:
        _clear_frames(error)
        raise
    finally:
        _ignore_signals()
        for module in _PARALLEL:
            vars(module).clear()
        gc.collect()  # errors caught in the block can be part of reference cycles
        dist.destroy_process_group()


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an error and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _backend(device: str) -> str:
    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(_local_rank() % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def _local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def _is_of_network(error: BaseException | None) -> bool:
    """Whether an error or one of its causes reports that another process is unreachable."""
    while error is not None:
        message = str(error).lower()
        if isinstance(error, RuntimeError) and any(word in message for word in TROUBLE):
            return True
        error = error.__cause__
    return False


def _ignore_signals() -> None:
    """Ignore signals in this process, which is about to end; `_ending` restores the handlers."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)


def _remedy() -> str:
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    used, given = (os.environ.get(name, "0") for name in names)
    return "torchrun restarts it" if int(used) < int(given) else "run the same command to resume"


@contextmanager
def _ending(team: Team) -> Iterator[None]:
    """Handle signals as in `join_processes`, and end a process that does not react in time.

    A process that waits on a GPU for a dead process never returns to Python.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or sys.platform == "win32":  # set_wakeup_fd does not take pipes on Windows
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handler = raise_interrupt if team.is_main else lambda number, frame: None
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    over = threading.Event()
    watcher = threading.Thread(target=_end_in_time, args=(reader, over, team), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(woken)
        for number, previous in before.items():
            signal.signal(number, previous)
        os.close(writer)
        watcher.join()


def _end_in_time(reader: int, over: threading.Event, team: Team) -> None:
    with open(reader, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] in SIGNALS and not over.wait(GRACE):
                if team.may_print():
                    message = "a process of this run does not respond; saved files are unaffected"
                    print(f"error: {message}; {_remedy()}", file=sys.stderr, flush=True)
                os._exit(2)


class _Objective(nn.Module):
    """The loss as a module, for DistributedDataParallel."""

    def __init__(self, net: nn.Module, precision: Precision, smoothing: float) -> None:
        super().__init__()
        self.net, self.precision, self.smoothing = net, precision, smoothing

    def forward(self, images: Prepared, labels: Tensor) -> Tensor:
        """Return the mean loss over a part of a batch."""
        return loss_of(self.net, images, labels, self.precision, self.smoothing)


def team_step(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    precision: Precision,
    team: Team,
    images: Callable[[], int],
    smoothing: float = 0.0,
) -> Step:
    """Return a training step for all processes together.

    Each process passes its part of a batch; `images` returns the size of the whole batch.
    """
    objective = _Objective(net, precision, smoothing)
    # A static graph can have unused weights. Buffers are already equal in all processes.
    together = DistributedDataParallel(objective, static_graph=True)
    together.broadcast_buffers = False
    _PARALLEL.add(together)

    def step(batch: Batch) -> Tensor:
        ready, labels = batch.select()
        count = images()
        whole_batch = count < team.count  # every process has the whole batch
        set_local_statistics(net, whole_batch)
        weight = 1.0 if whole_batch else len(labels) * team.count / count
        net.zero_grad(set_to_none=True)
        loss = weight * together(ready, labels)
        loss.backward()
        optimiser.step()
        if team.norms == "local":
            _average(running_statistics(net), team)
        return team.all_reduce_sum(loss.detach() / team.count)

    return step


@torch.no_grad()
def _average(tensors: list[Tensor], team: Team) -> None:
    """Replace tensors by their mean over all processes, in place."""
    if tensors:
        flat = team.all_reduce_sum(torch.cat([tensor.flatten() for tensor in tensors])) / team.count
        for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
