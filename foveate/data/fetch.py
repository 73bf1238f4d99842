"""Get the verified files of MNIST, Fashion-MNIST and CIFAR-10 from the cache or a mirror."""

import hashlib
import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from foveate.data.cifar import ARCHIVE, BATCHES, unpack
from foveate.data.idx import FILES, decode, find, gunzip
from foveate.errors import DataError
from foveate.files import cache_dir, write_bytes

TIMEOUT = 20.0  # seconds without a response
DEADLINE = 1800.0  # seconds for one file
ATTEMPTS = 3
BACKOFF = 1.0  # seconds before the second attempt; doubles after each
MAX_BYTES = 200_000_000  # per file, compressed or not; the largest has 184 million bytes

Report: TypeAlias = Callable[[str], None]
"""Called with a line of text for each file that is downloaded or found damaged."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The mirrors of a dataset, with files or one tar `archive`, and the sha256 of each file."""

    checksums: Mapping[str, str]
    mirrors: tuple[str, ...] = ()
    archive: str = ""


DATASETS = {
    "mnist": Dataset(
        checksums={
            FILES[0]: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            FILES[1]: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            FILES[2]: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            FILES[3]: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        mirrors=(
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
    ),
    "fashion-mnist": Dataset(
        checksums={
            FILES[0]: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            FILES[1]: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            FILES[2]: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            FILES[3]: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        mirrors=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
    ),
    "cifar10": Dataset(
        checksums={
            BATCHES[0]: "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            BATCHES[1]: "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            BATCHES[2]: "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            BATCHES[3]: "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            BATCHES[4]: "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            BATCHES[5]: "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        archive=ARCHIVE,
    ),
}


def fetch(dataset: str, report: Report | None = None) -> dict[str, bytes]:
    """Return the decoded, verified content of each file of `dataset`, by name.

    The cache is tried first, then each mirror for the files still missing, which are kept in the
    cache.
    """
    entry, say = DATASETS[dataset], report or _log.info
    cache = cache_dir() / dataset
    files = dict(_from_cache(cache, entry, say))
    failures: list[str] = []
    for mirror in entry.mirrors:
        missing = [name for name in entry.checksums if name not in files]
        if not missing:
            break
        try:
            for url, found in _download_files(mirror, entry.archive, say, missing):
                for name, content in found.items():
                    _verify(f"{name} in {url}", content, entry.checksums[name])
                    files[name] = content
                    _keep(cache / name, content)
        except (DataError, OSError) as error:
            failures.append(" ".join(str(error).split()))
    if len(files) < len(entry.checksums):
        tried = "; ".join([f"{cache} has no valid copy", *failures])
        raise DataError(
            f"cannot download {dataset}. Tried: {tried}. Connect to the network and try again, or "
            "use files that you have with cifar10:DIR or idx:DIR, or mnist-5k without a download"
        )
    return {name: files[name] for name in entry.checksums}


def _verify(origin: str, content: bytes, expected: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{origin} is not the published file: its sha256 is {found[:12]}..., expected "
            f"{expected[:12]}..."
        )


def _keep(path: Path, content: bytes) -> None:
    try:
        write_bytes(path, content)
    except OSError as error:  # the data is usable, and is downloaded again the next time
        _log.info("could not write %s to the cache: %s", path, error)


def _from_cache(folder: Path, entry: Dataset, say: Report) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file that `folder` has undamaged, under any of its names."""
    for name, sha256 in entry.checksums.items():
        for path in find(folder, name):
            try:
                content = decode(path, MAX_BYTES)
                _verify(str(path), content, sha256)
            except DataError as error:
                say(f"ignoring a damaged file: {error}")
            else:
                yield name, content
                break


def _download_files(
    mirror: str, archive: str, say: Report, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the URL of each file or archive at a mirror, and the content of the files in it."""
    for file in [archive] if archive else [f"{name}.gz" for name in names]:
        url = f"{mirror}{file}"
        say(f"downloading {url}")
        content = gunzip(_download(url), url, MAX_BYTES)
        yield url, unpack(content, url, names) if archive else {file.removesuffix(".gz"): content}


def _download(url: str) -> bytes:
    """Download `url`, and retry after temporary failures."""
    for attempt in range(ATTEMPTS):
        try:
            return _download_once(url)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if attempt == ATTEMPTS - 1 or not _may_pass(error):
                raise DataError(f"{url}: {error}") from error
        time.sleep(BACKOFF * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    # URLError means that there was no connection at all (unknown host, refused, unreachable).
    return not isinstance(error, urllib.error.URLError)


def _download_once(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "foveate"})
    end = time.monotonic() + DEADLINE
    data = bytearray()
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        expected = response.length or 0  # None if the server does not tell it
        while part := response.read1(1 << 16):
            data += part
            if len(data) > MAX_BYTES:
                raise DataError(f"{url}: more than {MAX_BYTES} bytes, too many for this file")
            if time.monotonic() > end:
                raise DataError(f"{url}: not finished after {DEADLINE:.0f} s")
    if len(data) < expected:
        raise http.client.IncompleteRead(bytes(data), expected - len(data))
    return bytes(data)
