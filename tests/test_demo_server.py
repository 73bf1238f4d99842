"""How the page is served: to this machine alone, in bounds, and with no file left behind."""

import http.client
import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from demo_nets import made_runs
from served_page import serving, written

pytest.importorskip("uvicorn", reason="pip install 'foveate[demo]'")
from foveate.demo.app import HERE as DEMO
from foveate.demo.app import LIMIT


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    return made_runs(tmp_path_factory.mktemp("nets"), ["fovmax"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def address(folder, specs):
    with serving(folder, specs) as found:
        yield found


def ask(address, method, path, headers=None, body=None):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
    with closing(connection):
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        found = {key.lower(): value for key, value in reply.getheaders()}
        return reply.status, found, reply.read()


def test_browsers_are_told_to_fetch_nothing_from_elsewhere(address):
    _, headers, _ = ask(address, "GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search("http|eval|script-src[^;]*inline|style-src [^;]*inline", policy)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_every_file_of_the_page_is_served(address):
    _, _, page = ask(address, "GET", "/")
    names = re.findall(r'(?:src|href)="([a-z.]+)"', page.decode())
    assert len(names) == 4
    for name in names:
        status, headers, body = ask(address, "GET", f"/{name}")
        assert status == 200 and body == (DEMO / name).read_bytes()
        kind = "css" if name.endswith(".css") else "javascript"
        assert headers["content-type"] == f"text/{kind}; charset=utf-8"


def test_requests_that_are_too_large_are_refused(address):
    headers = {"Content-Length": str(LIMIT + 1), "Content-Type": "application/json"}
    assert ask(address, "POST", "/take", headers)[0] == 413


def test_a_body_of_unknown_length_is_read_up_to_the_limit(address):
    def parts():
        for _ in range(LIMIT // 2**20 + 1):
            yield b" " * 2**20

    assert ask(address, "POST", "/take", {"Content-Type": "application/json"}, parts())[0] == 413


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
def test_a_request_of_the_wrong_form_gets_a_reason(address, body, words):
    headers = {"Content-Type": "application/json"}
    status, _, reply = ask(address, "POST", "/look", headers, body)
    assert status == 400 and words in json.loads(reply)["error"]


def test_it_listens_on_loopback_alone(address):
    port = urlsplit(address).port
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A" and int(line[1][-4:], 16) == port]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_port_that_is_taken_is_said(address, specs):
    command = [sys.executable, "-m", "foveate", "demo", "--model", specs[0]]
    command += ["--port", str(urlsplit(address).port)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose another --host or --port" in done.stderr


def test_nothing_is_written_outside_the_cache(address, folder):
    assert ask(address, "GET", "/")[0] == 200
    assert written(folder) == []
