"""The run folder: what is in it, who may use it, and what is said when it is damaged."""

import itertools
import json
import os
import random
import shutil
import stat
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image
from raised import one_line
from safetensors.torch import save
from tiny_runs import AS_TINY, MODEL, same_bits, stopped_at_once, tiny, trained
from torch import nn

import foveate
from foveate.cli.app import run as command_line
from foveate.errors import DataError, FoveateError
from foveate.provenance import _commit, commit, hardware
from foveate.training.checkpoint import Progress, RunFolder, RunWriter
from foveate.training.loop import train
from foveate.training.tensors import pack_tensors, read_tensors


@pytest.fixture
def finished(tmp_path):
    return train(tiny(epochs=1), tmp_path / "run")


def stopped(path, **changes):
    """A run that was interrupted in its second epoch."""

    def callback(config, progress, steps):
        if (progress.epoch, progress.step) == (1, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(**changes), path, callback=callback)
    return RunWriter(path)


error_of = partial(one_line, FoveateError)


def test_config_json_says_how_to_repeat_the_run(finished):
    content = json.loads((finished.path / "config.json").read_text())
    assert content["config"] == json.loads(json.dumps(tiny(epochs=1).to_dict()))
    assert content["digest"] == tiny(epochs=1).digest()
    assert content["version"] == foveate.__version__
    threads = torch.get_num_threads()
    assert f"CPU, {threads} thread{'s' if threads > 1 else ''}, torch" in content["hardware"]
    assert "CPU" in content["hardware"] and torch.__version__ in content["hardware"]
    assert "commit" in content
    assert finished.config() == tiny(epochs=1)
    assert finished.provenance() == {k: content[k] for k in ("version", "commit", "hardware")}


def test_weights_are_safetensors_of_the_network(finished):
    tensors, note = read_tensors(finished.weights)
    assert tensors.keys() == MODEL.build().state_dict().keys()
    assert json.loads(note["model"]) == json.loads(json.dumps(MODEL.to_dict()))
    net = finished.net()
    assert same_bits(tensors, net.state_dict())


def test_files_are_as_readable_as_others(finished):
    modes = {stat.S_IMODE(os.stat(path).st_mode) for path in finished.path.glob("*.*s*")}
    assert len(modes) == 1


def test_a_stopped_run_has_everything_to_go_on(tmp_path):
    folder = stopped(tmp_path)
    progress, tensors = folder.load()
    assert (progress.epoch, progress.step, len(progress.metrics)) == (1, 2, 1)
    assert progress.loss > 0 and progress.seconds > 0
    assert tensors["random"].dtype == torch.uint8
    adam = {key for key in tensors if key.startswith("adam.exp_avg_sq.")}
    assert len(adam) == len(list(MODEL.build().parameters()))
    assert float(tensors["adam.step.backbone.head.bias"]) == 8  # six steps and two
    assert len(folder.metrics()) == 1


