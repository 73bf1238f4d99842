"""Run a few tasks in parallel, in processes of one thread each."""

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from foveate.training.interrupt import end_with_parent, raise_interrupt

Send = Callable[[Any], None]
Task = Callable[[Send], object]


def run_tasks(tasks: Sequence[Task], receive: Send) -> None:
    """Run tasks, which save their results themselves, and pass what they send to `receive`.

    The tasks are run in parallel if each gets less than two cores: a process of one thread
    has no serial part during which other cores wait. With more cores, tasks run one after another
    with all of them. A task that fails in a process of its own has no effect: the caller finds its
    result missing, and repeats it to get the error. Ctrl-C and SIGTERM end all tasks.
    """
    threads = torch.get_num_threads()
    if sys.platform != "linux" or not 1 < threads < 2 * len(tasks):
        for task in tasks:
            task(receive)
        return
    context, children = multiprocessing.get_context("fork"), []
    ends: list[Connection] = []
    try:
        for task in tasks:
            end, child_end = context.Pipe(duplex=False)
            child = context.Process(target=_run_alone, args=(task, child_end), daemon=True)
            with warnings.catch_warnings():  # one thread is safe in a copy of a threaded process
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            child_end.close()
            children.append(child)
            ends.append(end)
        _receive_all(ends, receive)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.join()


def _receive_all(ends: list[Connection], receive: Send) -> None:
    while ends:
        for end in wait(ends):
            assert isinstance(end, Connection)
            try:
                receive(end.recv())
            except EOFError:  # the process has ended
                ends.remove(end)


def _run_alone(task: Task, end: Connection) -> None:
    """Run a task in a new process. Only the parent reacts to Ctrl-C, and then sends SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, raise_interrupt)
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    with suppress(BaseException):  # the caller repeats the task and gets the error
        task(end.send)
