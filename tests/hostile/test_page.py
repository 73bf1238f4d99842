"""Attacks on the page, against the real server: files, addresses, other sites, floods, noise."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from bad_requests import VALID, send_bad_requests
from bait import Bait
from served_page import JSON, raw, send_request, serving

pytest.importorskip("uvicorn", reason="pip install 'foveate[demo]'")
from foveate.demo.connections import PER_CLIENT, TIMEOUTS, TOTAL
from foveate.demo.server import serve
from foveate.errors import ConfigError

CASES = 2000
FIELDS = [(name, field) for name, fields in VALID.items() for field in fields]


@pytest.fixture(scope="module", autouse=True)
def drips(server):
    """Three clients that hold their connections; when the server closed each, in seconds."""
    port, begun, closed = int(server.split(":")[1]), time.monotonic(), {}
    head = f"POST /predict HTTP/1.1\r\nHost: {server}\r\nContent-Type: application/json\r\n"
    first = {
        "head": head.encode(),
        "body": f"{head}Content-Length: 9999\r\n\r\n".encode(),
        "reply": f"GET / HTTP/1.1\r\nHost: {server}\r\n\r\n".encode() * 900,
    }

    def hold(kind):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.bind(("127.0.0.9", 0))  # so that the floods below do not take its place
            client.connect(("127.0.0.1", port))
            try:
                client.sendall(first[kind])
                while time.monotonic() < begun + 60:
                    client.send(b"x")  # fails once the server has closed
                    time.sleep(0.2)
            except OSError:
                pass
            closed[kind] = time.monotonic() - begun

    holders = [threading.Thread(target=hold, args=(kind,), daemon=True) for kind in first]
    for holder in holders:
        holder.start()
    return holders, closed


@pytest.mark.parametrize("touch", ["read", "open", "connect"])
def test_the_bait_notices(tmp_path, touch):
    """The traps work here: reading, opening and connecting are seen."""
    bait = Bait(tmp_path)
    with bait.listener, ExitStack() as stack:
        bait.untouched()
        if touch == "read":
            bait.link.read_bytes()
            if bait.file.stat().st_atime == 1:
                pytest.skip("this file system does not record when files are read")
        elif touch == "open":
            stack.callback(os.close, os.open(bait.pipe, os.O_RDONLY | os.O_NONBLOCK))
        else:
            stack.enter_context(socket.create_connection(bait.listener.getsockname()))
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            bait.untouched()


def test_the_exploit_of_gradio_finds_nothing(server, bait):
    for name in bait.names:
        data = {"data": [6, {"path": name, "meta": {"_type": "gradio.FileData"}}, 0]}
        status, reply, _ = send_request(server, "POST", "/gradio_api/call/draw", data)
        assert status == 404 and bait.token not in reply
        status, reply, _ = send_request(server, "GET", f"/gradio_api/file={name}")
        assert status == 404 and bait.token not in reply
    assert send_request(server, "POST", "/gradio_api/upload", b"x")[0] == 404


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_no_field_opens_a_path_or_an_address(server, bait, name, field):
    for value in bait.values:
        status, reply, _ = send_request(server, "POST", f"/{name}", {**VALID[name], field: value})
        shown_only = field == "name" and isinstance(value, str)
        assert status == (200 if shown_only else 400), (value, reply)
        assert bait.token not in reply


@pytest.mark.parametrize("name", VALID)
def test_no_other_field_is_accepted(server, bait, name):
    for field, value in itertools.product(("path", "url", "file", "orig_name"), bait.values):
        status, reply, _ = send_request(server, "POST", f"/{name}", {**VALID[name], field: value})
        assert status == 400 and f"'{field}'" in json.loads(reply)["error"]


def test_only_the_files_of_the_page_are_served(server, bait):
    paths = [
        "/server.py", "/page.html", "/./page.css", "/page.css/", "/page.css/../server.py",
        "/..%2fserver.py", "/%2e%2e/networks.py", "/page.css%00.py", "//page.css", "/PAGE.CSS",
        "/../../../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd", "/%2fetc%2fpasswd", "/etc/passwd", "file:///etc/passwd", "etc/passwd",
        "http://127.0.0.1/etc/passwd", "/..\\..\\etc\\passwd", "*", f"/{bait.file}", str(bait.link),
        *(f"/{name}" for name in bait.names),
    ]  # fmt: skip
    for path in paths:
        request = f"GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n"
        reply = raw(server, request.encode())
        assert re.match(rb"HTTP/1.1 40[04] ", reply), (path, reply)
        assert bait.token not in reply and b"root:" not in reply


def test_other_sites_are_refused(server):
    port = server.split(":")[1]
    foreign = ["http://evil.example", "null", f"http://127.0.0.1:{int(port) + 1}", "", server]
    foreign += [f"http://{server}.evil.example", f"http://evil.example/{server}"]
    for origin in foreign:
        assert send_request(server, "GET", "/", headers={"Origin": origin})[0] == 403
        for name, fields in VALID.items():
            assert (
                send_request(server, "POST", f"/{name}", fields, {**JSON, "Origin": origin})[0]
                == 403
            )
    for site in ("cross-site", "same-site", "same-origin, cross-site"):
        headers = {**JSON, "Sec-Fetch-Site": site}
        assert send_request(server, "POST", "/samples", VALID["samples"], headers)[0] == 403
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""):
        assert send_request(server, "GET", "/", headers={"Host": host})[0] == 400
        assert (
            send_request(server, "POST", "/samples", VALID["samples"], {**JSON, "Host": host})[0]
            == 400
        )
    for name in ("127.0.0.1", "localhost"):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        headers = {**JSON, **own, "Sec-Fetch-Site": "same-origin"}
        assert send_request(server, "POST", "/samples", VALID["samples"], headers)[0] == 200


def test_only_json_is_accepted(server):
    """Pages of other sites can send these without asking first."""
    fields = json.dumps(VALID["samples"]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert send_request(server, "POST", "/samples", fields, {"Content-Type": kind})[0] == 415
    assert send_request(server, "POST", "/samples", fields, {})[0] == 415
    assert send_request(server, "OPTIONS", "/samples")[0] == 405
    assert send_request(server, "GET", "/samples?turn=1")[0] == 405


@pytest.mark.parametrize("host", ["", " ", "127.0.0.1 ", "a b", "a\0b", "a\nb", "<broadcast>", "é"])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(ConfigError, match="--host must be an address or a host name, got"):
        serve([], host, 0)


@pytest.mark.parametrize("host", ["a..b", "." * 70, "x" * 70, "256.256.256.256", "::g", "%"])
def test_a_host_that_cannot_be_bound_is_refused(host):
    with pytest.raises(ConfigError, match="cannot listen on"):
        serve([], host, 0)


def test_the_command_refuses_an_empty_host_in_one_line(fovmax_run):
    command = [sys.executable, "-m", "foveate", "demo", "--model", fovmax_run, "--host", ""]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --host must") and done.stderr.count("\n") == 1


def posted(server, name, more=""):
    """The bytes of a request."""
    body = json.dumps(VALID[name])
    head = f"POST /{name} HTTP/1.1\r\nHost: {server}\r\nContent-Type: application/json\r\n"
    return f"{head}{more}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def flood(stack, port, sources):
    """Open connections that send nothing, from these addresses."""
    return [
        stack.enter_context(socket.create_connection(("127.0.0.1", port), 10, (source, 0)))
        for source in sources
    ]


def open_sockets(clients):
    return [client for client in clients if not _ended(client)]


def _ended(client):
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_server_for_others_refuses_other_sites_and_ends_on_sigterm(fovmax_run, tmp_path):
    with (
        ExitStack() as left,
        serving(tmp_path, [fovmax_run], "--host", "0.0.0.0", end=signal.SIGTERM) as at,
    ):
        port = urlsplit(at).port
        here, box = f"127.0.0.1:{port}", f"box.example:{port}"
        for origin, status in ((f"http://{box}", 200), ("http://evil.example", 403)):
            headers = {**JSON, "Host": box, "Origin": origin}
            assert send_request(here, "POST", "/samples", VALID["samples"], headers)[0] == status
        idle = flood(left, port, [f"127.0.0.{2 + k % 10}" for k in range(250)])
        assert send_request(here, "POST", "/samples", VALID["samples"])[0] == 200
        assert len(open_sockets(idle)) <= TOTAL
        # What is left to do when it is told to end: queued scenes, and half a request.
        for _ in range(20):
            client = left.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(posted(here, "scene"))
        client = left.enter_context(socket.create_connection(("127.0.0.1", port)))
        client.sendall(posted(here, "scene")[:-1])


def test_idle_sockets_keep_nobody_out(server):
    with ExitStack() as stack:
        idle = flood(stack, int(server.split(":")[1]), ["127.0.0.1"] * 250)
        begun = time.monotonic()
        assert send_request(server, "POST", "/predict", VALID["predict"])[0] == 200
        assert time.monotonic() - begun < 2
        assert len(open_sockets(idle)) <= PER_CLIENT
        assert open_sockets(idle[-5:])  # the oldest had to go


def test_requests_under_way_are_not_cut_off(server):
    """Idle sockets beyond the limit take no place from a client that waits for its reply."""
    names = ["scene"] * 3 + ["predict"] * (PER_CLIENT - 3)
    with ExitStack() as stack:
        busy = flood(stack, int(server.split(":")[1]), ["127.0.0.1"] * PER_CLIENT)
        for client, name in zip(busy, names, strict=True):
            client.sendall(posted(server, name, "Connection: close\r\n"))
        time.sleep(0.5)  # the server has read them all; the scenes take longer
        flood(stack, int(server.split(":")[1]), ["127.0.0.1"] * 100)
        for client in busy:
            client.settimeout(30)
            assert client.recv(12) == b"HTTP/1.1 200"


def test_half_a_surrogate_pair_is_answered(server):
    status, reply, _ = send_request(
        server, "POST", "/upload", {"data": "", "name": "\ud800", "zoom": 1}
    )
    assert status == 400 and json.loads(reply)["error"].startswith("\ud800 is not an image")


def test_garbage_after_a_reply_closes_the_connection(server, server_folder):
    """The reply does not wait for the body, whose first chunk is then none."""
    whole = posted(server, "predict", "Transfer-Encoding: chunked\r\n")
    head = whole.partition(b"Content-Length")[0]
    with ExitStack() as stack:
        (client,) = flood(stack, int(server.split(":")[1]), ["127.0.0.1"])
        client.sendall(head.replace(b"application/json", b"text/plain") + b"\r\n")
        reply = client.recv(65536)
        while not reply.endswith(b"}"):  # its head and its body may come apart
            reply += client.recv(65536)
        assert reply.startswith(b"HTTP/1.1 415")
        client.sendall(b"no chunk\r\n")
        assert client.recv(65536) == b""
    assert (server_folder / "log").read_text().count("\n") == 1


def test_random_bad_requests_are_refused_without_a_traceback(server, server_folder):
    send_bad_requests(server, server_folder, "test_page.py", CASES)
    assert send_request(server, "POST", "/predict", VALID["predict"])[0] == 200


def test_clients_that_send_or_read_too_slowly_are_cut_off(drips):
    holders, closed = drips
    for holder in holders:
        holder.join(60)
    for kind, seconds in TIMEOUTS.items():
        assert seconds - 1 < closed[kind] < seconds + 5, closed
