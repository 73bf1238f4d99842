"""Pictures that cannot be used: they stop a run in one line, or are left out and named."""

import csv
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from photo_runs import PHOTOGRAPHS, SETTINGS, command, photo_config
from PIL import Image
from test_shards import png, write_tar
from tiny_runs import same_bits, timeless, tiny, weights

from foveate.cli.app import run
from foveate.data.pictures import PictureFolder
from foveate.data.shards import open_shards
from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.test_sets import open_test_set
from foveate.sweeps.study import read_study
from foveate.training.checkpoint import RunFolder
from foveate.training.config import build_net
from foveate.training.data import adapt_to_source, is_photo, open_batches
from foveate.training.distributed import Team
from foveate.training.loop import train, train_together
from foveate.training.presets import preset
from foveate.training.skipped import add_skipped, read_skipped
from foveate.training.unchanged import check_unchanged

CPU = torch.device("cpu")
BAD = ("train/hat/0.jpg", "train/hat/3.jpg", "train/pants/5.jpg", "train/shoes/2.jpg")
BAD += ("validation/pants/1.jpg", "test/shoes/0.jpg", "test/shoes/1.jpg")


def damage(folder):
    """Truncated, empty, a text, too narrow, and again."""
    contents = [(folder / BAD[0]).read_bytes()[:700], b"", b"no picture", None]
    for number, name in enumerate(BAD):
        if (content := contents[number % 4]) is None:
            Image.new("RGB", (1, 5000)).save(folder / name, format="png")
        else:
            (folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = Path(shutil.copytree(PHOTOGRAPHS, tmp_path_factory.mktemp("bad") / "pictures"))
    damage(folder)
    return folder


def config_of(folder, **changes):
    """At a base of 80, a picture of 1 x 5000 pixels would have 32 million."""
    return photo_config(source=f"folder:{folder}", recipe__base="80", **changes)


@pytest.fixture(scope="module")
def whole(damaged, tmp_path_factory):
    out = tmp_path_factory.mktemp("skipping") / "run"
    return train(config_of(damaged), out, workers=0, bad="skip")


def rows(folder):
    return list(csv.reader((folder / "skipped.csv").read_text().splitlines()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_batches_lack_the_bad_pictures_alone(damaged, split, workers):
    config = config_of(damaged)
    batches = open_batches(
        config, split, build_net(config), CPU, False, load_source, workers, "skip"
    )
    single = replace(batches, skipped={}, workers=0)
    order, names = torch.randperm(len(batches)), PictureFolder(damaged).items[split]
    good = [i for i in order.tolist() if names[i][0].relative_to(damaged).as_posix() not in BAD]
    found = list(batches(order, 5, (3, 1)))
    expected = [next(single(torch.tensor([i]), 5, (3, 1))) for i in good]
    for part in (lambda b: b.images.inputs[0], lambda b: b.labels):
        assert torch.equal(torch.cat(list(map(part, found))), torch.cat(list(map(part, expected))))
    assert len(found) == -(-len(batches) // 5)
    skipped = {Path(name).relative_to(damaged).as_posix() for _, name in batches.skipped}
    assert skipped == {n for n in BAD if n.startswith(split)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_skips_is_the_same_for_any_number_of_workers(damaged, whole, tmp_path, workers):
    found = train(config_of(damaged), tmp_path, workers=workers, bad="skip")
    assert same_bits(weights(found.path), weights(whole.path))
    assert rows(found.path) == rows(whole.path)


@pytest.mark.parametrize("stop", [2, 8])
def test_a_run_that_skips_is_the_same_after_an_interruption(damaged, whole, tmp_path, stop):
    def callback(config, progress, steps):
        if progress.epoch * steps + progress.step == stop:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config_of(damaged), tmp_path, callback=callback, workers=2, bad="skip")
    found = train(config_of(damaged), tmp_path, workers=0, bad="skip")
    assert same_bits(weights(found.path), weights(whole.path))
    assert timeless(found.path) == timeless(whole.path)
    assert rows(found.path) == rows(whole.path)


def test_the_run_names_what_it_left_out_and_does_not_count_it(damaged, whole):
    table = rows(whole.path)
    assert table[0] == ["split", "image", "reason"]
    trained = [name for name in BAD if not name.startswith("test")]
    assert [row[1] for row in table[1:]] == [str(damaged / name) for name in trained]
    assert [row[0] for row in table[1:]] == ["train"] * 4 + ["val"]
    assert all(Path(row[1]).name in row[2] for row in table[1:])
    tests = open_test_set(whole, load_source, split="val", bad="skip")
    (at,) = tests.measure(whole.net(), [1.0])
    assert at.count == 8  # of 9
    assert whole.validation() == pytest.approx(at.accuracy)


@pytest.mark.parametrize("stop", [None, 5, 22])
def test_a_batch_of_which_nothing_is_left_is_a_step_that_changes_nothing(damaged, tmp_path, stop):
    config = config_of(damaged, batch="1", epochs="2")
    found = train(config, tmp_path / "whole", workers=0, bad="skip")

    def callback(config, progress, steps):
        assert steps == 24
        if progress.epoch * steps + progress.step == stop:
            signal.raise_signal(signal.SIGINT)

    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", workers=0, bad="skip", callback=callback)
    again = train(config, tmp_path / "run", workers=2, bad="skip")
    assert same_bits(weights(found.path), weights(again.path))


def test_a_step_without_pictures_does_not_count_in_the_mean_loss(damaged, tmp_path, monkeypatch):
    """With batches of one, four of 24 steps are empty, also where the run is interrupted."""
    monkeypatch.setattr(
        "foveate.training.session.make_step", lambda *made, **how: lambda batch: 2.0
    )
    config = config_of(damaged, batch="1", epochs="1")

    def callback(config, progress, steps):
        if progress.step == 20:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, workers=0, bad="skip", callback=callback)
    found = train(config, tmp_path, workers=0, bad="skip")
    assert [entry["loss"] for entry in found.metrics()] == [2.0]


def test_commands_warn_once_with_the_count(damaged, tmp_path, capsys):
    out = str(tmp_path / "run")
    options = ["--set", f"source=folder:{damaged}", "--set", "recipe.base=80", "--workers", "0"]
    assert run(command(out, *options)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert any(name in said for name in BAD) and said.endswith("or skip it with --bad skip")
    assert run(command(out, *options, "--bad", "skip")) == 0
    warning = f"warning: skipped 5 images that cannot be read; see {out}/skipped.csv"
    assert capsys.readouterr().err.replace("\n", " ").count(warning) == 1
    assert run(["evaluate", out, "--scales", "1", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "skip it with --bad skip" in said and said.count("\n") == 1
    evaluate = ["evaluate", out, "--scales", "0.5,1", "--device", "cpu", "--bad", "skip"]
    assert run(evaluate) == 0
    assert "warning: skipped 2 images" in capsys.readouterr().err
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert sorted(results["skipped"]) == [str(damaged / name) for name in BAD[-2:]]
    counts = [sum(map(sum, at["confusion"])) for at in results["runs"][0]["scales"]]
    assert counts == [7, 7]  # of 9


def test_at_least_one_picture_must_be_left(damaged, tmp_path):
    folder = Path(shutil.copytree(damaged, tmp_path / "pictures"))
    for path in (folder / "validation").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 9 val images can be used"):
        train(config_of(folder, epochs="1"), tmp_path / "run", workers=1, bad="skip")


def test_what_cannot_skip_says_so(tmp_path):
    with pytest.raises(ConfigError, match="bad must be one of stop, skip, got 'ignore'"):
        train(photo_config(), tmp_path, bad="ignore")
    with pytest.raises(ConfigError, match="bad must be one of stop, skip, got 'ignore'"):
        train_together([(photo_config(), tmp_path / "run")], bad="ignore")
    with pytest.raises(ConfigError, match="--bad skip needs the recipe photo"):
        train(tiny(), tmp_path, bad="skip")
    with pytest.raises(ConfigError, match="--bad skip works in one process, not in 2"):
        train(photo_config(), tmp_path, bad="skip", team=Team(count=2))
    assert not list(tmp_path.iterdir())


def test_a_damaged_table_of_skipped_pictures_is_named(tmp_path):
    (tmp_path / "skipped.csv").write_text("split,image,reason\nonly,two\n")
    with pytest.raises(DataError, match=r"cannot read .*skipped\.csv"):
        read_skipped(tmp_path)


def test_a_name_that_is_not_utf8_is_listed_once(tmp_path):
    for _ in range(2):
        add_skipped(tmp_path, {("train", "kap\udcfctt.png"): "damaged: kap\udcfctt.png"})
        add_skipped(tmp_path, {("test", "b.png"): "damaged"})
    assert (tmp_path / "skipped.csv").read_text().count("\n") == 3
    assert read_skipped(tmp_path)["train", "kap\\udcfctt.png"] == "damaged: kap\\udcfctt.png"


def frames():
    chance = np.random.default_rng(0)
    made = [chance.integers(0, 256, (40, 60, 3)).astype(np.uint8) for _ in range(3)]
    return [Image.fromarray(pixels) for pixels in made]


def saved(kind, path):
    """Write a picture of a kind; return what its first frame is in RGB."""
    first, *others = frames()
    many = {"save_all": True, "append_images": others}
    if kind == "cmyk.jpg":
        first.convert("CMYK").save(path, quality=95)
    elif kind.startswith("16-bit"):
        Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27).save(path)
    elif kind == "wrong-suffix.png":
        first.save(path, format="jpeg")
    else:
        first.save(path, lossless=True, **many)
    if kind.startswith("16"):
        grey = (np.arange(2400).reshape(40, 60) * 27 >> 8).astype(np.uint8)
        return np.stack([grey] * 3, 2)
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


KINDS = ["cmyk.jpg", "16-bit.png", "16-bit.tif", "wrong-suffix.png"]
KINDS += ["animated.gif", "animated.webp", "animated.png"]


@pytest.mark.parametrize("kind", KINDS)
def test_unusual_pictures_are_used(tmp_path, kind):
    """Also their first frame alone, as a plain PNG, gives the same patches."""
    folder = Path(shutil.copytree(PHOTOGRAPHS, tmp_path / "pictures"))
    (folder / "validation" / "hat" / "x.jpg").mkdir()  # no picture, and not an error
    pixels = saved(kind, folder / "validation" / "hat" / f"0-{kind}")
    Image.fromarray(pixels).save(folder / "validation" / "pants" / "0-plain.png")
    config = photo_config(source=f"folder:{folder}")
    batches = open_batches(config, "val", build_net(config), CPU, False, load_source, 0)
    names = [path.name for path, _ in PictureFolder(folder).items["val"]]
    assert len(names) == 11
    ours, plain = names.index(f"0-{kind}"), names.index("0-plain.png")
    (batch,) = batches(torch.tensor([ours, plain]), 2)
    assert torch.equal(*batch.images.inputs[0])


def test_a_bad_first_picture_does_not_hide_that_others_are_in_colour(tmp_path):
    folder = Path(shutil.copytree(PHOTOGRAPHS, tmp_path / "pictures"))
    first = PictureFolder(folder).items["train"][0][0]
    first.write_bytes(b"")
    assert PictureFolder(folder).in_colour
    options = ["--set", f"source=folder:{folder}", "--workers", "0", "--bad", "skip"]
    assert run(command(tmp_path / "run", *options)) == 0
    assert list(read_skipped(tmp_path / "run")) == [("train", str(first))]


def test_a_link_that_leads_nowhere_is_skipped_like_a_bad_picture(tmp_path, capsys):
    folder = Path(shutil.copytree(PHOTOGRAPHS, tmp_path / "pictures"))
    link = folder / "train" / "hat" / "gone.jpg"
    link.symlink_to(tmp_path / "nowhere.jpg")
    options = ["--set", f"source=folder:{folder}", "--workers", "0"]
    assert run(command(tmp_path / "run", *options)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert str(link) in said and said.endswith("or skip it with --bad skip")
    assert run(command(tmp_path / "run", *options, "--bad", "skip")) == 0
    assert list(read_skipped(tmp_path / "run")) == [("train", str(link))]
    link.unlink()
    with pytest.raises(DataError, match="changed since"):
        check_unchanged(RunFolder(tmp_path / "run"), f"folder:{folder}", load_source)


@pytest.mark.parametrize("grey", [False, True])
def test_a_bad_first_picture_of_a_tar_does_not_decide_the_recipe(tmp_path, grey):
    for split, name in (("train", "train"), ("validation", "val"), ("test", "test")):
        paths = sorted((PHOTOGRAPHS / split).rglob("*.jpg"))
        labels = sorted({path.parent.name for path in paths})
        contents = [b"no picture" if split == "train" else paths[0].read_bytes()]
        contents += [path.read_bytes() for path in paths[1:]]
        if grey:
            contents[1:] = [png(np.zeros((40, 60), np.uint8))] * len(paths[1:])
        members = []
        for i, (path, content) in enumerate(zip(paths, contents, strict=True)):
            label = str(labels.index(path.parent.name)).encode()
            members += [(f"{i:03}.jpg", content), (f"{i:03}.cls", label)]
        write_tar(tmp_path / f"{name}-0.tar", members)
    source = f"shards:{tmp_path}"
    if grey:
        assert not open_shards(source).in_colour
        return
    settings = {**SETTINGS, "source": source}
    del settings["recipe"]
    config = adapt_to_source(preset("fovavg").changed(settings), load_source)
    assert is_photo(config)
    found = train(config, tmp_path / "run", workers=0, bad="skip")
    assert list(read_skipped(found.path)) == [("train", f"0 of {tmp_path / 'train-0.tar'}")]


STUDY = """\
name = "bad"
test_scales = [0.5, 1]
[defaults]
preset = "fovavg"
source = "folder:{folder}"
epochs = 1
batch = 10
recipe.base = 80
model.size = 16
model.features = [4, 8]
model.hidden = 8
model.scales = "1:4:1"
[[runs]]
"""


def test_a_study_skips_bad_pictures_in_training_and_tests(damaged, tmp_path, capsys):
    path, out = tmp_path / "study.toml", tmp_path / "out"
    path.write_text(STUDY.format(folder=damaged))
    arguments = ["sweep", str(path), "--device", "cpu", "--out", str(out)]
    assert run(arguments) == 1
    assert "or skip it with --bad skip" in capsys.readouterr().err.replace("\n", " ")
    assert run([*arguments, "--bad", "ignore"]) == 2
    assert "bad must be one of stop, skip" in capsys.readouterr().err
    assert run([*arguments, "--bad", "skip"]) == 0
    assert "skipped 7 images" in capsys.readouterr().err
    (job,) = read_study(path, load_source).jobs
    skipped = read_skipped(out / job.folder)
    assert [name for _, name in sorted(skipped)] == sorted(str(damaged / name) for name in BAD)
    assert {split for split, _ in skipped} == {"train", "val", "test"}


def test_a_study_without_photographs_cannot_skip(tmp_path, capsys):
    path = tmp_path / "study.toml"
    path.write_text('name = "digits"\n[[runs]]\npreset = "cnn"\nsource = "mnist-5k"\n')
    assert run(["sweep", str(path), "--device", "cpu", "--bad", "skip", "--dry-run"]) == 2
    assert "--bad skip needs the recipe photo" in capsys.readouterr().err
