"""How the page is served: to this machine alone, in bounds, and with no file left behind."""

import asyncio
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bad_requests import VALID
from served_page import JSON, send_request, written

pytest.importorskip("uvicorn", reason="pip install 'foveate[demo]'")
from foveate.demo.web import HERE as DEMO
from foveate.demo.web import MAX_REQUEST_BYTES, make_app
from foveate.errors import ConfigError


def test_browsers_are_told_to_fetch_nothing_from_elsewhere(server):
    _, _, headers = send_request(server, "GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search("http|eval|script-src[^;]*inline|style-src [^;]*inline", policy)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_every_file_of_the_page_is_served(server):
    _, page, _ = send_request(server, "GET", "/")
    names = re.findall(r'(?:src|href)="([a-z.]+)"', page.decode())
    assert len(names) == 4
    for name in names:
        status, body, headers = send_request(server, "GET", f"/{name}")
        assert status == 200 and body == (DEMO / name).read_bytes()
        kind = "css" if name.endswith(".css") else "javascript"
        assert headers["content-type"] == f"text/{kind}; charset=utf-8"


def test_requests_that_are_too_large_are_refused(server):
    headers = {**JSON, "Content-Length": str(MAX_REQUEST_BYTES + 1)}
    assert send_request(server, "POST", "/upload", headers=headers)[0] == 413


def test_a_body_of_unknown_length_is_read_up_to_the_limit(server):
    def parts():
        for _ in range(MAX_REQUEST_BYTES // 2**20 + 1):
            yield b" " * 2**20

    assert send_request(server, "POST", "/upload", parts())[0] == 413


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"digit": "x", "zoom": 2, "label": null}', "pick one"),
        ('{"digit": "x"}', "missing a required argument: 'zoom'"),
        ('{"digit": "x", "zoom": 2, "path": "/"}', "unexpected keyword argument 'path'"),
        ("[1, 2]", "not a JSON object"),
        ("{", "not valid JSON"),
        ("[" * 10**6, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_a_request_of_the_wrong_form_gets_a_reason(server, body, words):
    status, reply, _ = send_request(server, "POST", "/predict", body)
    assert status == 400 and words in json.loads(reply)["error"]


def test_twenty_at_once_are_all_answered(server):
    questions = [{**VALID["predict"], "zoom": 0.5 * 16 ** (k / 20)} for k in range(20)]

    def reply(fields):
        return send_request(server, "POST", "/predict", fields)[:2]

    alone = [reply(fields) for fields in questions]
    with ThreadPoolExecutor(20) as visitors:
        assert list(visitors.map(reply, questions)) == alone
    assert len(set(alone)) == 20 and {status for status, _ in alone} == {200}


class Sums:
    """A page of another kind."""

    files = ("page.css",)

    def html(self):
        return "<p>sums</p>"

    def requests(self):
        return (self.add,)

    def add(self, one, other):
        if one < 0:
            raise ConfigError("one must not be negative")
        return {"sum": one + other}


def posted(app, path, fields):
    """What an application replies to a request: its status, and the JSON."""
    sent, headers = [], [(b"host", b"here"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}

    async def receive():
        return {"type": "http.request", "body": json.dumps(fields).encode()}

    async def send(message):
        sent.append(message)

    asyncio.run(app({**scope, "headers": headers}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_any_page_can_be_served():
    app = make_app(Sums())
    assert posted(app, "/add", {"one": 1, "other": 2}) == (200, {"sum": 3})
    refused = {"error": "one must not be negative"}
    assert posted(app, "/add", {"one": -1, "other": 2}) == (400, refused)
    app.state.closing = True
    refused = {"error": "the server is shutting down"}
    assert posted(app, "/add", {"one": 1, "other": 2}) == (400, refused)


def test_it_listens_on_loopback_alone(server):
    port = int(server.split(":")[1])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A" and int(line[1][-4:], 16) == port]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_port_that_is_taken_is_said(server, fovmax_run):
    command = [sys.executable, "-m", "foveate", "demo", "--model", fovmax_run]
    command += ["--port", server.split(":")[1]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose another --host or --port" in done.stderr


def test_nothing_is_written_outside_the_cache(server, server_folder):
    assert send_request(server, "GET", "/")[0] == 200
    assert written(server_folder) == []