def test_saving_gives_back_what_was_saved(tmp_path):
    folder = RunWriter(tmp_path)
    progress = Progress(3, 7, 1.25, 0.5, 0.25, [{"epoch": 1.0}])
    shared = torch.rand(4)
    tensors = {"random": torch.get_rng_state(), "tied": shared, "twin": shared, "part": shared[1:3]}
    folder.save(progress, tensors)
    again, back = folder.load()
    assert again == progress
    assert same_bits(back, tensors)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_finished_run_is_not_done_again(finished):
    before = {p.name: p.stat().st_mtime_ns for p in finished.path.iterdir()}
    train(tiny(epochs=1), finished.path, callback=lambda *progress: pytest.fail("it trains again"))
    assert {p.name: p.stat().st_mtime_ns for p in finished.path.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"seed": 1}, "other settings (seed);"),
        ({"epochs": 5, "batch": 4}, "other settings (batch, epochs);"),
        (
            {"model": replace(MODEL, size=14, pool="max")},
            "other settings (model.pool, model.size);",
        ),
        ({"backbone": "a:b"}, "other settings (backbone);"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_another_run_in_the_folder_is_refused(tmp_path, ended, changes, keys):
    if ended:
        train(tiny(), tmp_path)
    else:
        stopped(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    said = error_of(lambda: train(tiny(**changes), tmp_path))
    assert keys in said and "choose another --out" in said
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def cut(path, share=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def test_damaged_configs(finished):
    path = finished.path / "config.json"
    whole = json.loads(path.read_text())
    damaged = ["", "[]", "null", '{"config": 3}', path.read_text()[:100]]
    for key, value in [("scales", 2), ("epochs", "x"), ("model", []), ("unheard", 1)]:
        damaged.append(json.dumps({"config": {**whole["config"], key: value}}))
    for text in damaged:
        path.write_text(text)
        for action in (finished.config, finished.net, lambda: train(tiny(epochs=1), finished.path)):
            assert "config.json is damaged" in error_of(action)
    path.write_bytes(b"\xff\xfe\x00")
    assert "config.json is damaged" in error_of(finished.config)
    path.unlink()
    assert "is not a run: it has no config.json" in error_of(finished.net)
    assert "has weights but no config.json" in error_of(lambda: train(tiny(epochs=1), path.parent))


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
def test_a_truncated_checkpoint_is_named(tmp_path, share):
    whole = trained(tmp_path / "whole")
    folder = stopped(tmp_path / "run")
    cut(folder.resume, share)
    said = error_of(lambda: train(tiny(), folder.path))
    assert "resume.safetensors is not a complete safetensors file" in said and "remove it" in said
    folder.resume.unlink()
    assert same_bits(whole, trained(folder.path))


def test_a_checkpoint_without_its_parts_is_named(tmp_path):
    folder = stopped(tmp_path)
    progress, tensors = folder.load()
    del tensors["random"]
    folder.save(progress, tensors)
    assert "resume.safetensors is damaged; remove it to start over" in error_of(folder.load)


def test_truncated_weights_are_named(finished):
    cut(finished.weights)
    for action in (finished.net, lambda: train(tiny(epochs=1), finished.path)):
        assert "weights.safetensors is not a complete safetensors file" in error_of(action)


def test_a_checkpoint_of_another_architecture_is_named(tmp_path):
    other = stopped(tmp_path / "other", model=replace(MODEL, hidden=9))
    folder = stopped(tmp_path / "run")
    folder.resume.write_bytes(other.resume.read_bytes())
    said = error_of(lambda: train(tiny(), folder.path))
    assert "resume.safetensors has a different architecture" in said


def test_weights_of_another_architecture_are_named(finished, tmp_path):
    other = train(tiny(epochs=1, model=replace(MODEL, hidden=9)), tmp_path / "other")
    finished.weights.write_bytes(other.weights.read_bytes())
    assert "weights.safetensors has a different architecture" in error_of(finished.net)
    # The same shapes, but shown the image in another way:
    like = train(tiny(epochs=1, model=replace(MODEL, pool="max")), tmp_path / "like")
    finished.weights.write_bytes(like.weights.read_bytes())
    assert "belongs to another model than config.json;" in error_of(finished.net)


def test_an_unfinished_run_has_no_network_yet(tmp_path):
    folder = stopped(tmp_path)
    assert "is not finished (1 of 3 epochs)" in error_of(folder.net)


def test_damaged_metrics_are_named(finished):
    (finished.path / "metrics.jsonl").write_text('{"epoch"\n')
    assert "metrics.jsonl is damaged" in error_of(finished.metrics)


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    said = error_of(lambda: train(tiny(), tmp_path / "file" / "below"))
    assert "cannot use the folder" in said


def test_the_lock_keeps_others_out_and_is_given_back(tmp_path):
    folder = RunWriter(tmp_path)
    with folder.locked():
        said = error_of(lambda: train(tiny(), tmp_path))
        assert "another process is training" in said
    assert train(tiny(epochs=1), tmp_path).finished


def test_an_error_in_the_block_is_not_taken_for_the_lock(tmp_path):
    with pytest.raises(BlockingIOError), RunWriter(tmp_path).locked():
        raise BlockingIOError("of another kind")


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, *options):
        if str(path).endswith(".lock"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *options)

    monkeypatch.setattr(os, "open", refuse)
    said = error_of(lambda: train(tiny(), tmp_path))
    remedy = "check its permissions or choose another --out"
    assert said == f"cannot use the folder {tmp_path} (Permission denied); {remedy}"


@pytest.mark.parametrize("made_again", [False, True])
def test_a_run_whose_folder_was_removed_does_not_finish(tmp_path, made_again, capsys, monkeypatch):
    monkeypatch.setattr("foveate.training.session.SAVE_EVERY", 0.0)
    folder = RunFolder(tmp_path / "run")

    def callback(config, progress, steps):
        if (progress.epoch, progress.step) == (1, 2):
            shutil.rmtree(folder.path)
            if made_again:  # by another process, which trains there now
                folder.path.mkdir()
                (folder.path / ".lock").touch()

    said = error_of(lambda: train(tiny(), folder.path, callback=callback))
    assert f"{folder.path} was removed during training" in said
    assert not folder.saved and folder.path.exists() == made_again
    monkeypatch.setattr("foveate.cli.console.Display.__call__", lambda self, *at: callback(*at))
    assert command_line([*AS_TINY, "--out", str(folder.path)]) == 2
    out, err = capsys.readouterr()
    assert "was removed during" in err and err.count("\n") == 1 and "finished" not in out


def test_a_resumed_run_records_every_version_commit_and_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("FOVEATE_COMMIT", "first")
    folder = stopped(tmp_path)
    once = folder.history()
    assert len(once) == 1 and folder.provenance() == once[0]
    monkeypatch.setenv("FOVEATE_COMMIT", "second")
    monkeypatch.setattr("foveate.training.checkpoint.hardware", lambda device: "a machine")
    for _ in range(2):  # the second start is like the last, and adds nothing
        stopped_at_once(tmp_path)
    assert folder.history() == [*once, {**once[0], "commit": "second", "hardware": "a machine"}]
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["commit"], content["config"]) == (
        "first",
        json.loads(json.dumps(tiny().to_dict())),
    )
    train(tiny(), tmp_path)
    assert folder.provenance()["commit"] == "first; second"
    assert folder.provenance()["hardware"] == f"{once[0]['hardware']}; a machine"
    monkeypatch.setenv("FOVEATE_COMMIT", "third")
    train(tiny(), tmp_path)  # finished: nothing was computed by it
    assert len(folder.history()) == 2


def test_older_files_have_no_history(finished):
    path = finished.path / "config.json"
    content = json.loads(path.read_text())
    (start,) = content.pop("history")
    path.write_text(json.dumps(content))
    assert finished.history() == [start] and finished.provenance() == start
    path.write_text(json.dumps({**content, "history": 3}))
    assert "config.json is damaged ('int' object is not iterable)" in error_of(finished.provenance)


# Damaged weights


def test_a_flipped_bit_is_found_wherever_it_is(finished):
    whole, rng = finished.weights.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*rng.sample(range(header, len(whole)), 60), header, len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        finished.weights.write_bytes(damaged)
        said = error_of(finished.net)
        assert f"{finished.weights} is damaged: its sha256 does not match" in said
    weights = dict(finished_tensors(finished, whole))
    for place in rng.sample(range(header), 60):  # refused, or nothing of it matters
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        finished.weights.write_bytes(damaged)
        try:
            found, _ = read_tensors(finished.weights)
        except DataError:
            continue
        assert same_bits(found, weights), place


def finished_tensors(finished, content):
    finished.weights.write_bytes(content)
    return read_tensors(finished.weights)[0]


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path):
    folder = stopped(tmp_path)
    whole = folder.resume.read_bytes()
    number = b'\\"step\\": '  # in the metadata, which is JSON within JSON
    for place in (whole.index(number) + len(number), len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        folder.resume.write_bytes(damaged)
        said = error_of(lambda: train(tiny(), tmp_path))
        assert "resume.safetensors is damaged: its sha256 does not match; remove it" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_kind_of_tensor_has_a_digest(tmp_path, dtype):
    tensors = {"many": torch.ones(3, 2).to(dtype), "one": torch.tensor(1).to(dtype)}
    tensors["none"] = torch.ones(0, 2).to(dtype)
    (tmp_path / "file").write_bytes(pack_tensors(tensors, {"a": "b"}))
    found, note = read_tensors(tmp_path / "file")
    assert note == {"a": "b"} and all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_equal_weights_have_equal_files(tmp_path):
    """So that a checksum of the file tells whether two runs are the same."""
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
    note = {"digest": "0", "model": "{}", "classes": '["é"]', "seed": "1"}
    assert len({pack_tensors(tensors, note) for _ in range(10)}) == 1
    path = tmp_path / "weights.safetensors"
    path.write_bytes(pack_tensors(tensors, note))
    found, noted = read_tensors(path)
    assert noted == note and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_weights_of_an_older_version_have_no_digest(finished):
    weights, note = read_tensors(finished.weights)
    finished.weights.write_bytes(save(weights, note))
    assert same_bits(weights, finished.net().state_dict())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("key", ["backbone.head.weight", "backbone.trunk.1.running_var"])
@pytest.mark.parametrize("write", [pack_tensors, save])
def test_no_command_uses_weights_that_are_not_finite(finished, key, value, write, capsys, tmp_path):
    weights, note = read_tensors(finished.weights)
    weights[key].view(-1)[3] = value
    finished.weights.write_bytes(write(weights, note))
    words = f"weights.safetensors contains non-finite values in {key}; train again"
    assert words in error_of(finished.net)
    folder, picture = str(finished.path), str(tmp_path / "digit.png")
    commands = {
        "evaluate": [folder, "--scales", "1"],
        "predict": [picture, "--model", folder],
        "export": [folder, "--out", str(tmp_path / "net.pt2")],
        "audit": [folder, "--source", "mnist-5k", "--out", str(tmp_path / "audit")],
        "demo": ["--model", folder, "--port", "0"],
    }
    Image.new("L", (28, 28)).save(picture)
    for command, options in commands.items():
        assert command_line([command, *options]) == 2, command
        out, err = capsys.readouterr()
        assert words in err and err.count("\n") == 1 and out == "", command


class Tied(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.one = nn.Conv2d(channels, 4, 3)
        self.two = nn.Conv2d(channels, 4, 3)
        self.two.weight = self.one.weight
        self.head = nn.Linear(8, classes)

    def forward(self, patches):
        return self.head(torch.cat([f(patches).amax((2, 3)) for f in (self.one, self.two)], 1))


class Three(Tied):
    def __init__(self, channels, classes):
        super().__init__(channels, 3)


class Spatial(Tied):
    def forward(self, patches):
        return self.one(patches)


def test_tied_weights_can_be_saved(tmp_path):
    tensors = trained(tmp_path, backbone="test_checkpoint:Tied", epochs=1)
    assert torch.equal(tensors["backbone.one.weight"], tensors["backbone.two.weight"])
    assert same_bits(tensors, RunFolder(tmp_path).net(trust=True).state_dict())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nonsense", "must be given as package.module:factory, got 'nonsense'"),
        ("no_such_module:net", "cannot import 'no_such_module'"),
        ("test_checkpoint:Nothing", "'Nothing' does not exist in 'test_checkpoint'"),
        ("foveate:__version__", "'__version__' is not a function in 'foveate'"),
        ("torch:device", "torch:device failed with channels=1, classes=10"),
        ("builtins:dict", "builtins:dict must return a torch.nn.Module, got dict"),
        ("torch.nn:Identity", "returns a module without weights"),
        ("test_checkpoint:Three", "Three must return 10 logits, one per class, got 3"),
        ("test_checkpoint:Spatial", "the backbone must map"),
    ],
)
def test_backbones_that_cannot_be_made(tmp_path, spec, words):
    assert words in error_of(lambda: train(tiny(backbone=spec), tmp_path))
    assert not RunFolder(tmp_path).saved


