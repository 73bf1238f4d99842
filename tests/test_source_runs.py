"""Runs on CIFAR-10 and on files like Fashion-MNIST: trained, evaluated, audited, and resumed."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_sources import idx_bytes, write_cifar_folder
from PIL import Image
from tiny_runs import MODEL, same_bits, timeless, tiny, weights

from foveate.cli.app import run
from foveate.data.cifar import CLASSES
from foveate.data.idx import FILES
from foveate.data.mirrored import draw_augmentation, draw_sizes, rescale_mirrored
from foveate.data.recipes import Recipe, find_recipe
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.report import ORIGINAL
from foveate.evaluation.curve import accuracy_over_scale
from foveate.evaluation.models import load_model
from foveate.evaluation.predict import prepare, prepare_search
from foveate.execution.plan import prepare as prepare_images
from foveate.models.backbone import ConvNet
from foveate.models.zoo import ModelConfig
from foveate.resampling import foveate
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import adapt_to_source, open_batches
from foveate.training.loop import train
from foveate.training.rescaling import find_zooms
from foveate.training.zooms import draw_zooms, prepare_zoomed

SMALL = ["--set", "model.features=[4,8]", "--set", "model.size=12", "--set", "model.hidden=8"]
SMALL += ["--set", "model.scales=1:2:1", "--device", "cpu"]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Sixty images in three colours, and twelve to test: the name of the source."""
    folder = tmp_path_factory.mktemp("cifar")
    write_cifar_folder(folder, count=12)
    return f"cifar10:{folder}"


@pytest.fixture(scope="module")
def trained(cifar, tmp_path_factory):
    """A run of the command line, with its usual recipe."""
    out = tmp_path_factory.mktemp("runs") / "run"
    command = ["train", "fovmax", "--source", cifar, *SMALL, "--epochs", "4", "--batch", "10"]
    assert run([*command, "--set", "learning_rate=0.02", "--out", str(out)]) == 0
    return RunFolder(out)


def config_for(cifar, **changes):
    model = replace(MODEL, channels=3)
    usual = {"model": model, "source": cifar, "size": 24, "recipe": find_recipe("mirrored")}
    return tiny(**{**usual, "samples": 0, "batch": 10, "epochs": 2, **changes})


def first_batch(config, split, epoch=0, order=None):
    """The prepared images of all indices, in one batch in the order of the split."""
    net = config.model.build().eval()
    batches = open_batches(config, split, net, torch.device("cpu"), False, load_source)
    order = torch.arange(len(batches)) if order is None else order
    (batch,) = batches(order, len(order), (config.seed, epoch))
    return batch.select()[0].inputs[0], net


