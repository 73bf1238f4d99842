"""SIGINT (Ctrl-C) and SIGTERM: both raise an exception in the main thread, between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
arrived: list[
    int
] = []  # what `stop` was called for; Ray makes a KeyboardInterrupt of any exception


class Terminated(KeyboardInterrupt):
    """SIGTERM, which clusters send before they take a machine, asked the process to end."""


def stop(number: int, frame: object) -> NoReturn:
    """Signal handler that raises KeyboardInterrupt, for SIGTERM its subclass `Terminated`."""
    arrived.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Defer signals to the end of the block: a step half done cannot be saved.

    Only signals with a Python handler are deferred; others end the process as always. The block
    gets a list of those that arrived. Handlers that the block itself sets stay.
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
