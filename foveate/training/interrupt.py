"""Turn SIGINT (Ctrl-C) and SIGTERM into exceptions in the main thread, between two steps."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # option of prctl(2): signal to receive when the parent dies
received_signals: list[int] = []
"""Signals that `raise_interrupt` received. Ray replaces `Terminated` by KeyboardInterrupt, so the
exception alone does not tell SIGTERM from Ctrl-C."""


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM, which clusters send before they reclaim a machine."""


def raise_interrupt(number: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt, or its subclass `Terminated` for SIGTERM; a signal handler."""
    received_signals.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Defer signals to the end of the block, because an incomplete step cannot be saved.

    Only signals with a Python handler are deferred. Yields a list of the signals that arrived.
    Handlers that are set within the block remain.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def wait(number: int, frame: object) -> None:
        pressed.append(number)

    for number in handlers:
        signal.signal(number, wait)
    try:
        yield pressed
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is wait:
                signal.signal(number, handler)
    if pressed:
        handlers[signal.Signals(pressed[0])](pressed[0], None)


def end_with_parent(number: int) -> None:
    """On Linux, let this child process receive the signal `number` when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # the parent died before prctl was called
