"""The page for photographs without a browser: its networks, predictions and panels."""

import base64
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from demo_nets import base64_of, saved
from photo_runs import PHOTOGRAPHS, photo_config
from PIL import Image
from safetensors.torch import save_file
from tiny_runs import tiny

from foveate.cli.app import run
from foveate.data.recipes import Recipe
from foveate.data.sources import load_source
from foveate.demo.networks import predict_photo, to_photo_networks
from foveate.demo.panels import photo_channels
from foveate.demo.photo_page import EXAMPLES_SHOWN, PhotoPage
from foveate.demo.server import open_page
from foveate.errors import ConfigError, DataError
from foveate.evaluation.models import load_model
from foveate.evaluation.test_sets import open_test_set
from foveate.models.channels import ScaleChannels
from foveate.training.checkpoint import RunFolder
from foveate.training.loop import train

pytest.importorskip("torchvision", reason="pip install 'foveate[photos]'")
FILES = sorted(PHOTOGRAPHS.glob("test/*/*.jpg"))


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory):
    return str(train(photo_config(), tmp_path_factory.mktemp("runs") / "clothes").path)


@pytest.fixture(scope="module")
def page(photo_run):
    return open_page([photo_run])


def predicted(reply):
    return re.findall(r"<output>(.*?)</output>", reply["cards"])


@pytest.mark.parametrize("scale", [0.25, 1.0, 2.7])
def test_predictions_at_a_size_are_those_of_evaluate(page, photo_run, scale):
    test, network = open_test_set(RunFolder(Path(photo_run)), load_source), page.networks[1]
    batches = list(test.batches(network.model.net, scale))
    patches = torch.cat([images.inputs[0] for images, _ in batches])
    right, labels = 0, torch.cat([labels for _, labels in batches]).tolist()
    for index, label in enumerate(labels):
        pixels, name = page._read(index)
        _, view = predict_photo(page.networks, pixels, scale)
        torch.testing.assert_close(view.patches, patches[index], rtol=0, atol=0)
        assert name == network.model.classes[label]
        card = page.predict(index, scale, 0, 0)["cards"].partition('net1"')[2]
        assert (view.prediction.label == name) == ('class="right"' in card)
        right += view.prediction.label == name
    (measured,) = test.measure(network.model.net, [scale])
    assert right == round(measured.accuracy * len(labels))


def test_a_file_is_seen_as_the_same_picture_of_the_source(page):
    index = [path for path, _ in page.pictures.shards[0].items["test"]].index(FILES[4])
    sent = base64.b64encode(FILES[4].read_bytes()).decode()
    one, other = (page.predict(p, 0.7, 0.1, -0.2) for p in (index, sent))
    assert one["channels"] == other["channels"]
    assert 'class="right"' in one["cards"] or 'class="wrong"' in one["cards"]
    assert "right" not in other["cards"] and "wrong" not in other["cards"]


def test_one_run_is_compared_with_its_backbone_on_the_whole_frame(page, photo_run):
    whole, channels = page.networks
    assert (whole.title, channels.title) == ("clothes, whole frame", "clothes, 3 channels")
    assert whole.model.net.backbone is channels.model.net.backbone
    assert page.frame == whole.windows[0] == channels.windows[-1] == 64
    pixels, _ = page._read(0)
    image = replace(whole.model.recipe, base=24).transform()(pixels)[None]
    with torch.no_grad():
        expected = channels.model.net.channels(image)[0, -1].softmax(0)
    seen, _ = predict_photo(page.networks, pixels, 0.5)
    torch.testing.assert_close(torch.tensor(seen.prediction.probabilities), expected)


@pytest.mark.parametrize(("y", "x"), [(0.25, 0.0), (0.0, -0.25), (-0.125, 0.25)])
def test_the_place_moves_the_picture_under_the_windows(page, y, x):
    """A white square in the middle is found where the picture was moved to, in patch pixels."""
    picture = torch.zeros(3, 48, 48, dtype=torch.uint8)
    picture[:, 20:28, 20:28] = 255
    shift = (y * page.frame, x * page.frame)
    (view,) = predict_photo(page.networks[:1], picture, 1.0, shift)
    light = view.patches[0, 0] - view.patches[0, 0].min()
    places = torch.arange(16) + 0.5
    middle = [float((light.sum(d) * places).sum() / light.sum()) for d in (1, 0)]
    # 64 pixels of the frame are 16 of the patch; a symmetric filter keeps the middle of a square.
    assert middle == pytest.approx([8 + 16 * y, 8 + 16 * x], abs=0.01)


