"""Settings of a wrong type, requests without bound, and errors of the operating system."""

import errno
import os
from dataclasses import fields, replace

import pytest
from tiny_runs import MODEL, tiny

from foveate import checks
from foveate.checks import check_memory, free_memory
from foveate.cli import app
from foveate.errors import ConfigError, DataError
from foveate.files import check_folder, parse_json, replacing
from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleGrid
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.loop import find_device, train

OTHERS = (None, {}, [], object(), float("nan"), 10**400, 1j, b"x")


@pytest.mark.parametrize("config", [tiny(), MODEL], ids=["run", "model"])
def test_every_field_refuses_values_of_other_types(config):
    for field in fields(config):
        now = getattr(config, field.name)
        wrong = [True, *OTHERS] if not isinstance(now, bool) else [1, "true", *OTHERS]
        for value in wrong:
            if value is None and now is None:  # a part that may be left out
                continue
            with pytest.raises(ConfigError, match=rf"{field.name} must be|features must be"):
                replace(config, **{field.name: value})


@pytest.mark.parametrize("form", ["plain", "foveated", "sliding"])
def test_every_form_checks_its_padding(form):
    with pytest.raises(ConfigError, match="padding must be one of border, reflect or a finite"):
        ModelConfig(form=form, padding="zzz")
    assert ModelConfig(form=form, padding=0.5).padding == 0.5


@pytest.mark.parametrize("values", [None, 3, "x", [], {"model": 3}, {"model": {"scales": 3}}])
def test_what_is_no_configuration_is_a_config_error(values):
    with pytest.raises(ConfigError):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ScaleGrid(1, 4, per_octave=1e6), "the limit is 1,000"),
        (lambda: ScaleGrid(1e-300, 1e300, per_octave=1e308), "the limit is 1,000"),
        (lambda: ModelConfig(classes=10_000_000), "classes must be 1 to 100,000"),
        (lambda: ModelConfig(hidden=10**6), "hidden must be 1 to 65,536"),
        (lambda: ModelConfig(features=(5000,)), "numbers from 1 to 4,096"),
        (lambda: ModelConfig(features=(1,) * 65), "features must be 1 to 64 numbers"),
        (lambda: ModelConfig(size=4096, hidden=65_536), "the limit is 1,073,741,824"),
        (lambda: tiny(batch=10**6), "batch must be 1 to 65,536"),
        (lambda: tiny(epochs=10**7), "epochs must be 1 to 1,000,000"),
        (lambda: tiny(size=5000), "size must be 1 to 4,096 pixels"),
        (lambda: tiny(scales=",".join(["1"] * 1001)), "the limit is 1,000"),
    ],
)
def test_requests_without_bound_are_refused_with_the_limit(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


GENERATE = ["generate", "mnist-large-scale", "--source", "mnist-5k", "--out", "new"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["reproduce", "--dry-run", "--engine", "afile"],
            "engine must be local or ray, got 'afile'",
        ),
        (["reproduce", "--dry-run", "--seeds", "4294967296"], "seeds must be 1 to 1000, got"),
        (["reproduce", "--dry-run", "--out", "file/x"], "cannot use file/x (Not a directory)"),
        (["train", "cnn", "--set", "model.padding=zzz"], "padding must be one of border"),
        (["train", "cnn", "--set", "epochs=" + "1" * 5000], "epochs must be a value such as 20"),
        (
            ["train", "cnn", "--set", "learning_rate=" + "1" * 400],
            "learning_rate must be a value such as",
        ),
        (
            [*GENERATE, "--train-scales", "none", "--test-scales", "none"],
            "--test-scales are both none",
        ),
        ([*GENERATE, "--size", "99999999"], "size must be 1 to 4,096 pixels"),
        (["show", "mnist-5k", "--size", "99999999"], "size must be 1 to 4,096 pixels"),
        (["show", "mnist-5k", "--out", "file/x.png"], "cannot use file (Not a directory)"),
        (["report", "--out", "file"], "cannot use file (Not a directory)"),
        (
            ["audit", "file", "--source", "mnist-5k", "--classes", ""],
            "classes must be a,b,c or a file",
        ),
        (["show", "[/]"], "unknown data source '[/]'"),
        (["sweep", "fifo"], "fifo is a FIFO, a socket or a device, not a regular file"),
    ],
)
def test_the_command_line_says_no_early(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a text")
    os.mkfifo(tmp_path / "fifo")
    assert app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err and "--debug" not in err
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file"]


def test_only_the_devices_that_networks_run_on_are_taken():
    for name in ("meta", "mps", "privateuseone", "vulkan"):
        with pytest.raises(ConfigError, match=f"device must be cpu or cuda, got '{name}'"):
            find_device(name)


def test_the_scale_of_a_prediction_is_checked_before_the_picture_is_padded(tmp_path, capsys):
    from PIL import Image

    Image.linear_gradient("L").save(tmp_path / "a.png")
    assert app.run(["predict", str(tmp_path / "a.png"), "--scale", "1e-4"]) == 2
    assert "scale must lie between 1/16 and 64, got 0.0001" in capsys.readouterr().err


def raising(error):
    def command(*_, **__):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b (No space left on device)"),
        (OSError(errno.ENOSPC, "No space left on device"), "free some space, or choose another"),
        (PermissionError(errno.EACCES, "Permission denied", "c"), "check the path and permissions"),
        (MemoryError(), "out of memory; use a smaller --size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
    ],
)
def test_errors_of_the_system_are_one_line_with_a_remedy(monkeypatch, capsys, error, words):
    monkeypatch.setattr(app, "app", raising(error))
    assert app.run([]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and "--debug" not in err


def test_an_error_of_our_own_still_says_how_to_see_where(monkeypatch, capsys):
    monkeypatch.setattr(app, "app", raising(RuntimeError("a bug")))
    assert app.run([]) == 2
    assert (
        "RuntimeError: a bug (run 'foveate --debug ...' for the traceback)"
        in capsys.readouterr().err
    )


def test_a_failed_write_names_the_file_and_not_its_temporary_twin(tmp_path):
    with pytest.raises(OSError) as caught, replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "file")


