"""Networks that come with the package: chosen, written, described, and refused when altered."""

import hashlib
import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import ship as shipping
import torch
from model_cards import card, overview
from raised import one_line
from ship import row_name, ship
from tiny_runs import tiny

import foveate
from foveate.data.sources import Split, load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.curve import AtScale, accuracy_over_scale
from foveate.evaluation.results import RunResult
from foveate.models.pretrained import (
    WEIGHTS,
    from_pretrained,
    pretrained_info,
    pretrained_names,
    read_index,
)
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train_together
from foveate.training.presets import PRESETS, preset

SCALES = (0.5, 1.0, 2.0)
TR1, TR2 = "tiny-mnist-tr1", "tiny-mnist-tr2"
SHIPPED = pretrained_names()
CARDS = Path(__file__).parent.parent / "docs" / "models"


def name(config):
    return f"tiny-mnist-tr{config.scales}"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three seeds of one row and one of another, tested on a few images."""
    folder = tmp_path_factory.mktemp("runs")
    configs = [*(tiny(seed=seed, epochs=1) for seed in range(3)), tiny(scales="2", epochs=1)]
    runs = train_together([(c, folder / str(i)) for i, c in enumerate(configs)])
    test = load_source("mnist-5k").test
    some = Split(test.images[:50], test.labels[:50])
    return [
        RunResult(
            run=str(run.path),
            config=config,
            scales=tuple(accuracy_over_scale(run.net(), some, SCALES, size=24)),
            made_with=run.provenance(),
        )
        for run, config in zip(runs, configs, strict=True)
    ]


@pytest.fixture
def folder(results, tmp_path):
    ship(results, tmp_path / "cards", tmp_path, name=name)
    return tmp_path


def validation(result):
    return RunFolder(Path(result.run)).metrics()[-1]["validation"]


def with_file(folder, content):
    """Put other content under a network's name, with a checksum that fits it."""
    (folder / f"{TR2}.safetensors").write_bytes(content)
    path = folder / "index.json"
    entries = json.loads(path.read_text())
    entries[1]["sha256"] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(entries))


def test_the_median_seed_is_taken(results, folder):
    ranked = sorted(results[:3], key=lambda r: (validation(r), r.config.seed))
    assert len({validation(result) for result in ranked}) > 1
    info = pretrained_info(TR1, folder)
    assert (info.seed, info.seeds) == (ranked[1].config.seed, 3)
    assert info.validation == validation(ranked[1])
    assert info.accuracy == {at.scale: at.accuracy for at in ranked[1].scales}
    taken = (Path(ranked[1].run) / "weights.safetensors").read_bytes()
    assert (folder / info.file).read_bytes() == taken
    assert hashlib.sha256(taken).hexdigest() == info.sha256


def test_of_two_seeds_the_lower_one_is_taken(results, tmp_path):
    pair = sorted(results[:3], key=validation)[::2]
    (info,) = ship(pair[::-1], tmp_path / "cards", tmp_path, name=name)
    assert info.validation == validation(pair[0]) < validation(pair[1])


def test_the_network_is_that_of_the_run(results, folder):
    images = torch.randn(3, 1, 24, 24)
    run, loaded = RunFolder(Path(results[3].run)).net().eval(), from_pretrained(TR2, folder)
    assert not any(module.training for module in loaded.modules())
    assert {weight.device.type for weight in loaded.parameters()} == {"cpu"}
    with torch.no_grad():
        assert torch.equal(loaded(images), run(images))


def test_loading_leaves_the_random_state_alone(folder):
    before = torch.get_rng_state()
    from_pretrained(TR2, folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_known_survives_the_file(results, folder, tmp_path):
    assert pretrained_names(folder) == [TR1, TR2]
    info, config = pretrained_info(TR2, folder), results[3].config
    assert (info.model, info.source, info.scales) == (config.model, "mnist-5k", "2")
    assert (info.samples, info.size, info.tested) == (96, 24, 50)
    assert list(info.accuracy) == list(SCALES)
    assert (info.version, info.hardware) == (foveate.__version__, results[3].made_with["hardware"])
    rebuilt = {**config.to_dict(), **info.recipe}
    assert rebuilt == config.to_dict() and info.recipe["batch"] == 16
    (again,) = ship([results[3]], tmp_path / "other", tmp_path / "other", name=name)
    assert again == info == pretrained_info(TR2, tmp_path / "other")


def test_shipping_again_replaces_one_and_keeps_the_others(results, folder):
    others = replace(results[0], scales=(AtScale(1.0, ((3, 1), (0, 4))),))
    ship([others], folder / "cards", folder, name=name)
    assert pretrained_names(folder) == [TR1, TR2]
    info = pretrained_info(TR1, folder)
    assert (info.accuracy, info.seeds, info.tested) == ({1.0: 0.875}, 1, 8)
    for known in pretrained_names(folder):
        from_pretrained(known, folder)


def test_an_unknown_name_brings_near_ones(folder, tmp_path):
    near = one_line(ConfigError, lambda: from_pretrained("tiny-mnist-tr4", folder))
    assert "no pretrained network 'tiny-mnist-tr4'; did you mean tiny-mnist-tr" in near
    far = one_line(ConfigError, lambda: from_pretrained("zzz", folder))
    assert far.endswith(f"available: {TR1}, {TR2}")
    assert "contains none" in one_line(ConfigError, lambda: from_pretrained("x", tmp_path / "no"))


@pytest.mark.parametrize("change", ["one bit", "cut short"])
def test_an_altered_file_is_refused(folder, change):
    path, info = folder / f"{TR2}.safetensors", pretrained_info(TR2, folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if change == "one bit" else data[:-1])
    message = one_line(DataError, lambda: from_pretrained(TR2, folder))
    assert f"has sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}" in message
    assert f"expected {info.sha256}" in message
    from_pretrained(TR1, folder)


def test_a_missing_file_is_named(folder):
    (folder / f"{TR2}.safetensors").unlink()
    message = one_line(DataError, lambda: from_pretrained(TR2, folder))
    assert f"{TR2}.safetensors: No such file or directory" in message


def test_weights_of_another_network_are_refused(results, folder):
    other = RunFolder(Path(results[3].run)).net()
    other.backbone.head = torch.nn.Linear(8, 3)
    from safetensors.torch import save

    with_file(folder, save(other.state_dict()))
    message = one_line(DataError, lambda: from_pretrained(TR2, folder))
    assert f"does not contain the network {TR2}" in message and "size mismatch" in message


def test_weights_that_are_not_finite_are_refused(results, folder):
    from safetensors.torch import save

    weights = RunFolder(Path(results[3].run)).net().state_dict()
    weights["backbone.head.bias"][0] = torch.nan
    with_file(folder, save(weights))
    message = one_line(DataError, lambda: from_pretrained(TR2, folder))
    assert f"{TR2}.safetensors contains non-finite values in backbone.head.bias" in message


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(folder):
    mark = folder / "executed"
    with_file(folder, pickle.dumps(_Bomb(mark)))
    one_line(DataError, lambda: from_pretrained(TR2, folder))
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Bomb(mark)))  # noqa: S301  (the bomb itself works)
    assert mark.exists()


