"""foveate train: its options, output, files and errors, and custom backbones."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import AS_TINY, python, same_bits, tiny, weights

from foveate.cli import console as display_module
from foveate.cli import training
from foveate.cli.app import run
from foveate.cli.console import Display
from foveate.data.sources import load_source
from foveate.data.store import FileSpec, write
from foveate.scales import ScaleRange
from foveate.training.checkpoint import Progress, RunFolder
from foveate.training.config import TrainConfig
from foveate.training.loop import train
from foveate.training.presets import preset

SMALL = ["--set", "size=24", "--set", "model.size=12", "--set", "model.features=[4,8]"]
SMALL += ["--set", "model.hidden=8", "--device", "cpu"]


def config_of(folder):
    return RunFolder(folder).config()


def test_train_and_its_lines(tmp_path, capsys):
    out = tmp_path / "a run"
    assert run([*AS_TINY, "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert lines[0] == f"training fovavg in {out}"
    number = r"\d+\.\d+"
    for epoch, line in enumerate(lines[1:3], start=1):
        found = rf"epoch {epoch}/3  loss {number}  validation {number} %"
        assert re.fullmatch(rf"{found}  [\d,.]+ images/s  \d:\d\d:\d\d remaining", line)
    assert re.fullmatch(rf"epoch 3/3  loss {number}  validation {number} %", lines[3])
    last = 100 * RunFolder(out).metrics()[-1]["validation"]
    ending = f"validation {last:.2f} %; next: foveate evaluate '{out}'"
    assert lines[4:] == [f"{out} is finished: {ending}"]
    assert config_of(out) == tiny()
    before = (out / "weights.safetensors").stat().st_mtime_ns
    assert run([*AS_TINY, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out} was already finished: {ending}\n"
    assert (out / "weights.safetensors").stat().st_mtime_ns == before


def test_the_command_and_the_call_make_the_same_run(tmp_path):
    assert run([*AS_TINY, "--out", str(tmp_path / "a")]) == 0
    assert same_bits(weights(tmp_path / "a"), weights(train(tiny(), tmp_path / "b").path))


def test_without_out_each_set_of_options_has_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in ("0", "1", "0"):
        assert run([*AS_TINY, "--set", "epochs=1", "--seed", seed]) == 0
    folders = sorted((tmp_path / "runs").iterdir())
    digests = [tiny(epochs=1, seed=seed).digest() for seed in (0, 1)]
    assert {f.name for f in folders} == {f"fovavg-{digest}" for digest in digests}
    assert capsys.readouterr().out.count("already finished") == 1


def test_only_what_is_given_changes_a_preset(tmp_path):
    arguments = ["train", "fovmax-few100", "--source", "mnist-5k", "--epochs", "1", *SMALL]
    assert run([*arguments, "--samples", "40", "--out", str(tmp_path)]) == 0
    config, usual = config_of(tmp_path), preset("fovmax-few100")
    assert (config.scales, config.epochs_per_decay) == ("1-4", usual.epochs_per_decay)
    assert (config.samples, config.epochs, config.batch) == (40, 1, 32)
    assert config.model.scales == usual.model.scales


def test_every_option_reaches_the_config(tmp_path):
    options = ["--samples", "33", "--epochs", "1", "--batch", "11", "--seed", "4"]
    options += ["--precision", "bf16", "--scales", "1,2"]
    source = ["--source", "mnist-5k", "--set", "model.scales=1:1:1"]
    assert run(["train", "fovmax", *source, *SMALL, *options, "--out", str(tmp_path)]) == 0
    config = config_of(tmp_path)
    assert (config.samples, config.epochs, config.batch, config.seed) == (33, 1, 11, 4)
    assert (config.precision, config.scales, config.source) == ("bf16", "1,2", "mnist-5k")


def test_bf16_of_a_preset_is_for_gpus_and_a_started_run_keeps_its_precision(tmp_path):
    assert preset("finetune").precision == "bf16"
    assert training._precision("finetune", None, "cuda:0") == "bf16"
    assert training._precision("finetune", tmp_path, "cpu") == "float32"
    arguments = [*AS_TINY, "--epochs", "1", "--out", str(tmp_path)]
    assert run([*arguments, "--precision", "bf16"]) == 0
    assert run(arguments) == 0  # finished, and not a run with other settings
    assert run([*arguments, "--precision", "float32"]) == 2


def pictures(folder, classes=3, count=20):
    random = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for index in range(count):
            pixels = random.integers(0, 100, (20, 20, 3)).astype(np.uint8)
            pixels[..., label] += 120
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{index:02}.png")


def test_the_network_follows_a_folder_of_pictures(tmp_path, capsys):
    pictures(tmp_path / "pictures")
    options = ["--source", f"folder:{tmp_path / 'pictures'}", *SMALL, "--epochs", "2"]
    options += ["--recipe", "mnist-large-scale", "--scales", "1", "--out", str(tmp_path / "run")]
    options += ["--set", "model.scales=1:2:1"]
    assert run(["train", "fovavg", *options]) == 0
    model = config_of(tmp_path / "run").model
    assert (model.channels, model.classes) == (3, 3)
    assert run(["evaluate", str(tmp_path / "run"), "--scales", "1,2"]) == 0
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(content["runs"][0]["scales"][0]["confusion"]) == 3
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "run"), "--source", "mnist-5k"]) == 2
    assert "mnist-5k has images of 1 channels, but the network takes 3" in capsys.readouterr().err


def test_the_contrast_of_grey_pictures_is_not_stretched_silently(tmp_path, capsys):
    pictures(tmp_path / "a")
    for path in (tmp_path / "a").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "train")
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "test")
    shutil.rmtree(tmp_path / "b" / "test" / "class1")
    options = [*SMALL, "--epochs", "1", "--scales", "1", "--set", "model.scales=1:2:1"]
    source, out = f"folder:{tmp_path / 'b'}", str(tmp_path / "run")
    assert run(["train", "fovavg", "--source", source, *options, "--out", out]) == 0
    said = capsys.readouterr().err
    assert "grey images; recipe mnist-large-scale, which stretches their contrast" in said
    assert run(["evaluate", out, "--scales", "1"]) == 0
    found = json.loads((tmp_path / "run" / "results.json").read_text())["runs"][0]["scales"][0]
    assert found["per_class"][1] is None


def test_what_is_set_is_not_made_to_follow(tmp_path):
    assert run([*AS_TINY, "--set", "model.classes=12", "--out", str(tmp_path)]) == 0
    assert config_of(tmp_path).model.classes == 12


def test_a_data_set_file_resident_and_streamed(tmp_path, capsys):
    one = ScaleRange(2, 2)
    file = write(FileSpec(train=one, test=one, size=24), load_source("mnist-5k"), tmp_path)
    options = ["--source", str(file), "--samples", "64", "--epochs", "1", "--device", "cpu"]
    options += ["--set", "model.size=12", "--set", "model.features=[4,8]"]
    options += ["--set", "model.scales=1:2:1"]
    for name, extra in (("a", []), ("b", ["--stream"])):
        assert run(["train", "fovmax", *options, *extra, "--out", str(tmp_path / name)]) == 0
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))
    config = config_of(tmp_path / "a")
    assert (config.size, config.scales) == (24, "2")
    assert run(["evaluate", str(tmp_path / "a"), "--scales", "1"]) == 0  # on the source of the file
    content = json.loads((tmp_path / "a" / "results.json").read_text())
    assert [source["name"] for source in content["sources"]] == ["mnist-5k"]
    capsys.readouterr()
    assert run(["train", "fovmax", *options, "--scales", "1", "--out", str(tmp_path / "c")]) == 2
    assert "are already rescaled; leave out scales" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "Missing argument"),
        (["train", "fovagv"], "no model or preset 'fovagv'; use cnn, fovmax"),
        (["train", "fovavg-tr3"], "did you mean fovavg-tr"),
        (
            [*AS_TINY, "--set", "batch"],
            "--set must be KEY=VALUE, such as model.dropout=0, got 'batch'",
        ),
        ([*AS_TINY, "--set", "nothing=1"], "cannot set 'nothing'; use one of"),
        ([*AS_TINY, "--epochs", "0"], "epochs must be 1 to 1,000,000, got 0"),
        ([*AS_TINY, "--epochs", "few"], "Invalid value for '--epochs'"),
        ([*AS_TINY, "--precision", "int4"], "precision must be one of float32, bf16, got 'int4'"),
        ([*AS_TINY, "--source", "nothing"], "unknown data source 'nothing'"),
        ([*AS_TINY, "--source", "folder:/no/such"], "/no/such"),
        ([*AS_TINY, "--source", "none.h5", "--scales", "1"], "no such file: none.h5"),
        ([*AS_TINY, "--samples", "9999"], "samples must be at most 3500"),
        ([*AS_TINY, "--device", "abacus"], "unknown device 'abacus'"),
        ([*AS_TINY, "--backbone", "nonsense"], "must be given as package.module:factory"),
        ([*AS_TINY, "--backbone", "nowhere:net"], "cannot import 'nowhere'"),
        ([*AS_TINY, "--set", "learning_rate=1e30"], "the loss is not finite in epoch 1, step"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1
    assert words in err
    assert out == "" or "not finite" in err
    assert not list(tmp_path.rglob("weights.safetensors"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_where_one_was_asked_for(tmp_path, capsys):
    assert run([*AS_TINY, "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: no GPU was found; use --device cpu\n"


# Custom backbones

OWN = """
from torch import nn

