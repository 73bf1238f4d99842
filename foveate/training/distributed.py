"""One run on several processes: who they are, what each takes of a batch, how they step together.

`torchrun --nproc-per-node=N -m foveate train ...` starts N processes (NCCL between GPUs, Gloo
between CPUs) that train one network. Up to rounding the result does not depend on N:

- The batch is `config.batch` images over all processes. Each takes its part of every batch, and
  losses are weighted so that the gradients, averaged by PyTorch's DistributedDataParallel, are
  those of the whole batch, also where parts differ by an image. A last batch of fewer images than
  processes is computed whole by each.
- Batch norm is `shared`: mean and variance are over the whole batch, exactly as in one process.
  Or it is `local`: each process norms its part by itself, which is quicker and depends on N, and
  the running statistics are averaged over the processes after every step.
- Dropout is drawn by each process for its part, from (seed, epoch, step, rank): a run that goes
  on with as many processes draws the same, and with another number of them other draws.
- The first process alone reads and writes the run folder and hands its content to the others.
  Nothing in a checkpoint tells N.

Images that are not streamed are held by every process; of streamed ones each reads its own part.
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

# Ten functions of this module take group.WORLD as a default argument. If torch._dynamo imported
# it after the group was made, they would keep the group and its threads alive until the end.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from foveate.errors import ConfigError, FoveateError
from foveate.execution.captured import Batch, Step, loss_of
from foveate.execution.plan import Prepared
from foveate.files import is_alive
from foveate.training.config import Precision
from foveate.training.interrupt import SIGNALS, stop
from foveate.training.shared_norm import running_statistics, set_apart, share_norms

Norms = Literal["shared", "local"]
Result = TypeVar("Result")
GRACE = 20.0  # seconds from the request to end to the end; torchrun itself waits for 30
TROUBLE = ("gloo", "nccl", "connection", "socket")  # words in the errors of the two backends
_PARALLEL: WeakSet[DistributedDataParallel] = WeakSet()  # what `_group_destroyed` must take apart


class LostProcessError(FoveateError):
    """Another process of this run is no more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Team:
    """The processes of a run; this is number `rank` of `count`. Alone, nothing changes."""

    rank: int = 0
    count: int = 1
    norms: Norms = "shared"
    store: Any = None  # of torch.distributed: what all processes can read and write

    @property
    def leads(self) -> bool:
        """Whether this process reads and writes the run folder, and speaks."""
        return self.rank == 0

    def deal(self, order: Tensor, batch: int) -> list[tuple[Tensor, int]]:
        """This process's part of each batch of `order`, as (order, batch) to go through in turn."""
        if self.count == 1:
            return [(order, batch)]
        whole, rest = order.split([len(order) // batch * batch, len(order) % batch])
        parts = whole.view(len(order) // batch, batch).tensor_split(self.count, 1)[self.rank]
        last = rest if len(rest) < self.count else rest.tensor_split(self.count)[self.rank]
        dealt = [(parts.flatten(), parts.shape[1]), (last, len(last))]
        return [(some, size) for some, size in dealt if len(some)]

    @property
    def words(self) -> str:
        """How many there are, for the record; nothing for one."""
        return f"{self.count} processes, {self.norms} batch norm" if self.count > 1 else ""

    def prepare(self, net: nn.Module, batch: int) -> None:
        """Let a network be trained by all; each takes a part of a batch."""
        if self.norms not in get_args(Norms):
            raise ConfigError(f"norms must be {' or '.join(get_args(Norms))}, got {self.norms!r}")
        if batch < self.count:
            raise ConfigError(f"batch={batch} is too few for {self.count} processes; start fewer")
        if self.count > 1 and self.norms == "shared":
            share_norms(net, self.add_up)

    def device(self, name: str) -> str:
        """The device of this process: of several on a machine each has a GPU of its own."""
        return f"cuda:{_local_rank()}" if name == "cuda" and self.count > 1 else name

    def part(self, order: Tensor) -> Tensor:
        """This process's part of all."""
        return order.tensor_split(self.count)[self.rank]

    def seed(self, *numbers: int) -> None:
        """Give dropout a state that depends on the numbers and the process."""
        if self.count > 1:
            state = np.random.SeedSequence([*numbers, self.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(state[0]))

    def add_up(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def tell(self, number: int) -> int:
        """Give every process the first one's number."""
        return int(self.add_up(torch.tensor(number if self.leads else 0, dtype=torch.int64)))

    def share(self, data: bytes) -> bytes:
        """Give every process the first one's bytes."""
        if self.count == 1:
            return data
        held = np.zeros(self.tell(len(data)), np.uint8)
        if self.leads:
            held[:] = np.frombuffer(data, np.uint8)
        if len(held):
            dist.broadcast(torch.from_numpy(held), 0)
        return held.tobytes()

    def in_turn(self, action: Callable[[], Result]) -> Result:
        """Let the first process of each machine act before the others, as it may fetch files."""
        first = _local_rank() == 0
        if self.count > 1 and not first:
            self.tell(0)
        done = action()
        if self.count > 1 and first:
            self.tell(0)
        return done

    def may_say(self) -> bool:
        """Whether no process has said yet how the run ended: it is said once."""
        if self.store is None:
            return True
        try:
            return bool(self.store.add("said", 1) == 1)
        except RuntimeError:  # the store is lost with the process that kept it
            return True

    @contextmanager
    def guard(self, kept: Callable[[], str]) -> Iterator[None]:
        """Say in one line that another process died; `kept` says what is not lost."""
        try:
            yield
        except (RuntimeError, FoveateError, KeyboardInterrupt) as error:
            if self.count == 1 or isinstance(error, LostProcessError):
                raise
            asked = isinstance(error, KeyboardInterrupt)  # by the user, or by torchrun for this
            if not (self._one_is_gone() if asked else _is_of_network(error)):
                raise
            _ignore_signals()  # torchrun's request to end comes now, and would cut off the words
            raise LostProcessError(f"a process of this run died; {kept()}; {_remedy()}") from error

    def _one_is_gone(self) -> bool:
        """Whether a process of this machine is no more."""
        try:
            said = [self.store.get(f"process/{k}").decode().split() for k in range(self.count)]
        except RuntimeError:  # the store is lost with the process that kept it
            return True
        here = said[self.rank][0]
        return not all(is_alive(int(pid)) for host, pid in said if host == here)


@contextmanager
def joined(device: str, norms: str = "shared") -> Iterator[Team]:
    """Join the processes that torchrun started beside this one; without it, be a team of one.

    `norms` is shared or local, as above. Ctrl-C and a request to end (SIGTERM) reach the first
    process as KeyboardInterrupt and its subclass `Terminated`. The others end when it does: so it
    can still finish its step with them, and save.
    """
    norms = cast(Norms, norms)  # `prepare` looks, when one of the processes can say it for all
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "MASTER_ADDR" not in os.environ:
        yield Team(norms=norms)
        return
    try:
        common, rank, count = next(iter(rendezvous("env://")))
        # Torchrun's store outlives a restart, and must not be asked for what died before it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"foveate/{attempt}/{count}", common)  # type: ignore[attr-defined]
        store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
        dist.init_process_group(_backend(device), store=store, rank=rank, world_size=count)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise FoveateError(f"the processes of this run did not meet ({reason})") from None
    team = Team(rank=rank, count=count, norms=norms, store=store)
    with _ending(team), _group_destroyed(), team.guard(lambda: "what was saved is kept"):
        yield team


@contextmanager
def _group_destroyed() -> Iterator[None]:
    """Destroy the process group after the block, and with it the threads of Gloo.

    A thread of Gloo may drop the last reference to a tensor some time after the operation is
    complete. If Python is finalizing by then, the thread cannot take the GIL and the process
    aborts. The threads end when nothing refers to the group any more. References are held by the
    reducer of DistributedDataParallel and by frames in the tracebacks of errors.
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
        gc.collect()  # errors caught in the block may be part of reference cycles
        dist.destroy_process_group()


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _backend(device: str) -> str:
    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(_local_rank() % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def _local_rank() -> int:
    """Which process of this machine this is."""
    return int(os.environ.get("LOCAL_RANK", 0))


def _is_of_network(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that another process cannot be reached."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, RuntimeError) and any(word in words for word in TROUBLE):
            return True
        error = error.__cause__
    return False


def _ignore_signals() -> None:
    """Let nothing interrupt this process, which is about to end; `_ending` puts back what was."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)


def _remedy() -> str:
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    used, given = (os.environ.get(name, "0") for name in names)
    return "it starts again by itself" if int(used) < int(given) else "start the same command again"


@contextmanager
def _ending(team: Team) -> Iterator[None]:
    """Handle signals as `joined` says, and end a process that cannot handle them in time.

    One that waits on a GPU for a process that is no more never comes back to Python.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or sys.platform == "win32":  # no pipe can be woken there
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handler = stop if team.leads else lambda number, frame: None
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
    with open(reader, "rb", buffering=0) as told:
        while number := told.read(1):
            if number[0] in SIGNALS and not over.wait(GRACE):
                if team.may_say():
                    words = "a process of this run does not answer; what was saved is kept"
                    print(f"error: {words}; {_remedy()}", file=sys.stderr, flush=True)
                os._exit(2)


class _Objective(nn.Module):
    """The loss as a module, for DistributedDataParallel."""

    def __init__(self, net: nn.Module, precision: Precision, smoothing: float) -> None:
        super().__init__()
        self.net, self.precision, self.smoothing = net, precision, smoothing

    def forward(self, images: Prepared, labels: Tensor) -> Tensor:
        """Mean loss of a part of a batch."""
        return loss_of(self.net, images, labels, self.precision, self.smoothing)


def team_step(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    precision: Precision,
    team: Team,
    images: Callable[[], int],
    smoothing: float = 0.0,
) -> Step:
    """The plain step, taken by all processes together, each with its part of `images()` images."""
    objective = _Objective(net, precision, smoothing)
    # A graph that never changes may leave weights out. Buffers are the same everywhere already.
    together = DistributedDataParallel(objective, static_graph=True)
    together.broadcast_buffers = False
    _PARALLEL.add(together)

    def step(batch: Batch) -> Tensor:
        ready, labels = batch.pick()
        count = images()
        apart = count < team.count  # then everyone has all of them
        set_apart(net, apart)
        weight = 1.0 if apart else len(labels) * team.count / count
        optimiser.zero_grad(set_to_none=True)
        loss = weight * together(ready, labels)
        loss.backward()
        optimiser.step()
        if team.norms == "local":
            _average(running_statistics(net), team)
        return team.add_up(loss.detach() / team.count)

    return step


@torch.no_grad()
def _average(tensors: list[Tensor], team: Team) -> None:
    """Replace tensors by their mean over all processes."""
    if tensors:
        flat = team.add_up(torch.cat([tensor.flatten() for tensor in tensors])) / team.count
        for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
