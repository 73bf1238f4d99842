"""Training on photographs of mixed sizes, read and cut by worker processes."""

import json
import multiprocessing
import os
import shutil
import signal
import tarfile
import time
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from photo_runs import PHOTOGRAPHS, SOURCE, command, photo_config
from PIL import Image
from tiny_runs import assert_as_if_nothing_had_been, python, same_bits, weights

from foveate.cli.app import run as run_command
from foveate.data import pictures
from foveate.data.pictures import PictureFolder, read_picture
from foveate.data.recipes import Recipe
from foveate.data.sources import load_source, open_source
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.evaluation.audit.report import ORIGINAL
from foveate.execution import patches
from foveate.training import photo_reader
from foveate.training.checkpoint import RunFolder
from foveate.training.config import build_net
from foveate.training.data import adapt_to_source, open_batches
from foveate.training.distributed import Team
from foveate.training.loop import train, train_together
from foveate.training.photo_reader import BLOCKS, Packed, Packer, PhotoDataset, PhotoReader
from foveate.training.photos import (
    PhotoBatches,
    cut_patches,
    cut_together,
    default_workers,
    describe_photos,
    windows_of,
)
from foveate.training.presets import preset

CPU = torch.device("cpu")
STEPS = 3  # of an epoch: 24 pictures in batches of 10


def opened(config, split="train", workers=0):
    return open_batches(
        config, split, build_net(config, trust=True), CPU, False, load_source, workers
    )


def cut(batches, order, batch, draws=(0, 0)):
    """All patches and labels, and the sizes of the batches."""
    found = list(batches(order, batch, draws))
    batches.close()
    inputs = torch.cat([b.images.inputs[0] for b in found])
    return inputs, torch.cat([b.labels for b in found]), [len(b.labels) for b in found]


