"""The page, served by the real command in a process of its own, with nothing else in its home."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

JSON = {"Content-Type": "application/json"}
TESTS = Path(__file__).parent
PHOTOS = "import torchvision_ops as t; t.declare_missing(); from foveate.cli import main; main()"
"""The command for networks of torchvision and timm beside any build of torch."""
PLACES = {"HOME": "home", "TMPDIR": "tmp", "FOVEATE_CACHE": "cache"}


@contextmanager
def serving(folder, specs, *options, end=signal.SIGINT, program=("-m", "foveate")):
    """Serve the page with these networks, and give its address; it has to end well on a signal."""
    for name in (*PLACES.values(), "here"):
        (folder / name).mkdir()
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        **{key: str(folder / name) for key, name in PLACES.items()},
    }
    models = [word for spec in specs for word in ("--model", spec)]
    command = [sys.executable, "-u", *program, "demo", *models, "--port", "0", *options]
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment, cwd=folder / "here", stdout=output, stderr=output
        )
        try:
            yield _address(server, log)
            server.send_signal(end)
            assert server.wait(20) == 0
        finally:
            server.kill()
            server.wait()
    assert log.read_text().count("\n") == 1, log.read_text()  # the address, and no trouble


def send_request(server, method, path, body=None, headers=None):
    """Send a request: the status of the reply, its body, and its headers by lower-case name."""
    connection = http.client.HTTPConnection(server, timeout=10)
    with closing(connection):
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        connection.request(method, path, data, JSON if headers is None else headers)
        reply = connection.getresponse()
        found = {key.lower(): value for key, value in reply.getheaders()}
        return reply.status, reply.read(), found


def raw(server, data, complete=True):
    """Send bytes as they are; what comes back until the server is done or closes."""
    host, _, port = server.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
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


def written(folder):
    """What the server left outside its cache."""
    return [path for name in ("home", "tmp", "here") for path in (folder / name).rglob("*")]


def _address(server, log):
    for _ in range(900):
        if found := re.search(r"http://[\d.]+:\d+", log.read_text()):
            return found[0]
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError("the page was not served within 90 seconds")
