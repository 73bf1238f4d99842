"""Trained networks that come with the package: safetensors files and what is known about them."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from foveate.checks import check_fields
from foveate.errors import ConfigError, DataError
from foveate.files import parse_json, read_text, regular
from foveate.models.zoo import ModelConfig

WEIGHTS = Path(__file__).with_name("weights")
INDEX = "index.json"
AGAIN = "install foveate again"


@dataclass(frozen=True, kw_only=True)
class PretrainedInfo:
    """What a network is, what it was trained on and how, and what it scored.

    `scales` are its training scales as `foveate train` reads them, `samples` how many of the first
    training images it saw (0 for all), `size` the pixels of the frame they were shown in, and
    `recipe` everything else that decides the weights. `validation` is its accuracy on images of
    the training scales, the median over as many runs as `seeds` says, which is why this one was
    taken; `accuracy` is that over scale on the `tested` test images. `sha256` is of the file.
    """

    name: str
    file: str
    sha256: str
    model: ModelConfig
    source: str
    scales: str
    samples: int
    size: int
    seed: int
    seeds: int
    recipe: Mapping[str, Any]
    validation: float
    accuracy: Mapping[float, float]
    tested: int
    version: str
    commit: str
    hardware: str

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        accuracy = [[scale, share] for scale, share in self.accuracy.items()]
        return {**asdict(self), "model": self.model.to_dict(), "accuracy": accuracy}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PretrainedInfo":
        """Read what `to_dict` wrote."""
        known = {field.name: values[field.name] for field in fields(cls)}
        model, accuracy = ModelConfig.from_dict(values["model"]), dict(values["accuracy"])
        info = cls(**{**known, "model": model, "accuracy": accuracy})
        check_fields(info)
        return info


def pretrained_names(folder: Path = WEIGHTS) -> list[str]:
    """List the names of the trained networks."""
    return list(read_index(folder))


def pretrained_info(name: str, folder: Path = WEIGHTS) -> PretrainedInfo:
    """Look up the index entry of a trained network."""
    index = read_index(folder)
    if name not in index:
        near = get_close_matches(name, index, n=3)
        known = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(index)}"
        raise ConfigError(f"no pretrained network {name!r}; {known if index else 'there are none'}")
    return index[name]


def from_pretrained(name: str, folder: Path = WEIGHTS) -> nn.Module:
    """Load a trained network from `folder`, on the CPU and in eval mode.

    The file's checksum is compared with the one in the index, and nothing in it is executed.
    """
    info = pretrained_info(name, folder)
    with torch.random.fork_rng(devices=[]):  # initial weights are replaced at once
        net = info.model.build()
    path = folder / info.file
    try:
        load_weights(net, load(_verified(path, info.sha256)), path)
    except (SafetensorError, ConfigError) as error:
        raise DataError(f"{info.file} does not hold the network {name} ({error})") from None
    return net.eval()


def load_weights(net: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Load the weights of the file `path` into the network, if they are finite and fit it."""
    if name := find_non_finite(weights):
        raise DataError(f"{path} has a value that is not finite in {name}; train again")
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} is of another architecture ({reason} ...)") from None


def find_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity, or None."""
    finite = [tensor.isfinite().all() for tensor in tensors.values()]
    if not finite or torch.stack(finite).all():  # one answer, for which a GPU waits once
        return None
    return next(name for name, fine in zip(tensors, finite, strict=True) if not fine)


def read_index(folder: Path = WEIGHTS) -> dict[str, PretrainedInfo]:
    """Read what is known about every network in the folder; nothing if it has none."""
    path = folder / INDEX
    try:
        entries = parse_json(read_text(path))
        return {entry["name"]: PretrainedInfo.from_dict(entry) for entry in entries}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(f"{path} is damaged ({error}); {AGAIN}") from None


def _verified(path: Path, sha256: str) -> bytes:
    try:
        data = regular(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); {AGAIN}") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DataError(f"{path} has the sha256 {found} and should have {sha256}; {AGAIN}")
    return data
