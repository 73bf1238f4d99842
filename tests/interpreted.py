"""Triton's kernels on a machine without a GPU: in Triton's interpreter, on CPU tensors."""

import importlib
import os
import sys
from unittest import mock

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOADED = []  # modules of kernels that this module has imported


def load(name):
    """Import a module of kernels, for the interpreter where there is no GPU."""
    compiled = "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ and not LOADED
    if DEVICE == "cpu" and compiled:
        pytest.skip(
            "triton was imported for a GPU; set TRITON_INTERPRET=1", allow_module_level=True
        )
    choice = {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}
    with mock.patch.dict(os.environ, choice):
        pytest.importorskip("triton")
        if DEVICE == "cpu":
            _mend()
        LOADED.append(importlib.import_module(name))
        return LOADED[-1]


def _mend():
    """Mend four errors of the interpreter of Triton 3.6, once.

    It keeps bf16 values as bits and multiplies them as integers, it truncates where a GPU rounds to
    bf16, it broadcasts a truth value as an integer, which Triton 3.9 rejects as a mask, and recent
    versions of NumPy do not convert the array of one value that bounds a loop.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    # Otherwise imported at the first launch, when the interpreter is no longer chosen.
    importlib.import_module("triton.experimental.gluon")
    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    if hasattr(builder, "mended"):
        return
    multiply, convert, splat = builder.create_dot, builder.cast_impl, builder.create_splat

    def rounded(self, tensor, dtype):
        if (tensor.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return convert(self, tensor, dtype)
        values = torch.from_numpy(np.ascontiguousarray(tensor.data)).bfloat16()
        return interpreter.TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)

    def widened(tensor):
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        values = (tensor.data.astype("uint32") << 16).view("float32")
        return interpreter.TensorHandle(values, tl.float32)

    def broadcast(self, kind, given):
        filled = splat(self, kind, given)
        if given.data.dtype == bool:
            filled.data = filled.data.astype(bool)
        return filled

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    builder.create_dot = lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest)
    builder.cast_impl, builder.create_splat = rounded, broadcast
    interpreter._patch_lang_tensor = patch_tensor
    builder.mended = True
