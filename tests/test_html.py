"""The page builder: whole HTML, everything escaped, nothing fetched, the same each time."""

import base64
import io
import re
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from foveate.errors import DataError
from foveate.report.html import DOWN, INKS, STRONGEST, UP, Page

VOID = {"meta", "br", "img", "hr", "link", "input"}


EMPTY = Figure(figsize=(1, 1))


class Tree(HTMLParser):
    """Reads a page: its elements with attributes and text, and that every tag is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attrs": dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "attrs": dict(attrs), "text": ""})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def find(self, tag):
        return [element for element in self.elements if element["tag"] == tag]

    def texts(self, tag):
        return [element["text"] for element in self.find(tag)]


def drawing():
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.plot([1, 2, 3], [3, 1, 2], label="a <line>")
    axes.grid(color="0.9")
    axes.legend()
    return figure


def full_page():
    page = Page("A title", "What it is about.")
    page.section("First")
    page.text("One.", "Two with `code`.")
    page.notice("Mind this.")
    page.table(["name", "value"], [["a", 1.5], ["b", None]], colour=[[None, 1], [None, None]])
    page.figure(drawing(), drawing(), caption="Two drawings.")
    with page.details("More"):
        page.code("x = 1 < 2\n")
    page.provenance({"version": "1.0", "seed": 3})
    return page


def test_a_page_has_its_parts_in_order():
    tree = Tree(full_page().html())
    assert tree.texts("title") == ["A title"] and tree.texts("h1") == ["A title"]
    assert tree.texts("h2") == ["First", "Provenance"]
    assert tree.texts("p") == ["What it is about.", "One.", "Two with code.", "Mind this."]
    assert tree.texts("figcaption") == ["Two drawings."]
    assert tree.texts("pre") == ["x = 1 < 2\n"]
    assert tree.texts("details")[0].split() == ["More", "x", "=", "1", "<", "2"]
    assert tree.texts("dt") == ["version", "seed"] and tree.texts("dd") == ["1.0", "3"]
    order = [e["tag"] for e in tree.elements if e["tag"] in ("h1", "table", "figure", "dl")]
    assert order == ["h1", "table", "figure", "dl"]


def test_nothing_is_fetched_and_no_script_runs():
    text = full_page().html()
    tree = Tree(text)
    for element in tree.elements:
        for name, value in element["attrs"].items():
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert value.startswith(("data:", "#"))
            assert not name.startswith("on")
    assert not tree.find("script") and not tree.find("link") and not tree.find("iframe")
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    (policy,) = [e["attrs"]["content"] for e in tree.find("meta") if "http-equiv" in e["attrs"]]
    assert policy.startswith("default-src 'none'") and "http" not in policy


plain_text = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="`"))
markup = st.text("<>&\"'/=! abi;#x3")


@example('</code><script>alert(1)</script>&amp;" onload="x')
@given(plain_text | markup)
def test_any_text_comes_out_as_it_went_in(text):
    page = Page(text, "lead " + text)
    page.section(text)
    page.text(text)
    page.notice(text)
    page.table([text], [[text]], caption="." + text)
    page.figure(EMPTY, caption="." + text, alt="!" + text)
    page.code(text)
    with page.details(text):
        pass
    page.provenance({text: text})
    tree = Tree(page.html())
    for tag in ("title", "h1", "code", "summary", "dt", "dd"):
        assert tree.texts(tag) == [text]
    assert tree.texts("p") == ["lead " + text, text, text]
    assert tree.texts("th") == [text, text] and tree.texts("caption") == ["." + text]
    labels = [e["attrs"]["aria-label"] for e in tree.find("div") if "aria-label" in e["attrs"]]
    assert labels == ["!" + text]


def test_backticks_are_code_and_what_they_hold_is_escaped():
    page = Page("t")
    page.text("run `<b>` now, and ` alone")
    tree = Tree(page.html())
    assert tree.texts("p") == ["run <b> now, and ` alone"] and tree.texts("code") == ["<b>"]
    assert not tree.find("b")


def test_names_of_classes_and_files_are_never_code():
    name = "a `b` c"
    page = Page("t")
    page.table(["class", "like"], [[name, name]])
    page.gallery([(name, [(torch.zeros(1, 2, 2), name)])])
    page.provenance({"model": name})
    tree = Tree(page.html())
    assert not tree.find("code")
    assert tree.texts("th") == ["class", "like", name]
    assert [tree.texts(tag) for tag in ("td", "b", "figcaption", "dd")] == [[name]] * 4


def cells(page, tag="td"):
    return Tree(page.html()).find(tag)


def test_numbers_stand_at_the_right_and_words_at_the_left():
    page = Page("t")
    rows = [["a", 1, "1.5 [1, 2]", "x"], ["b", 1234, "−3", "1"], ["c", None, "–", ""]]
    page.table(["name", "count", "share", "mixed"], rows)
    classes = [cell["attrs"].get("class") for cell in cells(page, "th")[:4]]
    assert classes == [None, "number", "number", None]
    body = cells(page)
    assert [cell["attrs"].get("class") for cell in body[:3]] == ["number", "number", None]
    assert [cell["text"] for cell in body] == [
        "1", "1.5 [1, 2]", "x", "1,234", "−3", "1", "–", "–", ""
    ]  # fmt: skip


def test_colours_say_sign_and_strength():
    page = Page("t")
    tints = [[None, 1.0, -1.0, 0.5, -7.0, 0.0, float("nan")]]
    page.table(list("abcdefg"), [[1] * 7], colour=tints)
    styles = [cell["attrs"].get("style") for cell in cells(page)]
    full, half = f"{STRONGEST:.2f}", f"{STRONGEST / 2:.2f}"
    assert styles == [
        f"background: rgb({UP} / {full})",
        f"background: rgb({DOWN} / {full})",
        f"background: rgb({UP} / {half})",
        f"background: rgb({DOWN} / {full})",
        None,
        None,
    ]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """WCAG's ratio of two colours."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def palettes():
    style = re.search(r"<style>(.*)</style>", Page("t").html(), re.DOTALL)[1]
    light, dark = (
        {
            name: [int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)]
            for name, value in re.findall(r"--(\w+): #(\w{6})", block)
        }
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    )
    assert "prefers-color-scheme: dark" in style and light.keys() == dark.keys()
    return light, dark