def test_the_winning_window_and_the_responses_are_those_of_the_network(page):
    reply, pixels = page.predict(2, 0.5, 0.1, 0.0), page._read(2)[0]
    _, view = predict_photo(page.networks, pixels, 0.5, (0.1 * page.frame, 0.0))
    prediction = view.prediction
    side = (16, 32, 64)[prediction.channel]
    drawn = re.findall(r'class="net1".*?width="([\d.]+)"', reply["windows"])
    assert drawn == [f"{min(side, 0.995 * 64):.1f}"]
    shown = re.findall(r'title="window of (\d+) pixels: (-?[\d.]+)"', reply["channels"])
    assert [int(window) for window, _ in shown] == [16, 32, 64]
    label = view.network.model.classes.index(prediction.label)
    strengths = [logits[label] for logits in prediction.channels]
    assert [float(s) for _, s in shown] == pytest.approx(strengths, abs=0.051)
    assert f"--at:{prediction.channel};" in reply["channels"]
    shares = [float(share) for share in re.findall(r"<b>([\d.]+)</b>", reply["cards"])]
    assert shares[:3] == sorted(shares[:3], reverse=True) and sum(shares) == pytest.approx(
        200, 0.01
    )


def test_the_page_draws_the_area_around_a_photograph_as_the_first_network_does(page, photo_run):
    def filled(*paddings):
        models = [load_model(photo_run) for _ in paddings]
        for model, padding in zip(models, paddings, strict=True):
            model.net.padding = padding
        shown = PhotoPage(to_photo_networks(models)).html()
        return re.search(r'data-padding="(.*?)"', shown)[1]

    assert 'data-padding="border"' in page.html()
    assert filled("border") == "border"
    assert filled("reflect", "border") == "reflect"
    assert filled(0) == "rgb(48.5% 45.6% 40.6%)"  # the mean of the recipe


def test_several_networks_are_compared_as_they_are(photo_run, tmp_path):
    one = train(photo_config(epochs="1", model__scales="4:4:1"), tmp_path / "whole").path
    page = open_page([str(one), photo_run])
    assert [n.title for n in page.networks] == ["whole", "clothes"]
    assert page.predict(0, 1, 0, 0)["cards"].count("<article") == 2
    alike = to_photo_networks([load_model(photo_run)] * 2)
    assert [n.title for n in alike] == [f"clothes ({photo_run})"] * 2
    (alone,) = open_page([str(one)]).networks
    assert alone.title == "whole"
    other = replace(load_model(photo_run), recipe=Recipe(name="photo", base=64))
    with pytest.raises(ConfigError, match="short sides of 48 and 64 pixels"):
        to_photo_networks([load_model(photo_run), other])


def test_digits_and_photographs_need_a_page_each(photo_run, tmp_path, capsys):
    digits = str(train(tiny(samples=32, epochs=1), tmp_path / "digits").path)
    assert run(["demo", "--model", digits, "--model", photo_run]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"error: {photo_run} classifies photographs and {digits} does not; run a separate demo "
        "for each"
    ]


def test_samples_are_pictures_of_every_class_and_others_follow(page):
    first, second = (page.samples(turn)["html"] for turn in (0, 1))
    assert re.findall(r'data-index="(\d+)"', first) == [str(k) for k in range(EXAMPLES_SHOWN)]
    assert re.findall(r'data-index="(\d+)"', second)[:2] == ["8", "0"]
    assert set(re.findall(r'title="(\w+)"', first)) == {"hat", "pants", "shoes"}
    assert first.count('src="data:image/jpeg;base64,') == EXAMPLES_SHOWN


def test_a_run_whose_pictures_are_gone_takes_files(photo_run):
    page = PhotoPage([changed(page_network(photo_run), source="folder:gone")])
    assert page.samples(0)["html"] == "" and 'class="more" hidden' in page.html()
    with pytest.raises(DataError, match="upload or pick one"):
        page.predict(0, 1, 0, 0)
    assert predicted(page.predict(base64_of(FILES[0].read_bytes()), 1, 0, 0))


def page_network(ref):
    return to_photo_networks([load_model(ref)])[1]


def changed(network, **changes):
    return replace(network, model=replace(network.model, **changes))


