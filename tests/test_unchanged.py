"""The checksum of a run's data: recorded at the start, and data that changed since is refused."""

import json
import re

import h5py
import numpy as np
import pytest
from PIL import Image
from test_shards import png, write_h5, write_tar
from tiny_runs import AS_TINY, MODEL, tiny

from foveate.cli.app import run
from foveate.data.sources import load_source
from foveate.data.store import FileSpec, write
from foveate.errors import DataError
from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleRange
from foveate.sweeps.jobs import Job, perform
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train
from foveate.training.unchanged import check_unchanged, source_checksum

CHANGED = r"changed since .*: its checksum was ([0-9a-f]{12}) and is ([0-9a-f]{12}); restore"


@pytest.fixture
def pictures(tmp_path):
    """Two classes of 30 pictures."""
    digits = load_source("mnist-5k").train
    for number in range(300):
        label = int(digits.labels[number])
        if label < 2:
            path = tmp_path / "pictures" / f"{label}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digits.images[number, 0].numpy()).save(path)
    return tmp_path / "pictures"


def config_for(source, **changes):
    model = ModelConfig(**{**vars(MODEL), "classes": 2})
    usual = {"source": source, "samples": 0, "model": model, "batch": 8, "epochs": 1}
    return tiny(**{**usual, **changes})


def interrupted(config, folder, **options):
    """A run that was stopped after its first step."""

    def callback(*progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, folder, callback=callback, **options)
    assert RunFolder(folder).saved
    return folder


def recorded(folder):
    return json.loads((folder / "config.json").read_text())["data"]


def test_a_run_records_its_source_and_checksum(tmp_path):
    folder = interrupted(tiny(), tmp_path / "run")
    checksum = load_source("mnist-5k").checksum
    known = {"source": "mnist-5k", "checksum": checksum, "classes": list("0123456789")}
    assert recorded(folder) == known
    train(tiny(), folder)
    known = {"source": "mnist-5k", "checksum": checksum, "classes": list("0123456789")}
    assert recorded(folder) == known


@pytest.mark.parametrize("stream", [False, True])
def test_changed_pictures_are_refused_until_told_so(tmp_path, pictures, stream):
    config = config_for(f"folder:{pictures}")
    folder = interrupted(config, tmp_path / "run", stream=stream)
    before = recorded(folder)
    assert before["checksum"].startswith("listing:") == stream
    gone = sorted(pictures.glob("1/*"))[0]
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(DataError, match=CHANGED) as caught:
        train(config, folder, stream=not stream)  # streaming is a choice of each start
    was, now = re.search(CHANGED, str(caught.value)).groups()
    assert before["checksum"].removeprefix("listing:").startswith(was) and was != now
    assert recorded(folder) == before and not RunFolder(folder).finished
    train(config, folder, stream=stream, changed_data=True)
    after = recorded(folder)
    assert after["checksum"].removeprefix("listing:").startswith(now)
    assert after["earlier"] == [before["checksum"]]
    gone.write_bytes(content)
    with pytest.raises(DataError, match=CHANGED):
        check_unchanged(RunFolder(folder), f"folder:{pictures}", load_source)


def test_a_run_goes_on_streamed_or_not_where_nothing_changed(tmp_path, pictures):
    config = config_for(f"folder:{pictures}")
    for stream in (False, True):
        folder = interrupted(config, tmp_path / f"run{stream}", stream=stream)
        assert train(config, folder, stream=not stream).finished


def test_a_run_of_an_older_version_passes(tmp_path, pictures):
    config = config_for(f"folder:{pictures}")
    folder = interrupted(config, tmp_path / "run")
    path = folder / "config.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if k != "data"}
    path.write_text(json.dumps(content))
    sorted(pictures.glob("1/*"))[0].unlink()
    check_unchanged(RunFolder(folder), f"folder:{pictures}", load_source)
    train(config, folder)
    for damaged in ([], {"checksum": 7}, "text", None):
        path.write_text(json.dumps({**content, "data": damaged}))
        with pytest.raises(DataError, match="damaged \\(data\\)"):
            RunFolder(folder).data()


def test_the_commands_refuse_changed_data(tmp_path, pictures, capsys):
    source, out = f"folder:{pictures}", str(tmp_path / "run")
    command = [*AS_TINY, "--source", source, "--samples", "0", "--epochs", "1", "--out", out]
    assert run(command) == 0
    evaluate = ["evaluate", out, "--scales", "1"]
    audit = ["audit", out, "--source", source, "--scales", "1:2:1", "--out", f"{tmp_path}/audit"]
    assert run(evaluate) == run(audit) == 0
    sorted(pictures.glob("1/*"))[0].unlink()
    capsys.readouterr()
    for refused in (evaluate, [*evaluate, "--source", source], audit):
        assert run(refused) == 2
        said = capsys.readouterr().err
        assert re.search(CHANGED, said.replace("\n", " ")) and "--changed-data" in said
        assert run([*refused, "--changed-data"]) == 0
    (tmp_path / "run" / "weights.safetensors").unlink()
    capsys.readouterr()
    assert run(command) == 2
    assert "--changed-data" in capsys.readouterr().err
    assert run([*command, "--changed-data"]) == 0


