"""The comparison of methods: its registry, its runs, its table and its page."""

import csv
import math
import re
import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_runs import tiny
from torch import nn

from foveate.baselines.comparison import (
    Measurement,
    find_data_sets,
    find_methods,
    measurements,
    plan_jobs,
)
from foveate.baselines.data_sets import ALL, DATA_SETS, DataSet
from foveate.baselines.methods import METHODS
from foveate.baselines.summary import (
    check_references,
    comparison_views,
    find_ceiling,
    mean_interval,
)
from foveate.cli.app import run
from foveate.data.large_scale import rescale
from foveate.data.recipes import find_recipe
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.models.channels import PAPER_SCALES
from foveate.report.comparison_page import comparison_figure, comparison_page
from foveate.resampling import foveate
from foveate.scales import ScaleGrid
from foveate.sweeps import runner
from foveate.sweeps.jobs import Job, Variant, find_outcome, perform
from foveate.sweeps.records import Record, read_lines, read_records
from foveate.training import config
from foveate.training.checkpoint import RunFolder
from foveate.training.presets import preset
from foveate.training.session import worth_compiling

GIVEN = {
    name: replace(data, source=data.source or "folder:photos") for name, data in DATA_SETS.items()
}
PAIRS = [
    (method, data)
    for data in GIVEN.values()
    for method in METHODS.values()
    if data.name not in ("fashion-mnist", "mnist-few")  # the networks of mnist
    and method.trainings(data)
    and not method.runs_of
]


# The registry


@pytest.mark.parametrize(
    ("method", "data"), PAIRS, ids=[f"{method.name}-{data.name}" for method, data in PAIRS]
)
def test_every_method_has_a_network_for_every_data_set(method, data, monkeypatch):
    monkeypatch.setattr(config, "_try_out", lambda net, config: None)  # the pass below is enough
    run_config = method.config(data, method.trainings(data)[0])
    net = config.build_net(run_config).eval()
    if run_config.backbone:
        net.to(memory_format=torch.channels_last)  # as training does
    side = data.image if data.recipe == "photo" else data.frame
    with torch.no_grad():
        logits = net(torch.randn(1, data.channels, side, side))
    assert logits.shape == (1, data.classes) and torch.isfinite(logits).all()


def test_every_factory_that_the_documentation_names_exists():
    page = (Path(__file__).parents[1] / "docs" / "backbones.md").read_text(encoding="utf-8")
    found = re.findall(r"`(foveate\.baselines\.\w+):(\w+)`(?:, `:(\w+)`)?", page)
    for module, *names in found:
        for name in filter(None, names):
            assert callable(getattr(import_module(module), name, None)), f"{module}:{name}"
    registered = {m.backbone for m in METHODS.values()} - {""}
    assert registered == {f"{module}:{name}" for module, *names in found for name in names if name}


def test_every_method_is_described_and_few_combinations_are_missing():
    for method in METHODS.values():
        assert method.paper[-4:].isdigit() and method.title and method.family
        assert METHODS[method.run_name].run_name == method.run_name
    missing = {(m.name, name) for m in METHODS.values() for name in m.missing}
    zoomed = {("cnn-zooms", "photographs"), ("cnn-zooms", "mnist-few")}  # of several scales
    grey = {d.name for d in DATA_SETS.values() if d.channels == 1}
    own = {(name, data) for name in ("residual-zooms", "residual-expert") for data in grey}
    own |= {
        (name, data) for name in ("cnn-expert", "fovmax-expert") for data in DATA_SETS.keys() - grey
    }
    wide = {(name, "mnist-few") for name in METHODS if name.endswith("-wide")}
    assert missing == {("swmax", "photographs"), *zoomed, *own, *wide}
    for data in DATA_SETS.values():  # each has a ceiling
        experts = [m for m in METHODS.values() if m.trained == "expert" and m.trainings(data)]
        assert bool(experts) != data.few


def validated_once(config):
    """Runs of a comparison are validated at their end; this cannot change their weights."""
    assert config.keep == "last"
    return replace(config, validations=1)


