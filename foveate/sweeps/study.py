"""Read a study, a TOML file that lists runs, and check all of it before the first run starts.

The keys are `name`, `seeds` and `test_scales`, the tables `resources`, `defaults` and `grid`, and
the list of tables `runs`; `examples/study.toml` explains each of them.
"""

import json
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

import torch
from torch import Tensor

from foveate.checks import check_range, check_type, is_number, suggest
from foveate.data.recipes import Recipe
from foveate.data.sources import load_source, open_source
from foveate.errors import ConfigError, FoveateError
from foveate.evaluation.curve import default_scales
from foveate.evaluation.test_sets import find_test_source
from foveate.files import read_text
from foveate.models.zoo import ModelConfig
from foveate.scales import as_scales
from foveate.sweeps.jobs import MAX_SEEDS, Job
from foveate.training.config import TrainConfig, build_net
from foveate.training.data import (
    PHOTO_SHAPE,
    Load,
    adapt_to_source,
    check_fit,
    is_photo,
    open_pictures,
    sample_count,
    unused_setting,
)
from foveate.training.presets import preset

HINTS = {
    "seed": "set seeds at the top level, for all runs",
    "model": "choose a network with preset, and change it with model.KEY",
}
TOP = ("name", "seeds", "test_scales", "resources", "defaults", "runs", "grid")
SETTINGS: dict[str, Any] = {
    **{name: kind for name, kind in get_type_hints(TrainConfig).items() if name not in HINTS},
    **{f"model.{name}": kind for name, kind in get_type_hints(ModelConfig).items()},
    **{f"recipe.{name}": kind for name, kind in get_type_hints(Recipe).items()},
    **{"preset": str, "recipe": str, "scales": str | float, "model.scales": str | float},
}
"""The type of each setting; scales are text or a number, as on the command line."""
PARTS = ("model", "recipe")  # settings that are tables
NAME = re.compile(r"[\w+=,-][\w.+=,-]*")
LONGEST = 120  # characters of a name, which is also a folder name


class Setting(NamedTuple):
    """A value, and its key path in the file, such as ``runs[2].epochs``."""

    value: Any
    where: str


class Run(NamedTuple):
    """A run for all seeds; `where` is the key path of its table."""

    name: str
    settings: dict[str, Setting]
    where: str

    def at(self, key: str) -> str:
        """Return the key path of a setting, or of the run's table if it is not set."""
        return self.settings[key].where if key in self.settings else self.where


@dataclass(frozen=True)
class StudyFile:
    """A checked study, ready to run.

    Attributes:
        name: Name of the study.
        jobs: Jobs, one per run and seed.
        cpus: CPU threads per run; 0 if the file does not set them.
        gpus: Fraction of a GPU per run; None if the file does not set it.

    Examples:
        >>> StudyFile(name="empty", jobs=(), cpus=1, gpus=None).gpus is None
        True
    """

    name: str
    jobs: tuple[Job, ...]
    cpus: int
    gpus: float | None


