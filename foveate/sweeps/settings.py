"""Settings of runs in a TOML file: known by name, of the right kind, each with its place.

The keys are those of `foveate train --set`, and `preset`, the network or preset they change.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from foveate.errors import ConfigError
from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleGrid
from foveate.sweeps.toml_lines import Keys, TomlFile
from foveate.training.config import TrainConfig
from foveate.training.presets import preset

RUN = tuple(f.name for f in fields(TrainConfig) if f.name not in ("model", "seed"))
MODEL = tuple(f"model.{f.name}" for f in fields(ModelConfig))
KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    list: "a list",
    dict: "a table",
    tuple: "a list of whole numbers, as [16, 32]",
    ScaleGrid: "low, high and per_octave, as [0.5, 8, 4]",
}


class Setting(NamedTuple):
    """A value, and where it stands."""

    value: Any
    at: Keys


def check_keys(file: TomlFile, at: Keys, table: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keys that mean nothing."""
    known = tuple(known)
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise file.error((*at, key), f"unknown key {key!r}; {hint}")


def check_kind(file: TomlFile, at: Keys, value: object, kind: type) -> None:
    """Refuse a value that is not of that kind; a whole number is a number too."""
    fits = type(value) in (int, float) if kind is float else type(value) is kind
    if not fits:
        raise file.error(at, f"{at[-1]} must be {KINDS[kind]}, got {_shown(value)}")


def read_settings(file: TomlFile, at: Keys, table: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings in a table, model.dropout for the dropout in the table model."""
    found: dict[str, Setting] = {}
    for key, value in table.items():
        if key == "seed":
            raise file.error((*at, key), "seeds are the same for all runs: say seeds at the top")
        if key != "model":
            check_keys(file, at, [key], ("preset", *RUN, *MODEL))
            found[key] = Setting(value, (*at, key))
            continue
        if not isinstance(value, dict):
            name = f"preset = {json.dumps(value)}" if isinstance(value, str) else "preset"
            raise file.error((*at, key), f"a network is named by {name}, and changed by model.KEY")
        names = [name.removeprefix("model.") for name in MODEL]
        check_keys(file, (*at, key), value, names)
        found |= {f"model.{name}": Setting(v, (*at, key, name)) for name, v in value.items()}
    return found


def configure(file: TomlFile, settings: Mapping[str, Setting]) -> TrainConfig:
    """The run that the settings, `preset` among them, say."""
    name, at = settings["preset"]
    check_kind(file, at, name, str)
    with file.about(at):
        config = preset(name)
    for key, setting in settings.items():
        if key != "preset":
            with file.about(setting.at):
                now = _now(config, key)
                config = config.changed({key: _text(key, setting.value, now)})
    return config


def _now(config: TrainConfig, key: str) -> Any:
    owner = config.model if key.startswith("model.") else config
    return getattr(owner, key.removeprefix("model."))


def _text(key: str, value: Any, now: Any) -> str:
    """The value as --set takes it, if it is of the kind of the one that is there now."""
    if key == "scales" and type(value) in (int, float):
        return f"{value:g}"  # 2 is as good as "2" for a single training scale
    if isinstance(now, ScaleGrid) and _is_list(value, (int, float)) and len(value) == 3:
        return ":".join(map(repr, value))
    if isinstance(now, tuple) and _is_list(value, (int,)):
        return json.dumps(value)
    kinds = {float: (int, float), tuple: (), ScaleGrid: (str,)}.get(type(now), (type(now),))
    if key == "model.padding":  # a way of padding, or a grey value
        kinds = (str, int, float)
    if type(value) not in kinds:
        raise ConfigError(f"{key} must be {KINDS[type(now)]}, got {_shown(value)}")
    return value if isinstance(value, str) else json.dumps(value)


def _is_list(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(type(item) in kinds for item in value)


def _shown(value: object) -> str:
    """A value as TOML has it, or nearly so."""
    return json.dumps(value, default=str, ensure_ascii=False)