def test_fovplus_is_its_preset_and_the_cnn_is_offered_the_same_zooms():
    for trained in ("1", "2", "4"):
        config = METHODS["fovplus"].config(GIVEN["mnist"], trained)
        own = validated_once(preset(f"fovplus-tr{trained}"))
        assert replace(config, epochs_per_decay=own.epochs_per_decay) == own
        assert METHODS["cnn-zooms"].config(GIVEN["mnist"], trained).zooms == own.zooms
    for samples in GIVEN["mnist-few"].trained:
        few = METHODS["fovplus"].config(GIVEN["mnist-few"], samples)
        assert few == validated_once(preset(f"fovplus-few{samples}"))


def test_runs_on_all_digits_are_compiled():
    for method in METHODS.values():
        for trained in method.trainings(GIVEN["mnist"])[:1]:
            found = method.config(GIVEN["mnist"], trained)
            steps = math.ceil(50_000 / found.batch) * found.epochs
            assert worth_compiling(found, steps), method.name
    other = replace(found, backbone="timm:resnet18")
    assert not worth_compiling(other, 8000) and worth_compiling(other, 8001)


def test_photographs_of_random_sizes_stand_for_zooms():
    recipes = {
        name: METHODS[name].config(GIVEN["photographs"], trained).recipe
        for name, trained in (("fovplus", "1"), ("residual-zooms", "1"), ("cnn-all-scales", ALL))
    }
    assert {recipe.sizes for recipe in recipes.values()} == {(0.25, 2.0)}
    assert METHODS["fovavg"].config(GIVEN["photographs"], "1").recipe.sizes == (1.0, 1.0)


def test_methods_on_cifar10_see_the_same_images_and_those_with_zooms_the_same_zooms():
    data = GIVEN["cifar10"]
    used = [(m, trained) for m in METHODS.values() for trained in m.trainings(data)[:1]]
    configs = {m.name: m.config(data, trained) for m, trained in used}
    zoomed = {name: found.zooms for name, found in configs.items() if found.zooms != (1.0, 1.0)}
    assert zoomed.keys() == {"fovplus", "cnn-zooms", "residual-zooms"}
    assert len(set(zoomed.values())) == 1
    assert zoomed["fovplus"] == (data.scales.low, data.scales.high)  # trained on scale 1
    for name, found in configs.items():
        assert (found.recipe, found.size) == (find_recipe("mirrored"), 64), name
        if name != "cnn-all-scales" and not name.endswith("-expert"):
            assert found.scales == "1", name
    assert tuple(configs["fovplus"].model.scales) == tuple(data.scales)[::2]
    for name in ("fovplus", "residual-zooms"):  # the same network, in five windows and in one
        net = config.build_net(configs[name])
        assert sum(weight.numel() for weight in net.parameters()) == 1_646_122


@pytest.mark.parametrize("name", ["cnn", "fovavg", "fovmax", "fovconc", "swmax"])
def test_the_runs_of_the_paper_are_those_of_reproduce(name):
    for trained in ("1", "2", "4"):
        own = validated_once(preset(f"{name}-tr{trained}"))
        assert METHODS[name].config(GIVEN["mnist"], trained) == own
    for samples in GIVEN["mnist-few"].trained:
        own = validated_once(preset(f"{name}-few{samples}"))
        assert METHODS[name].config(GIVEN["mnist-few"], samples) == own


def test_channels_cover_the_test_scales():
    for data in DATA_SETS.values():
        assert data.windows.low <= data.scales.low and data.windows.high >= data.scales.high
    assert tuple(DATA_SETS["mnist"].scales) == tuple(PAPER_SCALES)
    assert [round(s**4, 9) for s in DATA_SETS["cifar10"].scales] == [2.0**k for k in range(-4, 5)]


def test_photographs_are_trained_at_the_size_of_their_scale():
    photographs = GIVEN["photographs"]
    assert photographs.images("1")["recipe"].sizes == (1.0, 1.0)
    assert photographs.images(ALL)["recipe"].sizes == (0.25, 2.0)
    for text, scale in zip(photographs.experts, photographs.scales, strict=True):
        assert photographs.images(text)["recipe"].sizes == (scale, scale)


# The runs


