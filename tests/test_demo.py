"""The page without a browser: what the networks are asked, what is taken, what is drawn."""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from demo_nets import BAD, GOOD, SCALES, base64_of, saved, seven
from PIL import Image
from tiny_runs import tiny

from foveate.cli.app import run
from foveate.data.large_scale import rescale
from foveate.demo import scenes, uploads
from foveate.demo.digit_page import DigitPage
from foveate.demo.networks import predict_digit
from foveate.demo.panels import MIN_ZOOM, accuracy, digit_channels
from foveate.demo.server import open_page
from foveate.demo.uploads import decode_digit, encode_digit, read_upload, to_mnist_digit
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.evaluation.models import load_model
from foveate.models.export import export
from foveate.models.sliding import LocalMaps, local_maps
from foveate.training.loop import train


@pytest.fixture(scope="module")
def digit_networks(specs):
    return open_page(specs).networks


@pytest.fixture(scope="module")
def page(digit_networks, digits):
    return DigitPage(digit_networks, digits)


def refusal(work, *arguments, **options):
    with pytest.raises(FoveateError) as caught:
        work(*arguments, **options)
    return str(caught.value)


def test_networks_come_with_titles_and_what_they_scored(digit_networks, specs):
    assert [c.title for c in digit_networks] == ["CNN", "FovMax", "FovAvg"]
    for network in digit_networks:
        assert tuple(network.accuracy) == SCALES
        assert network.tested == "100 test images of mnist-5k"


def test_results_with_another_pool_are_not_those_of_the_network(specs, tmp_path):
    copy = shutil.copytree(specs[1], tmp_path / "fovmax")
    assert open_page([str(copy)]).networks[0].accuracy
    assert run(["evaluate", str(copy), "--pool", "avg", "--scales", "2"]) == 0
    assert not open_page([str(copy)]).networks[0].accuracy


def test_two_networks_of_one_kind_are_told_apart(specs):
    titles = [c.title for c in open_page([specs[1], specs[1]]).networks]
    assert titles == [f"FovMax ({specs[1]})"] * 2


def test_networks_that_do_not_fit_the_page_are_refused(specs, tmp_path):
    with pytest.raises(ConfigError, match="at most 4 networks, got 5"):
        open_page(specs[:1] * 5)
    small = train(tiny(samples=32, epochs=1), tmp_path / "small").path
    with pytest.raises(ConfigError, match="frames of 112 and 24 pixels"):
        open_page([specs[0], str(small)])
    two = replace(tiny().model, classes=12)
    other = train(tiny(model=two, samples=32, epochs=1), tmp_path / "other").path
    for ref in (str(other), "fovmax"):  # 12 classes, and a network without trained weights
        with pytest.raises(ConfigError, match="was not trained on digits"):
            open_page([ref])
    export(load_model(small).net, tmp_path / "small.pt2", shape=(1, 24, 24))
    with pytest.raises(ConfigError, match=r"small\.pt2 is none; pass the run folder"):
        open_page([str(tmp_path / "small.pt2")], trust=True)


def test_a_file_of_weights_has_no_accuracy(specs):
    (network,) = open_page([f"{specs[1]}/weights.safetensors"]).networks
    assert (network.title, network.accuracy, network.tested) == ("FovMax", {}, "")


@pytest.mark.parametrize(
    "changes", [{"split": None}, {"sources": None}, {"sources": [{}]}, {"sources": 5}, {"runs": []}]
)
def test_results_of_another_form_are_not_shown(specs, tmp_path, changes):
    """A results.json can come from `save_results` with other entries, or from an editor."""
    run = shutil.copytree(specs[0], tmp_path / "cnn")
    about = json.loads((run / "results.json").read_text()) | changes
    kept = {key: value for key, value in about.items() if value is not None}
    (run / "results.json").write_text(json.dumps(kept))
    (network,) = open_page([str(run)]).networks
    assert (network.accuracy, network.tested) == ({}, "")


