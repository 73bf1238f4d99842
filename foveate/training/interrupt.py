"""Turn SIGINT (Ctrl-C) and SIGTERM into exceptions in the main thread, between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
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

    Only signals with a Python handler are deferred; others end the process as usual. Yields a list
    of the signals that arrived. Handlers that are set within the block remain.
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