def test_a_network_is_trained_once_for_all_of_its_tests():
    methods = find_methods(["cnn", "cnn-averaged", "cnn-expert"])
    jobs = {job.folder: job for job in plan_jobs(methods, [GIVEN["mnist"]], seeds=2)}
    assert len(jobs) == 3 * 2 + 14  # 14 of the 17 experts have scales on which no cnn is trained
    shared = jobs["mnist-cnn-2-s0"]
    assert shared.rows == (("mnist", "cnn@2"), ("mnist", "cnn-expert@2"))
    assert [v.rows for v in shared.variants] == [(("mnist", "cnn-averaged@2"),)]
    assert jobs["mnist-cnn-2-s1"].rows == (("mnist", "cnn@2"),)
    for job in jobs.values():
        if job.rows[0][1].startswith("cnn-expert"):
            assert job.scales == (float(job.config.scales),)
    assert {job.scales for job in jobs.values() if "cnn@" in job.rows[0][1]} == {
        tuple(PAPER_SCALES)
    }


def test_training_scales_are_chosen():
    methods = find_methods(["fovmax", "cnn-all-scales"])
    sets = [GIVEN[name] for name in ("mnist", "mnist-few")]
    jobs = plan_jobs(methods, sets, scales=(2.0,), seeds=1)
    names = [job.folder for job in jobs]
    assert names[:2] == ["mnist-cnn-all-scales-all-s0", "mnist-fovmax-2-s0"]
    assert len(names) == 2 + 3  # few samples have no scale
    assert jobs[0].config.scales == "0.5:8:4"
    with pytest.raises(
        ConfigError, match=r"scales 3; the training sets are fovmax on mnist: 1, 2, 4$"
    ):
        plan_jobs(find_methods(["fovmax"]), sets[:1], scales=(3.0,))


def test_sources_are_replaced_with_their_classes(tmp_path):
    (found,) = find_data_sets(["mnist"], {"mnist": "mnist-5k"}, load_source)
    assert (found.source, found.channels, found.classes) == ("mnist-5k", 1, 10)
    coloured = replace(GIVEN["mnist-few"], source="folder:photos", channels=3, classes=5)
    for method in METHODS.values():  # of other sources too, also with a preset
        for samples in method.trainings(coloured):
            run_config = method.config(coloured, samples)
            assert run_config.source == "folder:photos"
            assert (run_config.model.channels, run_config.model.classes) == (3, 5)
    names = [data.name for data in find_data_sets([], {}, load_source)]
    assert names == [name for name in DATA_SETS if name != "photographs"]