def per_picture(config, split, index, draws):
    """What the network sees of one picture, step by step."""
    recipe, net = config.recipe, build_net(config)
    path, label = PictureFolder(PHOTOGRAPHS).items[split][index]
    picture = torch.from_numpy(np.array(read_picture(path))).permute(2, 0, 1)
    if split != "train":
        return net.patches(recipe.transform()(picture)[None])[0], label
    state = np.random.SeedSequence([*draws, index]).generate_state(1, np.uint64)
    with torch.random.fork_rng([]):
        torch.manual_seed(int(state[0]))
        image = recipe.normalise(recipe.resize(training=True)(picture))
        shift = (2 * torch.rand(2, dtype=torch.float64) - 1) * recipe.shift
    centre = torch.tensor(image.shape[1:]).double() / 2 + shift
    return net.patches(image[None], centre[None])[0], label


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("antialias", ["true", "false"])
@pytest.mark.parametrize(("split", "count"), [("train", 24), ("val", 9)])
def test_batches_are_the_pictures_one_by_one(split, count, antialias, workers):
    config = photo_config(model__antialias=antialias)
    batches, order = opened(config, split, workers), torch.randperm(count)
    before = torch.get_rng_state()
    inputs, labels, sizes = cut(batches, order, 10, (7, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert sizes == [10, 10, 4][: len(sizes)] if split == "train" else [9]
    assert inputs.shape == (count, 3, 3, 16, 16)
    for place, index in enumerate(order.tolist()):
        expected, label = per_picture(config, split, index, (7, 2))
        assert int(labels[place]) == label
        assert torch.equal(inputs[place], expected)
    assert not multiprocessing.active_children()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
def test_on_a_gpu_batches_are_those_of_the_cpu_and_runs_repeat(tmp_path):
    """The run cuts patches on the GPU; the bound is that of the kernel's own tests."""
    config, cuda = photo_config(backbone="photo_runs:backbone"), torch.device("cuda")
    here, labels, _ = cut(opened(config), torch.arange(24), 10, (7, 2))
    net = build_net(config, trust=True).to(cuda)
    batches = open_batches(config, "train", net, cuda, False, load_source, 2)
    there, same, _ = cut(batches, torch.arange(24), 10, (7, 2))
    torch.testing.assert_close(there.cpu(), here, atol=1e-5, rtol=0)
    assert torch.equal(same.cpu(), labels)
    whole = train(config, tmp_path / "whole", device="cuda", workers=2)

    def stop(config, progress, steps):
        if progress.epoch * steps + progress.step == STEPS + 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", device="cuda", workers=0, callback=stop)
    again = train(config, tmp_path / "stopped", device="cuda", workers=1)
    assert same_bits(weights(again.path), weights(whole.path))


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    batches, order = opened(photo_config()), torch.arange(24)
    whole = cut(batches, order, 10, (1, 1))[0]
    assert torch.equal(cut(batches, order.flip(0), 7, (1, 1))[0].flip(0), whole)
    for draws in ((1, 2), (2, 1)):
        assert not any(map(torch.equal, cut(batches, order, 10, draws)[0], whole))
    still = opened(photo_config(recipe__shift="0", recipe__flip="false"))
    assert torch.equal(cut(still, order, 10, (1, 1))[0], cut(still, order, 10, (5, 3))[0])


def test_validation_comes_in_batches_of_the_size_of_training():
    batches = opened(photo_config(batch="4"), "val")
    assert cut(batches, torch.arange(9), 1000)[2] == [4, 4, 1]
    assert list(batches(torch.arange(0), 1000)) == []


def test_images_of_equal_shape_are_cut_together_as_they_are_one_by_one():
    random = np.random.default_rng(4)
    shapes = np.array([(20, 30), (31, 17), (20, 30), (8, 9), (31, 17), (20, 30)])
    pixels = random.integers(0, 256, int(3 * shapes.prod(1).sum()), dtype=np.uint8)
    centres = shapes / 2 + random.normal(size=(6, 2))
    packed = Packed(torch.from_numpy(pixels), shapes, centres, np.arange(6))
    recipe, windows = Recipe(name="photo"), windows_of(build_net(photo_config()))
    found, expected = (
        cut_together(packed, recipe, windows),
        cut_patches(packed, recipe, windows),
    )
    # One rounding of each pixel value (below 3) and one of each sum of products.
    torch.testing.assert_close(found, expected, rtol=0, atol=4 * 3 * 2**-24)


def test_batches_are_what_the_network_computes():
    config = photo_config()
    net = build_net(config).eval()
    for batch in open_batches(config, "val", net, CPU, False, load_source, 0)(torch.arange(9), 9):
        assert batch.images.plan is patches
        found = batch.images.plan.outputs(net, batch.images.inputs).logits
        for index, logits in enumerate(found):
            path, _ = PictureFolder(PHOTOGRAPHS).items["val"][index]
            picture = torch.from_numpy(np.array(read_picture(path))).permute(2, 0, 1)
            image = config.recipe.transform()(picture)[None]
            torch.testing.assert_close(net(image)[0], logits, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(photo_config(), tmp_path_factory.mktemp("photos"), workers=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_has_the_same_bits_with_any_number_of_workers(tmp_path, whole, workers):
    found = train(photo_config(), tmp_path, workers=workers)
    assert same_bits(weights(found.path), weights(whole.path))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("stop", [2, STEPS + 1])
def test_a_run_has_the_same_bits_after_an_interruption(tmp_path, whole, stop):
    def callback(config, progress, steps):
        if progress.epoch * steps + progress.step == stop:
            signal.raise_signal(signal.SIGINT)  # is held back to the end of the step

    with pytest.raises(KeyboardInterrupt) as caught:
        train(photo_config(), tmp_path, callback=callback, workers=2)
    assert not multiprocessing.active_children()  # though `caught` has the frames of the run
    del caught
    assert_as_if_nothing_had_been(train(photo_config(), tmp_path, workers=1).path, whole)


def test_a_run_augments_by_its_seed_and_epoch(tmp_path, monkeypatch):
    seen, hand_out = [], PhotoBatches.__call__

    def recording(self, order, batch, draws=(0, 0)):
        seen.append((self.split, draws))
        return hand_out(self, order, batch, draws)

    monkeypatch.setattr(PhotoBatches, "__call__", recording)
    train(photo_config(seed="5", epochs="2"), tmp_path, workers=0)
    assert [draws for split, draws in seen if split == "train"] == [(5, 0), (5, 1)]


def test_runs_side_by_side_are_what_they_are_alone(tmp_path, whole):
    other = replace(photo_config(), seed=1)
    runs = [(photo_config(), tmp_path / "a"), (other, tmp_path / "b")]
    one, two = (weights(run.path) for run in train_together(runs))
    assert same_bits(one, weights(whole.path))
    assert same_bits(two, weights(train(other, tmp_path / "c", workers=0).path))


def test_processes_of_a_run_read_their_parts_of_the_same_batches():
    batches, order = opened(photo_config()), torch.randperm(24)
    whole = [batch.images.inputs[0] for batch in batches(order, 10, (0, 1))]
    dealt = [Team(rank=rank, count=3).split_batches(order, 10) for rank in range(3)]
    hands = [
        [batch.images.inputs[0] for part, size in deal for batch in batches(part, size, (0, 1))]
        for deal in dealt
    ]
    for batch, *parts in zip(whole, *hands, strict=True):
        assert torch.equal(torch.cat(parts), batch)


def test_workers_by_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    assert [default_workers(runs) for runs in (1, 2, 4, 20)] == [6, 3, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert default_workers() == 2


@pytest.mark.parametrize(("most", "decodings"), [(photo_reader.MOST_DECODED, 1), (30_000, 3)])
@pytest.mark.parametrize("workers", [0, 2])
def test_only_workers_decode_and_small_images_only_once(
    tmp_path, monkeypatch, whole, workers, most, decodings
):
    log = tmp_path / "log"

    def logging(path):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return read_picture(path)

    monkeypatch.setattr("foveate.data.pictures.read_picture", logging)
    monkeypatch.setattr(photo_reader, "MOST_DECODED", most)
    run = train(photo_config(), tmp_path / "run", workers=workers)
    processes = log.read_text().split()
    assert len(processes) == decodings * (24 + 9)
    assert (str(os.getpid()) in processes) == (workers == 0)
    assert same_bits(weights(run.path), weights(whole.path))


def test_decoded_images_are_kept_with_their_layout_while_there_is_space():
    grey, colour = (np.random.default_rng(0).integers(0, 256, (5, 4, c), np.uint8) for c in (1, 3))
    kept = photo_reader.DecodedImages(3, grey.size + colour.size)
    for index, image in enumerate((grey, colour, grey)):
        kept.add(index, image.transpose(2, 0, 1))
    for index, image in enumerate((grey, colour)):
        found = kept.get(index)
        assert np.array_equal(found, image.transpose(2, 0, 1))
        assert found.strides == image.transpose(2, 0, 1).strides
    assert kept.get(2) is None


# What goes wrong


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(PHOTOGRAPHS, tmp_path / "pictures"))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("harm", ["truncated", "empty", "text", "narrow", "gone", "bomb"])
def test_a_bad_picture_is_named_in_one_line(tmp_path, copied, monkeypatch, harm, workers):
    config, path = photo_config(source=f"folder:{copied}"), copied / "train" / "pants" / "5.jpg"
    if harm == "bomb":
        Image.new("RGB", (300, 300)).save(path)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200 * 200)
    elif harm == "narrow":
        Image.new("RGB", (60_000, 1)).save(path)
    elif harm == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        content = {"truncated": path.read_bytes()[:700], "empty": b"", "text": b"picture"}
        path.write_bytes(content[harm])
    batches = opened(config, workers=workers)
    with pytest.raises(DataError, match=r"pants/5\.jpg") as caught:
        list(batches(torch.arange(24), 10))
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not multiprocessing.active_children()


def test_a_bad_picture_stops_a_run_that_can_go_on(tmp_path, copied, whole):
    path = copied / "train" / "pants" / "5.jpg"
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    config = photo_config(source=f"folder:{copied}")
    with pytest.raises(DataError, match=r"pants/5\.jpg"):
        train(config, tmp_path / "run", workers=1)
    path.write_bytes(good)
    found = train(config, tmp_path / "run", workers=1)
    assert same_bits(weights(found.path), weights(whole.path))


def test_a_worker_that_is_killed_is_said_in_one_line(monkeypatch):
    def die(path):
        os.kill(os.getpid(), signal.SIGKILL)

    batches = opened(photo_config(), workers=1)
    monkeypatch.setattr("foveate.data.pictures.read_picture", die)
    with pytest.raises(
        FoveateError, match=r"ended early \(DataLoader worker .*--workers 0"
    ) as caught:
        list(batches(torch.arange(24), 10))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__form": "plain", "model__size": "112"}, "needs a network with scale channels"),
        ({"model__form": "sliding"}, "needs a network with scale channels"),
        ({"model__channels": "1"}, "set model.channels=3"),
        ({"model__classes": "2"}, "set model.classes=3"),
        ({"samples": "25"}, "samples must be at most 24, .*, got 25"),
    ],
)
def test_what_cannot_be_trained_is_said_before(tmp_path, changes, words):
    asked = {key.replace("__", ".") for key in changes}
    usual = photo_config()
    config = usual.changed({key.replace("__", "."): value for key, value in changes.items()})
    assert adapt_to_source(config, load_source, explicit_fields=asked) == config
    with pytest.raises(ConfigError, match=words):
        train(config, tmp_path, workers=0)


def test_photo_needs_picture_files(tmp_path):
    with pytest.raises(ConfigError, match="reads image files, and mnist-5k has none"):
        photo_config(source="mnist-5k")
    with pytest.raises(ConfigError, match="workers must be 0 or more, got -1"):
        train(photo_config(), tmp_path, workers=-1)


def test_an_unknown_split_folder_is_named(copied):
    (copied / "validation").rename(copied / "valid")
    with pytest.raises(DataError, match="has test and train and valid; its splits"):
        photo_config(source=f"folder:{copied}")


# Which recipe


def test_colour_pictures_are_photographs_unless_said_otherwise(tmp_path):
    config = adapt_to_source(preset("fovavg").changed({"source": SOURCE}), load_source)
    assert config.recipe is not None and config.recipe.name == "photo"
    assert (config.model.channels, config.model.classes, config.model.antialias) == (3, 3, True)
    undecided = replace(config, recipe=None, model=replace(config.model, size=16))
    same = tmp_path / "same"
    for path in PHOTOGRAPHS.rglob("*.jpg"):
        target = same / path.relative_to(PHOTOGRAPHS)
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).resize((20, 20)).save(target)
    undecided = replace(undecided, source=f"folder:{same}")
    with pytest.raises(ConfigError, match="has colour images; set recipe to photo"):
        train(undecided, tmp_path / "a")
    stretched = adapt_to_source(undecided.changed({"recipe": "mnist-large-scale"}), load_source)
    assert stretched.recipe is not None and stretched.recipe.name == "mnist-large-scale"
    (batch,) = opened(stretched)(torch.arange(4), 4)
    assert batch.images.inputs[0].shape[0] == 24  # all of them are held, as before


