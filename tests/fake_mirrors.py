"""A tiny data set, servers that give it, fail, lie or hang up, and an empty cache."""

import gzip
import hashlib
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from foveate.data import fetch as module
from foveate.data.fetch import DATASETS, Dataset, fetch
from foveate.data.idx import FILES
from foveate.errors import DataError

CONTENT = {name: bytes([index]) * 1000 for index, name in enumerate(FILES)}
TINY = Dataset(checksums={name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()})
LARGEST = 200_000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        self.server.answer(self, Path(self.path).name.removesuffix(".gz"))

    def reply(self, status, body=b"", *, promise=None):
        self.send_response(status)
        self.send_header("Content-Length", str(promise or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def good(handler, name):
    handler.reply(200, gzip.compress(CONTENT[name]))


def missing(handler, name):
    handler.reply(404)


def hangs_up(handler, name):
    packed = gzip.compress(CONTENT[name])
    handler.reply(200, packed[:20], promise=len(packed))


def lies(handler, name):
    handler.reply(200, gzip.compress(b"something else"))


def too_large(handler, name):
    handler.reply(200, bytes(LARGEST + 1))


def not_gzip(handler, name):
    handler.reply(200, b"\x1f\x8b<html>please log in</html>")


@pytest.fixture
def serve():
    """Start servers on this computer; each is (server, its address as a mirror)."""
    servers = []

    def start(answer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answer, server.requests = answer, []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server, f"http://127.0.0.1:{server.server_port}/tiny/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use an empty cache, no proxy, and no waiting between attempts."""
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "BACKOFF", 0.001)
    monkeypatch.setattr(module, "MAX_BYTES", LARGEST)
    return tmp_path / "cache" / "tiny"


@pytest.fixture
def use(monkeypatch):
    """Make `tiny` a data set that is to be had in these ways."""

    def change(*mirrors, **places):
        entry = replace(TINY, mirrors=tuple(mirrors), **places)
        monkeypatch.setitem(DATASETS, "tiny", entry)

    return change


def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"


def error_of_fetch():
    with pytest.raises(DataError) as caught:
        fetch("tiny")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