def test_the_answers_are_the_networks(digit_networks, digits):
    digit = digits.images[7:8]
    for zoom in (0.5, 1.7, 8.0):
        seen, views = predict_digit(digit_networks, digit, zoom)
        frame = rescale(digit, zoom, size=112)
        torch.testing.assert_close(seen, frame, rtol=0, atol=0)
        assert [view.network for view in views] == digit_networks
        for network, prediction, _ in views:
            with torch.no_grad():
                logits = network.model.net(frame)[0]
            assert prediction.probabilities == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
            assert prediction.label == str(int(logits.argmax()))


def test_channels_show_what_they_see_and_the_strongest_is_marked(digit_networks, digits):
    frame, views = predict_digit(digit_networks, digits.images[3:4], 2.0)
    net, prediction = digit_networks[1].model.net, views[1].prediction
    with torch.no_grad():
        torch.testing.assert_close(views[1].patches, net.patches(frame)[0], rtol=0, atol=0)
        said = net.channels(frame)[0]
        scale = float(net.select_scale(frame))
    strengths = said[:, int(prediction.label)]
    assert prediction.channel == int(strengths.argmax())
    assert prediction.scale == pytest.approx(scale, rel=1e-4)
    assert views[0].prediction.channel is None
    shown = re.findall(r'title="scale [\d.]+: (-?[\d.]+)"', digit_channels(views))[: len(strengths)]
    assert [float(value) for value in shown] == pytest.approx(strengths.tolist(), abs=0.051)


def test_a_reply_has_the_answers_of_all_and_one_winner_each(page, digit_networks, digits):
    digit = digits.images[5:6]
    reply = page.predict(encode_digit(digit), 2.5, int(digits.labels[5]))
    found = [view.prediction for view in predict_digit(digit_networks, digit, 2.5)[1]]
    said = re.findall(r"<output>(\d)</output>", reply["cards"])
    assert said == [prediction.label for prediction in found]
    for prediction in found:
        right = prediction.label == str(int(digits.labels[5]))
        assert f'class="{"right" if right else "wrong"}"' in reply["cards"]
    rows = [re.findall(r'<i class="(best)?"', row) for row in reply["channels"].split("bars")[1:]]
    strongest = [prediction.channel for prediction in found[1:]]
    assert [row.index("best") for row in rows] == strongest
    assert reply["frame"].count("<rect") == 2
    places = re.findall(r"--at:(\d+)", reply["channels"])
    assert places == [str(channel) for channel in strongest]


def test_without_a_true_label_nothing_is_called_right(page, digits):
    reply = page.predict(encode_digit(digits.images[:1]), 1.0)
    assert "right" not in reply["cards"] and "wrong" not in reply["cards"]


@pytest.mark.parametrize("zoom", [0.49, 8.01, float("nan"), "2", None, True])
def test_a_zoom_out_of_range_is_said(page, digits, zoom):
    assert "zoom must be" in refusal(page.predict, encode_digit(digits.images[:1]), zoom)


@pytest.mark.parametrize("digit", ["", "no base64!", base64_of(b"short"), None])
def test_what_is_no_digit_is_said(page, digit):
    assert "draw, upload or pick one" in refusal(page.predict, digit, 1.0)


WHOLE = ("turn", "label", "count", "network", "seed")


@pytest.mark.parametrize("value", [-1, 2**31, 10**4000, 1.0, "1", True, [[1]], {}, float("nan")])
@pytest.mark.parametrize("name", WHOLE)
def test_integers_of_a_request_are_checked(page, digits, name, value):
    digit, scene = encode_digit(digits.images[:1]), {"count": 2, "network": 0, "seed": 0}
    if name == "turn":
        reason = refusal(page.samples, value)
    elif name == "label":
        reason = refusal(page.predict, digit, 1.0, value)
    else:
        reason = refusal(page.scene, **{**scene, name: value})
    assert f"{name} must be an integer from" in reason and len(reason) < 150


def test_a_scene_needs_a_network_with_scale_channels(digit_networks, digits):
    plain = DigitPage(digit_networks[:1], digits)
    assert (
        refusal(plain.scene, count=2, network=0, seed=0)
        == "none of these networks has scale channels; add one with --model"
    )


def test_a_network_that_was_not_tested_has_no_curve(digit_networks):
    untested = [replace(c, accuracy={}, tested="") for c in digit_networks]
    assert "No test results" in accuracy(2.0, untested)
    some = [digit_networks[0], untested[1]]
    assert "not tested" in accuracy(2.0, some)