def test_grey_pictures_and_digits_keep_the_recipe_of_the_paper(copied):
    for path in copied.rglob("*.jpg"):
        Image.open(path).convert("L").resize((20, 20)).save(path)
    for source in (f"folder:{copied}", "mnist-5k"):
        for changes in ({}, {"recipe": "mnist-large-scale"}):
            config = preset("fovavg").changed({"source": source, **changes})
            assert adapt_to_source(config, load_source).recipe is None
    grey = photo_config(source=f"folder:{copied}")  # as asked
    assert cut(opened(grey), torch.arange(24), 10)[0].shape[2] == 3


def test_photographs_in_tar_files_are_those_of_the_folder(tmp_path):
    folder = PictureFolder(PHOTOGRAPHS)
    for split, items in folder.items.items():
        with tarfile.open(tmp_path / f"{split}-000.tar", "w") as tar:
            for number, (path, label) in enumerate(items):
                tar.add(path, f"{number:04}{path.suffix}")
                (tmp_path / "label").write_text(str(label))
                tar.add(tmp_path / "label", f"{number:04}.cls")
    tars = f"shards:{tmp_path}"
    for split in ("train", "val"):
        order = torch.arange(9)
        found = [cut(opened(photo_config(source=s), split), order, 4) for s in (SOURCE, tars)]
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    folder = train(photo_config(epochs="1"), tmp_path / "run", workers=0)
    for name in (SOURCE, tars):
        given = ["--source", name, "--scales", "0.5,1", "--changed-data"]
        assert (
            run_command(["audit", str(folder.path), *given, "--out", str(tmp_path / name[:3])]) == 0
        )
    audits = [json.loads((tmp_path / name / "audit.json").read_text()) for name in ("fol", "sha")]
    assert audits[0]["checksum"] == audits[1]["checksum"]  # of pixels and labels
    found = [[at["right"] for at in audit["audits"][ORIGINAL]["scales"]] for audit in audits]
    assert found[0] == found[1] and audits[1]["audits"][ORIGINAL]["classes"] == ["0", "1", "2"]
    wide = {"backbone": "photo_runs:backbone", "recipe": "photo", "recipe.base": "48"}
    made = [
        adapt_to_source(preset("finetune").changed({**wide, "source": source}), load_source)
        for source in (SOURCE, tars)
    ]
    assert made[0].model == made[1].model  # windows from the sizes of the photographs
    assert describe_photos(made[1]).removeprefix(tars) == (
        describe_photos(made[0]).removeprefix(SOURCE)
    )


