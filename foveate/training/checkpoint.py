"""A run's folder: its configuration, metrics, weights, and the point to resume from.

Everything is safetensors and JSON, written whole or not at all, by one process at a time.
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
from safetensors.torch import load
from torch import Tensor, nn

from foveate import __version__
from foveate.checks import check_fields, check_names, is_number
from foveate.errors import ConfigError, DataError
from foveate.files import parse_json, read_text, reason_of, replacing, write_text
from foveate.models.pretrained import load_weights
from foveate.models.zoo import ModelConfig
from foveate.provenance import commit as commit
from foveate.provenance import hardware as hardware
from foveate.training.backbones import is_registered
from foveate.training.config import TrainConfig, build_net
from foveate.training.tensors import pack_tensors, read_tensors
from foveate.trust import require_trust

LOCK = ".lock"
CONFIG = "config.json"
MADE_WITH = ("version", "commit", "hardware")


class BusyError(DataError):
    """Another process holds the folder of a run."""


@dataclass
class Progress:
    """How far a run is: the next step of the next epoch, and what past epochs measured.

    `seconds` are those of its epochs by the clock; `share` is what the run took of the time of the
    runs side by side, with preparing, validating and saving, also before an interruption.
    """

    epoch: int = 0
    step: int = 0
    loss: float = 0.0  # sum over the steps of this epoch
    seconds: float = 0.0
    share: float = 0.0
    metrics: list[dict[str, float]] = field(default_factory=list)
    empty: int = 0  # steps of this epoch of whose pictures none could be used

    @property
    def reached(self) -> str:
        """Where the run is, in words."""
        return f"epoch {self.epoch + 1}, step {self.step}"


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "weights.safetensors"
        self.resume = path / "resume.safetensors"
        self._lock: os.stat_result | None = None

    @property
    def finished(self) -> bool:
        """Whether the run has ended; its weights appear last."""
        return self.weights.exists()

    @property
    def saved(self) -> bool:
        """Whether there is a point to resume from."""
        return self.resume.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out while the block runs; the lock ends with the process."""
        lock = FileLock(self.path / LOCK, thread_local=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            self._lock = os.stat(self.path / LOCK)
        except Timeout:
            raise BusyError(
                f"another process is training in {self.path}; wait for it, or choose another --out"
            ) from None
        except OSError as error:
            raise DataError(f"cannot use the folder {self.path} ({error.strerror})") from None
        try:
            yield
        finally:
            self._lock = None
            lock.release()

    def claim(self, config: TrainConfig, device: torch.device, also: str = "") -> None:
        """Record what this run is, or check that it is what the folder already holds.

        `also` follows the hardware. A start with another version, commit or hardware than the last
        is added to the history.
        """
        used = ", ".join(filter(None, [hardware(device), also]))
        how = {"version": __version__, "commit": commit(), "hardware": used}
        if not (self.path / CONFIG).exists():
            if self.saved or self.finished:
                raise DataError(f"{self.path} has weights but no {CONFIG}; choose another --out")
            new = {"config": config.to_dict(), "digest": config.digest(), **how, "history": [how]}
            self._write_record(new)
            return
        record = self._record()
        if differing := _differences(record["config"].to_dict(), config.to_dict()):
            others = ", ".join(differing)
            raise ConfigError(f"{self.path} has a run with other {others}; choose another --out")
        if not self.finished and record["history"][-1:] != [how]:
            self._update_record(history=[*record["history"], how])

    def config(self) -> TrainConfig:
        """Read the configuration of the run."""
        config: TrainConfig = self._record()["config"]
        return config

    def about(self) -> dict[str, Any]:
        """Read with what the run was made: version, commit and hardware, of a resumed run all."""
        starts = self.history()
        values = {key: dict.fromkeys(start[key] for start in starts) for key in MADE_WITH}
        return {key: "; ".join(filter(None, found)) for key, found in values.items()}

    def history(self) -> list[dict[str, str]]:
        """Read version, commit and hardware of each start that differed from the one before."""
        history: list[dict[str, str]] = self._record()["history"]
        return history

    def data(self) -> dict[str, Any]:
        """Read the source of the run, its checksum and classes; nothing of an older version."""
        data: dict[str, Any] = self._record()["data"]
        return data

    def classes(self) -> tuple[str, ...]:
        """Read the names of the classes; nothing if the source has none, or of an older run."""
        return tuple(self.data().get("classes", ()))

    def record_data(self, data: dict[str, Any]) -> None:
        """Add the source of the run, its checksum and its classes to config.json."""
        self._update_record(data=data)

    def _record(self) -> dict[str, Any]:
        """Read config.json: the configuration, the history of starts, and the data of the run."""
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
        except FileNotFoundError:
            raise DataError(f"{self.path} is not a run: it has no {CONFIG}") from None
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise DataError(f"{path} is damaged ({error}); remove the folder") from None
        return {"config": config, "history": history, "data": data}

    def _update_record(self, **changes: Any) -> None:
        self._write_record({**parse_json(read_text(self.path / CONFIG)), **changes})

    def _write_record(self, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=1) + "\n"
        self._write(lambda: write_text(self.path / CONFIG, text))

    def save(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Write the point to resume from, and the metrics so far."""
        self._write(lambda: _write_bytes(self.resume, pack(progress, tensors)))
        self._save_metrics(progress)

    def load(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """Read the point to resume from, if there is one."""
        if not self.saved:
            return None
        tensors, note = read_tensors(self.resume)
        try:
            tensors["random"]
            progress = Progress(**parse_json(note["progress"]))
            check_fields(progress)
            return progress, tensors
        except (KeyError, TypeError, ValueError, ConfigError):
            raise DataError(f"{self.resume} is damaged; remove it to start again") from None

    def finish(self, progress: Progress, weights: dict[str, Tensor], config: TrainConfig) -> None:
        """Write the final weights; only then is the run finished."""
        self._save_metrics(progress)  # the last save may have been cut off before them
        note = {"model": json.dumps(config.model.to_dict()), "digest": config.digest()}
        if config.recipe is not None:
            note["recipe"] = json.dumps(config.recipe.to_dict())
        if classes := self.classes():
            note["classes"] = json.dumps(classes)
        self._write(lambda: _write_bytes(self.weights, pack_tensors(weights, note)))
        self.resume.unlink(missing_ok=True)

    def check_finished(self) -> None:
        """Make sure that the final weights are whole; clear away what is no longer needed."""
        read_tensors(self.weights)
        self.resume.unlink(missing_ok=True)

    def net(self, trust: bool = False) -> nn.Module:
        """Build the network of a finished run, with its weights, on the CPU.

        Args:
            trust: Whether a factory that config.json names may be imported and called.
        """
        config = self.config()
        if config.backbone and not is_registered(config.backbone):
            named = f"{self.path / CONFIG} names the backbone {config.backbone!r}"
            require_trust(trust, f"{named}, which would be imported and called")
        if not self.finished:
            raise DataError(
                f"{self.path} is not finished ({len(self.metrics())} of {config.epochs} epochs); "
                "run 'foveate train' as before to go on"
            )
        weights, note = read_tensors(self.weights)
        with torch.random.fork_rng(devices=[]):
            net = build_net(config, trust=trust)
        load_weights(net, weights, self.weights)
        if "model" in note and _model(note["model"]) != config.model:
            raise ConfigError(f"{self.weights} is of another model than {CONFIG} says")
        return net

    def validation(self) -> float | None:
        """Return the validation accuracy of the weights that the run keeps, if there is one yet."""
        found = [entry["validation"] for entry in self.metrics() if "validation" in entry]
        if not found:
            return None
        return max(found) if self.config().keep == "best" else found[-1]

    def metrics(self) -> list[dict[str, float]]:
        """Read what was measured after each epoch."""
        path = self.path / "metrics.jsonl"
        try:
            found = [parse_json(line) for line in read_text(path).splitlines()]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise DataError(f"{path} is damaged ({error}); remove it") from None
        for line, entry in enumerate(found, 1):
            if not isinstance(entry, dict) or not all(map(is_number, entry.values())):
                raise DataError(f"{path} is damaged (line {line} has no numbers); remove it")
        return found

    def _save_metrics(self, progress: Progress) -> None:
        lines = "".join(json.dumps(entry) + "\n" for entry in progress.metrics)
        self._write(lambda: write_text(self.path / "metrics.jsonl", lines))

    def _write(self, action: Callable[[], None]) -> None:
        if self._lock is not None and not _is_same(self._lock, self.path / LOCK):
            raise DataError(
                f"{self.path} was removed while the run was training; run the same command to "
                "start again"
            )
        try:
            action()
        except (OSError, SafetensorError) as error:
            reason = reason_of(error)
            raise DataError(
                f"cannot write in {self.path} ({reason}); free some space and run again to go on"
            ) from None


def _is_same(lock: os.stat_result, path: Path) -> bool:
    """Whether the lock that this process holds is still the one at `path`."""
    try:
        return os.path.samestat(lock, os.stat(path))
    except OSError:
        return False


def _model(note: str) -> ModelConfig | None:
    """The model that a file of weights says it is of; None if that cannot be read."""
    with suppress(ValueError, TypeError, ConfigError):
        return ModelConfig.from_dict(parse_json(note))
    return None


def pack(progress: Progress, tensors: dict[str, Tensor]) -> bytes:
    """A point to resume from, as a safetensors file has it."""
    return pack_tensors(tensors, {"progress": json.dumps(vars(progress))})


def unpack(data: bytes) -> tuple[Progress, dict[str, Tensor]] | None:
    """Read what `pack` made; nothing from nothing."""
    if not data:
        return None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return Progress(**json.loads(header["__metadata__"]["progress"])), load(data)


def _write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:  # save_file has temporary files of its own
        temporary.write_bytes(data)


def _differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key in sorted(one.keys() | other.keys()):
        first, second = one.get(key), other.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            names += _differences(first, second, f"{prefix}{key}.")
        elif first != second:
            names.append(prefix + key)
    return names
