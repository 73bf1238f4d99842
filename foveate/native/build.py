"""Compile the C files beside this module with the system's compiler on first use, and load them.

The library is kept in the cache under a name that says what it was made of: the source and all
that the compiler knows about itself and this processor. Nothing here raises: where there is no
compiler, or FOVEATE_NATIVE=0 is set, `library` is None and callers take their plain path.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from foveate.errors import FoveateError
from foveate.files import cache_dir, replacing

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
TARGETS = ("-march=native", "-mcpu=native")  # the first that the compiler knows
FLAGS = ("-std=c11", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
TIMEOUT = 120.0  # seconds for the compiler, which needs 1

_log = logging.getLogger(__name__)
_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The compiled functions, or None; tried once in a process."""
    if os.environ.get("FOVEATE_NATIVE") == "0":
        return None
    with _lock:
        return _library()


@cache
def _library() -> ctypes.CDLL | None:
    try:
        lib = _load(*_identify())
        for function in (lib.cut, lib.work, lib.finish):
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        lib.lanes.restype = ctypes.c_int64
    except (OSError, AttributeError, subprocess.SubprocessError, FoveateError) as error:
        _log.info("no native code, the plain path is used: %s", error)
        return None
    return lib


def _load(compiler: str, target: str, name: str) -> ctypes.CDLL:
    """Load the library from the cache, where it is made if need be, or from a passing folder."""
    try:
        path = cache_dir() / "native" / name
        if not path.exists():
            with replacing(path) as temporary:
                _compile(compiler, target, temporary)
        return ctypes.CDLL(str(path))
    except (OSError, FoveateError) as error:
        _log.info("the cache cannot be used: %s", error)
    with tempfile.TemporaryDirectory() as folder:  # a loaded library outlives its file
        path = Path(folder) / name
        _compile(compiler, target, path)
        return ctypes.CDLL(str(path))


def _identify() -> tuple[str, str, str]:
    """The compiler, how it says "this processor", and a name for what it makes of the source."""
    found = [path for path in map(shutil.which, COMPILERS) if path is not None]
    for compiler in found:
        for target in TARGETS:
            macros = _run([compiler, target, "-dM", "-E", "-x", "c", os.devnull])
            if macros.returncode == 0:
                source = [path.read_text(encoding="utf-8") for path in _sources("*.[ch]")]
                made_of = [*source, *FLAGS, target, macros.stdout]
                digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
                return compiler, target, f"{digest}.so"
    raise FoveateError(f"no C compiler among {', '.join(COMPILERS)}")


def _compile(compiler: str, target: str, path: Path) -> None:
    files = map(str, _sources("*.c"))
    done = _run([compiler, target, *FLAGS, "-o", str(path), *files, "-lm"])
    if done.returncode != 0:
        raise FoveateError(f"{compiler} failed: {done.stderr[-500:]}")


def _sources(pattern: str) -> list[Path]:
    return sorted(FOLDER.glob(pattern))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