def test_text_can_be_read_in_light_and_dark_on_every_tint():
    for palette in palettes():
        assert contrast(palette["ink"], palette["page"]) > 10
        assert contrast(palette["quiet"], palette["page"]) > 4.5  # WCAG AA for text
        assert contrast(palette["ink"], palette["notice"]) > 7
        for tint in (UP, DOWN):
            over = [int(c) / 255 for c in tint.split()]
            mixed = [
                STRONGEST * c + (1 - STRONGEST) * p
                for c, p in zip(over, palette["page"], strict=True)
            ]
            assert contrast(palette["ink"], mixed) > 4.5


def test_a_table_of_the_wrong_shape_is_refused():
    page = Page("t")
    with pytest.raises(AssertionError, match=r"2 headers above \[1, 2, 3\]"):
        page.table(["a", "b"], [[1, 2, 3]])
    with pytest.raises(AssertionError, match=r"2 headers above \[None\]"):
        page.table(["a", "b"], [[1, 2]], colour=[[None]])
    with pytest.raises(ValueError, match="zip"):
        page.table(["a", "b"], [[1, 2]], colour=[[None, None]] * 2)


def test_a_figure_follows_the_colours_of_the_page_and_is_the_same_each_time():
    page, again = Page("t"), Page("t")
    page.figure(drawing(), caption="c")
    again.figure(drawing(), caption="c")
    text = page.html()
    assert text == again.html()
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert not any(ink in svg for ink in INKS)
    assert "currentColor" in svg and "var(--line)" in svg
    assert (
        "fill: currentColor" in text[: text.index("</style>")]
    )  # letters have no fill of their own


def test_a_gallery_shows_small_pictures_with_their_pixels():
    page = Page("t")
    colour = torch.tensor([0.2, 0.5, 0.9])[:, None, None].expand(3, 400, 200)
    page.gallery([("<true>", [(colour, "one <x>"), (torch.full((1, 8, 8), 0.5), "two")])])
    text = page.html()
    Tree(text)
    assert "<b>&lt;true&gt;</b>" in text and 'alt="one &lt;x&gt;"' in text
    data = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    shown = [Image.open(io.BytesIO(base64.b64decode(part))) for part in data]
    assert [(image.mode, image.size) for image in shown] == [("RGB", (80, 160)), ("L", (8, 8))]
    assert shown[0].getpixel((40, 80)) == pytest.approx((51, 128, 230), abs=3)
    assert shown[1].getpixel((4, 4)) == pytest.approx(128, abs=2)


def test_save_writes_the_page(tmp_path):
    path = full_page().save(tmp_path / "new" / "page.html")
    assert path.read_text(encoding="utf-8") == full_page().html()
    with pytest.raises(DataError, match=r"cannot write .*page\.html"):
        full_page().save(path / "page.html")


@pytest.mark.parametrize("width", [375, 1280])
def test_a_long_name_leaves_room_for_the_numbers_of_its_row(browser, width):
    page = Page("Results")
    long = "pneumonoultramicroscopicsilicovolcanoconiosis_of_the_left_lower_lobe_with_a_remark"
    page.table(["class", *"abcdefghi"], [[long, *["99.3"] * 9], ["a dog", *["7.1"] * 9]])
    shown = browser.new_page(viewport={"width": width, "height": 800})
    shown.set_content(page.html())
    head, last = shown.locator("tbody tr:first-child > *").all()[::9]
    last.scroll_into_view_if_needed()
    held, number = head.bounding_box(), last.bounding_box()
    assert held["x"] + held["width"] <= number["x"] < width
    assert held["width"] <= max(0.4 * width, 384)
    shown.close()
