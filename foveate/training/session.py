"""The training of one run: start or resume, epochs, validation, checkpoints and final weights."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from foveate.data.splits import SplitName
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.execution.captured import CHUNK, Batch, Step, make_step, plain_step
from foveate.execution.plan import logits
from foveate.execution.precision import cast
from foveate.models.channels import ScaleChannels
from foveate.models.pretrained import find_non_finite, load_weights
from foveate.training.checkpoint import CONFIG, Progress, RunWriter, pack, unpack
from foveate.training.config import TrainConfig, build_net
from foveate.training.data import Batches, Load, open_batches
from foveate.training.distributed import Team, team_step
from foveate.training.interrupt import deferred_signals
from foveate.training.optimiser import WeightAverage, make_optimiser, set_rate
from foveate.training.rescaling import is_random
from foveate.training.skipped import Bad, add_skipped
from foveate.training.state import RandomStates, capture_state, restore_state, select_prefix
from foveate.training.unchanged import record_data
from foveate.trust import is_own

SAVE_EVERY = 30.0  # seconds between checkpoints within an epoch
# A large validation set is used less often, so that validation processes at most a quarter as many
# images as training, but at least so many times.
FEWEST = 4
READ_LOSSES_EVERY = 1.0  # seconds between reads of the losses, each of which synchronises a GPU
TIME_SLICE = 0.005  # seconds for which one of several concurrent runs takes steps at a time
# EfficientNet-Lite0 in 7 channels of 160 pixels, batch 32, on one H200: compiling takes 50 s and
# reduces a step from 20 to 14 ms. The runs of a comparison share what is compiled for a network.
COMPILED_FROM = 8000  # steps
BASELINES_FROM = 3000
ALONE = Team()
Callback = Callable[[TrainConfig, Progress, int], None]


class Shared(NamedTuple):
    """Options of concurrent runs; runs that differ only in their seed also share `batches`."""

    device: torch.device
    stream: bool
    compiled: bool
    callback: Callback
    load: Load
    batches: dict[tuple[str, str], Batches]
    recompute: int = 0
    team: Team = ALONE
    changed_data: bool = False
    deterministic: bool = True
    workers: int | None = None
    bad: Bad = "stop"


def worth_compiling(config: TrainConfig, steps: int) -> bool:
    """Whether a run on a GPU has enough steps to make up for the time of compiling its network.

    This must not depend on other runs, because compiled steps round differently.
    """
    if not config.backbone:
        return True
    return steps > (BASELINES_FROM if is_own(config.backbone) else COMPILED_FROM)


class Session:
    """The training of one run; iterate over `steps` to train it."""

    def __init__(self, config: TrainConfig, folder: RunWriter, shared: Shared) -> None:
        self.config, self.folder, self.shared = config, folder, shared
        self.device, self.team = shared.device, shared.team
        self.lane = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.random = RandomStates(self.device)
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.average: WeightAverage | None = None
        self.new = False
        self.saved = time.perf_counter()

    def steps(self) -> Generator[None, None, None]:
        """Train to the end and write the final weights, yielding after every few steps."""
        with self.team.guard(self._describe_checkpoint), self._claimed():
            if self.team.broadcast_int(self.folder.finished):
                return
            with self._timed(), self._alone(), self._started():
                self._begin()
            work = self._run()
            try:
                while True:
                    with (
                        deferred_signals() as pressed,
                        # Detects a dead process before signals act:
                        self.team.guard(self._describe_checkpoint),
                        self._timed(),
                        self._alone(),
                    ):
                        if self._turn(work, pressed):
                            return
                    yield
            except (KeyboardInterrupt, SystemExit, GeneratorExit):  # SIGTERM: Ray raises SystemExit
                if not self.folder.finished:
                    with self._alone():
                        self._save()
                raise
            finally:
                work.close()  # stops the data loader's processes
                for batches in self.shared.batches.values():
                    batches.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the duration of the block to this run's time."""
        start = time.perf_counter()
        yield
        self.progress.share += time.perf_counter() - start

    @staticmethod
    def _turn(work: Iterator[None], pressed: list[int]) -> bool:
        """Take steps for `TIME_SLICE` or until a signal arrives; return whether the run is done."""
        until = time.perf_counter() + TIME_SLICE
        while next(work, "done") != "done":
            if pressed or time.perf_counter() > until:
                return False
        return True

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Lock the folder, and check that folder and all processes have this configuration."""
        with self.folder.locked() if self.team.is_main else nullcontext():
            if self.team.is_main:
                made = (self.config, self.device, self.team.description)
                self.new = self.folder.write_or_check_config(*made)
                if self.folder.finished:
                    self.folder.check_finished()
                else:
                    shared = self.shared
                    options = {"listing": shared.stream, "changed_data": shared.changed_data}
                    with self._started():
                        record_data(self.folder, self.config, shared.load, **options)
            digest = int(self.config.digest(), 16)
            if self.team.broadcast_int(digest) != digest:
                raise ConfigError(
                    "the processes of this run have different options; start all with the same ones"
                )
            yield

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Remove the configuration of a new run if the block raises an error."""
        try:
            yield
        except FoveateError:
            if self.new:
                (self.folder.path / CONFIG).unlink(missing_ok=True)
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Use this run's own random states and, on a GPU, its own CUDA stream."""
        with self.random.active(), torch.cuda.stream(self.lane):
            yield

    def _begin(self) -> None:
        """Build the network, restore the checkpoint and open the images."""
        config, device = self.config, self.device
        torch.manual_seed(config.seed)
        start = not self.folder.saved
        # The caller of `train` named the backbone, so it is trusted.
        self.net = build_net(config, trust=True, start=start).to(device)
        if config.backbone:  # EfficientNet-Lite0: a third of the time on one H200, half on a CPU
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimiser = make_optimiser(self.net, config, device)
        self.average = WeightAverage(self.net, config.ema) if config.ema else None
        self._restore()
        if self.shared.recompute:
            if not isinstance(self.net, ScaleChannels):
                raise ConfigError(
                    "recompute needs a network with scale channels; use fovmax, fovavg or fovconc"
                )
            self.net.recompute = self.shared.recompute
        self.team.prepare(self.net, config.batch)
        self.train, self.valid = self._open("train"), self._open("val")
        self.count = math.ceil(len(self.train) / config.batch)
        self.step = self._make_step()

    def _make_step(self) -> Step:
        config, made = self.config, (self.net, self.optimiser, self.config.precision)
        if self.team.count > 1:
            return team_step(*made, self.team, self._images, config.label_smoothing)
        if self.shared.recompute:
            return plain_step(*made, config.label_smoothing)
        return make_step(
            *made,
            self.device,
            batch=config.batch,
            compiled=self.shared.compiled and worth_compiling(config, self.count * config.epochs),
            smoothing=config.label_smoothing,
        )

    @property
    def result(self) -> nn.Module:
        """The network to validate and save: the average of the weights, if there is one."""
        return self.net if self.average is None else self.average.net

    def _set_mode(self, training: bool) -> None:
        """Set training or evaluation mode; frozen batch norms stay in evaluation mode."""
        self.net.train(training)
        if self.config.freeze_norms:
            for module in self.net.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()

    def _images(self) -> int:
        """Return the number of images in the current batch over all processes."""
        batch = self.config.batch
        return min(batch, len(self.train) - self.progress.step * batch)

    def _run(self) -> Generator[None, None, None]:
        while self.progress.epoch < self.config.epochs:
            yield from self._epoch()
            yield from self._close_epoch()
        self._record_skipped()
        if self.team.is_main:
            self.folder.finish(self.progress, self.best or self.result.state_dict(), self.config)

    def _open(self, split: SplitName) -> Batches:
        # Random images are drawn for each epoch, in which runs differ even with the same seed.
        own = split == "train" and is_random(self.config)
        owner = str(self.folder.path) if own else replace(self.config, seed=0).digest()
        shared, key = self.shared, (split, owner)
        self._set_mode(split == "train")  # the prepared form of the images can depend on the mode
        if key not in shared.batches:
            shared.batches[key] = open_batches(
                self.config, split, self.net, self.device, shared.stream, shared.load,
                shared.workers, shared.bad,
            )  # fmt: skip
        return shared.batches[key]

    def _epoch(self) -> Iterator[None]:
        """Train for the rest of an epoch; order and dropout depend only on seed and epoch."""
        progress, config = self.progress, self.config
        order = torch.Generator().manual_seed(config.seed * 1_000_003 + progress.epoch)
        shuffled = torch.randperm(len(self.train), generator=order)
        if progress.step == 0:
            torch.manual_seed(config.seed * 1_000_003 + progress.epoch)
        set_rate(self.optimiser, config.rate(progress.epoch))
        self.losses, self.counted = torch.zeros(self.count, device=self.device), progress.step
        self._set_mode(True)
        start = last_read = time.perf_counter()
        begun = progress.seconds
        for batch in self._batches(shuffled[progress.step * config.batch :]):
            self.team.seed(config.seed, progress.epoch, progress.step)
            if config.schedule != "steps":
                set_rate(self.optimiser, config.rate(progress.epoch + progress.step / self.count))
            if len(batch.labels):
                self.losses[progress.step] = self.step(batch)
                if self.average is not None:
                    self.average.update(progress.epoch * self.count + progress.step)
            else:  # all images of the batch were left out
                progress.empty += 1
            progress.step += 1
            now = time.perf_counter()
            progress.seconds = begun + now - start
            if now - last_read > READ_LOSSES_EVERY:
                self._accumulate_losses()
                last_read = now
            if now - self.saved > SAVE_EVERY:
                self._save()
            self.shared.callback(config, progress, self.count)
            yield

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        for part, size in self.team.split_batches(order, self.config.batch):
            yield from self.train(part, size, (self.config.seed, self.progress.epoch))

    def _accumulate_losses(self) -> None:
        """Add the losses since the last call to the sum; stop at the first non-finite one.

        They are added one by one, so that the sum does not depend on the times of the calls.
        """
        for loss in self.losses[self.counted : self.progress.step].tolist():
            self.counted += 1
            if not math.isfinite(loss):
                self._stop(f"in epoch {self.progress.epoch + 1}, step {self.counted}")
            self.progress.loss += loss

    def _stop(self, where: str) -> NoReturn:
        kept = f"the last finite state is in {self.folder.path}; " if self.folder.saved else ""
        raise FoveateError(
            f"the loss is not finite {where}; {kept}use a smaller learning_rate and another --out"
        )

    def _close_epoch(self) -> Iterator[None]:
        self._accumulate_losses()
        progress = self.progress
        entry = {
            "epoch": progress.epoch + 1,
            "loss": progress.loss / max(1, progress.step - progress.empty),
            "learning_rate": self.config.rate(progress.epoch),
            "seconds": progress.seconds,
        }
        ended = progress.epoch + 1
        due = ended == self.config.epochs or ended % self._validated_every() == 0
        if due:
            entry["validation"] = yield from self._accuracy()
            before = [past["validation"] for past in progress.metrics if "validation" in past]
            if self.config.keep == "best" and entry["validation"] >= max(before, default=-1.0):
                self.best = {k: v.detach().clone() for k, v in self.result.state_dict().items()}
        progress.metrics.append({**entry, "share": progress.share})
        progress.epoch, progress.step, progress.loss = progress.epoch + 1, 0, 0.0
        progress.empty = 0
        if due:
            self._save()
        self.shared.callback(self.config, progress, self.count)

    def _validated_every(self) -> int:
        total = self.config.epochs
        fair = min(total // FEWEST, math.ceil(4 * len(self.valid) / len(self.train)))
        return max(1, total // self.config.validations, fair)

    @torch.no_grad()
    def _accuracy(self) -> Generator[None, None, float]:
        """Return the validation accuracy, yielding after every chunk of images."""
        net = self.result.eval()
        counts = torch.zeros(2, device=self.device)  # correct predictions, and images
        for batch in self.valid(self.team.part(torch.arange(len(self.valid))), CHUNK):
            images, labels = batch.select()
            with cast(self.config.precision, self.device):
                counts[0] += (logits(net, images).argmax(1) == labels).sum()
            counts[1] += len(labels)
            yield
        right, seen = self.team.all_reduce_sum(counts).tolist()
        return float(right / seen)

    def _save(self) -> None:
        if not self.team.is_main:
            return
        if self.progress.step:
            self._accumulate_losses()
        averaged = {} if self.average is None else self.average.net.state_dict()
        ema = {f"ema.{name}": tensor for name, tensor in averaged.items()}
        if find_non_finite(self.net.state_dict() | ema):
            self._stop(f"after epoch {self.progress.epoch}, step {self.progress.step}")
        self._record_skipped()
        best = {f"best.{name}": tensor for name, tensor in self.best.items()}
        self.folder.save(self.progress, capture_state(self.net, self.optimiser) | best | ema)
        self.saved = time.perf_counter()

    def _record_skipped(self) -> None:
        """Write the list of left-out images to the run's folder."""
        add_skipped(self.folder.path, {**self.train.skipped, **self.valid.skipped})

    def _restore(self) -> None:
        found = self.folder.load() if self.team.is_main else None
        if self.team.count > 1:
            found = unpack(self.team.broadcast_bytes(pack(*found) if found else b""))
        if found is not None:
            self.progress, tensors = found
            restore_state(self.net, self.optimiser, tensors, self.folder.resume)
            best = select_prefix(tensors, "best.")
            self.best = {name: tensor.to(self.device) for name, tensor in best.items()}
            if self.average is not None:
                load_weights(self.average.net, select_prefix(tensors, "ema."), self.folder.resume)

    def _describe_checkpoint(self) -> str:
        """Describe the last checkpoint, for the error after a process died."""
        with suppress(DataError):
            if found := self.folder.load():
                return f"the last checkpoint is at {found[0].position} in {self.folder.path}"
        return f"there is no checkpoint in {self.folder.path} yet"