def test_other_images_are_compared_with_nothing(tmp_path, pictures):
    folder = tmp_path / "run"
    train(config_for(f"folder:{pictures}"), folder)
    (pictures / "0" / "more.png").write_bytes(sorted(pictures.glob("0/*"))[0].read_bytes())
    check_unchanged(RunFolder(folder), "mnist-5k", load_source)


def test_a_job_is_not_tested_on_changed_data(tmp_path, pictures):
    config = config_for(f"folder:{pictures}")
    job = Job(name="a", config=config, scales=(1.0,), rows=(("study", "a"),))
    perform([job], tmp_path / "study")
    sorted(pictures.glob("1/*"))[0].unlink()
    with pytest.raises(DataError, match=CHANGED):
        perform([job], tmp_path / "study")


def test_a_file_made_from_data_that_changed(tmp_path, pictures):
    source, one = f"folder:{pictures}", ScaleRange(1, 1)
    path = write(FileSpec(train=one, test=one, size=24), load_source(source), tmp_path)
    folder = train(config_for(str(path)), tmp_path / "run")
    check_unchanged(folder, source, load_source)
    sorted(pictures.glob("1/*"))[0].unlink()
    with pytest.raises(DataError, match=r"changed since .*\.h5 was made: its checksum was"):
        check_unchanged(folder, source, load_source)
    path.unlink()
    check_unchanged(folder, source, load_source)  # it says nothing now


# What a listing notices


def listing(source):
    return source_checksum(source, load_source, listing=True)


def test_a_listing_of_a_folder_notices_names_and_sizes_alone(tmp_path, pictures):
    source, first = f"folder:{pictures}", sorted(pictures.glob("1/*"))[0]
    before, content = listing(source), first.read_bytes()
    first.write_bytes(content + b"x")
    assert listing(source) != before
    first.write_bytes(content[:-1] + b"x")  # documented: not noticed
    assert listing(source) == before
    first.rename(pictures / "0" / first.name)
    assert listing(source) != before
    (pictures / "0" / first.name).rename(first)
    pictures.rename(tmp_path / "elsewhere")
    assert listing(f"folder:{tmp_path / 'elsewhere'}") == before
    (tmp_path / "elsewhere" / "0" / "gone.png").symlink_to("nowhere")
    assert listing(f"folder:{tmp_path / 'elsewhere'}") != before  # reading it is the error


def test_a_listing_of_files_notices_labels_manifests_and_sizes(tmp_path):
    path = tmp_path / "train.h5"
    write_h5(path, "train", 20)
    found = {listing(str(path)), listing(f"shards:{tmp_path}")}
    assert len(found) == 1
    with h5py.File(path, "a") as file:
        file["y_train"][3] = (int(file["y_train"][3]) + 1) % 10
    found.add(listing(str(path)))
    write_h5(tmp_path / "val.h5", "val", 20)
    found.add(listing(f"shards:{tmp_path}"))
    path.rename(tmp_path / "other.h5")
    found.add(listing(str(tmp_path / "other.h5")))
    assert len(found) == 4


def test_a_listing_of_files_notices_their_manifest(tmp_path):
    found, sizes, ends = set(), set(), {"low": 1, "high": 1}
    manifest = {"source": {"name": "mnist", "checksum": ""}, "size": 24, "border": "zero"}
    for seed in (1, 2):
        path = tmp_path / f"{seed}" / "train.h5"
        path.parent.mkdir()
        write_h5(path, "train", 20)
        with h5py.File(path, "a") as file:
            text = json.dumps({**manifest, "train": ends, "test": ends, "seed": seed})
            file.attrs["foveate"] = text
        found.add(listing(str(path)))
        sizes.add(path.stat().st_size)
    assert len(found) == 2 and len(sizes) == 1


def test_a_listing_of_tars_notices_labels_and_places(tmp_path):
    picture, found = png(np.zeros((4, 4), np.uint8)), set()
    for number, (size, label) in enumerate([(0, b"0"), (0, b"1"), (7, b"1")]):
        (tmp_path / f"{number}").mkdir()
        members = [("a.png", picture + bytes(size)), ("a.cls", label)]
        write_tar(tmp_path / f"{number}" / "train.tar", members)
        found.add(listing(f"shards:{tmp_path / str(number)}"))
    assert len(found) == 3
