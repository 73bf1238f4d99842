"""The folder of a run: its configuration, metrics, weights and checkpoint.

All files are safetensors, JSON or CSV. They are written atomically, by one process at a time.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor, nn

from foveate import __version__
from foveate.checks import check_fields, check_names, is_number
from foveate.errors import ConfigError, DataError
from foveate.files import parse_json, read_text, reason_of, write_bytes, write_text
from foveate.models.pretrained import load_weights
from foveate.models.zoo import ModelConfig
from foveate.provenance import commit, hardware
from foveate.training.backbones import needs_trust
from foveate.training.config import TrainConfig, build_net
from foveate.training.tensors import pack_tensors, read_tensors, unpack_tensors
from foveate.trust import require_trust

LOCK = ".lock"
CONFIG = "config.json"
MADE_WITH = ("version", "commit", "hardware")


class BusyError(DataError):
    """The folder of a run is locked by another process."""


@dataclass
class Progress:
    """Progress of a run: complete epochs, steps of the current one, and metrics of each epoch."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0  # sum over the steps of the current epoch
    seconds: float = 0.0  # wall-clock time of the epochs
    share: float = 0.0  # time of this run alone, including preparation, validation and saving
    metrics: list[dict[str, float]] = field(default_factory=list)
    empty: int = 0  # steps of the current epoch without any usable image

    @property
    def position(self) -> str:
        """Current epoch and step as text."""
        return f"epoch {self.epoch + 1}, step {self.step}"


