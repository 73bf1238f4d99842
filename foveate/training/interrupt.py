"""Ctrl-C, and a request to end, that wait for a good moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Let signals wait for the end of the block: a step half done could not be saved.

    Only those that something in Python waits for: others end the process as always. The block gets
    a list of those that came. Handlers that it sets itself stay.
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
