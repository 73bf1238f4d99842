"""Presets: a configuration for each row of the paper's tables, and our own for other purposes."""

from dataclasses import replace
from difflib import get_close_matches

from foveate.data.recipes import Recipe
from foveate.errors import ConfigError
from foveate.models.zoo import ZOO, ModelConfig, model_config
from foveate.scales import ScaleGrid
from foveate.training.config import TrainConfig

TRAINED_ON = {"tr1": "1", "tr2": "2", "tr4": "4", "tr14": "1-4"}
FEW = (10_000, 5_000, 2_000, 1_000, 500, 200, 100)
BATCH = {"fovavg": 16, "fovmax": 16}  # with all images; 32 otherwise (docs/reproduction.md)


def _table_1() -> dict[str, TrainConfig]:
    five = model_config("fovconc", scales=ScaleGrid(0.5, 8, per_octave=1))
    rows = {name: (model_config(name), list(TRAINED_ON)) for name in ("cnn", "fovavg", "fovmax")}
    rows["fovconc"] = (model_config("fovconc"), ["tr1", "tr2", "tr4"])
    rows["fovconc5"] = (five, ["tr2", "tr14"])
    rows["swmax"] = (model_config("swmax"), list(TRAINED_ON))
    return {
        f"{name}-{trained}": _whole(name, model, TRAINED_ON[trained])
        for name, (model, sets) in rows.items()
        for trained in sets
    }


def _table_2() -> dict[str, TrainConfig]:
    return {
        f"{name}-tr2-{count}ch": _whole(
            name, model_config(name, scales=ScaleGrid(0.5, 8, per_octave=per_octave)), "2"
        )
        for name in ("fovmax", "fovavg")
        for count, per_octave in ((17, 4), (9, 2), (5, 1))
    }


def _whole(name: str, model: ModelConfig, scales: str) -> TrainConfig:
    """Return the configuration of a run on all training images."""
    return TrainConfig(model=model, scales=scales, batch=BATCH.get(name, TrainConfig.batch))


def _table_3() -> dict[str, TrainConfig]:
    """Return the configurations with few samples.

    The paper does not state the number of epochs. Here it is 20 to 400, with at most 200,000 images
    in all, and the schedule is stretched to it.
    """
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
FINETUNE = TrainConfig(
    model=ModelConfig(
        pool="avg", scales=ScaleGrid(0.35, 2.8, per_octave=2), size=160, channels=3,
        antialias=True,
    ),
    recipe=Recipe(name="photo", base=224, shift=12.0, resolution=0.5),
    backbone="timm:tf_efficientnet_lite0",
    epochs=12,
    learning_rate=6e-4,
    smallest_rate=1e-7,
    schedule="cosine",
    weight_decay=0.01,
    label_smoothing=0.1,
    keep="best",
    precision="bf16",
    ema=0.99,
)  # fmt: skip
"""Fine-tuning on photographs; pool, rate and epochs by cross-validation (results/photographs)."""


def _fovplus(scale: int) -> TrainConfig:
    """Return FovAvg with zooms, wider layers, AdamW and label smoothing.

    The zooms show objects of scale 0.35 to 11.3, half an octave beyond the paper's test scales.
    """
    return TrainConfig(
        model=model_config("fovavg", features=(16, 16, 48, 48)),
        scales=str(scale),
        zooms=(0.354 / scale, 11.32 / scale),
        smallest_rate=1e-6,
        schedule="cosine",
        warmup=0.1,
        weight_decay=0.02,
        label_smoothing=0.05,
    )


def _fovplus_few(samples: int) -> TrainConfig:
    """Return FovAvg for few samples, with distortions and zooms (results/few-samples)."""
    return replace(
        PRESETS[f"fovavg-few{samples}"],
        epochs=max(20, min(800, 200_000 // samples)),
        schedule="cosine",
        label_smoothing=0.1,
        zooms=(0.5, 2.0),
        distortions=2.0,
    )


OWN = (
    {"finetune": FINETUNE}
    | {f"fovplus-tr{scale}": _fovplus(scale) for scale in (1, 2, 4)}
    | {f"fovplus-few{samples}": _fovplus_few(samples) for samples in FEW}
)
"""Presets that are not in the paper."""


def preset(name: str) -> TrainConfig:
    """Return the configuration of a preset.

    Args:
        name: A row of the paper's tables, such as ``fovavg-tr2``, ``fovmax-tr2-9ch`` or
            ``cnn-few1000``; a network name, such as ``fovavg``, for its run on scale 2;
            ``finetune`` for photographs; ``fovplus-tr1``, ``-tr2`` or ``-tr4`` for a network that
            is accurate at all scales; or ``fovplus-few100`` to ``fovplus-few10000``.

    Returns:
        The configuration. Use `TrainConfig.changed` or `dataclasses.replace` to change it.

    Raises:
        ConfigError: If there is no such preset.

    Examples:
        >>> preset("fovavg-tr14").scales
        '1-4'
        >>> preset("finetune").backbone
        'timm:tf_efficientnet_lite0'
    """
    found = (OWN | PRESETS).get(f"{name}-tr2" if name in ZOO else name)
    if found is not None:
        return found
    near = get_close_matches(name, [*ZOO, *PRESETS, *OWN], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"no model or preset {name!r}; use {', '.join(ZOO)} or a preset{hint}")


def model_name(config: TrainConfig) -> str:
    """Return the zoo name of a run's network, with its channels and backbone if they differ."""
    model = config.model
    if model.form == "plain":
        return "cnn"
    pool = "conc" if model.pool == "concat" else model.pool
    name = f"sw{pool}" if model.form == "sliding" else f"fov{pool}"
    usual = ZOO.get(name, ZOO["fovmax"]).scales
    channels = "" if model.scales == usual else f"-{len(model.scales)}ch"
    return f"{name}{channels}" + (f" with {config.backbone}" if config.backbone else "")
