"""Run the stages of `native/trunk.c`, and cache their large buffers."""

import ctypes
import math
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from foveate.native.build import library
from foveate.native.calls import PARTS, call, fields

MAX_BUFFER = 1 << 23  # largest buffer to cache, in floats
MAX_CACHED = 1 << 25  # limit of all cached buffers together, in floats
SIZES = 16  # limit of different buffer sizes in the cache
KINDS = (
    "fold", "moments", "first", "next", "last", "last_back", "next_back", "first_back", "unfold"
)  # fmt: skip
WITHOUT_PARTS = ("fold", "unfold")

Field: TypeAlias = int | float | Tensor | None


class Job(ctypes.Structure):
    """Mirror of `struct job` in native/trunk.h, field by field."""

    _fields_ = (
        *fields(ctypes.c_int64, "kind count parts colours height width from to stride plane pitch"),
        *fields(ctypes.c_void_p, "images shift weight bias first first_bias moments map norm"),
        *fields(ctypes.c_void_p, "below below_norm boxes below_boxes result slope below_slope"),
        *fields(ctypes.c_void_p, "unnorm below_unnorm sums squares weight_sums bias_sums"),
        *fields(ctypes.c_void_p, "first_sums first_bias_sums weight_gradient bias_gradient"),
        *fields(ctypes.c_void_p, "norm_weight norm_bias norm_weight_gradient norm_bias_gradient"),
        *fields(ctypes.c_void_p, "running_mean running_variance"),
        *fields(ctypes.c_double, "momentum eps"),
        *fields(ctypes.c_int64, "training next failed"),
    )


class Buffers:
    """Large buffers that return to a cache when this object is deleted.

    Newly allocated memory must be mapped page by page, which took a third of a training step.
    """

    _store: ClassVar[dict[int, list[Tensor]]] = {}

    def __init__(self) -> None:
        self._allocated: list[Tensor] = []

    def allocate(self, *shape: int) -> Tensor:
        """Return an uninitialised float32 tensor, valid as long as this object exists."""
        size = math.prod(shape)
        try:
            flat = self._store[size].pop()
        except (KeyError, IndexError):
            flat = empty_cpu(size)
        self._allocated.append(flat)
        return flat.view(shape)

    def __del__(self) -> None:
        for flat in self._allocated:
            if flat.numel() <= MAX_BUFFER:
                self._keep(flat)

    def _keep(self, flat: Tensor) -> None:
        stored = list(self._store.items())  # a copy: other threads can add sizes
        total = flat.numel() + sum(size * len(cached) for size, cached in stored)
        if total > MAX_CACHED or len(self._store) > SIZES:  # drops sizes that are no longer used
            self._store.clear()
        self._store.setdefault(flat.numel(), []).append(flat)


def empty_cpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised CPU tensor, independent of the default device."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def parts_of(count: int) -> int:
    """Return the number of parts into which `count` patches are split."""
    return min(PARTS, -(-count // 4))


def stage(kind: str, count: int, **given: Field) -> None:
    """Run one stage on `count` patches; `given` are fields of `struct job`.

    Tensors must be contiguous.
    """
    lib = library()
    assert lib is not None
    held = {name: _address(value) for name, value in given.items()}
    parts = 0 if kind in WITHOUT_PARTS else parts_of(count)
    job = Job(kind=KINDS.index(kind), count=count, parts=parts, **held)
    if parts:
        call(lib.work, job)
    lib.finish(ctypes.byref(job))


def _address(value: Field) -> int | float | None:
    if not isinstance(value, Tensor):
        return value
    assert value.is_contiguous()
    return value.data_ptr()
