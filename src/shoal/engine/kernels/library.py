"""The kernels as Python functions over addresses. Whoever calls them keeps the tensors behind the addresses alive."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_void_p
from typing import Any

from shoal.engine.kernels.build import Unavailable, library


class Linear(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("epsilon", c_float),
    )


class Sampling(ctypes.Structure):
    """`Sampling` of sample.h."""

    _fields_ = (
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("keys", c_void_p),
        ("greedy_below", c_float),
    )


class Kernels:
    """`linear(linear, x, norm, rows, epilogue, out)`, `sample(logits, rows, vocab, sampling, tokens)`: see kernels.cpp.

    Calls let other Python threads run.
    """

    STORE, ADD, SILU, FLOAT = range(4)  # Epilogue of linear.h

    def __init__(self, threads: int) -> None:
        """Raises build.Unavailable."""
        try:
            functions: Any = ctypes.CDLL(str(library()))
        except OSError as error:
            raise Unavailable(str(error)) from error
        self.has_linear = bool(functions.shoal_has_linear())
        functions.shoal_threads(threads)
        if self.has_linear:
            self.linear = functions.shoal_linear
            self.linear.argtypes = (POINTER(Linear), c_void_p, c_void_p, c_int, c_int, c_void_p)
            self.linear.restype = None
        self.sample = functions.shoal_sample
        self.sample.argtypes = (c_void_p, c_int, c_int, POINTER(Sampling), c_void_p)
        self.sample.restype = None
