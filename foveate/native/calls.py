"""Call a compiled function on several threads."""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

PARTS = 16  # parts of a job; fixed, so that sums do not depend on the number of threads


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one type for a ctypes structure."""
    return [(name, kind) for name in names.split()]


def call(function: Any, job: ctypes.Structure) -> None:
    """Process the `parts` of a job with as many threads as PyTorch uses.

    The C function claims parts by incrementing `next`, and sets `failed` if it runs out of memory.
    """
    threads, team = min(job.parts, torch.get_num_threads()), _team()
    if threads > 1 and team is not None:
        team(function, ctypes.byref(job), threads, 0)
    else:
        _call_plainly(function, job, threads)
    if job.failed:
        raise MemoryError("cannot allocate scratch memory for compiled code; reduce the batch size")


def _call_plainly(function: Any, job: ctypes.Structure, threads: int) -> None:
    others = [
        threading.Thread(target=function, args=(ctypes.byref(job),)) for _ in range(1, threads)
    ]
    for thread in others:
        thread.start()
    function(ctypes.byref(job))
    for thread in others:
        thread.join()


@cache
def _team() -> Callable[[Any, Any, int, int], None] | None:
    """Return the function with which PyTorch's OpenMP starts threads, or None if not found.

    OpenMP threads spin while they wait for work, and separate threads would compete with them for
    the cores: a training step then took 72 ms instead of 49 ms.
    """
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        team = torch_library.GOMP_parallel  # defined in one of its dependencies
    except (OSError, AttributeError):
        return None
    team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    team.restype = None
    return team
