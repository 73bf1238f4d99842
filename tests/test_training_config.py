"""What a run is: the schedule of its rate, the presets of the paper, and its settings."""

import math
from dataclasses import replace

import pytest
from tiny_runs import tiny

from foveate.errors import ConfigError
from foveate.models.channels import PAPER_SCALES
from foveate.models.zoo import ZOO
from foveate.scales import ScaleGrid
from foveate.training.config import TrainConfig, build_net
from foveate.training.presets import PRESETS, model_name, preset


def test_the_rate_falls_by_e_every_second_epoch_to_the_floor():
    config = TrainConfig()
    expected = [max(3e-3 * math.exp(-(epoch // 2)), 5e-5) for epoch in range(20)]
    assert [config.rate(epoch) for epoch in range(20)] == pytest.approx(expected, rel=1e-12)
    assert config.rate(10) == 5e-5  # e^-5 of 3e-3 is 2e-5


def test_a_stretched_schedule_takes_the_same_rates():
    stretched = TrainConfig(epochs=400, epochs_per_decay=40.0)
    assert [stretched.rate(20 * k) for k in range(20)] == [TrainConfig().rate(k) for k in range(20)]


def test_the_defaults_are_the_papers():
    config = TrainConfig()
    assert (config.epochs, config.batch, config.learning_rate) == (20, 32, 3e-3)
    assert (config.size, config.model.dropout, config.samples) == (112, 0.15, 0)


def rows(name):
    return [key for key in PRESETS if key.startswith(name + "-tr") and "ch" not in key]


def test_there_is_a_preset_for_each_row_of_the_paper():
    counts = {name: len(rows(name)) for name in [*ZOO, "fovconc5"]}
    assert counts == {"cnn": 4, "fovavg": 4, "fovmax": 4, "fovconc": 3, "fovconc5": 2, "swmax": 4}
    assert sum(counts.values()) == 21
    second = {key: len(c.model.scales) for key, c in PRESETS.items() if key.endswith("ch")}
    expected = {f"{n}-tr2-{s}ch": s for n in ("fovmax", "fovavg") for s in (17, 9, 5)}
    assert second == expected
    third = [key for key in PRESETS if "-few" in key]
    assert len(third) == 5 * 7
    assert len(PRESETS) == 21 + 6 + 35


@pytest.mark.parametrize(
    ("name", "parameters"), [("cnn", 92_198), ("fovavg", 68_870), ("fovmax", 68_870)]
)
def test_presets_have_the_papers_numbers_of_parameters(name, parameters):
    for key in rows(name):
        net = build_net(PRESETS[key])
        assert sum(p.numel() for p in net.parameters()) == parameters


def test_preset_details():
    assert preset("cnn-tr14").scales == "1-4"
    assert preset("fovconc-tr1").model.scales == ScaleGrid(1, 4, per_octave=1)
    assert preset("fovconc5-tr14").model.scales == ScaleGrid(0.5, 8, per_octave=1)
    assert len(preset("fovconc-few100").model.scales) == 17
    few = preset("fovavg-few1000")
    assert (few.samples, few.scales, few.epochs, few.epochs_per_decay) == (1000, "1-4", 200, 20)
    assert preset("cnn-few10000").epochs == 20
    assert preset("swmax") == TrainConfig(model=ZOO["swmax"])
    with pytest.raises(ConfigError, match="did you mean fovavg-tr2"):
        preset("fovavg-rt2")


@pytest.mark.parametrize("name", ["cnn", "fovmax", "fovavg", "fovconc", "swmax"])
def test_networks_are_named_as_in_the_zoo(name):
    assert model_name(preset(name)) == name


def test_other_networks_are_named_by_what_differs():
    assert model_name(preset("fovmax-tr2-9ch")) == "fovmax-9ch"
    assert model_name(preset("fovconc5-tr2")) == "fovconc-5ch"
    assert model_name(replace(preset("fovavg"), backbone="a.b:c")) == "fovavg with a.b:c"


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_fovplus_sees_all_test_scales_from_one(scale):
    config = preset(f"fovplus-tr{scale}")
    assert config.scales == str(scale)
    low, high = (zoom * scale for zoom in config.zooms)
    assert low < PAPER_SCALES.low and high > PAPER_SCALES.high
    assert sum(p.numel() for p in build_net(config).parameters()) <= 120_000
    assert config.epochs / config.batch <= preset("fovavg").epochs / preset("fovavg").batch


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name):
    config = PRESETS[name]
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_digests_tell_configs_apart():
    digests = {config.digest() for config in PRESETS.values()}
    assert len(digests) == len(set(PRESETS.values()))
    assert tiny().digest() == tiny().digest() != tiny(seed=1).digest()


def test_settings_are_read_as_what_they_replace():
    changes = {"batch": "8", "learning_rate": "1", "scales": "1,2", "model.batch_norm": "False"}
    changes |= {"model.features": "[3, 5]", "model.scales": "1:4:2", "model.padding": "0.5"}
    config = tiny().changed(changes)
    assert (config.batch, config.learning_rate, config.scales) == (8, 1.0, "1,2")
    assert config.model.batch_norm is False
    assert config.model.features == (3, 5)
    assert config.model.scales == ScaleGrid(1, 4, per_octave=2)
    assert config.model.padding == 0.5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("finetune", {"recipe": "photo", "recipe.base": "112", "recipe.flip": "false"}),
        ("fovavg", {"backbone": "timm:resnet10t", "pretrained": "true"}),
        ("fovplus-tr2", {"zooms": "[1, 1]", "recipe": "photo", "recipe.sizes": "[0.5, 2]"}),
        ("fovplus-tr2", {"zooms": "[1, 1]", "model.pool": "concat"}),
    ],
)
def test_the_order_of_settings_does_not_matter(name, changes):
    found = preset(name).changed(changes)
    assert found == preset(name).changed(dict(reversed(changes.items())))
    changes.pop("recipe", None)
    assert all(found.changed({key: text}) == found for key, text in changes.items())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("epoch", "3", "cannot set 'epoch'; use one of"),
        ("model", "cnn", "cannot set 'model'"),
        ("model.colour", "3", "cannot set 'colour'"),
        ("epochs", "many", "epochs must be a value such as 3, got 'many'"),
        ("epochs", "2.5", "epochs must be a value such as 3, got '2.5'"),
        ("epochs", "0", "epochs must be 1 to 1,000,000, got 0"),
        ("batch", "true", "batch must be a value such as 16"),
        ("samples", "-1", "samples must be 0 to 2"),
        ("seed", "-1", "seed must be 0 to 2"),
        ("data_seed", str(2**40), "data_seed must be 0 to 2"),
        ("learning_rate", "NaN", "learning_rate must be a finite number, got nan"),
        ("learning_rate", "0", "learning_rate must be above 0"),
        ("precision", "fp8", "precision must be one of float32, bf16, got 'fp8'"),
        ("border", "odd", "border must be one of"),
        ("scales", "2,huge", "scales must look like .* got 'huge'"),
        ("model.features", '["a"]', r"features must be a value such as \[4, 8\]"),
        ("model.scales", "1,4,2", "low:high:per_octave"),
        ("model.dropout", "1", "dropout must be at least 0 and below 1"),
    ],
)
def test_settings_that_cannot_work(key, value, words):
    with pytest.raises(ConfigError, match=words):
        tiny().changed({key: value})
