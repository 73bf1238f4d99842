"""A run's folder: its configuration, metrics, weights, and the point to resume from.

Everything is safetensors and JSON, written whole or not at all, by one process at a time.
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from foveate import __version__
from foveate.checks import check_fields, is_number
from foveate.errors import ConfigError, DataError
from foveate.files import check_regular, parse_json, read_text, replacing, write_text
from foveate.models.zoo import ModelConfig
from foveate.training.config import TrainConfig
from foveate.training.network import build_net


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

    @property
    def saved(self) -> bool:
        """Whether there is a point to resume from."""
        return self.resume.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out while the block runs."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataError(f"cannot use the folder {self.path} ({error.strerror})") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"another process is training in {self.path}; wait for it, or choose another "
                    "--out"
                ) from None
            yield
        finally:
            os.close(handle)

    def claim(self, config: TrainConfig, device: torch.device, also: str = "") -> None:
        """Write down what this run is, or check that it is what the folder already holds.

        `also` is said after the hardware.
        """
        path = self.path / "config.json"
        if path.exists():
            differing = _differences(self.config().to_dict(), config.to_dict())
            if differing:
                others = ", ".join(differing)
                raise ConfigError(
                    f"{self.path} has a run with other {others}; choose another --out"
                )
            return
        if self.saved or self.finished:
            raise DataError(f"{self.path} has weights but no config.json; choose another --out")
        used = ", ".join(filter(None, [hardware(device), also]))
        how = {"version": __version__, "commit": commit(), "hardware": used}
        text = json.dumps({"config": config.to_dict(), "digest": config.digest(), **how}, indent=1)
        self._write(lambda: write_text(path, text + "\n"))

    def config(self) -> TrainConfig:
        """Read the configuration of the run."""
        path = self.path / "config.json"
        try:
            return TrainConfig.from_dict(parse_json(read_text(path))["config"])
        except FileNotFoundError:
            raise DataError(f"{self.path} is not a run: it has no config.json") from None
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise DataError(f"{path} is damaged ({error}); remove the folder") from None

    def about(self) -> dict[str, Any]:
        """Read with what the run was made: version, commit and hardware."""
        self.config()  # says what is wrong with a damaged file
        found = parse_json(read_text(self.path / "config.json"))
        return {key: str(found.get(key, "")) for key in ("version", "commit", "hardware")}

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
        self._write(lambda: _write_bytes(self.weights, _packed(weights, note)))
        self.resume.unlink(missing_ok=True)

    def check_finished(self) -> None:
        """Make sure that the final weights are whole; clear away what is no longer needed."""
        read_tensors(self.weights)
        self.resume.unlink(missing_ok=True)

    def net(self) -> nn.Module:
        """Build the network of a finished run, with its weights, on the CPU."""
        config = self.config()
        if not self.finished:
            raise DataError(
                f"{self.path} is not finished ({len(self.metrics())} of {config.epochs} epochs); "
                "run 'foveate train' as before to go on"
            )
        weights, note = read_tensors(self.weights)
        with torch.random.fork_rng(devices=[]):
            net = build_net(config)
        load_weights(net, weights, self.weights)
        if "model" in note and _model(note["model"]) != config.model:
            raise ConfigError(f"{self.weights} is of another model than config.json says")
        return net

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
        try:
            action()
        except (OSError, SafetensorError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"cannot write in {self.path} ({reason}); free some space and run again to go on"
            ) from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its notes; nothing in it is executed."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            # Copies: the file may be replaced while its tensors are in use.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} is not a whole safetensors file ({error}); remove it and train again"
        ) from None


def _model(note: str) -> ModelConfig | None:
    """The model that a file of weights says it is of; None if that cannot be read."""
    with suppress(ValueError, TypeError, ConfigError):
        return ModelConfig.from_dict(parse_json(note))
    return None


def load_weights(net: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Put the weights of `path` into the network, if they are of its architecture."""
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} is of another architecture ({reason} ...)") from None


def pack(progress: Progress, tensors: dict[str, Tensor]) -> bytes:
    """A point to resume from, as a safetensors file has it."""
    return _packed(tensors, {"progress": json.dumps(vars(progress))})


def unpack(data: bytes) -> tuple[Progress, dict[str, Tensor]] | None:
    """Read what `pack` made; nothing from nothing."""
    if not data:
        return None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return Progress(**json.loads(header["__metadata__"]["progress"])), load(data)


def _packed(tensors: dict[str, Tensor], note: dict[str, str]) -> bytes:
    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    copies = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    return save(copies, note)


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


def commit() -> str:
    """The commit of the checkout that runs, with -dirty if it was changed, or nothing.

    FOVEATE_COMMIT says it for a copy that came without its history.
    """
    if "FOVEATE_COMMIT" in os.environ:
        return os.environ["FOVEATE_COMMIT"]
    here = Path(__file__)
    tracked = _git(here.parent, "ls-files", here.name)  # else installed inside another checkout
    return _git(here.parent, "describe", "--always", "--dirty", "--exclude", "*") if tracked else ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def hardware(device: torch.device) -> str:
    """What the run was computed on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
