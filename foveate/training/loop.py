"""The training loop, from the first batch to the last weights, across any interruption."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from foveate.data.store import SplitName
from foveate.errors import ConfigError, FoveateError
from foveate.training.checkpoint import Progress, RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import Batches, open_batches
from foveate.training.engine import CHUNK, Step, answer, cast, make_step

SAVE_EVERY = 30.0  # seconds between saves inside a long epoch
Watch = Callable[[TrainConfig, Progress, int], None]


def train(
    config: TrainConfig,
    folder: Path,
    *,
    device: str = "cpu",
    stream: bool = False,
    compiled: bool = True,
    watch: Watch = lambda config, progress, steps: None,
) -> RunFolder:
    """Train a network in `folder`, going on where an earlier call was interrupted.

    `watch` is told after every step how far the run is, and of how many steps an epoch has.
    """
    return train_together(
        [(config, folder)], device=device, stream=stream, compiled=compiled, watch=watch
    )[0]


def train_together(
    runs: list[tuple[TrainConfig, Path]],
    *,
    device: str = "cpu",
    stream: bool = False,
    compiled: bool = True,
    watch: Watch = lambda config, progress, steps: None,
) -> list[RunFolder]:
    """Train several networks side by side on one device, a step of each in turn.

    On a GPU every run has a stream of its own, so that they fill it together.
    """
    place = find_device(device)
    shared: dict[tuple[str, str], Batches] = {}
    sessions = [
        _Session(config, RunFolder(folder), place, stream, compiled, watch, shared)
        for config, folder in runs
    ]
    active = [s.steps() for s in sessions if not s.folder.finished]
    while active:
        active = [steps for steps in active if next(steps, "done") != "done"]
    return [session.folder for session in sessions]


def find_device(name: str) -> torch.device:
    """Check that the device is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"no device is called {name!r}; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU was found; use --device cpu")
    return device


@dataclass(eq=False)
class _Session:
    """One run while it trains."""

    config: TrainConfig
    folder: RunFolder
    device: torch.device
    stream: bool
    compiled: bool
    watch: Watch
    shared: dict[tuple[str, str], Batches]  # seeds of one row see the same images: prepared once

    def steps(self) -> Iterator[None]:
        """Do the whole run, pausing after every step; the weights are there at the end."""
        lane = torch.cuda.Stream() if self.device.type == "cuda" else None
        with self.folder.locked():
            self.folder.claim(self.config, self.device)
            work = self._run()
            while True:
                with torch.cuda.stream(lane):
                    try:
                        next(work)
                    except StopIteration:
                        return
                    except KeyboardInterrupt:
                        self._save()
                        raise
                yield

    def _run(self) -> Iterator[None]:
        torch.manual_seed(self.config.seed)
        self.net = self.config.model.build().to(self.device)
        self.optimiser = _adam(self.net, self.config, self.device)
        self.progress = Progress()
        self._restore()
        train = self._open("train")
        valid = self._open("val")
        precision = self.config.precision
        step = make_step(self.net, self.optimiser, precision, self.device, compiled=self.compiled)
        while self.progress.epoch < self.config.epochs:
            yield from self._epoch(train, step)
            self._close_epoch(valid)
        self.folder.finish(self.net.state_dict(), self.config)

    def _open(self, split: SplitName) -> Batches:
        key = (split, replace(self.config, seed=0).digest())
        if key not in self.shared:
            self.shared[key] = open_batches(self.config, split, self.net, self.device, self.stream)
        return self.shared[key]

    def _epoch(self, batches: Batches, step: Step) -> Iterator[None]:
        """Train for the rest of an epoch; its order and its dropout depend on its number alone."""
        progress, config = self.progress, self.config
        order = torch.Generator().manual_seed(config.seed * 1_000_003 + progress.epoch)
        shuffled = torch.randperm(len(batches), generator=order)
        count = math.ceil(len(batches) / config.batch)
        if progress.step == 0:
            torch.manual_seed(config.seed * 1_000_003 + progress.epoch)
        self._set_rate(config.rate(progress.epoch))
        losses = torch.zeros(count, device=self.device)
        self.net.train()
        start, saved = time.perf_counter(), time.perf_counter()
        begun = progress.seconds
        for inputs, labels in batches(shuffled[progress.step * config.batch :], config.batch):
            losses[progress.step] = step(inputs, labels)
            progress.step += 1
            progress.seconds = begun + time.perf_counter() - start
            self.watch(config, progress, count)
            yield
            if time.perf_counter() - saved > SAVE_EVERY and progress.step < count:
                self._add_up(losses)
                self._save()
                saved = time.perf_counter()
        self._add_up(losses)

    def _add_up(self, losses: Tensor) -> None:
        """Take the losses of the steps since the last time; stop at the first that is no number."""
        bad = (~torch.isfinite(losses)).nonzero()
        if len(bad):
            epoch, step = self.progress.epoch + 1, int(bad[0]) + 1
            raise FoveateError(
                f"the loss is no number in epoch {epoch}, step {step}; the last good state is kept "
                f"in {self.folder.path}: try a smaller learning_rate"
            )
        self.progress.loss += float(losses.sum())
        losses.zero_()

    def _close_epoch(self, valid: Batches) -> None:
        progress, steps = self.progress, self.progress.step
        progress.epoch += 1
        entry = {
            "epoch": progress.epoch,
            "loss": progress.loss / steps,
            "validation": self._accuracy(valid),
            "learning_rate": self.config.rate(progress.epoch - 1),
            "seconds": progress.seconds,
        }
        progress.metrics.append(entry)
        progress.step, progress.loss = 0, 0.0
        self._save()

    @torch.no_grad()
    def _accuracy(self, batches: Batches) -> float:
        self.net.eval()
        right = torch.zeros((), device=self.device)
        for inputs, labels in batches(torch.arange(len(batches)), CHUNK):
            with cast(self.config.precision, self.device):
                right += (answer(self.net, inputs).argmax(1) == labels).sum()
        return float(right) / max(1, len(batches))

    def _set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _save(self) -> None:
        if hasattr(self, "progress"):
            self.folder.save(self.progress, _tensors(self.net, self.optimiser))

    def _restore(self) -> None:
        found = self.folder.load()
        if found is None:
            return
        self.progress, tensors = found
        torch.set_rng_state(tensors.pop("random").to(torch.uint8))
        _put_back(self.net, self.optimiser, tensors, self.folder.resume)


def _adam(net: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    on_gpu = device.type == "cuda"
    rate = torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate
    return torch.optim.Adam(net.parameters(), lr=rate, fused=on_gpu, capturable=on_gpu)


def _tensors(net: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that must survive: weights, running statistics, Adam's state, the random state."""
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"adam.{key}.{name}"] = value
    return {**tensors, "random": torch.get_rng_state()}


def _put_back(
    net: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path
) -> None:
    weights = {k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")}
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} is of another architecture ({reason} ...)") from None
    for name, parameter in net.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"adam.{key}.{name}" in tensors:
                value = tensors[f"adam.{key}.{name}"]
                on_device = key != "step" or parameter.is_cuda
                optimiser.state[parameter][key] = value.to(parameter.device) if on_device else value
