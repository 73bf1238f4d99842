"""Time several ways to compute the same thing, in turns, and report failures in their place."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

Step = Callable[[], object]
Factory = Callable[[], Step]
"""Builds a step; its first call, which may compile, is not timed."""
Cell = dict[str, Any]
"""Milliseconds of each round, ``{"ms": [...]}``, or ``{"missing": reason}``."""

LEAST = 0.02  # seconds of a round; shorter steps are repeated
MOST = 150.0  # seconds for compiling one candidate


class OutOfTimeError(BaseException):
    """The time limit has passed; not an Exception, which the compiler would catch."""


class SkippedError(Exception):
    """A candidate is not measured, for the reason in the message."""


class Compiler:
    """Compiles candidates until a total time is used up, and each for `MOST` seconds at most."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.total = seconds

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Run the block with the time that is left, and subtract what it took."""
        if self.left < 1:
            raise SkippedError(f"the {self.total:.0f} s for compiling are used up")
        begun, most = time.perf_counter(), min(self.left, MOST)
        try:
            with time_limit(most):
                yield
        except OutOfTimeError:
            raise SkippedError(f"not compiled within {most:.0f} s") from None
        finally:
            self.left -= time.perf_counter() - begun


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after some seconds (Unix, main thread)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe(error: Exception) -> Cell:
    """Return the cell of a candidate that failed."""
    reason = (str(error).strip().splitlines() or [""])[0][:150]
    kind = "" if isinstance(error, SkippedError) else f"{type(error).__name__}: "
    return {"missing": kind + reason}


def alternate(
    candidates: dict[str, Factory], device: torch.device, rounds: int, seconds: float
) -> dict[str, Cell]:
    """Time candidates in turns, so that noise affects all alike.

    Stops after `rounds` rounds, or after `seconds` if there were three. A candidate that fails gets
    the reason as its cell.
    """
    cells: dict[str, Cell] = {}
    steps: dict[str, tuple[Step, int]] = {}
    for name, make in candidates.items():
        try:
            step = make()
            duration(step, 1, device)
            once = duration(step, 1, device)
            steps[name] = step, max(1, math.ceil(LEAST / once))
            cells[name] = {"ms": []}
        except Exception as error:
            cells[name] = describe(error)
    begun = time.perf_counter()
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - begun > seconds:
            break
        for name, (step, repeats) in steps.items():
            cells[name]["ms"].append(round(1e3 * duration(step, repeats, device), 5))
    return cells


def duration(step: Step, repeats: int, device: torch.device) -> float:
    """Return the seconds of a call, as the mean of several."""
    _finish(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        step()
    _finish(device)
    return (time.perf_counter() - begun) / repeats


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
