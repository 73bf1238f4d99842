"""Call a compiled function on all cores."""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

PARTS = 16  # of any work; a fixed number, so that sums do not depend on the number of threads


def call(function: Any, job: ctypes.Structure) -> None:
    """Let as many threads as PyTorch may use do the `parts` of a job.

    The function takes them by counting up `next`, and says in `failed` that memory ran out.
    """
    threads, team = min(job.parts, torch.get_num_threads()), _team()
    if threads > 1 and team is not None:
        team(function, ctypes.byref(job), threads, 0)
    else:
        _call_plainly(function, job, threads)
    if job.failed:
        raise MemoryError("no memory for the scratch of compiled code")


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
