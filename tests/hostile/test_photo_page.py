"""Attacks on the page for photographs, against the real server."""

import itertools
import json
import re

import pytest
from bad_requests import PHOTO_VALID, send_bad_requests
from demo_nets import BAD, base64_of, saved
from photo_runs import photo_config
from PIL import Image
from served_page import PHOTOS, send_request, serving

pytest.importorskip("uvicorn", reason="pip install 'foveate[demo]'")
pytest.importorskip("torchvision", reason="pip install 'foveate[photos]'")
CASES = 600
FIELDS = [(name, field) for name, question in PHOTO_VALID.items() for field in question]


@pytest.fixture(scope="module")
def server(server_folder, tmp_path_factory):
    from foveate.training.loop import train

    run = train(photo_config(epochs="1"), tmp_path_factory.mktemp("run") / "clothes").path
    with serving(server_folder, [str(run)], program=("-c", PHOTOS)) as address:
        yield address.removeprefix("http://")


def refusal(server, name, **changes):
    status, reply, _ = send_request(server, "POST", f"/{name}", {**PHOTO_VALID[name], **changes})
    assert status == 400, reply
    reason = json.loads(reply)["error"]
    assert "\n" not in reason and len(reason) < 250, reason
    return reason


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_no_field_opens_a_path_or_an_address(server, bait, name, field):
    for value in bait.values:
        assert bait.token.decode() not in refusal(server, name, **{field: value})


@pytest.mark.parametrize("name", PHOTO_VALID)
def test_no_other_field_is_accepted(server, bait, name):
    for field, value in itertools.product(("path", "index", "file"), bait.values):
        assert f"'{field}'" in refusal(server, name, **{field: value})


@pytest.mark.parametrize("value", [-1, 9, 2**31, 10**400, True, None, "", [0], {"index": 0}])
def test_only_the_samples_have_numbers(server, value):
    assert re.search("picture|no image", refusal(server, "predict", picture=value))


@pytest.mark.parametrize("value", [0.24, 4.01, -1, 1e308, "1", None, True, [1], {}])
def test_a_size_out_of_range_is_refused(server, value):
    assert refusal(server, "predict", size=value).startswith("size must be a number from 0.25 to 4")


@pytest.mark.parametrize("field", ["y", "x"])
@pytest.mark.parametrize("value", [-1.01, 1.01, "0", None, [0]])
def test_a_place_out_of_range_is_refused(server, field, value):
    assert refusal(server, "predict", **{field: value}).startswith(f"{field} must be a number")


@pytest.mark.parametrize("name", [name for name in BAD if name != "blank.png"])
def test_bad_files_are_refused(server, name):
    reason = refusal(server, "predict", picture=base64_of(BAD[name][0]))
    assert re.search("uploaded file|no image", reason)


def test_a_picture_too_narrow_for_its_size_is_refused(server):
    data = base64_of(saved(Image.new("RGB", (1, 20_000))))
    reason = refusal(server, "predict", picture=data, size=4)
    assert reason.startswith("the image has 1x20000 pixels: with a short side of 192")


def test_random_bad_requests_are_refused_without_a_traceback(server, server_folder):
    send_bad_requests(server, server_folder, "test_photo_page.py", CASES, PHOTO_VALID)
    status, reply, _ = send_request(server, "POST", "/predict", PHOTO_VALID["predict"])
    assert status == 200 and json.loads(reply)["cards"].count("<output>") == 2