@pytest.mark.parametrize(
    ("zoom", "place", "nearest"), [(0.5, 0, 0.5), (8.0, 100, 8.0), (2.1, 51.8, 2.0)]
)
def test_the_cursor_stands_at_the_zoom(digit_networks, zoom, place, nearest):
    drawn = accuracy(zoom, digit_networks)
    assert f'class="cursor" style="left:{place:.1f}%"' in drawn
    assert place == pytest.approx(25 * np.log2(zoom / MIN_ZOOM), abs=0.05)
    share = 100 * digit_networks[0].accuracy[nearest]
    assert f"<b>CNN</b> {share:.1f} at scale {nearest:g}" in drawn


def test_titles_are_escaped(digit_networks, digits):
    odd = [replace(c, title="<script>", tested="<b>") for c in digit_networks]
    reply = DigitPage(odd, digits).predict(encode_digit(digits.images[:1]), 1.0)
    assert "<script>" not in "".join(reply.values())


def test_a_digit_survives_the_way_to_the_page_and_back(digits):
    digit = digits.images[9:10]
    assert torch.equal(decode_digit(encode_digit(digit)), digit)


def test_ten_digits_are_offered_one_of_each_class_others_each_turn(page, digits):
    first, second = (page.samples(turn)["html"] for turn in (0, 1))
    assert re.findall(r'data-label="(\d)"', first) == [str(k) for k in range(10)]
    found = re.findall(r'data-digit="([^"]+)"', first)
    assert len(found) == 10 and not set(found) & set(re.findall(r'data-digit="([^"]+)"', second))
    for k, text in enumerate(found):
        matching = (digits.images == decode_digit(text)).flatten(1).all(1)
        assert int(digits.labels[matching][0]) == k


@pytest.mark.parametrize("name", GOOD)
def test_pictures_of_all_kinds_become_the_same_digit(name):
    digit, note = read_upload(base64_of(GOOD[name]), name)
    plain, _ = read_upload(base64_of(GOOD["grey.png"]), "grey.png")
    # Compression moves a pixel of the strokes by a few of 255 grey levels, JPEG by some more.
    assert (digit.int() - plain.int()).abs().float().mean() < 4
    assert bool(note) == (name == "moving.gif")


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(page, name):
    data, words = BAD[name]
    said = refusal(page.upload, base64_of(data), name, 1.0)
    assert words in said and "\n" not in said and "BytesIO" not in said


