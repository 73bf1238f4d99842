"""Compile `native.c` with the system's compiler on first use, and run its stages on all cores.

The library is kept in the cache under a name that says what it was made of: the source and all
that the compiler knows about itself and this processor. Nothing here raises: where there is no
compiler, or FOVEATE_NATIVE=0 is set, `library` is None and callers take their plain path.
"""

import ctypes
import hashlib
import logging
import math
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from foveate.data.fetch import cache_dir
from foveate.errors import FoveateError
from foveate.files import replacing

SOURCES = tuple(Path(__file__).with_suffix(suffix) for suffix in (".c", ".h"))
COMPILERS = ("cc", "gcc", "clang")
TARGETS = ("-march=native", "-mcpu=native")  # the first that the compiler knows
FLAGS = ("-std=c11", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
TIMEOUT = 120.0  # seconds for the compiler, which needs 1
PARTS = 16  # of the work; a fixed number, so that sums do not depend on the number of threads
KEPT = 1 << 23  # floats of the largest buffer to keep
KINDS = ("moments", "first", "next", "last", "last_back", "next_back", "first_back")

_log = logging.getLogger(__name__)
_lock = threading.Lock()

Field: TypeAlias = int | Tensor


class _Job(ctypes.Structure):
    """`struct job` of the C file, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "count", "parts", "colours", "height")),
        *((name, ctypes.c_int64) for name in ("width", "from", "to", "stride", "plane")),
        *((name, ctypes.c_void_p) for name in ("images", "shift", "first", "first_bias")),
        *((name, ctypes.c_void_p) for name in ("below", "below_norm", "weight", "bias", "map")),
        *((name, ctypes.c_void_p) for name in ("unnorm", "slope", "below_slope", "result")),
        *((name, ctypes.c_void_p) for name in ("sums", "squares", "weight_sums", "bias_sums")),
        *((name, ctypes.c_void_p) for name in ("first_sums", "first_bias_sums")),
        ("next", ctypes.c_int64),
        ("failed", ctypes.c_int64),
    )


class Buffers:
    """Large buffers that go back to a store when this object ends, to be used again.

    Fresh memory has to be mapped page by page, which took a third of a training step.
    """

    _store: ClassVar[dict[int, list[Tensor]]] = {}

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def take(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor, valid as long as this object lives."""
        size = math.prod(shape)
        try:
            flat = self._store[size].pop()
        except (KeyError, IndexError):
            flat = torch.empty(size)
        self._held.append(flat)
        return flat.view(shape)

    def __del__(self) -> None:
        if len(self._store) > 16:  # sizes that come no more
            self._store.clear()
        for flat in self._held:
            kept = self._store.setdefault(flat.numel(), [])
            if len(kept) < 4 and flat.numel() <= KEPT:
                kept.append(flat)


def library() -> ctypes.CDLL | None:
    """The compiled stages, or None; tried once in a process."""
    if os.environ.get("FOVEATE_NATIVE") == "0":
        return None
    with _lock:
        return _library()


def parts_of(count: int) -> int:
    """Into how many parts `count` patches are cut."""
    return min(PARTS, -(-count // 4))


def stage(kind: str, count: int, **fields: Field) -> None:
    """Run one stage on `count` patches; `fields` are those of `struct job`, tensors contiguous.

    What the parts add to `*_sums`, whose first axis they are, is then added up in the first.
    """
    lib = library()
    assert lib is not None
    held = {name: _address(value) for name, value in fields.items()}
    job = _Job(**{"kind": KINDS.index(kind), "count": count, "parts": parts_of(count), **held})
    _spread(lib, job, min(job.parts, torch.get_num_threads()))
    if job.failed:
        raise MemoryError(f"no memory for the scratch of stage {kind!r}")
    lib.finish(ctypes.byref(job))


def _address(value: Field) -> int:
    if not isinstance(value, Tensor):
        return value
    assert value.is_contiguous()
    return value.data_ptr()


def _spread(lib: ctypes.CDLL, job: _Job, threads: int) -> None:
    """Let that many threads do the parts of a job."""
    team = _team()
    if threads > 1 and team is not None:
        team(lib.work, ctypes.byref(job), threads, 0)
        return
    others = [
        threading.Thread(target=lib.work, args=(ctypes.byref(job),)) for _ in range(1, threads)
    ]
    for thread in others:
        thread.start()
    lib.work(ctypes.byref(job))
    for thread in others:
        thread.join()


@cache
def _team() -> Callable[[Any, Any, int, int], None] | None:
    """How PyTorch's own OpenMP starts its threads, if that can be found.

    Its threads wait for more work by spinning, and others would have to share the cores with
    them: with threads of our own, a training step took 72 ms instead of 49.
    """
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        team = torch_library.GOMP_parallel  # found in the libraries it depends on
    except (OSError, AttributeError):
        return None
    team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    team.restype = None
    return team


@cache
def _library() -> ctypes.CDLL | None:
    try:
        lib = _load(*_identify())
        for function in (lib.work, lib.finish):
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
                source = [path.read_text(encoding="utf-8") for path in SOURCES]
                made_of = [*source, *FLAGS, target, macros.stdout]
                digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
                return compiler, target, f"{digest}.so"
    raise FoveateError(f"no C compiler among {', '.join(COMPILERS)}")


def _compile(compiler: str, target: str, path: Path) -> None:
    done = _run([compiler, target, *FLAGS, "-o", str(path), str(SOURCES[0])])
    if done.returncode != 0:
        raise FoveateError(f"{compiler} failed: {done.stderr[-500:]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