def test_json_that_is_nested_too_deeply_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def test_a_folder_can_be_made_where_all_above_it_are_folders(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "loop").symlink_to("loop")
    check_folder(tmp_path / "a" / "b")
    for name in ("file", "file/a", "nowhere", "nowhere/a", "loop/a", "n" * 300):
        with pytest.raises(OSError):
            check_folder(tmp_path / name)


def test_memory_is_compared_with_what_is_free(monkeypatch):
    assert free_memory() > 0
    monkeypatch.setattr(checks, "free_memory", lambda: 2e9)
    check_memory(1.9e9, "images", "use fewer")
    with pytest.raises(ConfigError, match=r"images need about 3.0 GB .* 2.0 GB are free; use few"):
        check_memory(3e9, "images", "use fewer")


def test_the_page_cache_of_a_container_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "GROUP", tmp_path)
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 300\nactive_file 200\ninactive_file 400\n")
    assert free_memory() == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > 1000


def test_a_run_that_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MIN_CHECKED", 0)
    monkeypatch.setattr(checks, "free_memory", lambda: 400_000)
    with pytest.raises(ConfigError, match=r"96 images of 24 pixels need about .* a smaller size"):
        train(tiny(), tmp_path)
    monkeypatch.setattr(checks, "free_memory", lambda: 1_000_000)
    with pytest.raises(ConfigError, match=r"steps of 96 images need about .* a smaller batch"):
        train(tiny(batch=96), tmp_path / "other")


def test_steps_of_other_backbones_and_recomputed_steps_are_not_estimated(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MIN_CHECKED", 0)
    monkeypatch.setattr(checks, "free_memory", lambda: 4_000_000)
    config = tiny(batch=500, samples=500, epochs=1)
    with pytest.raises(ConfigError, match="steps of 500 images need"):
        train(config, tmp_path / "whole")
    assert train(config, tmp_path / "recomputed", recompute=1).finished
    small = replace(config, backbone="test_checkpoint:Tied")
    assert train(small, tmp_path / "backbone").finished


@pytest.mark.parametrize("text", ["[1]", '{"epoch": "x"}', '{"loss": NaN}', "[" * 99_999, "x"])
def test_damaged_metrics_are_one_line(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged"):
        RunFolder(tmp_path).metrics()