def read_study(
    path: Path, load: Load = load_source, *, trust: bool = False, dry_run: bool = False
) -> StudyFile:
    r"""Read a study, and check all of its runs.

    Args:
        path: TOML file, see ``examples/study.toml``.
        load: Function that loads a source by name.
        trust: Allow backbones named in the file to be imported and called.
        dry_run: Do not import backbones. The jobs can then be listed, but not performed.

    Returns:
        The study, with one job per run and seed.

    Raises:
        ConfigError: If the file is invalid. The message names the file and the key, such as
            ``study.toml: runs[2].epochs must be a whole number, got 2.5``.

    Examples:
        >>> text = 'name = "first"\n[grid]\nsource = ["mnist-5k"]\npreset = ["cnn", "fovavg"]\n'
        >>> _ = Path("study.toml").write_text(text)
        >>> [job.folder for job in read_study(Path("study.toml")).jobs]
        ['cnn_source=mnist-5k-s0', 'fovavg_source=mnist-5k-s0']
    """
    values = _read_toml(path)
    try:
        return _study(values, lru_cache(maxsize=2)(load), trust, dry_run)
    except FoveateError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; save it in that encoding") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _study(values: dict[str, Any], load: Load, trust: bool, dry_run: bool) -> StudyFile:
    _check_keys("", values, TOP)
    if "name" not in values:
        raise ConfigError('name is missing; add name = "pooling"')
    name, seeds = _checked_name("name", values["name"]), _seeds(values.get("seeds", 1))
    with _at("test_scales"):
        given = as_scales(values["test_scales"]) if "test_scales" in values else None
    for key in ("resources", "defaults", "grid"):
        check_type(key, values.get(key, {}), Mapping)
    resources = values.get("resources", {})
    _check_keys("resources", resources, ("cpus", "gpus"))
    cpus, gpus = resources.get("cpus", 1), resources.get("gpus", 0)
    check_type("resources.cpus", cpus, int)
    check_type("resources.gpus", gpus, float)
    check_range("resources.cpus", cpus, 1, math.inf, "at least 1")
    check_range("resources.gpus", gpus, 0, 1, "a fraction of a GPU from 0 to 1")
    jobs: list[Job] = []
    for run, config in _different(values, load, trust, dry_run):
        recipe = config.recipe.name if config.recipe else "mnist-large-scale"
        scales = given or default_scales(recipe).values
        if config.recipe and is_photo(config):
            with _at("test_scales"):
                config.recipe.at_scale(max(scales))  # the largest images of the tests
        rows = ((name, run.name),)
        jobs += [
            Job(name=run.name, config=replace(config, seed=seed), scales=scales, rows=rows)
            for seed in seeds
        ]
    return StudyFile(name, tuple(jobs), resources.get("cpus", 0), resources.get("gpus"))


def _seeds(given: Any) -> list[int]:
    if not isinstance(given, list):
        check_type("seeds", given, int)
        given = range(min(given, MAX_SEEDS + 1))
    seeds: list[int] = list(given)
    for seed in seeds:
        check_type("seeds", seed, int)
        with _at("seeds"):
            TrainConfig(seed=seed)
    if not 0 < len(set(seeds)) == len(seeds) <= MAX_SEEDS:
        raise ConfigError(
            f"seeds must be a number from 1 to {MAX_SEEDS} or a list of distinct seeds"
        )
    return seeds


def _different(
    values: dict[str, Any], load: Load, trust: bool, dry_run: bool
) -> Iterator[tuple[Run, TrainConfig]]:
    """Yield the runs with their configurations; duplicate runs and names are errors."""
    configs: dict[str, Run] = {}
    names: dict[str, Run] = {}
    for run in _runs(values):
        config = _config(run, load)
        if not (dry_run and config.backbone):
            with _at(run.at("backbone")), torch.random.fork_rng(devices=[]):
                build_net(config, trust=trust)
        if twin := configs.get(config.digest()):
            message = f"{run.name} is the same run as {twin.name} in {twin.where}"
            raise _error(run.where, f"{message}; remove one of them")
        if other := names.get(run.name):
            message = f"the run in {other.where} is also named {run.name}"
            raise _error(run.where, f'{message}; rename one of them, such as name = "wide"')
        configs[config.digest()] = names[run.name] = run
        yield run, config


def _runs(values: dict[str, Any]) -> Iterator[Run]:
    """Yield the listed runs, or one run of defaults, each at every point of the grid."""
    usual, grid = _settings("defaults", values.get("defaults", {})), _grid(values.get("grid", {}))
    listed = values.get("runs", [{}] if "grid" in values else [])
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise ConfigError("runs must be a list of tables; write [[runs]] above each")
    if not listed:
        raise ConfigError("the study has no runs; add [[runs]], or a [grid] of settings")
    for index, table in enumerate(listed):
        where = f"runs[{index}]" if "runs" in values else "grid"
        own = _settings(where, {k: v for k, v in table.items() if k != "name"})
        for key in own.keys() & grid.keys():
            raise _error(own[key].where, "this key is also in the grid; set it in one place")
        for point in product(*grid.values()):
            varied = dict(zip(grid, point, strict=True))
            settings = {**usual, **own, **varied}
            if "preset" not in settings:
                raise _error(where, 'preset is missing; add preset = "fovavg"')
            check_type(settings["preset"].where, settings["preset"].value, str)
            if "name" in table:
                name = _checked_name(f"{where}.name", table["name"])
            else:
                name = _safe(settings["preset"].value) + _changes(own)
            yield Run(_checked_name(where, name + _changes(varied)), settings, where)


