"""Where files are kept, and writing one so that it is either whole and in place or not there."""

import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from foveate.errors import ConfigError, DataError

SPECIAL = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def cache_dir() -> Path:
    """Return where fetched files are kept: FOVEATE_CACHE, or else the user's cache folder."""
    if chosen := os.environ.get("FOVEATE_CACHE"):
        return Path(os.path.expanduser(chosen))
    try:
        import platformdirs
    except ImportError as error:
        raise ConfigError(
            "no cache folder: set FOVEATE_CACHE to a folder, or install platformdirs"
        ) from error
    return platformdirs.user_cache_path("foveate")


def regular(path: Path) -> Path:
    """Return `path`, or refuse a FIFO, socket or device: opening one may block or never end.

    Links are followed. A missing file or a folder passes, for opening it to report.
    """
    try:
        kind = SPECIAL.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return path
    if kind:
        raise DataError(f"{path} is {kind}, not a regular file; remove it or name another file")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it becomes `path`, on failure it is removed.

    The data reaches the disk before the name does, so a crash cannot leave a short file under the
    final name. What a killed process left behind is swept away by the next writer on that machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    temporary = path.with_name(f"{_prefix(path)}{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except OSError as error:
        if error.errno and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8 text."""
    return regular(path).read_text(encoding="utf-8")


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a decoder raises in the block into a one-line DataError that names `path`."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except Exception as error:  # h5py and tarfile raise anything from KeyError to MemoryError
        reason = reason_of(error)
        raise DataError(f"cannot read {path} ({reason}); make or download it again") from None


def parse_json(text: str) -> Any:
    """Read JSON; text that is not JSON, or nested too deeply, raises a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_folder(path: Path) -> None:
    """Raise an OSError if `path` is not a folder and no folder can be made there."""
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
    for leftover in path.parent.glob(f"{_prefix(path)}*.tmp"):
        pid = leftover.name.split(".")[-2]
        if pid.isdigit() and not is_alive(int(pid)):
            leftover.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether this machine has a process of that number, whoever's it is.

    On Windows it is always True: os.kill, which only asks elsewhere, would end the process there.
    """
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush_folder(path: Path) -> None:
    with suppress(OSError):  # Windows cannot open a folder, some file systems cannot sync one
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
