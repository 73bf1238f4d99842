"""Trained networks included in the package: safetensors files and an index with their details."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from foveate.checks import check_fields, suggest
from foveate.errors import ConfigError, DataError
from foveate.files import check_regular, parse_json, read_text
from foveate.models.zoo import ModelConfig

WEIGHTS = Path(__file__).with_name("weights")
INDEX = "index.json"
AGAIN = "reinstall foveate"


@dataclass(frozen=True, kw_only=True)
class PretrainedInfo:
    """Architecture, training settings and accuracy of a trained network.

    Of several runs with different seeds, the package includes the one with the median validation
    accuracy.

    Attributes:
        name: Name for `create_model`.
        file: Name of the safetensors file.
        sha256: SHA-256 checksum of the file.
        model: Configuration of the network.
        source: Source of the training images.
        scales: Training scales in the text format of ``foveate train``.
        samples: Number of training images, taken from the start of the split; 0 means all.
        size: Width and height of the training images in pixels.
        seed: Random seed of this run.
        seeds: Number of runs from which this one was selected.
        recipe: All other settings that determine the weights.
        validation: Accuracy on validation images at the training scales.
        accuracy: Test accuracy by scale.
        tested: Number of test images.
        version: Version of foveate that trained the network.
        commit: Git commit that trained the network.
        hardware: Device and torch version of the training run.

    Examples:
        >>> info = pretrained_info("fovmax-mnist-tr2")
        >>> info.source, info.scales, info.model.pool
        ('mnist', '2', 'max')
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
        """Return all fields as a dict for JSON.

        Returns:
            Dict of the fields; `from_dict` reads it.
        """
        accuracy = [[scale, share] for scale, share in self.accuracy.items()]
        return {**asdict(self), "model": self.model.to_dict(), "accuracy": accuracy}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PretrainedInfo":
        """Build the entry from the result of `to_dict`.

        Args:
            values: Dict of all fields.

        Returns:
            The entry.

        Raises:
            ConfigError: If a field is invalid.
        """
        known = {field.name: values[field.name] for field in fields(cls)}
        model, accuracy = ModelConfig.from_dict(values["model"]), dict(values["accuracy"])
        info = cls(**{**known, "model": model, "accuracy": accuracy})
        check_fields(info)
        return info


def pretrained_names(folder: Path = WEIGHTS) -> list[str]:
    """List the names of the trained networks in a folder.

    Args:
        folder: Folder with an index; by default that of the package.

    Returns:
        The names in the order of the index.

    Raises:
        DataError: If the index is damaged.

    Examples:
        >>> "fovmax-mnist-tr2" in pretrained_names()
        True
    """
    return list(read_index(folder))


def pretrained_info(name: str, folder: Path = WEIGHTS) -> PretrainedInfo:
    """Return the training settings and accuracy of a trained network.

    Args:
        name: Name from `pretrained_names`.
        folder: Folder with an index; by default that of the package.

    Returns:
        The entry of the index.

    Raises:
        ConfigError: If there is no network of this name.
        DataError: If the index is damaged.

    Examples:
        >>> pretrained_info("fovmax-mnist-tr2").size
        112
    """
    index = read_index(folder)
    if name not in index:
        known = suggest(name, index, f"available: {', '.join(index)}", most=3)
        remedy = known if index else f"{folder} contains none"
        raise ConfigError(f"no pretrained network {name!r}; {remedy}")
    return index[name]


def from_pretrained(name: str, folder: Path = WEIGHTS) -> nn.Module:
    """Load a trained network from `folder`, on the CPU and in evaluation mode.

    The checksum of the file must match the index. Loading the file executes no code.
    """
    info = pretrained_info(name, folder)
    with torch.random.fork_rng(devices=[]):  # the initial weights are replaced
        net = info.model.build()
    path = folder / info.file
    try:
        load_weights(net, load(_verified(path, info.sha256)), path)
    except (SafetensorError, ConfigError) as error:
        raise DataError(
            f"{info.file} does not contain the network {name}: {error}; {AGAIN}"
        ) from None
    return net.eval()


def load_weights(net: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Load weights into a network; raise unless they are finite and match it.

    `path` is the file of the weights, for error messages.
    """
    if name := find_non_finite(weights):
        raise DataError(f"{path} contains non-finite values in {name}; train again")
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} has a different architecture: {reason} ...") from None


def find_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or infinite value, or None."""
    finite = [tensor.isfinite().all() for tensor in tensors.values()]
    if not finite or torch.stack(finite).all():  # a single GPU synchronisation
        return None
    return next(name for name, fine in zip(tensors, finite, strict=True) if not fine)


def read_index(folder: Path = WEIGHTS) -> dict[str, PretrainedInfo]:
    """Read the index of a folder by name; empty if the folder has no index."""
    path = folder / INDEX
    try:
        entries = parse_json(read_text(path))
        return {entry["name"]: PretrainedInfo.from_dict(entry) for entry in entries}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(f"{path} is damaged: {error}; {AGAIN}") from None


def _verified(path: Path, sha256: str) -> bytes:
    try:
        data = check_regular(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; {AGAIN}") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DataError(f"{path} has sha256 {found}, expected {sha256}; {AGAIN}")
    return data