class RunFolder:
    """The folder of a training run.

    Args:
        path: Path of the folder.

    Attributes:
        weights: Path of the final weights, ``weights.safetensors``; exists once the run is
            finished.
        resume: Path of the checkpoint, ``resume.safetensors``; exists until the run is finished.

    Examples:
        >>> from foveate.training.loop import train
        >>> config = TrainConfig(source="mnist-5k", samples=64, epochs=1)
        >>> path = train(config, Path("runs/first")).path
        >>> run = RunFolder(path)
        >>> run.finished, run.config() == config
        (True, True)
        >>> sorted(run.metrics()[0])
        ['epoch', 'learning_rate', 'loss', 'seconds', 'share', 'validation']
        >>> net = run.net().eval()
        >>> net(torch.zeros(1, 1, 112, 112)).shape
        torch.Size([1, 10])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "weights.safetensors"
        self.resume = path / "resume.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the run is finished: the final weights are the last file written."""
        return self.weights.exists()

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.resume.exists()

    def config(self) -> TrainConfig:
        """Read the configuration of the run.

        Returns:
            The configuration.

        Raises:
            DataError: If the folder is not a run, or its config.json is damaged.
        """
        return self._record()[0]

    def provenance(self) -> dict[str, Any]:
        """Read the version, commit and hardware with which the run was trained.

        Returns:
            A dictionary with ``version``, ``commit`` and ``hardware``. The different values of a
            resumed run are separated by semicolons.
        """
        starts = self.history()
        values = {key: dict.fromkeys(start[key] for start in starts) for key in MADE_WITH}
        return {key: "; ".join(filter(None, found)) for key, found in values.items()}

    def history(self) -> list[dict[str, str]]:
        """Read the version, commit and hardware of each start that differed from the one before.

        Returns:
            A dictionary with ``version``, ``commit`` and ``hardware`` per start.
        """
        return self._record()[1]

    def data(self) -> dict[str, Any]:
        """Read the description of the training data.

        Returns:
            ``source``, ``checksum`` and ``classes`` of the data; empty for a run of a version that
            did not store them.
        """
        return self._record()[2]

    def classes(self) -> tuple[str, ...]:
        """Read the names of the classes.

        Returns:
            Names in the order of the class indices; empty if the source does not name its classes,
            or the run did not store them.
        """
        return tuple(self.data().get("classes", ()))

    def _record(self) -> tuple[TrainConfig, list[dict[str, str]], dict[str, Any]]:
        """Read config.json: the configuration, the history of starts and the training data."""
        path = self.path / CONFIG
        try:
            found = parse_json(read_text(path))
            starts = found.get("history", [found])  # older files have no history
            history = [{key: str(start.get(key, "")) for key in MADE_WITH} for start in starts]
            data = found.get("data", {})
            if not isinstance(data, dict) or not isinstance(data.get("checksum", ""), str):
                raise TypeError("data")
            check_names(data.get("classes", []))
            config = TrainConfig.from_dict(found["config"])
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{self.path} is not a run: it has no {CONFIG}; pass the folder of a run, or use "
                "'foveate audit' for a model file"
            ) from None
        except OSError as error:
            raise DataError(
                f"cannot read {path} ({error.strerror}); check its permissions"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise DataError(f"{path} is damaged ({error}); remove the folder") from None
        return config, history, data

    def net(self, trust: bool = False) -> nn.Module:
        """Build the network of a finished run and load its weights.

        Args:
            trust: Whether a factory named in config.json may be imported and called.

        Returns:
            The network, on the CPU and in training mode.

        Raises:
            DataError: If the run is not finished, or a file is missing or damaged.
            ConfigError: If weights and configuration do not match, or ``trust`` is required.
        """
        config = self.config()
        if config.backbone and needs_trust(config.backbone):
            named = f"{self.path / CONFIG} names the backbone {config.backbone!r}"
            require_trust(trust, f"{named}, which would be imported and called")
        if not self.finished:
            raise DataError(
                f"{self.path} is not finished ({len(self.metrics())} of {config.epochs} epochs); "
                "run the same 'foveate train' command again to resume it"
            )
        weights, note = read_tensors(self.weights)
        with torch.random.fork_rng(devices=[]):
            net = build_net(config, trust=trust)
        load_weights(net, weights, self.weights)
        if "model" in note and _model(note["model"]) != config.model:
            raise ConfigError(
                f"{self.weights} belongs to another model than {CONFIG}; restore both files from "
                "the same run"
            )
        return net

    def validation(self) -> float | None:
        """Return the validation accuracy of the weights that the run saves.

        Returns:
            Accuracy from 0 to 1: the highest with ``keep="best"``, otherwise the last one. ``None``
            before the first validation.
        """
        found = [entry["validation"] for entry in self.metrics() if "validation" in entry]
        if not found:
            return None
        return max(found) if self.config().keep == "best" else found[-1]

    def metrics(self) -> list[dict[str, float]]:
        """Read the metrics of each epoch.

        Returns:
            A dictionary per epoch with ``epoch``, ``loss``, ``learning_rate``, ``seconds`` and
            ``share``, and ``validation`` for epochs after which the run was validated.

        Raises:
            DataError: If metrics.jsonl is damaged.
        """
        path = self.path / "metrics.jsonl"
        try:
            found = [parse_json(line) for line in read_text(path).splitlines()]
            for line, entry in enumerate(found, 1):
                if not isinstance(entry, dict) or not all(map(is_number, entry.values())):
                    raise ValueError(f"line {line} is not an object of numbers")
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise DataError(f"{path} is damaged ({error}); remove it") from None
        return found

    def load(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """Read the checkpoint.

        Returns:
            Progress and tensors, or ``None`` if there is no checkpoint.
        """
        if not self.saved:
            return None
        tensors, note = read_tensors(self.resume)
        try:
            tensors["random"]
            progress = Progress(**parse_json(note["progress"]))
            check_fields(progress)
            return progress, tensors
        except (KeyError, TypeError, ValueError, ConfigError):
            raise DataError(f"{self.resume} is damaged; remove it to start over") from None


class RunWriter(RunFolder):
    """A run folder for training: adds a lock and atomic writes to `RunFolder`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock: os.stat_result | None = None

    @contextmanager
    def locked(self, timeout: float = 0.0) -> Iterator[None]:
        """Lock the folder, waiting up to `timeout` seconds; other processes get a BusyError.

        The lock is released when the process ends, even if it is killed.
        """
        lock = FileLock(self.path / LOCK, thread_local=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout, poll_interval=0.5)
            self._lock = os.stat(self.path / LOCK)
        except Timeout:
            raise BusyError(
                f"another process is training in {self.path}; wait for it, or choose another --out"
            ) from None
        except OSError as error:
            raise DataError(
                f"cannot use the folder {self.path} ({error.strerror}); check its permissions or "
                "choose another --out"
            ) from None
        try:
            yield
        finally:
            self._lock = None
            lock.release()

    def write_or_check_config(
        self, config: TrainConfig, device: torch.device, extra: str = ""
    ) -> bool:
        """Write the configuration of a new run, or compare it; return whether the run is new.

        Version, commit and hardware, described with `extra`, are added to the history if they
        changed.
        """
        used = ", ".join(filter(None, [hardware(device), extra]))
        how = {"version": __version__, "commit": commit(), "hardware": used}
        if not (self.path / CONFIG).exists():
            if self.saved or self.finished:
                raise DataError(f"{self.path} has weights but no {CONFIG}; choose another --out")
            new = {"config": config.to_dict(), "digest": config.digest(), **how, "history": [how]}
            self._write_record(new)
            return True
        started, history, _ = self._record()
        if differing := _differences(started.to_dict(), config.to_dict()):
            others = ", ".join(differing)
            raise ConfigError(
                f"{self.path} has a run with other settings ({others}); choose another --out"
            )
        if not self.finished and history[-1:] != [how]:
            self.update_record(history=[*history, how])
        return False

    def update_record(self, **changes: Any) -> None:
        """Change entries of config.json."""
        self._write_record({**parse_json(read_text(self.path / CONFIG)), **changes})

    def _write_record(self, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=1) + "\n"
        self._write(lambda: write_text(self.path / CONFIG, text))

    def save(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Write the checkpoint and the metrics."""
        self._write(lambda: write_bytes(self.resume, pack(progress, tensors)))
        self._save_metrics(progress)

    def finish(self, progress: Progress, weights: dict[str, Tensor], config: TrainConfig) -> None:
        """Write the metrics and the final weights, and remove the checkpoint."""
        self._save_metrics(progress)  # the last save may have been interrupted before the metrics
        note = {"model": json.dumps(config.model.to_dict()), "digest": config.digest()}
        if config.recipe is not None:
            note["recipe"] = json.dumps(config.recipe.to_dict())
        if classes := self.classes():
            note["classes"] = json.dumps(classes)
        self._write(lambda: write_bytes(self.weights, pack_tensors(weights, note)))
        self.resume.unlink(missing_ok=True)

    def check_finished(self) -> None:
        """Verify the final weights, and remove a checkpoint that is no longer needed."""
        read_tensors(self.weights)
        self.resume.unlink(missing_ok=True)

    def _save_metrics(self, progress: Progress) -> None:
        lines = "".join(json.dumps(entry) + "\n" for entry in progress.metrics)
        self._write(lambda: write_text(self.path / "metrics.jsonl", lines))

    def _write(self, action: Callable[[], None]) -> None:
        try:
            if self._lock and not os.path.samestat(self._lock, os.stat(self.path / LOCK)):
                raise FileNotFoundError
        except OSError:
            raise DataError(
                f"{self.path} was removed during training; run the same command again to start over"
            ) from None
        try:
            action()
        except (OSError, SafetensorError) as error:
            reason = reason_of(error)
            raise DataError(
                f"cannot write in {self.path} ({reason}); free some disk space and run the same "
                "command again to resume"
            ) from None


def _model(note: str) -> ModelConfig | None:
    """Parse the model configuration in a weights file; None if it is invalid."""
    with suppress(ValueError, TypeError, ConfigError):
        return ModelConfig.from_dict(parse_json(note))
    return None


def pack(progress: Progress, tensors: dict[str, Tensor]) -> bytes:
    """Return a checkpoint as the bytes of a safetensors file."""
    return pack_tensors(tensors, {"progress": json.dumps(vars(progress))})


def unpack(data: bytes) -> tuple[Progress, dict[str, Tensor]] | None:
    """Read the output of `pack`; None for empty data."""
    if not data:
        return None
    tensors, note = unpack_tensors(data)
    return Progress(**json.loads(note["progress"])), tensors


def _differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key in sorted(one.keys() | other.keys()):
        first, second = one.get(key), other.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            names += _differences(first, second, f"{prefix}{key}.")
        elif first != second:
            names.append(prefix + key)
    return names
