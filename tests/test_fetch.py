"""Fetching data sets: servers that work, fail, lie or hang up, and the cache behind them."""

import gzip
import hashlib
import logging
import multiprocessing
import sys
import threading
from dataclasses import replace
from pathlib import Path

import fake_mirrors
import pytest
from fake_mirrors import (
    CONTENT,
    LARGEST,
    TINY,
    closed_port,
    error_of_fetch,
    good,
    hangs_up,
    lies,
    missing,
    names_in,
    not_gzip,
    too_large,
)

from foveate.data import fetch as module
from foveate.data.fetch import DATASETS, cache_dir, fetch
from foveate.data.idx import FILES
from foveate.errors import ConfigError

cache, serve, use = fake_mirrors.cache, fake_mirrors.serve, fake_mirrors.use  # fixtures
LIE = hashlib.sha256(b"something else").hexdigest()[:12]
TRUTH = TINY.checksums[FILES[0]][:12]


def test_files_come_from_the_mirror_once_and_then_from_the_cache(serve, use, cache):
    server, address = serve(good)
    use(address)
    said = []
    assert fetch("tiny", said.append) == CONTENT
    assert list(fetch("tiny")) == list(FILES)
    assert server.requests == [f"/tiny/{name}.gz" for name in FILES]
    assert said == [f"downloading {address}{name}.gz" for name in FILES]
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


@pytest.mark.parametrize(
    ("answer", "attempts", "reason"),
    [
        (missing, 1, "404"),
        (hangs_up, 3, "IncompleteRead"),
        (lies, 1, f"is not the published file: its sha256 is {LIE}..., expected {TRUTH}..."),
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


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000, "-1", "many"])
def test_invalid_length_of_a_file_is_ignored(serve, use, length):
    def promise(handler, name):
        handler.reply(200, gzip.compress(CONTENT[name]), promise=length)

    use(serve(promise)[1])
    assert fetch("tiny") == CONTENT


def test_redirection_to_an_invalid_address_is_reported(serve, use):
    def elsewhere(handler, name):
        handler.send_response(302)
        handler.send_header("Location", "http://[nowhere/")
        handler.end_headers()

    use(serve(elsewhere)[1])
    assert "Invalid IPv6 URL" in error_of_fetch()


def test_refused_and_unknown_hosts_are_not_tried_again(use, monkeypatch):
    def never(seconds):
        raise AssertionError("waited for a host that is not there")

    monkeypatch.setattr(module.time, "sleep", never)
    closed = closed_port()
    use(closed, "http://nowhere.invalid/")
    message = error_of_fetch()
    assert closed in message
    assert "nowhere.invalid" in message


def test_when_all_fails_one_line_tells_what_was_tried_and_the_remedies(use, cache):
    use(closed_port())
    message = error_of_fetch()
    for part in ("cannot download tiny", "127.0.0.1", str(cache), "Connect", "idx:DIR", "mnist-5k"):
        assert part in message


def test_unwritable_cache_does_not_stop_the_work(serve, use, cache, caplog):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    use(serve(good)[1])
    with caplog.at_level(logging.INFO, logger=module.__name__):
        assert fetch("tiny") == CONTENT
    assert "could not write" in caplog.text


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


# The tables and the cache folder


def test_tables_name_the_four_files_with_full_checksums_and_https():
    for entry in (DATASETS["mnist"], DATASETS["fashion-mnist"]):
        assert tuple(entry.checksums) == FILES
        assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in entry.checksums.values())
        assert all(mirror.startswith("https://") and mirror[-1] == "/" for mirror in entry.mirrors)


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