def test_files_that_are_too_large_or_broken_on_the_way_are_refused(page, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_FILE_BYTES", 2**20)
    said = refusal(page.upload, base64_of(b"x" * (2**20 + 9)), "large.png", 1.0)
    assert said == "large.png is larger than 1 MiB; choose a smaller file"
    assert "was not transmitted completely" in refusal(page.upload, "§", "odd.png", 1.0)


def test_the_size_of_a_picture_is_known_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(uploads, "PIXELS", 1000)
    monkeypatch.setattr(uploads, "read_picture", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="120 × 160 pixels, more than 1,000"):
        read_upload(base64_of(GOOD["grey.png"]), "grey.png")


def pixels(image):
    return np.asarray(image)[..., None]


def test_a_digit_is_brought_to_the_form_of_mnist():
    digit = to_mnist_digit(pixels(seven()))[0, 0].double() / 255
    rows, columns = ((digit > uploads.INK).any(axis).nonzero() for axis in (1, 0))
    assert len(rows) in (20, 21) and len(columns) <= 20  # resampling may smear by one pixel
    assert digit.max() == 1
    places = torch.arange(28) + 0.5
    for mass in (digit.sum(0), digit.sum(1)):
        # Whole pixels: the centre is met to half a pixel.
        assert abs(float((mass * places).sum() / mass.sum()) - 14) <= 0.5


def test_place_polarity_and_size_of_a_drawing_do_not_matter():
    plain = seven()
    moved = Image.new("L", (300, 400), 0)
    moved.paste(plain, (150, 20))
    same = to_mnist_digit(pixels(plain))
    assert torch.equal(to_mnist_digit(pixels(moved)), same)
    assert torch.equal(to_mnist_digit(255 - pixels(plain)), same)
    double = to_mnist_digit(pixels(plain.resize((240, 320), Image.Resampling.NEAREST)))
    assert (double.int() - same.int()).abs().float().mean() < 2


def test_what_is_drawn_is_answered_like_an_upload(page):
    reply = page.upload(base64_of(saved(seven())), "the drawing", 3.0)
    assert reply["note"] == ""
    again = page.predict(reply["digit"], 3.0)
    assert again["cards"] == reply["cards"]


def test_a_reply_takes_at_most_five_times_the_networks_alone(page, digit_networks, digits):
    frame, digit = rescale(digits.images[:1], 2.0, size=112), encode_digit(digits.images[:1])

    def quickest(work):
        times = []
        for _ in range(15):
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
        return min(times)

    with torch.no_grad():
        bare = quickest(lambda: [c.model.net(frame) for c in digit_networks])
    assert quickest(lambda: page.predict(digit, 2.0)) <= 5 * bare


@pytest.mark.parametrize("largest", [scenes.LARGEST, 5.0])
def test_scenes_have_their_digits_inside_and_apart(digits, monkeypatch, largest):
    """Where digits are larger than there is room for, they are drawn smaller."""
    monkeypatch.setattr(scenes, "LARGEST", largest)
    for seed in range(20):
        for count in (2, 6, 10):
            scene, placed = scenes.compose(digits, count, seed)
            assert scene.shape == (1, 1, scenes.HEIGHT, scenes.WIDTH) and len(placed) == count
            for k, one in enumerate(placed):
                half = 14 * one.scale
                assert half - 1 <= one.y <= scenes.HEIGHT - half + 1
                assert half - 1 <= one.x <= scenes.WIDTH - half + 1
                assert scenes.SMALLEST <= one.scale <= largest
                for other in placed[:k]:
                    far = np.hypot(one.y - other.y, one.x - other.x)
                    room = scenes.REACH * (one.scale + other.scale)
                    assert far >= room - 1e-6 or one.scale == scenes.SMALLEST


def test_a_scene_depends_on_its_seed_alone(digits):
    first, again = scenes.compose(digits, 5, 3), scenes.compose(digits, 5, 3)
    assert torch.equal(first[0], again[0]) and first[1] == again[1]
    assert not torch.equal(first[0], scenes.compose(digits, 5, 4)[0])


@pytest.mark.parametrize("count", [1, 11])
def test_a_scene_of_too_few_or_too_many_digits_is_refused(page, count):
    said = refusal(page.scene, count=count, network=0, seed=0)
    assert said == f"count must be an integer from 2 to 10, got {count}"


def test_what_is_said_at_a_digit_is_read_at_its_place():
    logits, scales = torch.zeros(1, 10, 56, 80), torch.ones(1, 56, 80)
    logits[0, 7, 10, 30], scales[0, 10, 30] = 5.0, 3.0
    digit = scenes.PlacedDigit(y=42, x=121, scale=1.0, label=7)  # 42 // 4 = 10, 121 // 4 = 30
    assert scenes.predict_at(LocalMaps(logits, scales), digit) == (7, 3.0)


def test_the_maps_of_a_scene_are_drawn(page, digit_networks, digits):
    scene, placed = scenes.compose(digits, 4, 0)
    drawn = scenes.draw(digit_networks[1], scene, placed)
    assert drawn.count("<img") == 2
    with torch.no_grad():
        maps = local_maps(digit_networks[1].model.net, scene, scenes.STEP)
    labels = [scenes.predict_at(maps, digit)[0] for digit in placed]
    found = re.findall(r'<g class="(right|wrong)">.*?>(\d)</text>', drawn)
    assert found == [
        ("right" if label == digit.label else "wrong", str(label))
        for label, digit in zip(labels, placed, strict=True)
    ]
    assert [c.title for c in page.channel_networks] == ["FovMax", "FovAvg"]


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_the_remedy(specs, package):
    code = (
        f"import sys; sys.modules[{package!r}] = None; from foveate.cli.app import run; "
        f"sys.exit(run(['demo', '--model', {specs[1]!r}, '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'foveate[demo]'" in done.stderr
