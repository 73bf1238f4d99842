"""The page for photographs in a real browser: upload, drag size and place, pick samples."""

import base64
import json

import pytest
from browsed_page import contrast, reply_count, wait_for_reply
from photo_runs import PHOTOGRAPHS, photo_config
from served_page import PHOTOS, serving, written

pytest.importorskip("uvicorn", reason="pip install 'foveate[demo]'")
pytest.importorskip("torchvision", reason="pip install 'foveate[photos]'")
HAT = PHOTOGRAPHS / "test" / "hat" / "0.jpg"
DOT = "canvas => [...canvas.getContext('2d').getImageData(448, 448, 1, 1).data]"
CORNER = "canvas => [...canvas.getContext('2d').getImageData(2, 2, 1, 1).data]"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    from foveate.training.loop import train

    run = train(photo_config(epochs="20"), tmp_path_factory.mktemp("run") / "clothes").path
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, [str(run)], program=("-c", PHOTOS)) as found:
        yield found
    assert written(folder) == []


def upload(page, path=HAT):
    before = reply_count(page)
    page.locator(".file input").first.set_input_files(path)
    wait_for_reply(page, before)


def resize(page, octave):
    before = reply_count(page)
    page.locator(".zoom input").fill(str(octave))
    wait_for_reply(page, before)


def window(page):
    return page.locator(".windows rect.net1").get_attribute("width")


def test_it_opens_with_a_sample_and_both_networks(page):
    titles = page.locator(".card h3").all_inner_texts()
    assert titles == ["clothes, whole frame", "clothes, 3 channels"]
    assert page.locator(".picks button").count() == 8
    assert page.locator(".windows rect").count() == 2
    assert page.locator(".right, .wrong").count() == 2


def test_an_uploaded_photograph_is_predicted_at_every_size(page):
    upload(page)
    assert page.locator(".right, .wrong").count() == 0  # its class is not known
    assert page.locator(".hint").is_hidden()
    seen = set()
    for octave in (-2, -1, 0, 1, 2):
        resize(page, octave) if octave else page.locator(".reset").click()
        page.wait_for_timeout(100)
        shown = (window(page), page.locator(".card").nth(1).locator(".top").inner_text())
        assert shown not in seen
        seen.add(shown)
    assert len({side for side, _ in seen}) > 1  # the winning window follows the size
    assert page.locator(".zoom output").inner_text() == "× 4.00"


def test_the_sent_photograph_is_small_and_gives_the_prediction_shown(page):
    """The browser sends one JPEG of at most 1,024 pixels, and nothing but the four fields."""
    large = page.evaluate(
        """async () => {
          const canvas = new OffscreenCanvas(3000, 1500), pen = canvas.getContext("2d");
          pen.fillStyle = "#c33"; pen.fillRect(500, 300, 2000, 900);
          const blob = await canvas.convertToBlob({ type: "image/png" });
          const reader = new FileReader();
          return new Promise((done) => {
            reader.onload = () => done(reader.result.split(",")[1]);
            reader.readAsDataURL(blob);
          });
        }"""
    )
    with page.expect_request("**/predict") as sent:
        page.locator(".file input").first.set_input_files(
            {"name": "large.png", "mimeType": "image/png", "buffer": base64.b64decode(large)}
        )
    fields = json.loads(sent.value.post_data)
    assert set(fields) == {"picture", "size", "y", "x"}
    size = page.evaluate(
        """async (data) => {
          const image = new Image();
          image.src = "data:image/jpeg;base64," + data;
          await image.decode();
          return [image.width, image.height];
        }""",
        fields["picture"],
    )
    assert size == [1024, 512]


def test_the_photograph_is_dragged_and_moved_by_keys(page):
    upload(page)
    resize(page, -1)
    middle, patches = page.locator("canvas").evaluate(DOT), page.locator(".strip img")
    first = patches.get_attribute("src")
    before, box = reply_count(page), page.locator("canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    with page.expect_request("**/predict") as sent:
        page.mouse.move(x + box["width"] / 4, y - box["height"] / 8)
    page.mouse.up()
    wait_for_reply(page, before)
    fields = json.loads(sent.value.post_data)
    assert (fields["x"], fields["y"]) == (
        pytest.approx(0.25, abs=0.01),
        pytest.approx(-0.125, abs=0.01),
    )
    assert page.locator("canvas").evaluate(DOT) != middle
    second = patches.get_attribute("src")
    assert second != first
    before = reply_count(page)
    page.locator("canvas").press("ArrowDown")
    wait_for_reply(page, before)
    assert patches.get_attribute("src") != second
    before = reply_count(page)
    page.locator(".reset").click()
    wait_for_reply(page, before)
    resize(page, -1)
    page.wait_for_timeout(100)
    assert patches.get_attribute("src") == first


def test_the_right_button_does_not_hold_the_photograph(page):
    upload(page)
    resize(page, -1)
    box, drawn = page.locator("canvas").bounding_box(), page.locator("canvas").evaluate(DOT)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down(button="right")  # its release goes to the menu
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 4)
    assert page.locator("canvas").evaluate(DOT) == drawn