def net(channels, classes):
    convolution = nn.Conv2d(channels, 6, 3, stride=2)
    return nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Dropout(0.2), nn.Linear(24, classes))
"""


def test_a_backbone_in_the_current_folder_trains_resumes_and_is_evaluated(tmp_path, monkeypatch):
    """In a new process, as installed: the current folder is not on its path."""
    (tmp_path / "mynet.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    options = [*AS_TINY, "--backbone", "mynet:net", "--out", "run"]
    code = f"""
import sys
from foveate.cli.app import run
sys.path.remove('')
print(run({options}))
print(run(["evaluate", "run", "--trust", "--scales", "1"]))
assert '' not in sys.path
"""
    process = python("-c", code)
    out, err = process.communicate()
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines.count("0") == 2, err
    assert RunFolder(tmp_path / "run").config().backbone == "mynet:net"
    assert weights(tmp_path / "run")["backbone.5.weight"].shape == (10, 24)
    assert "fovavg-2ch with mynet:net" in " ".join(out.split())


def test_a_backbone_resumes(tmp_path, monkeypatch):
    (tmp_path / "mynet2.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny(backbone="mynet2:net")

    def callback(config, progress, steps):
        if progress.epoch == 1 and progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "a", callback=callback)
    train(config, tmp_path / "a")
    train(config, tmp_path / "b")
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))


# The display


def test_time_left_counts_from_this_start_not_from_the_first(monkeypatch):
    clock = iter([100.0, 108.0])
    monkeypatch.setattr(display_module.time, "monotonic", lambda: next(clock))
    config, shown = TrainConfig(epochs=4, batch=10), Display("")
    entry = {"epoch": 1.0, "loss": 0.5, "validation": 0.9}
    shown(config, Progress(epoch=1, step=10, metrics=[entry]), 50)  # resumed after an epoch
    progress = Progress(epoch=2, step=0, metrics=[entry, {**entry, "epoch": 2.0}])
    lines = []
    monkeypatch.setattr(display_module.OUTPUT, "print", lines.append)
    shown(config, progress, 50)
    # 40 steps of 10 images in 8 seconds; 100 steps remain
    assert lines == ["epoch 2/4  loss 0.5000  validation 90.00 %  50 images/s  0:00:20 remaining"]


def test_a_terminal_gets_a_live_line(monkeypatch):
    from io import StringIO

    from rich.console import Console

    screen = Console(file=StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(display_module, "ERRORS", screen)
    monkeypatch.setattr(display_module, "REFRESH", 0.0)
    entry = {"epoch": 1.0, "loss": 0.5, "validation": 0.9}
    with Display("hello") as shown:
        for step in (20, 25):
            progress = Progress(epoch=1, step=step, loss=step / 4, metrics=[entry])
            shown(TrainConfig(epochs=4), progress, 50)
        shown.bar.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.file.getvalue())
    assert "epoch 2/4" in text
    assert "loss 0.2500  validation 90.00 %" in text
    assert "images/s" in text and "remaining" in text


def test_the_example_with_somebody_elses_backbone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("timm", reason="pip install 'foveate[photos]'")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    import own_backbone

    small = replace(own_backbone.CONFIG, samples=64, epochs=1, size=40)
    monkeypatch.setattr(own_backbone, "CONFIG", small)
    own_backbone.main(tmp_path / "run")
    out = capsys.readouterr().out
    assert out.startswith("epoch 1: loss ") and out.count("; trained only on scale 2") == 4