@pytest.mark.parametrize("text", ["{", "[]]", '{"a": 1}', '[{"name": "x"}]', '[{"name": 1}, 3]'])
def test_a_damaged_index_is_said(folder, text):
    (folder / "index.json").write_text(text)
    assert "index.json is damaged" in one_line(DataError, lambda: pretrained_names(folder))


def test_a_failed_write_keeps_the_index_and_says_why(results, folder, monkeypatch):
    before = (folder / "index.json").read_text()

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shipping, "write_text", full)
    message = one_line(DataError, lambda: ship(results[:1], folder / "cards", folder, name=name))
    assert "No space left on device" in message
    assert (folder / "index.json").read_text() == before


def test_runs_that_differ_in_more_than_the_seed_are_refused(results, tmp_path):
    mixed = [results[0], results[3]]
    message = one_line(
        ConfigError, lambda: ship(mixed, tmp_path / "cards", tmp_path, name=lambda c: "both")
    )
    assert f"must differ in their seed only: remove {results[3].run}" in message
    assert pretrained_names(tmp_path) == []


def test_unfinished_and_changed_runs_are_refused(results, tmp_path):
    unfinished = replace(results[0], run=str(tmp_path))
    one_line(DataError, lambda: ship([unfinished], tmp_path, tmp_path, name=name))
    other = replace(results[0], run=results[1].run)
    message = one_line(ConfigError, lambda: ship([other], tmp_path, tmp_path, name=name))
    assert "has changed since its evaluation" in message


def test_rows_of_table_one_have_names_and_other_runs_have_none():
    first = {key: run for key, run in PRESETS.items() if re.search(r"-tr\d+$", key)}
    assert len(first) == 21
    for key, config in first.items():
        network, _, trained = key.rpartition("-")
        assert row_name(replace(config, seed=2, precision="bf16")) == f"{network}-mnist-{trained}"
    for other in (tiny(), replace(PRESETS["fovmax-tr2"], epochs=3), PRESETS["fovmax-few100"]):
        assert "not a row of Table I" in one_line(ConfigError, lambda other=other: row_name(other))


def test_the_card_says_what_the_index_knows(folder):
    info, text = pretrained_info(TR1, folder), (folder / "cards" / f"{TR1}.md").read_text()
    assert text == card(info)
    for scale, share in info.accuracy.items():
        assert f"| {scale:.3f} | {100 * share:.2f} |" in text
    count = sum(weight.numel() for weight in from_pretrained(TR1, folder).parameters())
    assert f"{count:,} parameters" in text and info.sha256 in text
    assert "the first 96 training images of mnist-5k at scale 1." in text
    assert f"seed | {info.seed}, the median of 3" in text
    assert "part of the MNIST training set" in text
    assert f'create_model("{TR1}", pretrained=True)' in text
    listed = (folder / "cards" / "README.md").read_text()
    assert listed == overview(list(read_index(folder).values()))
    assert f"[{TR2}]({TR2}.md) | 2 |" in listed


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.96, 0.99, 0.95), "at least 95 % from scale 0.5 to 2;"),
        ((0.94, 0.99, 0.95), "at least 95 % from scale 1 to 2;"),
        ((0.99, 0.94, 0.98), "at least 95 % from scale 0.5 to 0.5;"),
        ((0.5, 0.6, 0.7), "below 95 % at all tested scales"),
    ],
)
def test_the_card_says_where_the_network_holds(folder, shares, words):
    info = replace(pretrained_info(TR1, folder), accuracy=dict(zip(SCALES, shares, strict=True)))
    assert f"Its accuracy is {words}" in card(info)


@pytest.mark.parametrize("shipped", SHIPPED)
def test_every_shipped_network_loads_and_has_its_card(shipped):
    info = pretrained_info(shipped)
    assert preset(shipped.replace("-mnist", "")).model == info.model
    with torch.no_grad():
        logits = from_pretrained(shipped)(torch.full((1, 1, 112, 112), -0.76))
    assert logits.shape == (1, 10) and logits.isfinite().all()
    assert len(info.accuracy) == 17
    assert (CARDS / f"{shipped}.md").read_text() == card(info)


def test_the_folder_holds_what_the_index_names_and_nothing_else():
    files = {path.name for path in WEIGHTS.glob("*.safetensors")}
    assert files == {info.file for info in read_index().values()}