def test_a_backbone_needs_scale_channels(tmp_path):
    model = replace(MODEL, form="sliding", pool="max")
    said = error_of(lambda: train(tiny(backbone="test_checkpoint:Tied", model=model), tmp_path))
    assert "fovmax, fovavg or fovconc" in said


def test_the_commit_is_of_this_checkout_or_nothing(monkeypatch, tmp_path):
    found = commit()
    assert found == "" or found.removesuffix("-dirty").isalnum()
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert commit() == found  # the code of this process is that of its start
    monkeypatch.setattr("foveate.provenance._commit", _commit.__wrapped__)
    assert commit() == ""


def test_the_hardware_is_said():
    assert hardware(torch.device("cpu")).endswith(f"torch {torch.__version__}")


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_tensors(tmp_path / "none.safetensors")
    assert RunFolder(tmp_path).load() is None
    assert RunFolder(tmp_path).metrics() == []


def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(tmp_path):
    files = [pack_tensors({"a": torch.full((size,), size)}, {}) for size in (3, 300_000)]
    path, over = tmp_path / "file", threading.Event()
    path.write_bytes(files[0])

    def replace_all_the_time():
        for content in itertools.cycle(files):
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").replace(path)
            if over.is_set():
                return

    writer = threading.Thread(target=replace_all_the_time)
    writer.start()
    seen, reads, deadline = set(), 0, time.monotonic() + 60
    try:
        # Under load, the writer can wait for long.
        while (reads < 50 or len(seen) < 2) and time.monotonic() < deadline:
            tensor, reads = read_tensors(path)[0]["a"], reads + 1
            assert (tensor == len(tensor)).all()
            seen.add(len(tensor))
    finally:
        over.set()
        writer.join()
    assert seen == {3, 300_000}