# The command


def test_the_command_says_what_it_took(tmp_path, capfd):
    assert run_command(command(tmp_path / "run", "--workers", "1", "--epochs", "1")) == 0
    shown = capfd.readouterr()
    assert (
        "24 training and 9 validation images of 3 classes, 60x60 to 72x128 pixels; recipe photo: "
        "short side 48; 3 windows of 16 to 64 pixels, patches of 16"
    ) in shown.err
    assert shown.out.endswith(f"next: foveate evaluate {tmp_path / 'run'}\n")


def test_the_command_names_one_window_and_random_weights(tmp_path, capfd):
    pytest.importorskip("timm", reason="pip install 'foveate[photos]'")
    given = ["--epochs", "1", "--set", "recipe.base=16", "--set", "model.size=32"]
    net = ["--backbone", "timm:test_efficientnet", "--set", "model.scales=1"]
    whole = ["train", "finetune", "--source", SOURCE, *given, *net, "--workers", "1"]
    assert run_command([*whole, "--out", str(tmp_path / "run")]) == 0
    err = capfd.readouterr().err
    assert "1 window of 32 pixels, patches of 32" in err
    assert "note: timm:test_efficientnet starts from random weights; add --pretrained" in err


def test_the_command_trains_a_backbone_of_ones_own(tmp_path):
    options = ["--backbone", "photo_runs:backbone", "--set", "model.size=20", "--workers", "1"]
    assert run_command([*command(tmp_path / "run"), *options]) == 0
    net = RunFolder(tmp_path / "run").net(trust=True)
    assert net.size == 20 and len(net.backbone) == 5
    losses = [entry["loss"] for entry in RunFolder(tmp_path / "run").metrics()]
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scales", "2"], "the recipe photo does not use scales; set recipe.base"),
        (["--set", "size=64"], "the recipe photo does not use size"),
        (["--recipe", "mnist"], "unknown recipe 'mnist'"),
        (["--workers", "-1"], "'--workers': Input should be greater"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capfd, options, words):
    arguments = command(tmp_path / "run")
    if options[0] == "--recipe":
        arguments = ["train", "fovavg", "--source", SOURCE, "--out", str(tmp_path / "run")]
    assert run_command([*arguments, *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()[-1:]
    assert line.startswith("error:") and words in line


def test_a_run_that_cannot_start_leaves_the_folder_to_others(tmp_path, capfd):
    own = [*command(tmp_path / "run"), "--backbone", "photo_runs:backbone", "--epochs", "1"]
    assert run_command([*own, "--weights", str(tmp_path / "typo.safetensors")]) == 2
    assert "typo.safetensors" in capfd.readouterr().err
    assert run_command(own) == 0
    assert run_command([*own, "--weights", str(tmp_path / "typo.safetensors")]) == 2
    assert "has a run with other settings (weights)" in capfd.readouterr().err
    assert RunFolder(tmp_path / "run").finished


def children(process):
    """The processes whose parent is `process`."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found]


def alive(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(processes, patience):
    until = time.monotonic() + patience
    while any(map(alive, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, processes))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for workers in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command(tmp_path, whole, number):
    run = tmp_path / "run"
    arguments = [Path(__file__).with_name("photo_runs.py"), run, "--workers", "2"]
    slow = python(*arguments, "--set", "epochs=3", start_new_session=True)
    found, until = [], time.monotonic() + 60
    while not (len(found) >= 2 and (run / "resume.safetensors").exists()):
        assert slow.poll() is None and time.monotonic() < until
        found = children(slow.pid)
    if number == signal.SIGKILL:
        slow.kill()  # the run alone
    else:
        os.killpg(slow.pid, number)
    _, error = slow.communicate(timeout=60)
    assert ended(found, 10), "workers outlive the run"
    assert "Traceback" not in error
    if slow.returncode != 0:  # else it was done before the signal came
        codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
        assert slow.returncode == codes[number]
    again = python(*arguments)
    again.communicate(timeout=60)
    assert again.returncode == 0
    assert same_bits(weights(run), weights(whole.path))


def dated(folder, when=1_700_000_000.0):
    """Let the folders of a tree seem to have been changed long ago, all at one time."""
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        os.utime(path, (when, when))


def test_a_folder_is_listed_once_in_a_command_and_again_when_it_changed(
    tmp_path, copied, monkeypatch
):
    listed, plan = [], pictures._plan
    monkeypatch.setattr(pictures, "_plan", lambda folder: listed.append(folder) or plan(folder))
    dated(copied)
    arguments = command(tmp_path / "run", "--set", f"source=folder:{copied}", "--workers", "0")
    place = arguments.index("recipe=photo")
    del arguments[place - 1 : place + 1]  # colour decides
    assert run_command(arguments) == 0
    assert listed == [copied]
    assert len(open_source(f"folder:{copied}", stream=True).labels("train")) == 24
    assert listed == [copied]
    (copied / "train" / "hat" / "0.jpg").unlink()
    assert len(open_source(f"folder:{copied}", stream=True).labels("train")) == 23
    shutil.copytree(copied, tmp_path / "new")
    shutil.rmtree(copied)
    (tmp_path / "new" / "train" / "hat" / "1.jpg").unlink()
    (tmp_path / "new").rename(copied)
    dated(copied)  # the times of the first listing, but other folders
    assert len(open_source(f"folder:{copied}", stream=True).labels("train")) == 22


def test_a_folder_that_changes_twice_in_a_moment_is_listed_each_time(copied):
    source, path, now = f"folder:{copied}", copied / "train" / "hat", time.time() + 60
    for count in range(24, 18, -1):
        dated(copied, now)  # a clock too coarse to tell the changes apart
        assert len(open_source(source, stream=True).labels("train")) == count
        next(path.glob("*.jpg")).unlink()


def test_batches_that_are_kept_do_not_change():
    batches, order = opened(photo_config()), torch.arange(24)
    kept = [batch.images.inputs[0] for batch in batches(order, 5)]
    copies = [batch.images.inputs[0].clone() for batch in batches(order, 5)]
    batches.close()
    assert all(map(torch.equal, kept, copies))


@pytest.mark.parametrize("workers", [1, 2])
def test_pixels_of_a_batch_are_valid_until_the_next_one_is_requested(workers):
    """Workers reuse memory; before each comparison they have read as far ahead as they can."""
    config = photo_config()
    dataset = PhotoDataset(open_source(SOURCE, stream=True), "train", config.recipe)
    groups = [torch.randperm(24)[: 2 + i % 2].tolist() for i in range(4 * BLOCKS)]
    here, there = (PhotoReader(dataset, count, pinned=False) for count in (0, workers))
    expected = [packed for packed, _ in here.read(groups, (3, 1))]
    for right, (found, _) in zip(expected, there.read(groups, (3, 1)), strict=True):
        time.sleep(0.05)
        assert all(map(torch.equal, found.pictures(), right.pictures()))
        assert np.array_equal(found.centres, right.centres)
    there.close()


def test_the_dataset_can_be_sent_to_workers_that_are_not_forked():
    dataset = PhotoDataset(open_source(SOURCE, stream=True), "train", photo_config().recipe)
    sent, packer = ForkingPickler.loads(ForkingPickler.dumps((dataset, Packer())))
    found, _ = packer(sent.__getitems__([(1, 2, 3)]))
    right, _ = Packer()(dataset.__getitems__([(1, 2, 3)]))
    assert torch.equal(found.values, right.values) and found.labels == right.labels


def test_evaluating_without_the_photographs_of_the_run_asks_for_their_source(
    tmp_path, copied, capsys
):
    out = tmp_path / "run"
    train(photo_config(source=f"folder:{copied}", epochs="1"), out, workers=0)
    moved = copied.rename(tmp_path / "elsewhere")
    assert run_command(["evaluate", str(out), "--scales", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"folder:{copied}, which does not exist here" in said
    assert "--source folder:DIR" in said
    assert run_command(["evaluate", str(out), "--scales", "1", "--source", f"folder:{moved}"]) == 0