def test_run_learns_its_colours_and_saves_its_recipe(trained, cifar, tmp_path, monkeypatch):
    config = trained.config()
    assert (config.size, config.scales, config.recipe) == (64, "1", find_recipe("mirrored"))
    assert (config.model.channels, trained.classes()) == (3, CLASSES)
    rescale, used = Recipe.rescale, []

    def recorded(self, images, scale, **frame):
        used.append((self, scale, frame["size"]))
        return rescale(self, images, scale, **frame)

    monkeypatch.setattr(Recipe, "rescale", recorded)
    command = ["evaluate", str(trained.path), "--scales", "0.5:2:1", "--out", str(tmp_path)]
    assert run(command) == 0
    assert used == [(config.recipe, scale, 64) for scale in (0.5, 1.0, 2.0)]
    (result,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [at["scale"] for at in result["scales"]] == [0.5, 1.0, 2.0]
    net, test = trained.net(), load_source(cifar).test
    own = accuracy_over_scale(net, test, [0.5, 1, 2], size=64, recipe=config.recipe)
    assert [at["accuracy"] for at in result["scales"]] == [at.accuracy for at in own]
    # Three classes and twelve images: chance gets 10 or more right once in two thousand times.
    assert min(at.accuracy for at in own) >= 10 / 12


def test_audit_and_prediction_see_what_evaluate_sees(trained, cifar, tmp_path):
    model, image = load_model(trained.path), load_source(cifar).test.images[3]
    assert model.recipe == find_recipe("mirrored") and model.photo is None
    assert (model.size, model.classes) == (64, CLASSES)
    assert set(model.metadata()["recipe"]) == {"name", "mean", "std"}
    assert load_model(trained.weights).recipe == model.recipe
    pixels = image.permute(1, 2, 0).numpy()
    for scale in (0.5, 1.0, 2.0):
        expected = model.recipe.rescale(image[None], scale, size=64)
        shown, inverted = prepare(pixels, model, None, scale)
        assert torch.equal(shown, expected) and not inverted
    Image.fromarray(pixels).save(tmp_path / "one.png")
    for more in ([], ["--search"]):
        command = ["predict", str(tmp_path / "one.png"), "--model", str(trained.path), *more]
        assert run(command) == 0
    whole, _ = prepare_search(pixels, model)
    torch.testing.assert_close(whole, model.recipe.rescale(image[None], 1.0, size=32))
    out = tmp_path / "audit"
    command = ["audit", str(trained.path), "--source", cifar, "--out", str(out)]
    assert run([*command, "--pool", "none"]) == 0
    found = json.loads((out / "audit.json").read_text())
    transform = found["transform"]
    assert (transform["recipe"], transform["size"]) == ("mirrored", [64, 64])
    own = Transform(size=(64, 64), recipe="mirrored", mean=model.recipe.mean, std=model.recipe.std)
    torch.testing.assert_close(own([image], 2.0), model.recipe.rescale(image[None], 2.0, size=64))
    curve = accuracy_over_scale(
        trained.net(), load_source(cifar).test, [0.5, 1], size=64, recipe=model.recipe
    )
    points = {at["scale"]: at["accuracy"]["value"] for at in found["audits"][ORIGINAL]["scales"]}
    assert len(points) == 9  # from 1/2 to 2, four per octave
    assert [points[0.5], points[1.0]] == [at.accuracy for at in curve]


def test_show_draws_frames_of_64(cifar, tmp_path, capsys):
    out = str(tmp_path / "shown.png")
    assert run(["show", cifar, "--samples", "2", "--scales", "0.5,2", "--out", out]) == 0
    assert run(["show", cifar, "--border", "zero", "--out", out]) == 2
    assert "the recipe mirrored has no border" in capsys.readouterr().err


# The recipe of a run


def test_recipe_follows_the_source_unless_it_is_given(cifar):
    usual = adapt_to_source(TrainConfig(source=cifar), load_source)
    assert (usual.size, usual.scales, usual.recipe) == (64, "1", find_recipe("mirrored"))
    given = {"size": "80", "scales": "1-2"}
    own = adapt_to_source(TrainConfig(source=cifar).changed(given), load_source, given)
    assert (own.size, own.scales) == (80, "1-2")
    grey = TrainConfig(source=cifar, recipe=Recipe())
    assert adapt_to_source(grey, load_source).recipe == Recipe()
    assert adapt_to_source(replace(grey, source="mnist-5k"), load_source).recipe is None
    cnn = TrainConfig(source=cifar, model=ModelConfig(form="plain", size=112))
    assert adapt_to_source(cnn, load_source).model.size == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "border=zero"], "the recipe mirrored has no border; leave it out"),
        (["--recipe", "photo"], "has none; use folder:DIR"),
        (["--recipe", "mirrored", "--set", "recipe.shift=0.5"], "must be a whole number"),
        (["--recipe", "mirrored", "--source", "mnist-5k"], "needs colour images"),
    ],
)
def test_wrong_settings_are_one_line(cifar, tmp_path, capsys, options, words):
    command = ["train", "fovmax", "--source", cifar, *SMALL, *options]
    assert run([*command, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error.replace("\n", " ") and error.startswith("error")


def test_study_accepts_the_recipe(cifar, tmp_path):
    text = f'name = "small"\ntest_scales = [0.5, 2]\n[grid]\nsource = ["{cifar}"]\n'
    text += 'preset = ["fovmax"]\n"recipe" = ["mirrored"]\n"recipe.shift" = [0, 2]\n'
    text += '[defaults]\nepochs = 1\n"model.features" = [4, 8]\n"model.size" = 12\n'
    (tmp_path / "study.toml").write_text(text + '"model.scales" = "1:2:1"\n')
    command = ["sweep", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]
    assert run([*command, "--device", "cpu"]) == 0
    lines = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2


# Augmentation in training


def test_training_images_are_shifted_and_flipped_by_seed_epoch_and_index(cifar):
    config = config_for(cifar, seed=5)
    images = load_source(cifar).train.images
    flips, offsets = draw_augmentation(len(images), 5, 1, True, 4)
    frames = config.recipe.rescale(images, 1.0, size=32)
    crops = [
        frame[:, y : y + 24, x : x + 24]
        for frame, (y, x) in zip(frames, offsets.tolist(), strict=True)
    ]
    crops = [c.flip(-1) if flip else c for c, flip in zip(crops, flips, strict=True)]
    found, net = first_batch(config, "train", epoch=1)
    expected = prepare_images(net, torch.stack(crops)).inputs[0]
    torch.testing.assert_close(found, expected)
    some = torch.tensor([7, 3, 20])
    assert torch.equal(first_batch(config, "train", 1, some)[0], found[some])
    assert not torch.equal(first_batch(config, "train", epoch=2)[0], found)


def test_training_images_have_sizes_by_seed_epoch_and_index(cifar):
    sizes = (0.5, 2.0)
    recipe = replace(find_recipe("mirrored"), flip=False, shift=0.0, sizes=sizes)
    config = config_for(cifar, seed=5, recipe=recipe)
    images = load_source(cifar).train.images
    factors = draw_sizes(len(images), 5, 1, sizes)
    assert factors.min() >= 0.5 and factors.max() <= 2 and len(factors.unique()) == len(images)
    frames = [
        recipe.rescale(image[None], float(factor), size=24)
        for image, factor in zip(images, factors, strict=True)
    ]
    found, net = first_batch(config, "train", epoch=1)
    torch.testing.assert_close(found, prepare_images(net, torch.cat(frames)).inputs[0])
    some = torch.tensor([7, 3, 20])
    torch.testing.assert_close(first_batch(config, "train", 1, some)[0], found[some])
    assert not torch.equal(first_batch(config, "train", epoch=2)[0], found)


@pytest.mark.parametrize("form", ["foveated", "plain"])
def test_zoomed_images_are_those_of_divided_scales_in_the_frame_of_their_scale(cifar, form):
    model = replace(MODEL, channels=3, form=form, size=24 if form == "plain" else 12)
    config = config_for(cifar, seed=5, zooms=(0.5, 2.0), model=model)
    images = load_source(cifar).train.images
    flips, offsets = draw_augmentation(len(images), 5, 1, True, 4)
    factors = draw_zooms(config.zooms, len(images), (5, 1)).tolist()
    assert min(factors) < 2**-0.5 and max(factors) > 2**0.5
    found, _ = first_batch(config, "train", epoch=1)
    for index, zoom in enumerate(factors):
        # The frame shows 24 / zoom pixels of an image at scale 1, an even number less or more than
        # 24. The recipe fills it with mirror images; its values are not stretched.
        side, (y, x) = 24 - 2 * round(12 * (1 - 1 / zoom)), offsets[index].tolist()
        frame = config.recipe.rescale(images[index, None], 1.0, size=side + 8)
        frame = frame[..., y : y + side, x : x + side]
        frame = frame.flip(-1) if flips[index] else frame
        resampled = foveate(frame, [1 / zoom], 24, antialias=True)[:, 0]
        if form == "plain":
            expected = resampled
        elif zoom < 1:
            expected = foveate(resampled, MODEL.scales, 12)
        else:
            expected = foveate(frame, [scale / zoom for scale in MODEL.scales], 12)
        torch.testing.assert_close(found[index, None], expected)
    some = torch.tensor([7, 3, 20])
    torch.testing.assert_close(first_batch(config, "train", 1, some)[0], found[some])
    still = replace(config, zooms=(1.0, 1.0))
    assert torch.equal(first_batch(config, "val")[0], first_batch(still, "val")[0])


def test_a_reduced_image_is_surrounded_by_mirror_images_as_in_the_test_set():
    """A cosine about the edge is its own mirror image, so its value is known in all the frame."""
    rate, place = math.pi / 32, (torch.arange(64) + 0.5 - 32) / 0.5 + 16
    line = 128 + 100 * (rate * (torch.arange(32) + 0.5)).cos()
    shown = rescale_mirrored(line.expand(1, 3, 32, 32), 1.0, size=128)
    recipe = find_recipe("mirrored")
    zooms = find_zooms(TrainConfig(size=64, zooms=(0.5, 1.0), recipe=recipe))
    assert zooms.margin == 32
    net = ConvNet(size=64, channels=3).eval()
    found = prepare_zoomed(net, shown, torch.tensor([0.5]), "float32", zooms).inputs[0]
    # Taylor: a symmetric kernel changes f by at most max|f''| / 2 times its second moment. Its
    # triangle has a half-width of 2 pixels, and taps at distances of 1/2 and 3/2.
    moment = (1.5 * 0.5**2 + 0.5 * 1.5**2) / 2
    bound = 100 * rate**2 / 2 * moment + 255 * 128 * torch.finfo(torch.float32).eps
    assert bound < 1  # of 200: without mirror images, the border would have one value
    inner = slice(1, -1)  # the outermost kernels reach beyond the frame
    expected = (128 + 100 * (rate * place).cos()).expand(1, 3, 64, 64)
    torch.testing.assert_close(found[..., inner], expected[..., inner], atol=bound, rtol=0)


@pytest.mark.parametrize("zooms", [(1.0, 1.0), (0.5, 2.0)])
def test_images_prepared_for_an_epoch_are_those_of_its_batches(cifar, zooms):
    """A GPU holds the augmented images of an epoch; a CPU prepares them batch by batch."""
    config = config_for(cifar, zooms=zooms)
    net = config.model.build().eval()
    streamed = open_batches(config, "train", net, torch.device("cpu"), False, load_source)
    assert streamed.resident is None
    held = streamed.make_resident(config)
    order = torch.tensor([7, 3, 20, 1])
    for epoch in (0, 1, 0):
        pairs = zip(streamed(order, 2, (5, epoch)), held(order, 2, (5, epoch)), strict=True)
        for (images, labels), (kept, same) in ((a.select(), b.select()) for a, b in pairs):
            torch.testing.assert_close(kept.inputs[0], images.inputs[0])
            assert torch.equal(same, labels)


@pytest.mark.parametrize("split", ["train", "val"])
def test_other_images_are_not_augmented(cifar, split):
    still = replace(find_recipe("mirrored"), flip=False, shift=0.0)
    config = config_for(cifar, recipe=still if split == "train" else find_recipe("mirrored"))
    images = getattr(load_source(cifar), split).images
    found, net = first_batch(config, split, epoch=1)
    plain = prepare_images(net, still.rescale(images, 1.0, size=24)).inputs[0]
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("zooms", [(1.0, 1.0), (0.5, 2.0)])
def test_interrupted_run_ends_as_if_nothing_had_been(cifar, tmp_path, zooms):
    config = config_for(cifar, zooms=zooms)
    whole = train(config, tmp_path / "whole")

    def stop(config, progress, steps):
        if (progress.epoch, progress.step) == (1, 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "part", callback=stop)
    again = train(config, tmp_path / "part")
    assert same_bits(weights(again.path), weights(whole.path))
    assert timeless(again.path) == timeless(whole.path)


def test_files_with_rescaled_images_take_no_recipe(tmp_path):
    command = ["generate", "mnist-large-scale", "--source", "mnist-5k", "--train-scales", "1"]
    command += ["--test-scales", "none", "--size", "16", "--out", str(tmp_path)]
    assert run(command) == 0
    (file,) = tmp_path.glob("*.h5")
    config = tiny(source=str(file), size=16, recipe=find_recipe("mirrored"))
    net = config.model.build()
    with pytest.raises(ConfigError, match="already rescaled; leave out recipe"):
        open_batches(config, "train", net, torch.device("cpu"), False, load_source)


# Files like Fashion-MNIST


def test_idx_files_are_evaluated_at_the_17_scales(tmp_path):
    generator, arrays = np.random.default_rng(0), []
    for count in (60, 20):
        labels = np.arange(count) % 2
        shapes = generator.integers(0, 40, (count, 28, 28))
        shapes[:, 10:18, 4:24] += 200 * labels[:, None, None]  # class 1 has a bar, class 0 none
        shapes[:, 4:24, 4:8] += 200
        arrays += [shapes.clip(0, 255), labels]
    for name, array in zip(FILES, arrays, strict=True):
        (tmp_path / name).write_bytes(idx_bytes(array))
    out, source = tmp_path / "run", f"idx:{tmp_path}"
    command = ["train", "fovmax", "--source", source, *SMALL, "--scales", "2", "--epochs", "2"]
    assert run([*command, "--out", str(out)]) == 0
    assert run(["evaluate", str(out)]) == 0
    (result,) = json.loads((out / "results.json").read_text())["runs"]
    scales = [at["scale"] for at in result["scales"]]
    assert len(scales) == 17 and (scales[0], scales[-1]) == (0.5, 8.0)
    assert all(sum(map(sum, at["confusion"])) == 20 for at in result["scales"])
