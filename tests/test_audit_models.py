"""Models of others in an audit: found by name or in a file, asked in any form, never unpickled."""

import logging
import os
import sys
import zipfile
from dataclasses import replace

import audited_nets
import pytest
import torch
from audited_nets import NAMES, SIZE, export, write_pictures
from made_images import random_images
from resampling_cases import foveate_plain
from torch import nn

from foveate.data.sources import load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.audited_images import open_images
from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.report import IN_CHANNELS, ORIGINAL, audit_with_channels
from foveate.evaluation.audit.transforms import choose_transform, classifier
from foveate.evaluation.audit.zero_shot import pair_with_channels
from foveate.evaluation.models import Model, load_model
from foveate.evaluation.third_party import Classifier
from foveate.models.zoo import ModelConfig

SCALES = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def net():
    return audited_nets.net().eval()


@pytest.fixture(scope="module")
def files(net, tmp_path_factory):
    """The network in every format, for any batch and for batches of exactly 3."""
    folder = tmp_path_factory.mktemp("models")
    paths = {kind: export(net, folder / f"net.{kind}") for kind in ("ts", "pt2", "onnx")}
    for kind in ("pt2", "onnx"):
        paths[f"{kind} of 3"] = export(net, folder / f"three.{kind}", batch=3)
    return paths


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return open_images(f"folder:{write_pictures(tmp_path_factory.mktemp('digits'))}", "all")


def audited(spec, pictures):
    model = load_model(str(spec), trust=True)
    return audit_with_channels(model, pictures, choose_transform(model, pictures), SCALES, batch=16)


def test_every_format_gives_the_same_audit(net, files, pictures):
    """Alone and in scale channels; logits may differ in the last bits of a float."""
    first = audited("audited_nets:net", pictures)
    assert first.plain.at_native.accuracy.value > 0.5  # it has learned something
    assert set(first.audits) == {ORIGINAL, IN_CHANNELS} and first.channels == SCALES
    assert first.transform.size == (SIZE, SIZE) and first.transform.channels == 1
    for kind, path in files.items():
        other = audited(path, pictures)
        for name, audit in first.audits.items():
            for a, b in zip(audit.overall, other.audits[name].overall, strict=True):
                assert (a.right, a.agreeing) == (b.right, b.agreeing), (kind, name)
                assert a.confidences == pytest.approx(b.confidences, abs=1e-3)


def test_loading_leaves_the_callers_logging_as_it_was(files):
    logging.disable(logging.ERROR)
    try:
        for path in files.values():
            load_model(str(path), trust=True)
            assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(logging.NOTSET)


def test_a_file_says_what_it_takes(files):
    assert load_model(str(files["onnx"])).shape == (None, 1, SIZE, SIZE)
    assert load_model(str(files["pt2"]), trust=True).shape == (None, 1, SIZE, SIZE)
    assert load_model(str(files["pt2 of 3"]), trust=True).shape == (3, 1, SIZE, SIZE)
    assert load_model(str(files["onnx of 3"])).shape == (3, 1, SIZE, SIZE)
    assert load_model(str(files["ts"]), trust=True).shape == (None,) * 4


def test_what_can_be_trained_on(files):
    assert load_model("audited_nets:net").trainable
    assert load_model(str(files["ts"]), trust=True).trainable
    for other in (str(files["onnx"]), str(files["pt2"]), "audited_nets:function"):
        assert not load_model(other, trust=True).trainable


@pytest.mark.parametrize("name", ["net", "instance", "function"])
def test_python_names_of_all_kinds(name):
    model = load_model(f"audited_nets:{name}")
    assert model.name == f"audited_nets:{name}"
    images = random_images(2, 1, SIZE, SIZE)
    known = audited_nets.net() if name == "net" else audited_nets.instance
    with torch.no_grad():
        asked = [m.eval() if isinstance(m, nn.Module) else m for m in (model.net, known)]
        torch.testing.assert_close(asked[0](images), asked[1](images))