def _grid(table: dict[str, Any]) -> dict[str, list[Setting]]:
    found = {}
    for key, (options, where) in _settings("grid", table).items():
        check_type(where, options, list)
        if not options:
            raise _error(where, "this key has no values; remove it")
        found[key] = [Setting(option, where) for option in options]
    return found


def _settings(where: str, table: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of a table with flat keys, such as `model.dropout`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        nested = key in PARTS and isinstance(value, dict)
        flat |= {f"{key}.{k}": v for k, v in value.items()} if nested else {key: value}
    if "recipe.name" in flat:
        flat = {"recipe": flat.pop("recipe.name"), **flat}
    _check_keys(where, flat, SETTINGS)
    return {key: Setting(value, f"{where}.{key}") for key, value in flat.items()}


def _config(run: Run, load: Load) -> TrainConfig:
    """Return the configuration of a run, fitted to its images and checked against them."""
    settings = run.settings
    with _at(settings["preset"].where):
        config = preset(settings["preset"].value)
    for key, setting in sorted(settings.items(), key=lambda item: item[0] != "recipe"):
        if key != "preset":  # sorted: the recipe before its own settings
            with _at(setting.where):
                config = _set(config, key, setting.value)
    with _at(run.at("source")):
        config = adapt_to_source(config, load, settings)
        shape, labels = _training_images(config, load)
    if unused := unused_setting(config, settings):
        raise _error(settings[unused[0]].where, unused[1])
    with _at(run.at("samples")):
        sample_count(config, len(labels), "train")
    with _at(run.at("model.classes" if shape[0] == config.model.channels else "model.channels")):
        check_fit(config, shape, labels)
    return config


def _set(config: TrainConfig, key: str, value: Any) -> TrainConfig:
    """Check the type of a setting, and change it as `foveate train --set` does."""
    name = key.rpartition(".")[2]
    if name == "scales" and isinstance(value, list):
        text = 'text such as "0.5:8:4" (low:high:per_octave)'
        raise ConfigError(f"scales must be {text}, got {value!r}")
    kind = SETTINGS[key]
    listed = isinstance(value, list) and get_origin(kind) is tuple
    check_type(name, tuple(value) if listed else value, kind)
    if key == "scales" and is_number(value):
        value = f"{value:g}"
    return config.changed({key: value if isinstance(value, str) else json.dumps(value)})


def _training_images(config: TrainConfig, load: Load) -> tuple[tuple[int, ...], Tensor]:
    """Return the shape and the labels of the training images; there must be test images, too."""
    if is_photo(config):
        pictures = open_pictures(config.source)
        pictures.labels("test")
        return PHOTO_SHAPE, pictures.labels("train")
    load(find_test_source(config))
    images = open_source(config.source, load)
    return images.shape, images.labels("train")


def _changes(settings: Mapping[str, Setting]) -> str:
    """Return settings as the suffix of a name: _batch=32_model.dropout=0.2."""
    values = {key: setting.value for key, setting in settings.items() if key != "preset"}
    short = {k: "x".join(map(str, v)) if isinstance(v, list) else v for k, v in values.items()}
    return _safe("".join(f"_{key}={value}" for key, value in short.items()))


def _safe(text: str) -> str:
    """Replace the characters that a name must not contain."""
    return re.sub(r"[^\w.+=,-]+", "_", text)


def _checked_name(where: str, name: object) -> str:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        message = f"a name can only contain letters, digits and _ . + = , -, got {name!r}"
        raise _error(where, message)
    if len(name) > LONGEST:
        message = f"{name[:20]}... has more than {LONGEST} characters"
        raise _error(where, f'{message}; set a shorter name = "wide"')
    return name


def _check_keys(where: str, keys: Iterable[str], known: Collection[str]) -> None:
    for key in keys:
        if key not in known:
            hint = HINTS.get(key) or suggest(key, known, f"use one of {', '.join(known)}")
            raise ConfigError(f"{f'{where}.{key}'.lstrip('.')} is not a known key; {hint}")


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Prefix an error in the block with the key path `where`."""
    try:
        yield
    except FoveateError as error:
        raise _error(where, str(error)) from None


def _error(where: str, message: str) -> ConfigError:
    """Return an error at `where`; "epochs must ..." becomes "runs[2].epochs must ..."."""
    name, _, rest = message.partition(" ")
    same = f".{where}".endswith(f".{name}")
    return ConfigError(f"{where} {rest}" if same else f"{where}: {message}")
