"""The page in Chromium: what it asks for, what it logs, and whether its text can be read."""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launched():
    """A browser, or a reason to skip."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium here; 'apt-get install chromium' installs it")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def visiting(browser, address):
    """Open the page, and afterwards hold what it asked for against where it may ask."""
    asked, troubles, contexts = [], [], []

    def visit(**options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
        page.troubles = troubles
        page.goto(address)
        page.wait_for_selector(".explore .card")
        return page

    yield visit
    for context in contexts:
        context.close()
    here = urlsplit(address).netloc
    outside = [url for url in asked if urlsplit(url).netloc != here and not url.startswith("data:")]
    assert (outside, troubles) == ([], [])


def reply_count(page):
    return int(page.locator(".explore").get_attribute("data-replies") or 0)


def wait_for_reply(page, before):
    page.wait_for_function(
        "before => Number(document.querySelector('.explore').dataset.replies || 0) > before",
        arg=before,
    )


def contrast(part):
    """The ratio of luminances that the W3C defines, of the text of a part and its ground."""
    one, other = part.evaluate(
        """element => {
          let below = element;
          while (getComputedStyle(below).backgroundColor === "rgba(0, 0, 0, 0)") {
            below = below.parentElement;
          }
          return [element, below].map((e, k) => {
            const style = getComputedStyle(e);
            return (k ? style.backgroundColor : style.color).match(/[\\d.]+/g).map(Number);
          });
        }"""
    )

    def light(colour):
        parts = [c / 255 for c in colour[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))