def message(spec, kind=(ConfigError, DataError)):
    with pytest.raises(kind) as caught:
        load_model(str(spec), trust=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_models_that_cannot_be_found_are_said(tmp_path):
    assert "cannot import 'no_such_module' for the model" in message("no_such_module:net")
    assert "'missing' does not exist in 'audited_nets'" in message("audited_nets:missing")
    assert "'NAMES' is not a function in 'audited_nets'" in message("audited_nets:NAMES")
    assert "model must be given as package.module:factory" in message("audited_nets:")
    assert "needs 2 arguments" in message("audited_nets:with_two")
    assert "must return a callable model, got int" in message("audited_nets:number")
    failed = "audited_nets:failing failed (RuntimeError: no weights here)"
    assert failed in message("audited_nets:failing")
    assert "is not a run: it has no config.json" in message(tmp_path)


def test_files_that_are_no_models_are_said(files, tmp_path):
    for name in ("net.pt", "net.ts", "net.pt2"):
        (tmp_path / name).write_bytes(b"something else")
        assert "contains no TorchScript, torch.export or ONNX model" in message(tmp_path / name)
    (tmp_path / "net.onnx").write_bytes(b"something else")
    assert "cannot load the model in" in message(tmp_path / "net.onnx")
    (tmp_path / "net.safetensors").write_bytes(b"something else")
    assert "is not a complete safetensors file" in message(tmp_path / "net.safetensors")
    whole = files["ts"].read_bytes()
    (tmp_path / "cut.ts").write_bytes(whole[: len(whole) // 2])
    assert "contains no TorchScript" in message(tmp_path / "cut.ts")
    torch.save(audited_nets.net().state_dict(), tmp_path / "weights.pt")
    assert "pass a function that builds the model" in message(tmp_path / "weights.pt")


def test_onnx_without_its_runtime_says_how_to_get_it(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install 'foveate[onnx]'" in message(files["onnx"])


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_pickle_is_not_opened(tmp_path):
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "net.pt")
    assert "pickled models and weights are never loaded" in message(tmp_path / "net.pt")
    assert not (tmp_path / "sprung").exists()


def with_member(path, new, name, content):
    """A copy of a zip archive in which one member is another, or comes anew."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(new, "w") as copy:
        for member in old.namelist():
            if not member.endswith(name):
                copy.writestr(member, old.read(member))
        copy.writestr(f"{old.namelist()[0].partition('/')[0]}/{name}", content)
    return new


def test_a_pickle_inside_an_exported_program_is_not_opened(files, tmp_path):
    trap = tmp_path / "sprung"
    torch.save(Trap(trap), tmp_path / "trap.pt")
    pickled = (tmp_path / "trap.pt").read_bytes()
    inputs = with_member(files["pt2"], tmp_path / "a.pt2", "data/sample_inputs/model.pt", pickled)
    assert "cannot load the model in" in message(inputs)
    objects = with_member(files["pt2"], tmp_path / "b.pt2", "data/constants/opaque_obj_0", pickled)
    assert "member data/constants/opaque_obj_0 is neither a graph nor a tensor" in message(objects)
    library = with_member(files["pt2"], tmp_path / "c.pt2", "data/aotinductor/model/x.so", b"")
    assert "its member data/aotinductor/model/x.so" in message(library)
    assert not trap.exists()
    torch.load(tmp_path / "trap.pt", weights_only=False)
    assert trap.exists()  # it would have sprung
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    untouched = with_member(files["pt2"], tmp_path / "d.pt2", "extra/note.txt", b"hello")
    assert load_model(str(untouched), trust=True).shape[1] == 1


def test_a_graph_that_takes_no_images_is_said(tmp_path):
    class Flat(nn.Linear):
        pass

    program = torch.export.export(Flat(4, 2), (torch.zeros(2, 4),))
    torch.export.save(program, tmp_path / "flat.pt2")
    assert "shape (B, C, H, W), got (2, 4)" in message(tmp_path / "flat.pt2")


# Asking


def test_a_model_is_asked_in_parts_and_a_fixed_graph_in_full_ones():
    sizes = []

    def ask(images):
        sizes.append(len(images))
        return images.flatten(1)[:, :4]

    images = random_images(7, 1, 4, 4)
    for exact, expected in ((False, [3, 3, 1]), (True, [3, 3, 3])):
        sizes.clear()
        outputs = Classifier(ask, 4, 3, exact=exact)(images)
        torch.testing.assert_close(outputs, images.flatten(1)[:, :4], rtol=0, atol=0)
        assert sizes == expected
    assert classifier(Model(name="m", net=ask, shape=(5, 1, 4, 4)), 4, 100).batch == 5
    assert not classifier(Model(name="m", net=ask), 4, 100).exact


def test_the_number_of_channels_is_found_out(pictures):
    def channels(net, **options):
        return choose_transform(Model(name="m", net=net), pictures, **options).channels

    assert channels(audited_nets.instance) == 1
    assert channels(audited_nets.coloured()) == 3  # of grey pictures
    assert channels(lambda images: images.mean((1, 2, 3))[:, None].repeat(1, 10)) == 1
    with pytest.raises(ConfigError, match=r"failed on images of shape \(2, 1, 9, 9\)"):
        channels(audited_nets.instance, size=9)


@pytest.mark.parametrize(("recipe", "antialias"), [("frame", True), ("mnist-large-scale", False)])
@pytest.mark.parametrize("pool", ["max", "avg", "logsumexp", "probabilities"])
def test_in_channels_is_the_loop_over_windows(net, pool, recipe, antialias):
    """Channel s shows the middle of the image, size times s pixels wide, at the model's size."""
    images = random_images(2, 1, SIZE, SIZE)
    classifier = Classifier(net, 10, 3)
    with torch.no_grad():
        transform = Transform(size=(SIZE, SIZE), channels=1, recipe=recipe)
        wrapped = pair_with_channels(classifier, transform, SCALES, pool, None)[1]
        patches = foveate_plain(images, SCALES, SIZE, antialias=antialias)
        logits = torch.stack([net(patches[:, s]) for s in range(3)], 1).double()
        expected = {
            "max": logits.amax(1),
            "avg": logits.mean(1),
            "logsumexp": logits.exp().sum(1).log(),
            "probabilities": logits.softmax(2).mean(1).log(),
        }
        torch.testing.assert_close(wrapped(images).double(), expected[pool], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patches[:, 1], images)
    with pytest.raises(ConfigError, match="square input, got 8 x 9"):
        pair_with_channels(classifier, Transform(size=(8, 9)), SCALES, pool, None)


def test_the_windows_have_the_same_pixels_whatever_the_patch(net):
    pairs = [
        pair_with_channels(net, Transform(size=(SIZE, SIZE)), SCALES, "max", p) for p in (None, 20)
    ]
    whole, half = (inside for _, inside, _ in pairs)
    assert [whole.size * s for s in whole.scales] == [half.size * s for s in half.scales]
    assert (whole.size, half.size) == (SIZE, 20)


def test_patches_that_the_model_rejects_are_said(pictures):
    model = load_model("audited_nets:net")
    fixed = replace(model, net=nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 10)).eval())
    transform = choose_transform(fixed, pictures, size=SIZE)
    with pytest.raises(ConfigError, match=r"failed on images of shape \(32, 1, 9, 9\)"):
        audit_with_channels(fixed, pictures, transform, SCALES, patch=9)


def test_windows_beyond_the_input_see_the_picture_beyond_it(pictures):
    """The plain model sees the centre of what the channels see, as if it were audited alone."""
    transform = Transform(size=(9, 9), channels=1, border=0.25)
    images = pictures.first(3)
    plain, inside, side = pair_with_channels(nn.Flatten(), transform, SCALES, "max", None)
    wide = transform(images, 1.5, side)
    assert side == 19 and wide.shape == (3, 1, 19, 19)
    assert torch.equal(plain(wide), wide[..., 5:14, 5:14].flatten(1))
    torch.testing.assert_close(plain(wide), transform(images, 1.5).flatten(1), rtol=0, atol=1e-6)
    largest = inside.patches(wide)[:, 2]
    torch.testing.assert_close(
        largest, transform(images, 0.75), rtol=0, atol=0.1
    )  # resampled twice
    plain, _, side = pair_with_channels(nn.Identity(), transform, (0.25, 1.0), "max", None)
    assert side == 9 and isinstance(plain, nn.Identity)


def test_wrong_numbers_of_classes_are_said_before_anything_is_read(pictures):
    model = load_model("audited_nets:few")
    with pytest.raises(ConfigError, match=r"shape \(2, 10\), one per class, got \(2, 3\)"):
        choose_transform(model, pictures)


def test_the_transform_follows_model_and_pictures(pictures, net):
    model = load_model("audited_nets:net")
    usual = choose_transform(model, pictures)
    assert (usual.recipe, usual.size, usual.border) == ("frame", (SIZE, SIZE), "replicate")
    assert choose_transform(model, pictures, size=32, border=0.5, mean=(0.5,)).size == (32, 32)
    digits = open_images("mnist-5k", limit=3)
    made = choose_transform(model, digits)
    assert (made.recipe, made.size) == ("mnist-large-scale", (112, 112))
    known = {"source": "mnist", "trained_on": "2", "border": "zero", "config": ModelConfig()}
    ours = Model(name="run", net=net, shape=(None, 1, 24, 24), **known)
    transform = choose_transform(ours, pictures)
    assert (transform.recipe, transform.size, transform.border) == (
        "mnist-large-scale",
        (24, 24),
        "zero",
    )
    assert ours.native_scale == 2 and replace(ours, trained_on="1-4").native_scale == 1
    own = Model(name="file", net=net, mean=(0.4,), std=(0.2,))
    assert choose_transform(own, pictures, mean=(0.5,)).mean == (0.5,)
    found = choose_transform(own, pictures)
    assert (found.mean, found.std) == ((0.4,), (0.2,))
    unused = choose_transform(own, digits)  # such images are not normalised
    assert (unused.recipe, unused.mean, unused.std) == ("mnist-large-scale", (0.0,), (1.0,))
    with pytest.raises(ConfigError, match="not normalised; leave out mean and std"):
        choose_transform(model, digits, mean=(0.5,))
    fixed = Model(name="file", net=net, shape=(None, 1, 36, 36))
    assert choose_transform(fixed, pictures).size == (36, 36)


def test_classes_in_the_order_of_the_model(net, pictures, tmp_path):
    """The folder's classes under other names, which sort in another order."""
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    names = [f"{9 - k}-{name}" for k, name in enumerate(NAMES)]
    for name, new in zip(NAMES, names, strict=True):
        origin = pictures.source.removeprefix("folder:")
        (renamed / new).symlink_to(os.path.join(origin, name), target_is_directory=True)
    first = audited("audited_nets:net", pictures)
    right = audited("audited_nets:net", open_images(f"folder:{renamed}", "all", classes=names))
    wrong = audited("audited_nets:net", open_images(f"folder:{renamed}", "all"))
    for a, b in zip(first.plain.per_class, right.plain.per_class, strict=True):
        assert [c.right for c in a] == [c.right for c in b]
    assert not first.notes and not right.notes
    (doubt,) = wrong.notes
    assert (
        "not above chance; check that the classes of the model are 0-digit-9" in doubt
        and "--classes" in doubt
        and "(--mean, --std, --size)" in doubt
    )
    (doubt,) = audited("audited_nets:net", open_images("mnist-5k", limit=4)).notes
    assert "that it was trained on images of MNIST Large Scale" in doubt and "--mean" not in doubt


def test_digits_are_those_of_the_source():
    test = load_source("mnist-5k").test
    assert torch.equal(audited_nets.framed(test.images[:1])[..., 6:-6, 6:-6], test.images[:1] / 255)
