"""Accuracy over scale: counted by hand, written down, read again, and summed up over seeds."""

import csv
import json
import math
import shutil
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_sources import idx_bytes
from tiny_runs import MODEL, stopped_at_once, tiny

import foveate
from foveate.cli.app import run
from foveate.cli.evaluation import print_accuracy
from foveate.data.idx import FILES
from foveate.data.large_scale import rescale
from foveate.data.sources import Split, load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.curve import AtScale, accuracy_over_scale
from foveate.evaluation.results import (
    COLUMNS,
    Curve,
    RunResult,
    read_results,
    save_results,
    summarise,
)
from foveate.evaluation.runs import open_run
from foveate.models.pretrained import pretrained_info, pretrained_names
from foveate.models.zoo import ModelConfig, create_model
from foveate.report.plots import accuracy_curves, save
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train, train_together
from foveate.training.presets import preset

SCALES = "0.5,1,2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one run, and another run."""
    folder = tmp_path_factory.mktemp("runs")
    wide = replace(MODEL, hidden=24)
    configs = [tiny(model=wide, seed=0), tiny(model=wide, seed=1), tiny(scales="2")]
    return [f.path for f in train_together([(c, folder / str(i)) for i, c in enumerate(configs)])]


@pytest.fixture(scope="module")
def evaluated(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    assert run(["evaluate", *map(str, runs), "--scales", SCALES, "--out", str(out)]) == 0
    return out


def some(count=120):
    test = load_source("mnist-5k").test
    return Split(test.images[:count], test.labels[:count])


def answers(net, split, scale):
    with torch.no_grad():
        return net.eval()(rescale(split.images, scale, size=24)).argmax(1)


def test_counts_are_those_made_by_hand(runs):
    net, split = RunFolder(runs[0]).net(), some()
    found = accuracy_over_scale(net, split, [0.5, 1.5], size=24)
    for at, scale in zip(found, [0.5, 1.5], strict=True):
        given = answers(net, split, scale).tolist()
        pairs = list(zip(split.labels.tolist(), given, strict=True))
        assert at.scale == scale and at.count == 120
        assert at.accuracy == sum(a == b for a, b in pairs) / 120
        for label in range(10):
            row = [pairs.count((label, answer)) for answer in range(10)]
            assert list(at.confusion[label]) == row
            assert at.per_class[label] == row[label] / sum(row)


def test_winners_are_the_channels_that_said_the_answer_loudest(runs):
    net, split = RunFolder(runs[0]).net().eval(), some()
    (at,) = accuracy_over_scale(net, split, [1.0], size=24)
    with torch.no_grad():
        outputs = net.channels(rescale(split.images, 1.0, size=24))
    winners = [0, 0]
    for image in outputs:
        winners[int(image[:, image.mean(0).argmax()].argmax())] += 1
    assert list(at.winners) == winners
    assert sum(at.winners) == 120 and min(winners) > 0


@pytest.mark.parametrize("form", ["plain", "sliding"])
def test_other_forms_of_network(form):
    size = 24 if form == "plain" else 12
    net = ModelConfig(form=form, size=size, features=(4, 8), hidden=8, batch_norm=False).build()
    (at,) = accuracy_over_scale(net, some(20), [1.0], size=24)
    assert at.count == 20
    assert len(at.winners) == (0 if form == "plain" else 17)
    assert sum(at.winners) in (0, 20)


def test_evaluating_in_chunks_counts_every_image_once(runs, monkeypatch):
    net, told = RunFolder(runs[0]).net(), []
    (all_at_once,) = accuracy_over_scale(net, some(), [1.0], size=24)
    monkeypatch.setattr("foveate.evaluation.curve.CHUNK", 50)
    (in_parts,) = accuracy_over_scale(net, some(), [1.0], size=24, advance=told.append)
    assert in_parts == all_at_once
    assert told == [50, 50, 20]


def test_the_network_is_left_in_the_mode_it_was_in(runs):
    net = RunFolder(runs[0]).net().train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    accuracy_over_scale(net, some(20), [1.0], size=24)
    assert net.training
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_data_that_does_not_fit_is_said(runs):
    net, split = RunFolder(runs[0]).net(), some(20)
    with pytest.raises(ConfigError, match="has class index 11, but the network has 10"):
        accuracy_over_scale(net, Split(split.images, split.labels + 2), [1.0], size=24)
    with pytest.raises(DataError, match="no images"):
        accuracy_over_scale(net, Split(split.images[:0], split.labels[:0]), [1.0])
    with pytest.raises(ConfigError, match="precision must be one of float32, bf16, got 'fp16'"):
        accuracy_over_scale(net, split, [1.0], size=24, precision="fp16")


def test_a_class_without_images_has_no_accuracy():
    at = AtScale(1.0, ((3, 1), (0, 0)))
    assert (at.count, at.accuracy, at.per_class[0]) == (4, 0.75, 0.75)
    assert math.isnan(at.per_class[1])


def test_accuracy_csv_has_a_line_per_run_and_scale(runs, evaluated):
    lines = list(csv.DictReader((evaluated / "accuracy.csv").read_text().splitlines()))
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == 9
    keys = [(line["run"], line["seed"], line["trained_on"], line["scale"]) for line in lines]
    assert keys == [
        (str(path), seed, scale, factor)
        for path, seed, scale in zip(runs, "010", "112", strict=True)
        for factor in ("0.5", "1.0", "2.0")
    ]
    assert {line["model"] for line in lines} == {"fovavg-2ch"}
    assert {line["count"] for line in lines} == {"1000"}
    test = load_source("mnist-5k").test
    right = (answers(RunFolder(runs[1]).net(), test, 2.0) == test.labels).sum()
    assert float(lines[5]["accuracy"]) == int(right) / 1000


def test_results_json_has_everything(runs, evaluated):
    content = json.loads((evaluated / "results.json").read_text())
    assert content["version"] == foveate.__version__
    assert content["split"] == "test"
    source = load_source("mnist-5k")
    assert content["sources"] == [{"name": "mnist-5k", "checksum": source.checksum}]
    assert "CPU" in content["hardware"] and "commit" in content
    for entry, path in zip(content["runs"], runs, strict=True):
        config = RunFolder(path).config()
        assert entry["config"] == json.loads(json.dumps(config.to_dict()))
        assert entry["made_with"] == RunFolder(path).provenance()
        for at in entry["scales"]:
            assert np.array(at["confusion"]).sum(1).tolist() == [100] * 10
            assert len(at["per_class"]) == 10 and sum(at["winners"]) == 1000
            assert statistics.mean(at["per_class"]) == pytest.approx(at["accuracy"])


def test_results_can_be_read_again(evaluated, tmp_path):
    results = read_results(evaluated)
    assert read_results(evaluated / "results.json") == results
    save_results(results, tmp_path)
    assert (tmp_path / "accuracy.csv").read_text() == (evaluated / "accuracy.csv").read_text()
    assert read_results(tmp_path) == results


def result(accuracies, **changes):
    rights = [round(100 * a) for a in accuracies]
    scales = [AtScale(2.0**k, ((n, 100 - n), (0, 0))) for k, n in enumerate(rights)]
    return RunResult(run="somewhere", config=tiny(**changes), scales=tuple(scales))


def test_seeds_of_one_run_make_mean_and_spread():
    results = [result([0.9, 0.5]), result([0.8, 0.7], scales="2"), result([0.8, 0.6], seed=1)]
    both, alone = summarise(results)
    assert (both.label, both.runs) == ("fovavg-2ch, trained on 1", 2)
    assert both.scales == (1.0, 2.0)
    assert both.mean == pytest.approx((0.85, 0.55))
    # Two values d apart have the standard deviation d / sqrt(2), with n - 1 below the fraction.
    assert both.spread == pytest.approx((0.1 / 2**0.5, 0.1 / 2**0.5))
    assert (alone.label, alone.runs, alone.spread) == ("fovavg-2ch, trained on 2", 1, ())


def test_runs_that_differ_in_more_are_kept_apart_and_told_apart():
    curves = summarise([result([0.9]), replace(result([0.8], samples=50), run="elsewhere")])
    assert [curve.label for curve in curves] == [
        "fovavg-2ch, trained on 1 (somewhere)",
        "fovavg-2ch, trained on 1 (elsewhere)",
    ]


def test_seeds_tested_at_other_scales_are_refused():
    with pytest.raises(DataError, match="tested at different scales"):
        summarise([result([0.9]), result([0.8, 0.7], seed=1)])


def test_an_empty_class_is_null_in_json(tmp_path):
    save_results([result([0.9])], tmp_path)
    (run_entry,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run_entry["scales"][0]["per_class"] == [0.9, None]


@pytest.mark.parametrize("text", ["", "[]", '{"runs": [{}]}', '{"runs": 3}'])
def test_damaged_results_are_named(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(DataError, match=r"results\.json is damaged"):
        read_results(tmp_path)


def test_a_scale_is_finite(tmp_path):
    save_results([result([0.9])], tmp_path)
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"scale": 1.0', '"scale": Infinity'))
    with pytest.raises(DataError, match=r"results\.json is damaged \(scale inf"):
        read_results(tmp_path)


def test_missing_results_are_named(tmp_path):
    with pytest.raises(DataError, match="run 'foveate evaluate' to write it"):
        read_results(tmp_path)


def test_the_plot_shows_mean_spread_and_octaves(tmp_path):
    results = [result([0.9, 0.5, 0.4]), result([0.8, 0.6, 0.2], seed=1), result([0.3] * 3, batch=3)]
    (axes,) = accuracy_curves(summarise(results)).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4"]
    assert axes.get_xscale() == "log"
    first, second = axes.get_lines()
    assert list(first.get_xdata()) == [1, 2, 4]
    assert list(first.get_ydata()) == pytest.approx([85, 55, 30])
    assert list(second.get_ydata()) == pytest.approx([30] * 3)
    (band,) = axes.collections  # only the first has a spread
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(85 + 10 / 2**0.5)
    assert heights.min() == pytest.approx(30 - 20 / 2**0.5)
    assert axes.get_legend().get_texts()[0].get_text().endswith("(2 runs)")


@pytest.mark.parametrize("name", [r"$\frac$", "caf\udce9"])
def test_names_of_runs_are_drawn_as_they_are(name, tmp_path):
    """They are no formulas, and file systems allow bytes that are not UTF-8."""
    curves = [Curve(label=name, trained_on="1", runs=1, scales=(1.0, 2.0), mean=(0.5, 0.6))]
    assert save(accuracy_curves(curves), tmp_path / "curves.svg").stat().st_size


def test_the_paper_scales_have_the_paper_ticks():
    scales = [AtScale(2 ** (k / 4), ((99, 1), (0, 0))) for k in range(-4, 13)]
    curves = summarise([RunResult(run="r", config=tiny(), scales=tuple(scales))])
    (axes,) = accuracy_curves(curves).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1/2", "1", "2", "4", "8"]
    assert axes.get_ylim()[0] == 90


# The command


def test_evaluate_prints_a_table_and_the_paths(runs, tmp_path, capsys):
    out = str(tmp_path)
    command = ["evaluate", *map(str, runs), "--split", "val", "--scales", "1,2", "--out", out]
    assert run(command) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert "(2 runs)" in " ".join(lines[:4]).replace("\n", " ")
    row = next(line for line in lines if line.startswith("1.000"))
    curves = summarise(read_results(tmp_path))
    assert f"{100 * curves[0].mean[0]:.2f} ± {100 * curves[0].spread[0]:.2f}" in row
    names = ["accuracy.csv", "results.json", "accuracy.png", "accuracy.svg"]
    assert lines[-4:] == [str(tmp_path / name) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "accuracy.svg").read_text()
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["split"] == "val"
    assert content["runs"][0]["scales"][0]["accuracy"] == RunFolder(runs[0]).metrics()[-1][
        "validation"
    ]  # fmt: skip


def test_intervals_are_printed_if_they_fit_into_a_line(capsys):
    ends = ((0.21, 0.29),)
    curve = Curve(label="a", trained_on="1", runs=1, scales=(1.0,), mean=(0.25,), intervals=ends)
    for count, text in ((1, "25.00 (21.0–29.0)"), (3, "25.00 (21.0–29.0)"), (4, "25.00  ")):
        print_accuracy([curve] * count)
        (row,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("1.000")]
        assert text in row and ("(" in row) == (count < 4) and len(row.rstrip()) <= 80


def test_one_run_gets_its_results_in_its_folder_and_at_17_scales(tmp_path, capsys):
    train(tiny(epochs=1, model=replace(MODEL, classes=10)), tmp_path / "run")
    assert run(["evaluate", str(tmp_path / "run")]) == 0
    (result,) = read_results(tmp_path / "run")
    assert [at.scale for at in result.scales] == [2 ** (k / 4) for k in range(-4, 13)]
    assert "8.000" in capsys.readouterr().out


def test_a_run_that_is_named_twice_is_one_run(runs, tmp_path):
    shutil.copytree(runs[2], tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for same in (f"{tmp_path / 'run'}/", str(tmp_path / "link")):
        assert run(["evaluate", str(tmp_path / "run"), same, "--scales", "1"]) == 0
        assert len(read_results(tmp_path / "run")) == 1


def test_a_pretrained_network_is_evaluated_by_its_name(tmp_path):
    digits = load_source("mnist-5k").train
    for name, array in zip(FILES, 2 * (digits.images[:40, 0], digits.labels[:40]), strict=True):
        (tmp_path / name).write_bytes(idx_bytes(array.numpy()))
    command = ["evaluate", "fovplus-tr2", "--source", f"idx:{tmp_path}", "--scales", "1,8"]
    assert run([*command, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    info, net = pretrained_info("fovplus-tr2"), create_model("fovplus-tr2", pretrained=True).eval()
    assert result["made_with"]["commit"] == info.commit and result["run"] == "fovplus-tr2"
    for at in result["scales"]:
        with torch.no_grad():
            found = net(rescale(digits.images[:40], at["scale"])).argmax(1)
        expected = torch.zeros(10, 10, dtype=torch.long)
        expected.index_put_((digits.labels[:40], found), torch.tensor(1), accumulate=True)
        assert at["confusion"] == expected.tolist()


@pytest.mark.parametrize("name", pretrained_names())
def test_a_pretrained_network_has_the_configuration_of_its_preset(name):
    config = open_run(name).config()
    row = name.replace("-mnist", "")
    own = replace(preset(row), seed=config.seed, precision=config.precision)
    assert config == own


def test_a_folder_takes_precedence_over_a_pretrained_name(runs, tmp_path, monkeypatch):
    shutil.copytree(runs[0], tmp_path / "fovplus-tr2")
    monkeypatch.chdir(tmp_path)
    assert open_run("fovplus-tr2").config() == RunFolder(runs[0]).config()


def test_errors_are_one_line_and_nothing_is_written(runs, tmp_path, capsys):
    stopped_at_once(tmp_path / "unfinished")
    broken = train(tiny(epochs=1), tmp_path / "broken")
    broken.weights.write_bytes(broken.weights.read_bytes()[:200])
    one = str(runs[0])
    cases = {
        "is not a run: it has no config.json": [str(tmp_path / "none")],
        "is not finished (0 of 3 epochs)": [one, str(tmp_path / "unfinished")],
        "is not a complete safetensors file": [str(tmp_path / "broken")],
        "--out is required to evaluate 3 runs": [*map(str, runs), one],
        "--out is required to evaluate fovplus-tr2": ["fovplus-tr2"],
        "split must be val or test, got 'train'": [one, "--split", "train"],
        "scales must look like": [one, "--scales", "big"],
        "scale must lie between": [one, "--scales", "0"],
        "use 'foveate audit' for a model file": [f"{one}/weights.safetensors"],
        "the largest window has 2,": [one, "--windows", "1-2000000"],
        "unknown data source 'nothing'": [one, "--source", "nothing"],
        "unknown device 'abacus'": [one, "--device", "abacus"],
        "Missing argument": [],
    }
    before = sorted(path for path in runs[0].iterdir())
    for words, arguments in cases.items():
        out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
        assert run(["evaluate", *arguments, *out]) == 2
        printed, err = capsys.readouterr()
        assert printed == ""
        assert err.startswith("error: ") and err.count("\n") == 1
        assert words in err
    assert sorted(path for path in runs[0].iterdir()) == before
    assert not (tmp_path / "out").exists()


def test_mnist_is_not_tested_on_its_own_training_images(runs, tmp_path, capsys):
    import shutil

    shutil.copytree(runs[0], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"mnist-5k"', '"mnist"'))
    assert run(["evaluate", str(tmp_path / "run"), "--source", "mnist-5k"]) == 2
    assert "is a subset of the training images of mnist" in capsys.readouterr().err