def test_a_sample_that_cannot_be_read_is_left_out(photo_run, tmp_path):
    for path in PHOTOGRAPHS.rglob("*.jpg"):
        copy = tmp_path / path.relative_to(PHOTOGRAPHS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(b"" if path == FILES[0] else path.read_bytes())
    page = PhotoPage([changed(page_network(photo_run), source=f"folder:{tmp_path}")])
    assert page.samples(0)["html"].count("<button") == EXAMPLES_SHOWN - 1


def test_grey_pictures_and_transparency_are_seen_as_in_training(page):
    grey = Image.open(FILES[0]).convert("L")
    colour = grey.convert("RGB")
    one, other = (page.predict(base64_of(saved(p)), 1, 0, 0) for p in (grey, colour))
    assert one["cards"] == other["cards"]
    clear = Image.new("RGBA", (60, 60), (255, 255, 255, 0))
    black = page.predict(base64_of(saved(Image.new("RGB", (60, 60)))), 1, 0, 0)
    assert page.predict(base64_of(saved(clear)), 1, 0, 0)["cards"] == black["cards"]


def test_class_names_and_titles_are_escaped(page):
    names = ("<script>a", "<script>b", "<script>c")
    odd = [replace(changed(n, class_names=names), title="<script>") for n in page.networks]
    reply = PhotoPage(odd).predict(0, 1, 0, 0)
    assert "<script>" not in "".join(reply.values())
    assert "&lt;script&gt;a" in reply["cards"]
    assert "<script>" not in PhotoPage(odd).samples(0)["html"]


def test_non_finite_logits_are_refused(page):
    broken = changed(page.networks[1], net=ScaleChannels(NotFinite(), (1.0,), 16))
    with pytest.raises(DataError, match="returns non-finite logits"):
        predict_photo([broken], page._read(0)[0], 1.0)


class NotFinite(torch.nn.Module):
    def forward(self, patches):
        return torch.full((len(patches), 3), torch.nan)


def test_a_model_of_timm_is_wrapped_with_the_names_of_its_classes(monkeypatch):
    timm = pytest.importorskip("timm", reason="pip install 'foveate[photos]'")
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained=False, **options: create(name, **options)
    )
    with pytest.raises(ConfigError, match="no trained weights here: add --pretrained"):
        open_page(["timm:lcnet_035"])
    page = open_page(["timm:lcnet_035"], pretrained=True)
    whole, channels = page.networks
    assert channels.title == "lcnet_035, 7 channels"
    assert channels.model.net.pool == "logsumexp" and channels.model.net.antialias
    assert [round(side) for side in channels.windows] == [56, 79, 112, 158, 224, 317, 448]
    assert whole.windows == (pytest.approx(448),)
    names = channels.model.classes
    assert (len(names), names[1]) == (1000, "goldfish")
    reply = page.predict(base64_of(FILES[0].read_bytes()), 0.5, 0, 0)
    assert reply["cards"].count("<li>") == 10  # five classes for each of the two
    few = load_model("timm:lcnet_035", num_classes=7)
    assert to_photo_networks([few])[1].model.classes == tuple("0123456")
    bare = replace(few, net=create("lcnet_035", num_classes=0))
    with pytest.raises(ConfigError, match="is not a classifier of RGB images"):
        to_photo_networks([bare])


def test_pretrained_is_for_timm(photo_run):
    with pytest.raises(ConfigError, match="add --model timm:NAME"):
        open_page([photo_run], pretrained=True)
    with pytest.raises(ConfigError, match="--weights applies to timm models only"):
        open_page([photo_run], weights="net.safetensors")
    with pytest.raises(ConfigError, match="--weights is for one timm model, got 2"):
        open_page(["timm:lcnet_035", "timm:resnet10t"], weights="net.safetensors")


def test_a_model_of_timm_is_opened_with_a_file_of_weights(tmp_path):
    timm = pytest.importorskip("timm", reason="pip install 'foveate[photos]'")
    net, path = timm.create_model("lcnet_035", num_classes=7), tmp_path / "net.safetensors"
    save_file(net.state_dict(), path)
    found = open_page(["timm:lcnet_035"], weights=path).networks[1].model
    assert torch.equal(found.net.backbone.classifier.weight, net.classifier.weight)
    assert len(found.classes) == 7


def test_one_channel_each_has_no_strip(page):
    pixels, _ = page._read(0)
    assert "None of these networks has several channels" in photo_channels(
        predict_photo(page.networks[:1], pixels, 1)
    )