def test_the_border_is_repeated_around_the_photograph(page, tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 64), (200, 40, 40)).save(tmp_path / "red.png")
    upload(page, tmp_path / "red.png")
    resize(page, -2)
    for place in (DOT, CORNER):
        red, green, blue, alpha = page.locator("canvas").evaluate(place)
        assert (red, alpha) == (pytest.approx(200, abs=3), 255) and max(green, blue) < 50


RED, BLUE, GREY = (200, 40, 40), (40, 40, 200), (128, 128, 128)


@pytest.mark.parametrize(
    ("padding", "seen"),
    [
        ("border", [RED, RED, RED, BLUE, BLUE]),
        ("reflect", [RED, BLUE, RED, BLUE, RED]),
        ("rgb(50% 50% 50%)", [GREY, GREY, RED, BLUE, GREY]),
    ],
)
def test_the_area_around_the_photograph_is_drawn_as_the_network_fills_it(
    page, tmp_path, padding, seen
):
    """At a quarter of the size, 12 of 64 pixels; colours at 6, 17, 29, 35 and 47 of them."""
    from PIL import Image

    def answer(route):
        html = route.fetch().text().replace('data-padding="border"', f'data-padding="{padding}"')
        route.fulfill(body=html, content_type="text/html")

    page.route("**/", answer)
    page.reload()
    page.wait_for_selector(".explore .card")
    image = Image.new("RGB", (64, 64), RED)
    image.paste(BLUE, (32, 0, 64, 64))
    image.save(tmp_path / "two.png")
    upload(page, tmp_path / "two.png")
    resize(page, -2)
    for place, colour in zip((6, 17, 29, 35, 47), seen, strict=True):
        for row in (1, 31, 63):
            at = f"getImageData({14 * place}, {14 * row}, 1, 1)"
            found = page.locator("canvas").evaluate(f"c => [...c.getContext('2d').{at}.data]")
            above = row != 31 and padding.startswith("rgb")
            assert found[:3] == pytest.approx(GREY if above else colour, abs=4), (place, row)


def test_a_dropped_file_is_taken(page):
    data = base64.b64encode(HAT.read_bytes()).decode()
    before = reply_count(page)
    page.evaluate(
        """(data) => {
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([bytes], "hat.jpg", { type: "image/jpeg" }));
          document.querySelector(".input").dispatchEvent(
            new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        }""",
        data,
    )
    wait_for_reply(page, before)
    assert page.locator(".right, .wrong").count() == 0


def test_a_file_that_is_no_picture_is_refused_and_the_page_goes_on(page):
    shown = page.locator(".cards").inner_text()
    page.locator(".file input").first.set_input_files(
        {"name": "notes.jpg", "mimeType": "image/jpeg", "buffer": b"no picture"}
    )
    page.wait_for_function(
        "() => document.querySelector('.notice').textContent.includes('notes.jpg')"
    )
    assert page.locator(".cards").inner_text() == shown
    upload(page)
    assert page.locator(".notice").is_hidden()


def test_samples_are_picked_and_others_offered(page):
    before = reply_count(page)
    page.locator(".picks button").nth(3).click()
    wait_for_reply(page, before)
    assert page.locator(".picks [aria-pressed=true]").get_attribute("data-index") == "3"
    page.locator(".more").click()
    page.wait_for_function("() => document.querySelector('.picks button').dataset.index === '8'")


def test_the_camera_is_offered_to_touch_screens_only(page, open_page):
    assert page.locator(".camera").is_hidden()
    phone = open_page(has_touch=True, is_mobile=True, viewport={"width": 390, "height": 800})
    assert phone.locator(".camera").is_visible()
    assert phone.locator(".camera input").get_attribute("capture") == "environment"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen_and_text_can_be_read(open_page, width, scheme):
    page = open_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for part in page.locator(".panel, .card, .lead, .picks, .strip, canvas").all():
        box = part.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    for what in (".lead", ".card h3", ".quiet", ".prediction output", ".top b", ".top span"):
        for part in page.locator(what).filter(visible=True).all():
            assert contrast(part) >= 4.5, what  # what the W3C asks for (WCAG 2, AA)
