"""The built documentation: no dead link, nothing from other servers, readable at every width."""

import os
import re
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
LOOKED_AT = ["index", "digits", "notebook", "commands", "api/models", "changelog"]

pytest.importorskip("mkdocs", reason="pip install 'foveate[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built without any warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """What each page loads, what it links to, and its anchors."""
    return {file: read(file) for file in site.rglob("*.html") if file.name != "404.html"}


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.anchors, self.links, self.loaded, self.inline, self.tag = set(), [], [], [], ""

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tag = tag
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        if named.get("src"):
            self.loaded.append(named["src"])
        if tag == "link" and named.get("rel") != "canonical":
            self.loaded.append(named["href"])

    def handle_endtag(self, tag):
        self.tag = ""

    def handle_data(self, data):
        if self.tag in ("script", "style"):
            self.inline.append(data)


def read(file):
    reader = Reader()
    reader.feed(file.read_text(encoding="utf-8"))
    return reader


def test_no_link_of_the_site_is_dead(site, pages):
    checked = 0
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.exists(), f"{file.relative_to(site)}: {link}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].anchors, f"{file.name}: {link}"
            checked += 1
    assert checked > 1000


def test_pages_load_nothing_from_other_servers(site, pages):
    remote = re.compile(r"""(?:import|url|src)\W{0,3}\(?["']?(?:https?:)?//[\w.]+""")
    for file, page in pages.items():
        assert not [url for url in page.loaded if urlsplit(url).netloc], file.name
        assert not [found[0] for text in page.inline for found in remote.finditer(text)], file.name
    for style in site.rglob("*.css"):
        assert not remote.search(style.read_text(encoding="utf-8")), style.name


def test_the_notebook_is_shown_with_its_figures(site):
    text = (site / "notebook.html").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") >= 3


@pytest.fixture(scope="module")
def served(site):
    """The address of the site, served on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_in_a_browser(browser, served, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    for name in LOOKED_AT:
        page.goto(f"{served}/{name}.html")
        page.wait_for_load_state("networkidle")
        excess = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert excess <= 0, f"{name} is {excess} pixels too wide"
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(int(value) for value in re.findall(r"\d+", shade)[:3]) / 3
        assert (light > 128) == (scheme == "light"), f"{name}: {shade}"
    context.close()
    outside = [url for url in requests if not url.startswith((served, "data:", "blob:"))]
    assert (outside, errors) == ([], [])
