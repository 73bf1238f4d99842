"""How the page is served: to this machine alone, in bounds, and with no file left behind."""

import http.client
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from demo_nets import made_runs
from served_page import serving, written

from foveate.demo.server import LIMIT

pytest.importorskip("gradio", reason="pip install 'foveate[demo]'")


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
        return reply.status, dict(reply.getheaders()), reply.read()


def test_browsers_are_told_to_fetch_nothing_from_elsewhere(address):
    _, headers, _ = ask(address, "GET", "/")
    policy = {key.lower(): value for key, value in headers.items()}["content-security-policy"]
    assert "default-src 'self'" in policy and "http" not in policy


def test_requests_under_another_name_are_refused(address):
    assert ask(address, "GET", "/", {"Host": "elsewhere.example"})[0] == 400


def test_requests_that_are_too_large_are_refused(address):
    headers = {"Content-Length": str(LIMIT + 1), "Content-Type": "application/json"}
    assert ask(address, "POST", "/gradio_api/component_server/", headers)[0] == 413


def test_no_file_can_be_left_with_the_server(address):
    assert ask(address, "POST", "/gradio_api/upload", body=b"x")[0] == 404


def test_a_question_of_the_wrong_form_is_answered_in_words(address):
    _, _, config = ask(address, "GET", "/config")
    (part,) = (
        c["id"]
        for c in json.loads(config)["components"]
        if "server.look" in str(c["props"].get("js_on_load"))
    )
    question = {"data": ["x", 2], "component_id": part, "fn_name": "look", "session_hash": "a"}
    headers = {"Content-Type": "application/json"}
    status, _, body = ask(
        address, "POST", "/gradio_api/component_server/", headers, json.dumps(question)
    )
    assert status == 200 and "pick one" in json.loads(body)["error"]


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
