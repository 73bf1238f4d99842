"""The cache folder, atomic writes, and reading files with clear errors."""

import csv
import errno
import glob
import io
import json
import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from foveate.errors import ConfigError, DataError


class NamedBytes(io.BytesIO):
    """The content of a file in memory; error messages show its name."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.shown = name

    def __str__(self) -> str:
        return self.shown


def cache_dir() -> Path:
    """Return the folder for downloaded files: FOVEATE_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("FOVEATE_CACHE"):
        return Path(os.path.expanduser(chosen))
    try:
        import platformdirs
    except ImportError as error:
        raise ConfigError(
            "cannot find a cache folder; set FOVEATE_CACHE to a folder, or install platformdirs"
        ) from error
    return platformdirs.user_cache_path("foveate")


def check_regular(path: Path) -> Path:
    """Return `path`; raise a DataError for a FIFO, socket or device, which could block on open."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(
            f"{path} is a FIFO, a socket or a device, not a regular file; pass another file"
        )
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; flush it to disk and rename it on success.

    Temporary files of killed processes are removed by the next call for the same path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    temporary = path.with_name(f"{_prefix(path)}{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:  # Windows requires write access for fsync
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except OSError as error:
        if error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
            del error.filename2  # the message of an error with None ends with "-> None"
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; see `escape_bytes`."""
    write_bytes(path, escape_bytes(text).encode())


def escape_bytes(text: str) -> str:
    r"""Return `text` with the bytes of file names that are not UTF-8 as escapes, such as \udcfc."""
    return text.encode(errors="backslashreplace").decode()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table to `path` atomically."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    write_text(path, text.getvalue())


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8 text, with or without a byte order mark."""
    return check_regular(path).read_text(encoding="utf-8-sig")


def reason_of(error: BaseException) -> str:
    """Return the first line of an error message, or the error type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Convert any error raised in the block into a one-line DataError that names `path`."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"no such file: {path}; check the path") from None
    except Exception as error:  # h5py and tarfile raise anything from KeyError to MemoryError
        reason = reason_of(error)
        raise DataError(f"cannot read {path}: {reason}; create or download it again") from None


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError raised in the block, which writes `path`, into a DataError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or reason_of(error)
        raise DataError(f"cannot write {path}: {reason}; choose another folder") from None


def parse_json(text: str) -> Any:
    """Parse JSON; raise a ValueError if the text is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def check_folder(path: Path) -> None:
    """Raise an OSError unless `path` is a writable folder, or can be created as one."""
    for place in (path, *path.absolute().parents):
        try:
            mode = os.stat(place).st_mode
        except FileNotFoundError:
            if place.is_symlink():
                raise
            continue
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return


def _prefix(path: Path) -> str:
    return f".{path.name}.{socket.gethostname()}."


def _sweep(path: Path) -> None:
    for leftover in path.parent.glob(f"{glob.escape(_prefix(path))}*.tmp"):
        pid = leftover.name.split(".")[-2]
        if pid.isdigit() and not is_alive(int(pid)):
            leftover.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this machine, owned by any user."""
    if sys.platform == "win32":  # where `os.kill(pid, 0)` would terminate the process
        return True
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # otherwise there is no such process
    return True


def _flush_folder(path: Path) -> None:
    with suppress(OSError):  # Windows cannot open folders, some file systems cannot sync them
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
