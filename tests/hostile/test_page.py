"""Attacks on the page, against the real server: files, addresses, other sites, floods, noise."""

import base64
import http.client
import itertools
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest
from demo_nets import GOOD, made_runs, saved, seven
from served_page import serving, written

pytest.importorskip("uvicorn", reason="pip install 'foveate[demo]'")
from foveate.demo.app import LIMIT
from foveate.demo.connections import PATIENCE, PER_CLIENT
from foveate.demo.server import serve
from foveate.errors import ConfigError

CASES, SEED = 2000, 15
JSON = {"Content-Type": "application/json"}
DIGIT = base64.b64encode(bytes(range(196)) * 4).decode()
PICTURE = base64.b64encode(GOOD["grey.png"]).decode()
VALID = {
    "look": {"digit": DIGIT, "zoom": 2.0, "label": 4},
    "take": {"data": PICTURE, "name": "seven.png", "zoom": 1},
    "offer": {"turn": 3},
    "scene": {"count": 2, "network": 0, "seed": 0},
}
FIELDS = [(name, field) for name, question in VALID.items() for field in question]


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    return made_runs(tmp_path_factory.mktemp("nets"), ["fovmax"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def address(folder, specs):
    with serving(folder, specs) as found:  # whose log must hold the address and nothing else
        yield urlsplit(found).netloc


@pytest.fixture(scope="module", autouse=True)
def drips(address):
    """Three clients that hold their connections; when the server closed each, in seconds."""
    port, begun, closed = int(address.split(":")[1]), time.monotonic(), {}
    head = f"POST /look HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    first = {
        "head": head.encode(),
        "body": f"{head}Content-Length: 9999\r\n\r\n".encode(),
        "reply": f"GET / HTTP/1.1\r\nHost: {address}\r\n\r\n".encode() * 900,
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


class Bait:
    """A picture that an attacker wants, under several names; it notices being read or fetched."""

    def __init__(self, folder):
        self.token = secrets.token_hex(16).encode()
        self.file = folder / "secret.png"
        self.file.write_bytes(saved(seven()) + self.token)
        self.link, self.pipe = folder / "link.png", folder / "pipe.png"
        self.link.symlink_to(self.file)
        os.mkfifo(self.pipe)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        os.utime(self.file, (1, 2))  # read before it was written: the next reading is recorded
        url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/secret.png"
        paths = [str(self.file), str(self.link), str(self.pipe)]
        up = "../" * 40 + str(self.file).lstrip("/")
        self.names = [*paths, up, "file://" + paths[0], url]
        self.values = self.names + [
            value
            for name in self.names
            for value in (
                {"path": name, "meta": {"_type": "gradio.FileData"}},
                {"url": name},
                [name],
            )
        ]

    def untouched(self):
        assert self.file.stat().st_atime == 1
        with pytest.raises(OSError, match="No such device"):  # nobody has it open for reading
            os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK)
        with pytest.raises(BlockingIOError):  # nobody has connected
            self.listener.accept()


@pytest.fixture
def bait(tmp_path, folder, address):
    made = Bait(tmp_path)
    with made.listener:
        yield made
        made.untouched()
    assert written(folder) == []
    for path in (folder / "cache").rglob("*"):
        assert path.is_dir() or made.token not in path.read_bytes()


def ask(address, method, path, body=None, headers=None, timeout=10):
    connection = http.client.HTTPConnection(address, timeout=timeout)
    with closing(connection):
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        connection.request(method, path, data, JSON if headers is None else headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


def raw(address, data, complete=True, timeout=10):
    """Send bytes as they are; what comes back until the server is done or closes."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as client:
        found = b""
        try:
            client.sendall(data)
            if not complete:
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                found += part
        except ConnectionError:  # the server closed before it had read everything
            pass
        return found


def test_the_bait_notices(tmp_path):
    """The traps work here: reading, opening and connecting are seen."""
    bait = Bait(tmp_path)
    with bait.listener:
        bait.untouched()
        bait.link.read_bytes()
        with pytest.raises(AssertionError):
            bait.untouched()


def test_the_exploit_of_gradio_finds_nothing(address, bait):
    for name in bait.names:
        data = {"data": [6, {"path": name, "meta": {"_type": "gradio.FileData"}}, 0]}
        status, reply = ask(address, "POST", "/gradio_api/call/draw", data)
        assert status == 404 and bait.token not in reply
        status, reply = ask(address, "GET", f"/gradio_api/file={name}")
        assert status == 404 and bait.token not in reply
    assert ask(address, "POST", "/gradio_api/upload", b"x")[0] == 404


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_no_field_opens_a_path_or_an_address(address, bait, name, field):
    for value in bait.values:
        status, reply = ask(address, "POST", f"/{name}", {**VALID[name], field: value})
        shown_only = field == "name" and isinstance(value, str)
        assert status == (200 if shown_only else 400), (value, reply)
        assert bait.token not in reply


@pytest.mark.parametrize("name", VALID)
def test_no_other_field_is_accepted(address, bait, name):
    for field, value in itertools.product(("path", "url", "file", "orig_name"), bait.values):
        status, reply = ask(address, "POST", f"/{name}", {**VALID[name], field: value})
        assert status == 400 and f"'{field}'" in json.loads(reply)["error"]


def test_only_the_files_of_the_page_are_served(address, bait):
    paths = [
        "/server.py", "/page.html", "/./page.css", "/page.css/", "/page.css/../server.py",
        "/..%2fserver.py", "/%2e%2e/networks.py", "/page.css%00.py", "//page.css", "/PAGE.CSS",
        "/../../../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd", "/%2fetc%2fpasswd", "/etc/passwd", "file:///etc/passwd", "etc/passwd",
        "http://127.0.0.1/etc/passwd", "/..\\..\\etc\\passwd", "*", f"/{bait.file}", str(bait.link),
        *(f"/{name}" for name in bait.names),
    ]  # fmt: skip
    for path in paths:
        request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        reply = raw(address, request.encode())
        assert re.match(rb"HTTP/1.1 40[04] ", reply), (path, reply)
        assert bait.token not in reply and b"root:" not in reply


def test_other_sites_are_refused(address):
    port = address.split(":")[1]
    foreign = ["http://evil.example", "null", f"http://127.0.0.1:{int(port) + 1}", "", address]
    foreign += [f"http://{address}.evil.example", f"http://evil.example/{address}"]
    for origin in foreign:
        assert ask(address, "GET", "/", headers={"Origin": origin})[0] == 403
        for name, question in VALID.items():
            assert ask(address, "POST", f"/{name}", question, {**JSON, "Origin": origin})[0] == 403
    for site in ("cross-site", "same-site", "same-origin, cross-site"):
        headers = {**JSON, "Sec-Fetch-Site": site}
        assert ask(address, "POST", "/offer", VALID["offer"], headers)[0] == 403
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""):
        assert ask(address, "GET", "/", headers={"Host": host})[0] == 400
        assert ask(address, "POST", "/offer", VALID["offer"], {**JSON, "Host": host})[0] == 400
    for name in ("127.0.0.1", "localhost"):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        headers = {**JSON, **own, "Sec-Fetch-Site": "same-origin"}
        assert ask(address, "POST", "/offer", VALID["offer"], headers)[0] == 200


def test_only_json_is_accepted(address):
    """Pages of other sites can send these without asking first."""
    question = json.dumps(VALID["offer"]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert ask(address, "POST", "/offer", question, {"Content-Type": kind})[0] == 415
    assert ask(address, "POST", "/offer", question, {})[0] == 415
    assert ask(address, "OPTIONS", "/offer")[0] == 405
    assert ask(address, "GET", "/offer?turn=1")[0] == 405


@pytest.mark.parametrize("host", ["", " ", "127.0.0.1 ", "a b", "a\0b", "a\nb", "<broadcast>", "é"])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(ConfigError, match="--host must be an address or a host name, got"):
        serve([], host, 0)


@pytest.mark.parametrize("host", ["a..b", "." * 70, "x" * 70, "256.256.256.256", "::g", "%"])
def test_a_host_that_cannot_be_bound_is_refused(host):
    with pytest.raises(ConfigError, match="cannot listen on"):
        serve([], host, 0)


def test_the_command_refuses_an_empty_host_in_one_line(specs):
    command = [sys.executable, "-m", "foveate", "demo", "--model", specs[0], "--host", ""]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --host must") and done.stderr.count("\n") == 1


def test_a_server_for_others_refuses_other_sites_and_ends_on_sigterm(specs, tmp_path):
    with (
        ExitStack() as left,
        serving(tmp_path, specs, "--host", "0.0.0.0", end=signal.SIGTERM) as at,
    ):
        port = urlsplit(at).port
        here, box = f"127.0.0.1:{port}", f"box.example:{port}"
        for origin, status in ((f"http://{box}", 200), ("http://evil.example", 403)):
            headers = {**JSON, "Host": box, "Origin": origin}
            assert ask(here, "POST", "/offer", VALID["offer"], headers)[0] == status
        # What is left to do when it is told to end: queued scenes, and half a request.
        for length in [*[None] * 20, 9999]:
            scene = json.dumps(VALID["scene"])
            client = left.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(
                f"POST /scene HTTP/1.1\r\nHost: {here}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {length or len(scene)}\r\n\r\n{scene}".encode()
            )


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


def test_idle_sockets_keep_nobody_out(address):
    with ExitStack() as stack:
        host, _, port = address.partition(":")
        idle = []
        for _ in range(250):
            idle.append(stack.enter_context(socket.create_connection((host, int(port)), 10)))
        begun = time.monotonic()
        assert ask(address, "POST", "/look", VALID["look"])[0] == 200
        assert time.monotonic() - begun < 2
        assert len(open_sockets(idle)) <= PER_CLIENT
        assert open_sockets(idle[-5:])  # the oldest had to go


def test_busy_clients_are_not_cut_off(address):
    """All places are taken by requests under way: none of them is closed for a newcomer."""
    found = []

    def visit():
        found.append(ask(address, "POST", "/look", VALID["look"], timeout=30)[0])

    visitors = [threading.Thread(target=visit) for _ in range(PER_CLIENT)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert found == [200] * PER_CLIENT


def junk(chance, deep=3):
    """A JSON value that no field expects, or now and then one that fits."""
    texts = [
        "",
        "x",
        "\0",
        "\ud800",
        "../" * 9,
        "é" * 300,
        DIGIT,
        PICTURE,
        PICTURE[:-7],
        "1",
        "NaN",
    ]
    numbers = [0, -1, 1, 2.5, 1e308, -0.0, 2**31, 2**63, 10**400, float("nan"), float("inf")]
    if deep and chance.random() < 0.2:
        values = [junk(chance, deep - 1) for _ in range(chance.randrange(4))]
        return values if chance.random() < 0.5 else {str(k): v for k, v in enumerate(values)}
    return chance.choice([*texts, *numbers, True, False, None, chance.randbytes(40).hex()])


def damaged(chance, data):
    """Bytes with some of them changed, removed or repeated."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        kind = chance.randrange(3)
        if kind == 0:
            data[place : place + 1] = chance.randbytes(1)
        elif kind == 1:
            del data[place : place + chance.randint(1, 30)]
        else:
            data[place:place] = chance.choice([b"\0", b"\xff\xfe", b"\r\n", b"}", b"[" * 20_000])
    return bytes(data)


def bad_body(chance, name):
    question = dict(VALID[name])
    for field in chance.sample(sorted(question), chance.randint(1, len(question))):
        if chance.random() < 0.2:
            del question[field]
        else:
            question[field] = junk(chance)
    if chance.random() < 0.15:
        question[chance.choice(["", "self", "path", "__class__", "x" * 3000])] = junk(chance)
    body = json.dumps(question).encode()
    forms = [
        body, body, body, damaged(chance, body), json.dumps(junk(chance)).encode(), b"",
        json.dumps(question).encode("utf-16"), b"[" * 100_000, b'{"zoom":' * 5000, b"9" * 9000,
        b'{"data": "' + base64.b64encode(damaged(chance, GOOD["moving.gif"])) + b'", '
        b'"name": "a.gif", "zoom": 1}',
    ]  # fmt: skip
    return chance.choice(forms)


def bad_request(number, address):
    """The bytes of a request, and whether it is complete."""
    chance = random.Random(f"{SEED} {number}")
    name = chance.choice(sorted(VALID))
    body = bad_body(chance, name)
    headers = [f"Host: {address}", "Content-Type: application/json", "Connection: close"]
    length, method, target, version = str(len(body)), "POST", f"/{name}", "1.1"
    if chance.random() < 0.4:  # and something is wrong with the head
        headers += chance.choices(
            [
                "Host: evil.example", "Content-Type: text/plain", "Origin: null", "no colon",
                "Cookie: " + "x" * 9000, "Expect: 100-continue", "Upgrade: websocket",
                "Connection: upgrade", "Range: bytes=0-", "X-Forwarded-For: evil",
                "Content-Length: 5", "Transfer-Encoding: gzip", "Content-Encoding: gzip",
                "Sec-Fetch-Site: cross-site", "X: é\x01", "Accept: \xff",
            ],
            k=chance.randint(1, 3),
        )  # fmt: skip
        length = chance.choice([length] * 4 + [str(LIMIT + 1), "-1", "x", "1e3", "9" * 30])
        method = chance.choice(["POST", "POST", "GET", "PUT", "OPTIONS", "TRACE", "x" * 99, "HEAD"])
        target = chance.choice([target, target, "/", "*", "/%ff%00", "//", "/look?" + "a" * 999])
        version = chance.choice(["1.1", "1.1", "1.1", "1.0", "2.0", "9"])
    head = "\r\n".join([f"{method} {target} HTTP/{version}", *headers, f"Content-Length: {length}"])
    request = head.encode("latin-1") + b"\r\n\r\n" + body
    if chance.random() < 0.15:
        chunks = b"".join(
            b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]) if part
        )
        head = "\r\n".join([f"POST /{name} HTTP/1.1", *headers, "Transfer-Encoding: chunked"])
        request = head.encode("latin-1") + b"\r\n\r\n" + chunks + b"0\r\n\r\n"
    if chance.random() < 0.15:
        return damaged(chance, request), False
    return request, length == str(len(body))


def test_random_bad_requests_are_refused_without_a_traceback(address, folder):
    chosen = os.environ.get("PAGE_CASE")
    seen = {}
    for number in [int(chosen)] if chosen else range(CASES):
        request, complete = bad_request(number, address)
        reply = raw(address, request, complete)
        again = f"PAGE_CASE={number} python -m pytest tests/hostile/test_page.py -k random"
        reply = reply.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        status = int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0
        fine = status == 200 or 400 <= status < 500 or (reply == b"" and not complete)
        assert fine, f"{reply[:200]}; {again}"
        log = (folder / "log").read_text()
        assert log.count("\n") == 1, f"{log}; {again}"
        seen[status] = seen.get(status, 0) + 1
    assert ask(address, "POST", "/look", VALID["look"])[0] == 200
    assert chosen or {200, 400, 403, 404, 405, 415} <= seen.keys(), seen


def test_clients_that_send_or_read_too_slowly_are_cut_off(drips):
    holders, closed = drips
    for holder in holders:
        holder.join(60)
    for kind, seconds in PATIENCE.items():
        assert seconds - 1 < closed[kind] < seconds + 5, closed