BAD = [
    (["--methods", "fovmix"], "no method 'fovmix'; did you mean fovmax?"),
    (["--methods", "xyz"], "no method 'xyz'; choose from cnn, cnn-all-scales,"),
    (["--data", "mnsit"], "no dataset 'mnsit'; did you mean mnist?"),
    (["--data", "photographs"], "no default source; add --source photographs=folder:DIR"),
    (["--source", "mnist"], "--source must be NAME=SOURCE, such as mnist=idx:DIR, got 'mnist'"),
    (["--data", "mnist", "--source", "mnist-few=mnist-5k"], "add mnist-few to --data"),
    (["--data", "mnist", "--source", "mnist=mnist-6k"], "unknown data source 'mnist-6k'"),
    (["--data", "mnist", "--split", "train"], "split must be val or test, got 'train'"),
    (["--data", "mnist", "--seeds", "0"], "seeds must be 1 to 1000, got 0"),
    (["--data", "mnist", "--methods", "cnn", "--set", "epoch=1"], "cannot set 'epoch'"),
    (["--data", "mnist", "--methods", "cnn", "--set", "epochs"], "--set must be KEY=VALUE"),
    (["--data", "mnist", "--set", "seed=5", "--dry-run"], "a comparison; use --seeds"),
    (["--data", "mnist", "--set", "scales=2", "--dry-run"], "cannot set scales for all runs"),
    (["--data", "mnist", "--set", "source=mnist-5k", "--dry-run"], "use --source"),
    (
        ["--data", "mnist", "--methods", "residual-zooms"],
        "the training sets are residual-zooms on mnist: none (a control for colour images)",
    ),
    (["--data", "mnist-few", "--methods", "cnn-all-scales"], "on mnist-few: none (few samples)"),
    (["--data", "mnist", "--methods", "cnn", "--bad", "skip"], "skip"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_mistakes_get_one_line_with_the_remedy(tmp_path, capsys, arguments, words):
    assert run(["compare", *arguments, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and words in told
    assert not (tmp_path / "out").exists()


def test_a_dry_run_loads_and_trains_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path / "cache"))  # mnist would have to be fetched
    arguments = ["--data", "mnist", "--methods", "cnn,cnn-averaged", "--out", str(tmp_path / "out")]
    assert run(["compare", *arguments, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "9 runs: 0 finished, 9 remaining" and len(lines) == 2 + 6
    assert any(line.startswith("mnist cnn-averaged 2 ") for line in lines)
    assert not list(tmp_path.iterdir())


# A whole comparison

TINY = DataSet(
    name="tiny",
    title="Digits in frames of 24 pixels",
    source="mnist-5k",
    scales=ScaleGrid(1, 2, per_octave=1),
    trained=("1", "2"),
    image=12,
    frame=24,
    windows=ScaleGrid(1, 2, per_octave=1),
)
SMALL = ["samples=96", "epochs=1", "batch=16", "model.features=[4,8]", "model.hidden=8"]
NAMES = ("cnn", "cnn-averaged", "fovmax", "cnn-expert")


def compare(out, *more, methods=NAMES):
    changes = [word for setting in SMALL for word in ("--set", setting)]
    names = ["--methods", ",".join(methods), "--data", "tiny", "--seeds", "2"]
    return run(["compare", *names, *changes, "--device", "cpu", "--out", str(out), *more])


@pytest.fixture(scope="module")
def tiny_set():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATA_SETS, "tiny", TINY)
        yield


@pytest.fixture(scope="module")
def folder(tiny_set, tmp_path_factory):
    """A comparison that was interrupted after three of its eight runs, and resumed."""
    out, performed = tmp_path_factory.mktemp("compare") / "out", []
    perform = runner.perform

    def counted(jobs, *arguments, **options):
        if len(performed) == 3:
            performed.append("interrupted")
            raise KeyboardInterrupt
        performed.extend(job.folder for job in jobs)
        return perform(jobs, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "perform", counted)
        assert compare(out) == 130
        partial = (out / "compare.html").read_text()
        assert compare(out) == 0
        assert compare(out) == 0
    names = [name for name in performed if name != "interrupted"]
    assert len(names) == len(set(names)) == 8  # nothing twice
    assert "5 runs are missing, of those that the last command names" in partial
    assert "tiny-fovmax-2-s1" in partial
    assert "<dt>runs of the last command</dt><dd>8, 5 of them missing</dd>" in partial
    return out


def test_the_page_attributes_settings_and_sources_to_the_last_command(folder):
    """Runs of earlier commands can have others."""
    assert compare(folder, "--source", "tiny=mnist-5k") == 0
    html = (folder / "compare.html").read_text()
    for what, value in (("settings changed", ", ".join(SMALL)), ("sources", "tiny=mnist-5k")):
        found = re.search(f"{what}[^<]*by the last command</dt><dd>([^<]*)<", html)
        assert found and found[1] == value, what


def test_the_table_is_tidy(folder):
    with (folder / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    columns = ["data", "method", "trained", "scale", "seed", "accuracy", "count", "parameters"]
    assert list(lines[0]) == [*columns, "training_seconds", "images_per_second"]
    keys = [tuple(line[c] for c in ("method", "trained", "seed", "scale")) for line in lines]
    expected = {
        (method, trained, seed, scale)
        for method in NAMES[:3]
        for trained in ("1", "2")
        for seed in ("0", "1")
        for scale in ("1.0", "2.0")
    } | {("cnn-expert", trained, "0", f"{trained}.0") for trained in ("1", "2")}
    assert set(keys) == expected and len(keys) == len(expected)
    found = read_lines(folder / "compare.csv", Measurement)
    assert {line.count for line in found} == {1000} and {line.data for line in found} == {"tiny"}
    assert [f.name for f in fields(Measurement)] == list(lines[0])
    cnn, averaged = ([m for m in found if m.method == n] for n in NAMES[:2])
    net = RunFolder(folder / "tiny-cnn-1-s0").net()
    assert cnn[0].parameters == averaged[0].parameters == sum(p.numel() for p in net.parameters())
    assert all(line.training_seconds > 0 for line in found)
    # Five times the work: the slower of two noisy measurements is that of the average.
    assert averaged[0].images_per_second < cnn[0].images_per_second


def test_results_that_another_command_has_added_meanwhile_are_kept(folder, monkeypatch):
    table = (folder / "compare.csv").read_bytes()

    def run_study(study, labels, **how):
        study.records = study.records[:1]  # those of a command that began before the others

    monkeypatch.setattr("foveate.cli.compare.run_study", run_study)
    assert compare(folder) == 0
    assert (folder / "compare.csv").read_bytes() == table


def test_logits_are_averaged_over_five_sizes_of_the_frame(folder):
    net = RunFolder(folder / "tiny-cnn-2-s1").net().eval()
    test = load_source("mnist-5k").test
    frames = rescale(test.images, 1.0, size=24)
    sizes = [2 ** (k / 2) for k in range(-2, 3)]
    with torch.no_grad():
        patches = foveate(frames, sizes, 24)
        logits = torch.stack([net(patches[:, k]) for k in range(5)]).mean(0)
    right = float((logits.argmax(1) == test.labels).double().mean())
    (line,) = [
        m
        for m in read_lines(folder / "compare.csv", Measurement)
        if (m.method, m.trained, m.seed, m.scale) == ("cnn-averaged", "2", 1, 1.0)
    ]
    assert line.accuracy == pytest.approx(right, abs=2.5 / len(test))  # two ties may break


def test_an_expert_is_the_run_on_its_scale(folder):
    found = read_lines(folder / "compare.csv", Measurement)
    expert = {(m.trained, m.scale): m.accuracy for m in found if m.method == "cnn-expert"}
    cnn = {(m.trained, m.scale): m.accuracy for m in found if (m.method, m.seed) == ("cnn", 0)}
    assert expert == {key: cnn[key] for key in [("1", 1.0), ("2", 2.0)]}


def test_the_page_has_every_method_and_figure(folder):
    page = (folder / "compare.html").read_text()
    for name in NAMES:
        assert f"<th>{name}</th>" in page or f">{name}<" in page, name
        assert METHODS[name].paper in page
    assert TINY.title in page and "missing" not in page.split("</style>")[1]
    assert "<dt>runs of the last command</dt><dd>8, all finished</dd>" in page
    found = read_lines(folder / "compare.csv", Measurement)
    for trained in ("1", "2"):
        assert (folder / "figures" / f"tiny-{trained}.svg").stat().st_size
        at = [m for m in found if (m.method, m.trained, m.scale) == ("fovmax", trained, 2.0)]
        assert f">{50 * sum(m.accuracy for m in at):.2f}<" in page  # the mean of two seeds


def test_validation_images_need_no_new_run_and_leave_the_test_results_alone(folder, tiny_set):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/weights.safetensors")}
    table = (folder / "compare.csv").read_bytes()
    assert compare(folder, "--split", "val", methods=("cnn", "fovmax")) == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert (folder / "compare.csv").read_bytes() == table
    found = read_lines(folder / "compare-val.csv", Measurement)
    assert {line.count for line in found} == {500} and len(found) == 2 * 2 * 2 * 2
    assert "validation images" in (folder / "compare-val.html").read_text()
    run_folder = RunFolder(folder / "tiny-cnn-1-s0")
    (line,) = [m for m in found if (m.method, m.trained, m.seed, m.scale) == ("cnn", "1", 0, 1.0)]
    assert line.accuracy == pytest.approx(run_folder.validation())  # the last one of training
    assert {record.table for record in read_records(folder)} == {"tiny", "tiny@val"}


# The page


def line(**changes):
    values = {"data": "mnist", "method": "cnn", "trained": "2", "scale": 2.0, "seed": 0}
    values |= {"accuracy": 0.9, "count": 100, "parameters": 5}
    return Measurement(**{**values, "training_seconds": 1.0, "images_per_second": 9.0, **changes})


def test_the_ceiling_is_the_best_expert_at_each_scale():
    experts = [("cnn-expert", 1.0, 0.8), ("fovmax-expert", 1.0, 0.7), ("fovmax-expert", 2.0, 0.6)]
    lines = [
        line(method=method, trained=f"{scale:g}", scale=scale, accuracy=accuracy)
        for method, scale, accuracy in experts
    ]
    (view,) = comparison_views([*lines, line()])
    assert view.ceiling == {1.0: 0.8, 2.0: 0.6} and list(view.curves) == ["cnn"]
    assert not find_ceiling([line()])


def test_the_ceiling_has_a_mean_over_all_scales_only_with_all_experts():
    scales = list(DATA_SETS["mnist"].scales)
    for count, mean in ((len(scales), "77.00"), (len(scales) - 1, "–")):
        experts = [
            line(method="cnn-expert", trained=f"{scale:g}", scale=scale, accuracy=0.77)
            for scale in scales[:count]
        ]
        lines = [line(), *experts]
        drawn = [(view, comparison_figure(view)) for view in comparison_views(lines)]
        html = comparison_page(lines, drawn, {}).html()
        row = html[html.index("trained on the test scale</t") :].partition("</tr>")[0]
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
        assert cells[-2:] == [mean, "–"]


def test_every_combination_of_results_makes_a_page():
    few = [
        line(data="mnist-few", trained=trained, scale=scale, seed=seed, accuracy=0.5 + seed / 10)
        for trained in ("100", "1000")
        for scale in (1.0, 4.0)
        for seed in (0, 1)
    ]
    kinds = {
        "experts alone": [line(method="cnn-expert")],
        "all scales alone": [line(method="cnn-all-scales", trained=ALL)],
        "few samples": few,
        "everything": [line(), line(method="cnn-all-scales", trained=ALL), *few],
        "nothing": [],
    }
    counts = {}
    for kind, lines in kinds.items():
        drawn = [(view, comparison_figure(view)) for view in comparison_views(lines)]
        counts[kind] = len(drawn)
        html = comparison_page(lines, drawn, {}).html()
        assert all(f">{m.method}<" in html for m in lines)
        assert ("dashed line" in html) == any(view.ceiling for view, _ in drawn)
    assert list(counts.values()) == [0, 1, 1, 2, 0]
    (view,) = comparison_views(few)
    curve = view.curves["cnn"]
    assert curve.scales == (100, 1000) and curve.runs == 2
    assert curve.mean == pytest.approx((0.55, 0.55))


def test_costs_are_those_of_the_fastest_run():
    """And with few samples, of a run with the most samples."""
    costs = [(8.5, 70.0), (2.5, 50.0), (4.5, 90.0)]
    for data, sizes, expected in [
        ("mnist", "124", ["2.5", "90"]),
        ("mnist-few", ("100", "1000", "1000"), ["2.5", "90"]),
        ("mnist-few", ("1000", "100", "1000"), ["4.5", "90"]),
    ]:
        lines = [
            line(data=data, trained=size, seed=seed, training_seconds=cost, images_per_second=speed)
            for seed, (size, (cost, speed)) in enumerate(zip(sizes, costs, strict=True))
        ]
        html = comparison_page(lines, [], {}).html()
        cells = re.findall(r'<td class="number">([^<]*)</td>', html)
        assert cells[1:3] == expected  # the first one has the parameters
        assert ("With 1,000 samples." in html) == (data == "mnist-few")


def test_the_page_shows_the_settings_of_its_data_sets():
    lines = [line(method="gaussian", data=name) for name in ("mnist", "fashion-mnist", "cifar10")]
    html = comparison_page(lines, [], {}).html()
    assert "mnist, fashion-mnist<" in html and "0.003<" in html  # one row for both
    assert "0.01<" in html and "photographs<" not in html
    html = comparison_page([line(method="fovplus", data="mnist-few")], [], {}).html()
    assert "presets fovplus-few..." in html
    html = comparison_page([line(method="cnn-expert"), line(data="mnist-few")], [], {}).html()
    assert "mnist, mnist-few<" in html  # of the CNN; experts have no runs with few samples
    assert "<th>cnn-expert</th><td>mnist</td>" in html


def test_a_method_is_calibrated_on_the_scales_of_its_reference():
    def riesz(five, seed=0, trained="1"):  # the authors publish five scales, mean 88.31
        return [
            line(method="riesz", trained=trained, scale=scale, accuracy=value / 100, seed=seed)
            for scale, value in zip((0.5, 1.0, 2.0, 4.0, 8.0), five, strict=True)
        ]

    others = [*riesz(5 * [10.0], trained="2"), line(method="riesz", trained="1", scale=3.0)]
    for value, holds in ((86.8, False), (86.82, True), (99.0, True)):
        lines = [*riesz(5 * [value - 1]), *riesz(5 * [value + 1], seed=1), *others]
        (found,) = check_references(lines)
        assert found.mean == pytest.approx(value) and found.holds is holds
        html = comparison_page(lines, [], {}).html()
        assert "Calibration" in html and f">{'holds' if holds else 'fails'}<" in html
    assert not list(check_references(riesz(5 * [99.0])[:4]))  # a scale is missing
    assert not list(
        check_references([line(method="sesn", scale=scale) for scale in PAPER_SCALES][1:])
    )
    (sesn,) = check_references([line(method="sesn", scale=scale) for scale in PAPER_SCALES])
    assert (
        sesn.mean == pytest.approx(90)
        and "Calibration" not in comparison_page([line()], [], {}).html()
    )


def test_intervals_are_those_of_student():
    stats = pytest.importorskip("scipy.stats")
    for count in (2, 3, 5, 10, 11, 30, 1000):
        values = [float(k % 7) for k in range(count)]
        _, half = mean_interval(values)
        expected = stats.t.ppf(0.975, count - 1) * stats.sem(values)
        assert half == pytest.approx(expected, rel=0.003 / 1.96)
    assert mean_interval([3.0]) == (3.0, None)


def test_an_interval_counts_the_seeds_of_its_own_number_of_samples():
    lines = [
        line(data="mnist-few", trained=trained, seed=seed, accuracy=0.9 + seed / 100)
        for trained, seeds in (("100", 3), ("1000", 2), ("10000", 1))
        for seed in range(seeds)
    ]
    (view,) = comparison_views(lines)
    html = comparison_page(lines, [(view, comparison_figure(view))], {}).html()
    assert "91.00 ±2.48" in html  # 4.303 / sqrt(3)
    assert "90.50 ±6.35" in html  # 12.706 / 2
    assert "90.00<" in html


def test_results_of_other_splits_and_studies_are_left_out():
    values = {"seed": 0, "scale": 1.0, "accuracy": 0.5, "validation": 0.5, "seconds": 2.0}
    values |= {"memory": 1, "config": "c", "version": "1", "commit": "", "hardware": ""}
    rows = [("mnist", "cnn@2"), ("mnist@val", "cnn@1"), ("mnist", "other@2"), ("pooling", "cnn@2")]
    records = [Record(table=table, row=row, **values) for table, row in rows]
    assert [(m.method, m.trained) for m in measurements(records)] == [("cnn", "2")]
    assert [(m.method, m.trained) for m in measurements(records, "val")] == [("cnn", "1")]


# Other networks and tests


class Flat(nn.Linear):
    def forward(self, images):
        return super().forward(images.flatten(1))


def test_a_baseline_is_trained_and_loaded_like_any_method(monkeypatch, tmp_path):
    def network(*, channels, classes, size):
        return Flat(channels * size**2, classes)

    module = ModuleType("foveate.baselines.stub")
    module.network, network.__module__ = network, module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    method = replace(METHODS["pyramid"], backbone="foveate.baselines.stub:network")
    small = replace(method.config(TINY, "1"), samples=96, epochs=1)
    job = Job(name="stub", config=small, scales=(1.0,), rows=(("t", "stub"),))
    (ended,) = runner.Study([job], tmp_path).run(runner.LocalEngine())
    assert isinstance(ended, runner.Done)
    assert ended.outcome.parameters == 10 * (24**2 + 1)
    net = RunFolder(tmp_path / job.folder).net().eval()
    test = load_source("mnist-5k").test
    with torch.no_grad():  # one window of scale 1 is the frame itself
        logits = net.backbone(rescale(test.images, 1.0, size=24))
    right = float((logits.argmax(1) == test.labels).double().mean())
    assert ended.outcome.scales[0].accuracy == pytest.approx(right, abs=2.5 / len(test))


def test_a_variant_is_tested_again_only_if_it_is_new(tmp_path):
    job = Job(name="a", config=tiny(epochs=1), scales=(1.0,), rows=(("t", "a"),))
    perform([job], tmp_path)
    variant = Variant(rows=(("t", "b"),), windows="12-24", pool="max")
    more = replace(job, variants=(variant,))
    assert find_outcome(job, tmp_path) and not find_outcome(more, tmp_path)
    (outcome,) = perform([more], tmp_path)
    assert find_outcome(more, tmp_path) == outcome
    assert outcome.variants["12-24 max"][0].count == 1000
    assert find_outcome(replace(job, split="val"), tmp_path) is None
