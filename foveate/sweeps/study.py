"""A list of runs as people write it: a TOML file, which is checked as a whole.

name = "pooling"                   # also the folder, runs/pooling, if --out does not say
seeds = 3                          # 0, 1 and 2; or a list of them
test_scales = [0.5, 1, 2, 4, 8]    # the paper's 17 if not said

[resources]                        # of each run
cpus = 1                           # threads; as many as torch takes here if not said
gpus = 0.5                         # the part of a GPU that a run gets: two share one

[defaults]                         # for all runs, the keys of 'foveate train --set'
source = "mnist-5k"
epochs = 3

[[runs]]
preset = "fovavg"                  # a network or preset, as for 'foveate train'
model.dropout = 0.2

[[runs]]
name = "plain"                     # made of the preset and its changes if not said
preset = "cnn"

[grid]                             # each run with every combination of these
samples = [1000, 3500]
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foveate.data.shards import is_shards, open_shards
from foveate.data.sources import load_source
from foveate.data.store import ScaledFile
from foveate.paper.tables import SCALES
from foveate.scales import as_scales
from foveate.sweeps.jobs import Job, source_of_tests
from foveate.sweeps.settings import Setting, check_keys, check_kind, configure, read_settings
from foveate.sweeps.toml_lines import Keys, TomlFile, read_toml
from foveate.training.config import TrainConfig, build_net
from foveate.training.data import Load, fitted, is_file, is_made

TOP = ("name", "seeds", "test_scales", "resources", "defaults", "runs", "grid")
NAME = re.compile(r"[\w+=,-][\w.+=,-]*")
LONGEST = 120  # letters of a name, which a folder has too


class Run(NamedTuple):
    """A run before its seeds, and where it stands."""

    name: str
    settings: dict[str, Setting]
    at: Keys


@dataclass(frozen=True)
class StudyFile:
    """A study that can be started; `cpus` is 0 and `gpus` None where the file does not say."""

    file: TomlFile
    name: str
    jobs: tuple[Job, ...]
    scales: tuple[float, ...]
    cpus: int
    gpus: float | None


def read_study(
    path: Path, load: Load = load_source, *, trust: bool = False, dry_run: bool = False
) -> StudyFile:
    """Read a study, and refuse one with a run that could not work.

    Args:
        path: The TOML file.
        load: Loads a source by its name.
        trust: Whether backbones that the file names may be imported and called.
        dry_run: Never import backbones: their runs are listed, but must not be performed.
    """
    load = lru_cache(maxsize=2)(load)
    file = read_toml(path)
    check_keys(file, (), file.values, TOP)
    if "name" not in file.values:
        raise file.error((), 'a study needs a name, as name = "pooling"')
    name = _checked_name(file, ("name",), file.values["name"])
    seeds, scales, (cpus, gpus) = _seeds(file), _scales(file), _resources(file)
    jobs = [
        Job(name=run.name, config=replace(config, seed=s), scales=scales, rows=((name, run.name),))
        for run, config in _different(file, load, trust, dry_run)
        for s in seeds
    ]
    return StudyFile(file, name, tuple(jobs), scales, cpus, gpus)


def _seeds(file: TomlFile) -> list[int]:
    given = file.values.get("seeds", 1)
    at = ("seeds",)
    if not isinstance(given, list):
        check_kind(file, at, given, int)
        given = list(range(given))
    for seed in given:
        check_kind(file, at, seed, int)
        with file.about(at):
            TrainConfig(seed=seed)
    if not given or len(set(given)) < len(given):
        raise file.error(at, "seeds must be a number of runs, as 3, or a list of different seeds")
    return given


def _scales(file: TomlFile) -> tuple[float, ...]:
    with file.about(("test_scales",)):
        return as_scales(file.values.get("test_scales", SCALES))


def _resources(file: TomlFile) -> tuple[int, float | None]:
    table = _table(file, "resources")
    check_keys(file, ("resources",), table, ("cpus", "gpus"))
    for key, kind in (("cpus", int), ("gpus", float)):
        if key in table:
            check_kind(file, ("resources", key), table[key], kind)
    cpus, gpus = table.get("cpus"), table.get("gpus")
    if cpus is not None and cpus < 1:
        raise file.error(("resources", "cpus"), f"a run needs a CPU, got cpus = {cpus}")
    if gpus is not None and not 0 <= gpus <= 1:
        raise file.error(("resources", "gpus"), f"a run uses a GPU or a part of it, got {gpus:g}")
    return cpus or 0, gpus


def _different(
    file: TomlFile, load: Load, trust: bool, dry_run: bool
) -> Iterator[tuple[Run, TrainConfig]]:
    """Every run with its configuration; two that are the same, or have one name, are refused."""
    configs: dict[str, Run] = {}
    names: dict[str, Run] = {}
    for run in _runs(file):
        config = _config(file, run, load)
        if not (dry_run and config.backbone):
            _try_net(file, run, config, trust)
        if twin := configs.get(config.digest()):
            words = f"{run.name} is the same run as {twin.name} in line {file.line(twin.at)}"
            raise file.error(run.at, f"{words}; leave out one of them")
        if other := names.get(run.name):
            words = f"{run.name} is the name of the run in line {file.line(other.at)} too"
            raise file.error(run.at, f'{words}; give one of them another, as name = "wide"')
        configs[config.digest()] = names[run.name] = run
        yield run, config


def _runs(file: TomlFile) -> Iterator[Run]:
    """The runs of the list, or one that is all defaults, each at every point of the grid."""
    usual = read_settings(file, ("defaults",), _table(file, "defaults"))
    grid = _grid(file)
    for at, table in _listed(file):
        own = read_settings(file, at, {k: v for k, v in table.items() if k != "name"})
        for key in own.keys() & grid.keys():
            raise file.error(own[key].at, f"{key} is in the grid too; say it in one of the places")
        for point in product(*grid.values()):
            varied = dict(zip(grid, point, strict=True))
            settings = {**usual, **own, **varied}
            if "preset" not in settings:
                raise file.error(at, 'which network? say preset = "fovavg"')
            if "name" in table:
                name = _checked_name(file, (*at, "name"), table["name"]) + _changes(varied)
            else:
                check_kind(file, settings["preset"].at, settings["preset"].value, str)
                name = _safe(settings["preset"].value) + _changes(own) + _changes(varied)
            yield Run(_checked_name(file, at, name), settings, at)


def _listed(file: TomlFile) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """The tables of runs; a grid without any is of one run."""
    listed = file.values.get("runs", [{}] if "grid" in file.values else [])
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise file.error(("runs",), "runs must be tables of a list: write [[runs]] above each")
    if not listed:
        raise file.error(("runs",), "there are no runs; add [[runs]], or a [grid] of settings")
    for index, table in enumerate(listed):
        yield (("runs", index) if "runs" in file.values else ("grid",)), table


def _grid(file: TomlFile) -> dict[str, list[Setting]]:
    """The values of each setting that is varied."""
    found = {}
    for key, (values, at) in read_settings(file, ("grid",), _table(file, "grid")).items():
        check_kind(file, at, values, list)
        if not values:
            raise file.error(at, f"{key} has no values; leave it out")
        for value in values:
            if values.count(value) > 1:
                raise file.error(at, f"{key} has the value {value} twice; leave out one of them")
        found[key] = [Setting(value, at) for value in values]
    return found


def _config(file: TomlFile, run: Run, load: Load) -> TrainConfig:
    """The configuration of a run, made to fit its images, and known to work with them."""
    settings, config = run.settings, configure(file, run.settings)
    source = settings["source"].at if "source" in settings else run.at
    with file.about(source):
        load(source_of_tests(config))
        made, there = is_made(config.source), _training_images(config.source, load)
    for key in ("scales", "size", "border"):
        if key in settings and made:
            words = f"the images in {config.source} are made already: leave out {key}"
            raise file.error(settings[key].at, words)
    if config.samples > there:
        at = settings["samples"].at if "samples" in settings else run.at
        raise file.error(at, f"samples = {config.samples}, but {config.source} has {there} images")
    with file.about(source):
        config = fitted(config, load, settings)
    _check_fit(file, config, fitted(config, load), settings)
    return config


def _try_net(file: TomlFile, run: Run, config: TrainConfig, trust: bool) -> None:
    """Build the network once, to hear of mistakes before anything starts."""
    place = run.settings["backbone"].at if "backbone" in run.settings else run.at
    with file.about(place), torch.random.fork_rng(devices=[]):
        build_net(config, trust=trust)


def _training_images(source: str, load: Load) -> int:
    if is_shards(source):
        return open_shards(source).counts["train"]
    return ScaledFile(Path(source)).counts["train"] if is_file(source) else len(load(source).train)


def _check_fit(
    file: TomlFile, config: TrainConfig, natural: TrainConfig, settings: Mapping[str, Setting]
) -> None:
    """Refuse a network for other images than there are; `natural` follows the images."""
    for key in ("channels", "classes"):
        ours, theirs = getattr(config.model, key), getattr(natural.model, key)
        if ours < theirs or (key == "channels" and ours != theirs):
            at = settings[f"model.{key}"].at
            raise file.error(at, f"{config.source} has {theirs} {key}, not {ours}; leave it out")


def _table(file: TomlFile, key: str) -> dict[str, Any]:
    table = file.values.get(key, {})
    check_kind(file, (key,), table, dict)
    return table  # type: ignore[no-any-return]


def _changes(settings: Mapping[str, Setting]) -> str:
    """Settings as the end of a name: _batch=32_model.dropout=0.2."""
    kept = {key: setting.value for key, setting in settings.items() if key != "preset"}
    short = {k: "x".join(map(str, v)) if isinstance(v, list) else v for k, v in kept.items()}
    return _safe("".join(f"_{key}={value}" for key, value in short.items()))


def _safe(text: str) -> str:
    """A text as a part of a name."""
    return re.sub(r"[^\w.+=,-]+", "_", text)


def _checked_name(file: TomlFile, at: Keys, name: object) -> str:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise file.error(at, f"a name has letters, digits and _ . + = , - alone, got {name!r}")
    if len(name) > LONGEST:
        raise file.error(at, f'{name[:20]}... is too long a name; say one, as name = "wide"')
    return name
