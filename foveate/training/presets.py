"""A preset for each row of the paper's tables: the run that makes it."""

from dataclasses import replace

from foveate.errors import ConfigError
from foveate.models.zoo import model_config
from foveate.scales import ScaleGrid
from foveate.training.config import TrainConfig

TRAINED_ON = {"tr1": "1", "tr2": "2", "tr4": "4", "tr14": "1-4"}
FEW = (10_000, 5_000, 2_000, 1_000, 500, 200, 100)


def _table_1() -> dict[str, TrainConfig]:
    five = model_config("fovconc", scales=ScaleGrid(0.5, 8, per_octave=1))
    rows = {name: (model_config(name), list(TRAINED_ON)) for name in ("cnn", "fovavg", "fovmax")}
    rows["fovconc"] = (model_config("fovconc"), ["tr1", "tr2", "tr4"])
    rows["fovconc5"] = (five, ["tr2", "tr14"])
    rows["swmax"] = (model_config("swmax"), list(TRAINED_ON))
    return {
        f"{name}-{trained}": TrainConfig(model=model, scales=TRAINED_ON[trained])
        for name, (model, sets) in rows.items()
        for trained in sets
    }


def _table_2() -> dict[str, TrainConfig]:
    return {
        f"{name}-tr2-{count}ch": TrainConfig(
            model=model_config(name, scales=ScaleGrid(0.5, 8, per_octave=per_octave)), scales="2"
        )
        for name in ("fovmax", "fovavg")
        for count, per_octave in ((17, 4), (9, 2), (5, 1))
    }


def _table_3() -> dict[str, TrainConfig]:
    """Few samples: the paper does not say how many epochs; here at least as many as 400 · 500."""
    conc = model_config("fovconc", scales=ScaleGrid(0.5, 8, per_octave=4))
    models = {n: model_config(n) for n in ("cnn", "fovavg", "fovmax", "swmax")} | {"fovconc": conc}
    rows = {}
    for name, model in models.items():
        for samples in FEW:
            epochs = max(20, min(400, 200_000 // samples))
            config = TrainConfig(model=model, scales="1-4", samples=samples, epochs=epochs)
            rows[f"{name}-few{samples}"] = replace(config, epochs_per_decay=epochs / 10)
    return rows


PRESETS = {**_table_1(), **_table_2(), **_table_3()}


def preset(name: str) -> TrainConfig:
    """Look up the run that makes a row of the paper."""
    if name not in PRESETS:
        some = ", ".join(list(PRESETS)[:3])
        raise ConfigError(f"no preset {name!r}; there are {len(PRESETS)}: {some}, ...")
    return PRESETS[name]
