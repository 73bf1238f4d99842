"""Requests to the page with something wrong in each, made from a seed."""

import base64
import json
import os
import random

from demo_nets import GOOD
from served_page import raw

from foveate.demo.uploads import MAX_FILE_BYTES

SEED = 15
DIGIT = base64.b64encode(bytes(range(196)) * 4).decode()
PICTURE = base64.b64encode(GOOD["grey.png"]).decode()
VALID = {
    "predict": {"digit": DIGIT, "zoom": 2.0, "label": 4},
    "upload": {"data": PICTURE, "name": "seven.png", "zoom": 1},
    "samples": {"turn": 3},
    "scene": {"count": 2, "network": 0, "seed": 0},
}
PHOTO_VALID = {
    "predict": {"picture": PICTURE, "size": 0.5, "y": 0.1, "x": -0.2},
    "samples": {"turn": 1},
}
"""Requests of the page for photographs."""


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


def bad_body(chance, valid, name):
    fields = dict(valid[name])
    for field in chance.sample(sorted(fields), chance.randint(1, len(fields))):
        if chance.random() < 0.2:
            del fields[field]
        else:
            fields[field] = junk(chance)
    if chance.random() < 0.15:
        fields[chance.choice(["", "self", "path", "__class__", "x" * 3000])] = junk(chance)
    body = json.dumps(fields).encode()
    forms = [
        body, body, body, damaged(chance, body), json.dumps(junk(chance)).encode(), b"",
        json.dumps(fields).encode("utf-16"), b"[" * 100_000, b'{"zoom":' * 5000, b"9" * 9000,
        b'{"data": "' + base64.b64encode(damaged(chance, GOOD["moving.gif"])) + b'", '
        b'"name": "a.gif", "zoom": 1}',
    ]  # fmt: skip
    return chance.choice(forms)


def bad_request(number, address, valid):
    """The bytes of a request, and whether it is complete."""
    chance = random.Random(f"{SEED} {number}")
    name = chance.choice(sorted(valid))
    body = bad_body(chance, valid, name)
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
        length = chance.choice([length] * 4 + [str(2 * MAX_FILE_BYTES), "-1", "x", "1e3", "9" * 30])
        method = chance.choice(["POST", "POST", "GET", "PUT", "OPTIONS", "TRACE", "x" * 99, "HEAD"])
        target = chance.choice([target, target, "/", "*", "/%ff%00", "//", "/predict?" + "a" * 999])
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


def send_bad_requests(server, folder, file, cases, fields=VALID):
    """Send requests that the server in `folder` must refuse without a traceback in its log.

    `file` is the file of the test, and PAGE_CASE in the environment the number of a single case.
    """
    chosen, seen = os.environ.get("PAGE_CASE"), set()
    for number in [int(chosen)] if chosen else range(cases):
        request, complete = bad_request(number, server, fields)
        reply = raw(server, request, complete).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        again = f"PAGE_CASE={number} python -m pytest tests/hostile/{file} -k random"
        status = int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0
        fine = status == 200 or 400 <= status < 500 or (reply == b"" and not complete)
        assert fine, f"{reply[:200]}; {again}"
        log = (folder / "log").read_text()
        assert log.count("\n") == 1, f"{log}; {again}"
        seen.add(status)
    assert chosen or {200, 400, 403, 404, 405, 415} <= seen, seen
