"""What a run trains on: the order of its images, their scales, and data set files."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from tiny_runs import MODEL, STEPS, same_bits, tiny, weights

import foveate.data.pictures as folder
import foveate.training.session as session
from foveate.data.large_scale import rescale
from foveate.data.shards import open_shards
from foveate.data.sources import Source, Split, load_source
from foveate.data.store import FileSpec, ScaledFile, write
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.execution.plan import prepare
from foveate.scales import ScaleRange
from foveate.training.data import (
    Batches,
    adapt_to_source,
    draw_training_scales,
    open_batches,
)
from foveate.training.loop import train


def recorded_batches(config, folder, monkeypatch, stop=None):
    """The labels that each step of a run sees; `stop` is a step at which it is interrupted."""
    seen = []
    make = session.make_step

    def recording(*arguments, **options):
        step = make(*arguments, **options)

        def wrapped(batch):
            seen.append(batch.select()[1].tolist())
            return step(batch)

        return wrapped

    def callback(config, progress, steps):
        if progress.epoch * steps + progress.step == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "make_step", recording)
    train(config, folder, callback=callback)
    return seen


def test_an_epoch_shows_every_sample_once_in_an_order_of_its_own(tmp_path, monkeypatch):
    config = tiny(samples=50, epochs=2)
    seen = recorded_batches(config, tmp_path, monkeypatch)
    assert [len(batch) for batch in seen] == [16, 16, 16, 2] * 2
    first, second = ([label for batch in half for label in batch] for half in (seen[:4], seen[4:]))
    labels = load_source("mnist-5k").train.labels[:50].tolist()
    assert sorted(first) == sorted(second) == sorted(labels)
    assert first != second != labels


def test_the_order_of_images_does_not_depend_on_interruptions(tmp_path, monkeypatch):
    whole = recorded_batches(tiny(), tmp_path / "a", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        recorded_batches(tiny(), tmp_path / "b", monkeypatch, stop=STEPS + 2)
    rest = recorded_batches(tiny(), tmp_path / "b", monkeypatch)
    assert rest == whole[-len(rest) :]
    assert len(rest) == 2 * STEPS - 2


def batches_of(config, split):
    net, device = MODEL.build(), torch.device("cpu")
    return open_batches(config, split, net, device, True, load_source)


def test_samples_are_the_first_images():
    source, some = load_source("mnist-5k"), batches_of(tiny(samples=30), "train")
    assert len(some) == 30
    (batch,) = some(torch.arange(30), 30)
    assert torch.equal(batch.labels, source.train.labels[:30])
    images = rescale(source.train.images[:30], 1.0, size=24)
    assert torch.equal(batch.images.inputs[0], prepare(MODEL.build(), images).inputs[0])
    assert len(batches_of(tiny(samples=30), "val")) == 500
    assert len(batches_of(tiny(samples=0), "train")) == 3500


def test_a_range_of_scales_is_drawn_once_for_all_seeds_and_samples():
    config = tiny(scales="1-4", samples=0)
    scales = draw_training_scales(config, 3500, "train")
    assert 1 <= float(scales.min()) < 1.01 < 3.9 < float(scales.max()) <= 4
    assert torch.equal(scales, draw_training_scales(replace(config, seed=3), 3500, "train"))
    assert not torch.equal(
        scales, draw_training_scales(replace(config, data_seed=3), 3500, "train")
    )
    (few,) = batches_of(replace(config, samples=20), "train")(torch.arange(20), 20)
    images = rescale(load_source("mnist-5k").train.images[:20], scales[:20], size=24)
    assert torch.equal(few.images.inputs[0], prepare(MODEL.build(), images).inputs[0])


def test_a_list_of_scales_gives_each_image_one_of_them():
    scales = draw_training_scales(tiny(scales="1,2,3-4"), 3000, "train")
    shares = [(scales == 1).sum(), (scales == 2).sum(), ((scales >= 3) & (scales <= 4)).sum()]
    assert sum(map(int, shares)) == 3000
    # Each share is binomial with p = 1/3: four standard deviations are 4 sqrt(3000 · 2/9) = 103.
    assert all(abs(int(share) - 1000) < 104 for share in shares)


@pytest.mark.parametrize("scales", ["1-2", "1,2"])
def test_runs_on_several_scales_train(tmp_path, scales):
    assert train(tiny(scales=scales, epochs=1), tmp_path).finished


# Data set files


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    digits = load_source("mnist-5k")
    some = [Split(s.images[:90], s.labels[:90]) for s in (digits.train, digits.val, digits.test)]
    source = Source("mnist-5k", *some, classes=digits.classes, checksum="")
    one = ScaleRange(1.5, 1.5)
    return write(FileSpec(train=one, test=one, size=24), source, tmp_path_factory.mktemp("data"))


def test_a_streamed_run_ends_with_the_bits_of_a_resident_one(tmp_path, data_file, monkeypatch):
    config = tiny(source=str(data_file), samples=70)
    resident = weights(train(config, tmp_path / "resident").path)
    taken, images = [], ScaledFile.images

    def counting(self, split, chosen):
        taken.append(len(chosen))
        return images(self, split, chosen)

    monkeypatch.setattr(ScaledFile, "images", counting)
    monkeypatch.setattr(session, "CHUNK", 20)
    streamed = weights(train(config, tmp_path / "streamed", stream=True).path)
    assert same_bits(resident, streamed)
    assert max(taken) == 20  # never more at once than a batch, or a chunk of the validation
    firsts = taken.count(1)  # read on each opening, for their shape
    assert firsts < 10 and sum(taken) == firsts + 3 * (70 + 90)  # then each once an epoch


@pytest.fixture
def picture_folder(tmp_path):
    """90 digits as pictures, a subfolder for each of three classes."""
    digits, counts = load_source("mnist-5k").train, [0, 0, 0]
    for image, label in zip(digits.images, digits.labels.tolist(), strict=True):
        if label < 3 and counts[label] < 30:
            path = tmp_path / "pictures" / str(label) / f"{counts[label]:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(path)
            counts[label] += 1
    return tmp_path / "pictures"


def test_a_folder_streams_the_images_that_a_resident_run_has(tmp_path, picture_folder, monkeypatch):
    opened = []
    read = folder.read_picture
    monkeypatch.setattr(folder, "read_picture", lambda path: opened.append(path) or read(path))
    # The folder is listed on each opening, also if the test takes longer than it is new.
    monkeypatch.setattr("foveate.data.shards.SETTLED", 2**62)
    config = adapt_to_source(
        tiny(source=f"folder:{picture_folder}", samples=50), load_source, stream=True
    )
    assert (config.model.channels, config.model.classes) == (1, 3)
    assert len(opened) == 1
    for scales in ("1", "1-2"):
        config = replace(config, scales=scales)
        rest = (MODEL.build(), torch.device("cpu"))
        for split, count in (("train", 50), ("val", 11)):
            order = torch.randperm(count)
            streamed = open_batches(config, split, *rest, True, load_source)
            resident = open_batches(config, split, *rest, False, load_source)
            assert len(streamed) == len(resident) == count
            for one, other in zip(streamed(order, 16), resident(order, 16), strict=True):
                (some, tags), (same, labels) = one.select(), other.select()
                assert torch.equal(tags, labels)
                torch.testing.assert_close(some.inputs[0], same.inputs[0], atol=5e-5, rtol=0)
    opened.clear()
    run = train(replace(config, epochs=1), tmp_path / "run", stream=True)
    assert len(opened) == 2 + 50 + 11  # the first for either split, then each once
    assert run.finished


def test_a_folder_that_is_named_like_a_data_set_file_is_a_folder(tmp_path, picture_folder):
    source = f"folder:{picture_folder.rename(tmp_path / 'pictures.h5')}"
    config = adapt_to_source(tiny(source=source, samples=50, epochs=1), load_source)
    assert config.model.classes == 3
    assert train(config, tmp_path / "run").finished


def test_a_folder_whose_pictures_differ_is_said_when_it_is_read(tmp_path, picture_folder):
    config = adapt_to_source(
        tiny(source=f"folder:{picture_folder}", samples=50), load_source, stream=True
    )
    Image.new("L", (27, 28)).save(picture_folder / "1" / "005.png")
    with pytest.raises(DataError, match=r"005\.png has shape \(1, 28, 27\), but image"):
        train(config, tmp_path / "run", stream=True)


def test_streaming_reads_ahead_by_one_batch_only(data_file):
    net, config = MODEL.build(), tiny()
    images, device = open_shards(str(data_file)), torch.device("cpu")
    batches = Batches(images, "train", 90, net, device, config.precision)
    got = [len(batch.labels) for batch in batches(torch.arange(90), 32)]
    assert got == [32, 32, 26]
    assert list(batches(torch.arange(0), 32)) == []


def test_a_config_follows_its_file(data_file):
    config = adapt_to_source(tiny(source=str(data_file), size=112), load_source)
    assert (config.size, config.scales, config.border) == (24, "1.5", "replicate")
    assert (config.model.channels, config.model.classes) == (1, 10)


def test_official_names_say_the_scales(data_file, tmp_path):
    import h5py
    import numpy as np

    path = tmp_path / "mnist_large_scale_tr5_vl5_te5_outsize8-8_sctr1p000-4p000_scte1p000-4p000.h5"
    with h5py.File(path, "w") as file:
        for split in ("train", "val", "test"):
            file[f"x_{split}"] = np.zeros((5, 8, 8, 3), np.float32)
            file[f"y_{split}"] = np.arange(5.0)
    config = adapt_to_source(tiny(source=str(path)), load_source)
    assert (config.scales, config.size) == ("1-4", 8)
    assert (config.model.channels, config.model.classes) == (3, 5)
    kept = adapt_to_source(tiny(source=str(path)), load_source, explicit_fields={"model.classes"})
    assert kept.model.classes == 10


@pytest.mark.parametrize(
    ("changes", "stream", "words"),
    [
        (
            {"samples": 4000},
            False,
            "samples must be at most 3500, the size of the training set, got 4000",
        ),
        ({"model": replace(MODEL, classes=3)}, False, "set model.classes=10"),
        ({"model": replace(MODEL, channels=3)}, False, "set model.channels=1"),
        ({"model": replace(MODEL, form="plain")}, False, "set both to the same number"),
        ({"source": "nothing"}, False, "unknown data source"),
        ({"source": "none.h5"}, False, "no such file"),
    ],
)
def test_what_cannot_be_trained_is_said_before(tmp_path, changes, stream, words):
    with pytest.raises(FoveateError, match=words):
        train(tiny(**changes), tmp_path, stream=stream)


def test_files_that_do_not_fit_are_said_before(tmp_path, data_file):
    file = str(data_file)
    with pytest.raises(ConfigError, match=r"samples must be at most 90, .*, got 91"):
        train(tiny(source=file, samples=91), tmp_path / "a", stream=True)
    with pytest.raises(ConfigError, match="24 pixels, not 30; set size=24"):
        train(tiny(source=file, samples=0, size=30), tmp_path / "b")
    with pytest.raises(ConfigError, match="already rescaled; distortions need the source"):
        train(tiny(source=file, samples=0, distortions=1.0), tmp_path / "d")
    test_only = write(FileSpec(test=ScaleRange(1, 1), size=24), load_source("mnist-5k"), tmp_path)
    with pytest.raises(DataError, match="has no train images"):
        train(tiny(source=str(test_only), samples=0), tmp_path / "c", stream=True)
