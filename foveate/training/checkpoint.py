"""A run's folder: its configuration, metrics, weights, and the point to resume from.

Everything is safetensors and JSON, written whole or not at all, by one process at a time.
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foveate import __version__
from foveate.errors import ConfigError, DataError
from foveate.files import replacing, write_text
from foveate.training.config import TrainConfig


@dataclass
class Progress:
    """How far a run is: the next step of the next epoch, and what past epochs measured."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0  # sum over the steps of this epoch
    seconds: float = 0.0
    metrics: list[dict[str, float]] = field(default_factory=list)


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "weights.safetensors"
        self.resume = path / "resume.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the run has ended; its weights appear last."""
        return self.weights.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out while the block runs."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise DataError(f"cannot use the folder {self.path} ({error.strerror})") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise DataError(f"another process is training in {self.path}; wait for it") from None
        finally:
            os.close(handle)

    def claim(self, config: TrainConfig, device: torch.device) -> None:
        """Write down what this run is, or check that it is what the folder already holds."""
        path = self.path / "config.json"
        if path.exists():
            differing = _differences(self.config().to_dict(), config.to_dict())
            if differing:
                others = ", ".join(differing)
                raise ConfigError(
                    f"{self.path} has a run with other {others}; choose another --out"
                )
            return
        how = {"version": __version__, "commit": commit(), "hardware": hardware(device)}
        text = json.dumps({"config": config.to_dict(), "digest": config.digest(), **how}, indent=1)
        self._write(lambda: write_text(path, text + "\n"))

    def config(self) -> TrainConfig:
        """Read the configuration of the run."""
        path = self.path / "config.json"
        try:
            return TrainConfig.from_dict(json.loads(path.read_text())["config"])
        except FileNotFoundError:
            raise DataError(f"{self.path} is not a run: it has no config.json") from None
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise DataError(f"{path} is damaged ({error}); remove the folder") from None

    def save(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Write the point to resume from, and the metrics so far."""
        note = {"progress": json.dumps(vars(progress))}
        self._write(lambda: _save_tensors(self.resume, tensors, note))
        lines = "".join(json.dumps(entry) + "\n" for entry in progress.metrics)
        self._write(lambda: write_text(self.path / "metrics.jsonl", lines))

    def load(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """Read the point to resume from, if there is one."""
        if not self.resume.exists():
            return None
        tensors, note = read_tensors(self.resume)
        try:
            return Progress(**json.loads(note["progress"])), tensors
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{self.resume} is damaged; remove it to start again") from None

    def finish(self, weights: dict[str, Tensor], config: TrainConfig) -> None:
        """Write the final weights; only then is the run finished."""
        note = {"model": json.dumps(config.model.to_dict()), "digest": config.digest()}
        self._write(lambda: _save_tensors(self.weights, weights, note))
        self.resume.unlink(missing_ok=True)

    def metrics(self) -> list[dict[str, float]]:
        """Read what was measured after each epoch."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _write(self, action: Any) -> None:
        try:
            action()
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"cannot write in {self.path} ({reason}); free some space and run again to go on"
            ) from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its notes; nothing in it is executed."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error})") from None


def _save_tensors(path: Path, tensors: dict[str, Tensor], note: dict[str, str]) -> None:
    with replacing(path) as temporary:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, temporary, note)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def commit() -> str:
    """The commit of the checkout that runs, or nothing."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def hardware(device: torch.device) -> str:
    """What the run was computed on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
