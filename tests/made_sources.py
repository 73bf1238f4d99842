"""Small IDX files and batches of CIFAR-10 for the tests, and the error that a bad source gives."""

import signal
import struct
from contextlib import contextmanager

import numpy as np
from raised import one_line

from foveate.data.cifar import BATCHES
from foveate.data.idx import FILES
from foveate.data.sources import load_source
from foveate.errors import DataError


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + (
        array.astype(np.uint8).tobytes()
    )  # fmt: skip


def error_of(name):
    """The message of the DataError that loading `name` raises; always one line."""
    return one_line(DataError, lambda: load_source(name))


def write_idx_folder(folder, *, train=30, spell=lambda name: name, pack=lambda data: data):
    generator = np.random.default_rng(0)
    arrays = []
    for count in (train, 5):
        arrays += [generator.integers(0, 256, (count, 3, 4)), np.arange(count) % 3]
    for name, array in zip(FILES, arrays, strict=True):
        (folder / spell(name)).write_bytes(pack(idx_bytes(array)))
    return arrays


def write_cifar_folder(folder, *, count=4):
    """Write six batches of `count` images of the first three classes: red, green and blue noise.

    Returns the records (count, 3073) by file name.
    """
    generator, batches = np.random.default_rng(0), {}
    for number, name in enumerate(BATCHES):
        labels = (np.arange(count) + number) % 3
        pixels = generator.integers(0, 100, (count, 3, 1024))
        pixels[np.arange(count), labels] += 150
        records = np.concatenate([labels[:, None], pixels.reshape(count, -1)], 1)
        batches[name] = records.astype(np.uint8)
        (folder / name).write_bytes(batches[name].tobytes())
    return batches


@contextmanager
def within(seconds):
    """Fail if the block takes longer; code that never returns to Python is not interrupted."""

    def late(number, frame):
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
