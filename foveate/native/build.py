"""Compile the C files of this package with the system's compiler on first use, and load them.

The library is cached under a hash of the source, the compiler flags, and the compiler's predefined
macros, which describe the compiler and the processor. It is loaded only from a folder that no other
user can write to, only if its content matches the digest at its end, and only as a private copy.
`library` never raises. Without a compiler, or with FOVEATE_NATIVE=0, it returns None and callers
use PyTorch instead.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from foveate.errors import FoveateError
from foveate.files import cache_dir, replacing

FOLDER = Path(__file__).parent
FUNCTIONS = ("cut", "blur", "scatter", "work", "finish")  # of a pointer to a job
COMPILERS = ("cc", "gcc", "clang")
TARGETS = ("-march=native", "-mcpu=native")  # the first one that the compiler accepts
FLAGS = ("-std=c11", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
TIMEOUT = 20.0  # seconds for all compiler calls together; they usually take 1
DIGEST = hashlib.sha256().digest_size

_log = logging.getLogger(__name__)
_lock = threading.Lock()


class UnsafeError(FoveateError):
    """A file or folder to which another user can write."""


def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None; compilation is attempted once per process."""
    if os.environ.get("FOVEATE_NATIVE") == "0" or sys.platform == "win32":
        return None
    with _lock:
        return _library()


@cache
def _library() -> ctypes.CDLL | None:
    try:
        lib = _find_or_compile()
        for name in FUNCTIONS:
            function = getattr(lib, name)
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        lib.lanes.restype = ctypes.c_int64
    except subprocess.TimeoutExpired as error:
        _log.warning(
            "%s did not finish within %g s; foveate runs slower, without compiled code. "
            "Set FOVEATE_NATIVE=0 to skip the attempt", error.cmd[0], TIMEOUT,
        )  # fmt: skip
        return None
    except (OSError, AttributeError, FoveateError) as error:
        _log.info("no compiled code, using PyTorch instead: %s", error)
        return None
    return lib


def _find_or_compile() -> ctypes.CDLL:
    end = time.monotonic() + TIMEOUT
    compiler, target, name = _identify(end)
    cached = None
    try:
        cached = _private_folder() / name
        return _load(_read(cached))
    except UnsafeError as error:
        _log.warning("compiled code is not cached: %s", error)
    except (OSError, FoveateError) as error:  # damaged, or not cached yet
        _log.info("no compiled code in the cache: %s", error)
    data = _compile(compiler, target, end)
    lib = _load(data)
    if cached is not None:
        with suppress(OSError), replacing(cached) as temporary:
            temporary.write_bytes(data + hashlib.sha256(data).digest())
            temporary.chmod(0o644)
    return lib


def _private_folder() -> Path:
    """Return the cache folder for compiled code, to which no other user can write."""
    root = Path(os.path.realpath(cache_dir()))
    for folder in (root, root / "native"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode):
            raise UnsafeError(f"{folder} is a symbolic link; remove it")
        _check_private(folder, found)
    return folder


def _check_private(path: Path, found: os.stat_result) -> None:
    """Raise if a path belongs to another user or other users can write to it."""
    if found.st_uid not in (0, os.geteuid()):
        raise UnsafeError(f"{path} belongs to another user; set FOVEATE_CACHE to your own folder")
    others = stat.S_IWOTH
    if found.st_gid != os.geteuid():  # a private group has the id of its user
        others |= stat.S_IWGRP
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX  # users own what they add
    if found.st_mode & others and not sticky:
        raise UnsafeError(f"other users can write to {path}; run 'chmod go-w {path}'")


def _read(path: Path) -> bytes:
    """Read a cached library and verify the digest that follows it."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeError(f"{path} is not a regular file; remove it")
        _check_private(path, found)
        content = file.read()
    data, digest = content[:-DIGEST], content[-DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        raise FoveateError(f"{path} is damaged: its digest does not match")
    return data


def _load(data: bytes) -> ctypes.CDLL:
    """Load a library from a private copy: truncating the original would crash the process.

    The copy is in memory if the system supports it, otherwise in a private temporary folder.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            # It stays open, because the loader identifies libraries by path.
            handle = os.memfd_create("foveate")
            with open(handle, "wb", closefd=False) as file:
                file.write(data)
            return ctypes.CDLL(f"/proc/self/fd/{handle}")
    with tempfile.TemporaryDirectory() as folder:  # a loaded library does not need its file
        path = Path(folder) / "foveate.so"
        path.write_bytes(data)
        return ctypes.CDLL(str(path))


def _identify(end: float) -> tuple[str, str, str]:
    """Return the compiler, its flag for this processor, and the file name of the library."""
    found = [path for path in map(shutil.which, COMPILERS) if path is not None]
    for compiler in found:
        for target in TARGETS:
            command = [compiler, target, "-dM", "-E", "-x", "c", os.devnull]
            code, macros, _ = _run(command, end)
            if code == 0:
                source = [path.read_text(encoding="utf-8") for path in _sources("*.[ch]")]
                made_of = [*source, *FLAGS, target, macros]
                digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
                return compiler, target, f"{digest}.so"
    raise FoveateError(f"no C compiler found; install one of {', '.join(COMPILERS)}")


def _compile(compiler: str, target: str, end: float) -> bytes:
    files = map(str, _sources("*.c"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "foveate.so"
        command = [compiler, target, *FLAGS, "-o", str(path), *files, "-lm"]
        code, _, errors = _run(command, end)
        if code != 0:
            raise FoveateError(f"{compiler} failed: {errors[-500:]}")
        return path.read_bytes()


def _sources(pattern: str) -> list[Path]:
    return sorted(FOLDER.glob(pattern))


def _run(command: list[str], end: float) -> tuple[int, str, str]:
    """Run the compiler until `end`; then kill it and all processes that it started."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
        except BaseException:  # Ctrl-C too, which does not reach a new session
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, errors
