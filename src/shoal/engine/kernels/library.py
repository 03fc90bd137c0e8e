"""The kernels as Python functions over addresses. Whoever calls them keeps the tensors behind the addresses alive."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np

from shoal.engine.kernels.build import Unavailable, library


def address(array: np.ndarray) -> int:
    """Where a contiguous array's memory begins. `array.ctypes.data` is the same number, by way of much Python."""
    place: int = array.__array_interface__["data"][0]
    return place


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


class Attention(ctypes.Structure):
    """`Attention` of attention_math.h."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_tokens", c_int32),
        ("math", c_int32),
        ("num_threads", c_int32),
        ("epsilon", c_float),
        ("num_shards", c_int32),
        ("shard", c_int32),
    )


class Step(ctypes.Structure):
    """`Step` of attention.h."""

    _fields_ = (
        ("row", c_void_p),
        ("start", c_void_p),
        ("length", c_void_p),
        ("table", c_void_p),
        ("num_spans", c_int32),
        ("width", c_int32),
        ("angles", c_void_p),
        ("tasks", c_void_p),
        ("writes", c_void_p),
        ("num_tasks", c_int32),
        ("num_writes", c_int32),
        ("num_slots", c_int32),
        ("results", c_void_p),
        ("done", c_void_p),
    )


class Layer(ctypes.Structure):
    """`Layer` of attention.h."""

    _fields_ = (
        ("qkv", c_void_p),
        ("kv", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("out", c_void_p),
        ("part", c_int32),
    )


class Block(ctypes.Structure):
    """`Block` of layers.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", POINTER(Linear)),
        ("output", POINTER(Linear)),
        ("gate_up", POINTER(Linear)),
        ("down", POINTER(Linear)),
        ("attention", Layer),
    )


class Activations(ctypes.Structure):
    """`Activations` of layers.h."""

    _fields_ = (("x", c_void_p), ("qkv", c_void_p), ("out", c_void_p), ("mlp", c_void_p), ("rows", c_int32))


class Sampling(ctypes.Structure):
    """`sampling::Settings` of sample.h."""

    _fields_ = (
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("keys", c_void_p),
        ("greedy_below", c_float),
    )


class Member(ctypes.Structure):
    """`Member` of ranks.h."""

    _fields_ = (
        ("arrivals", c_void_p),
        ("slots", c_void_p),
        ("channels", c_void_p),
        ("pieces", c_void_p),
        ("aborted", c_void_p),
        ("rank", c_int32),
        ("size", c_int32),
        ("slot_bytes", c_int64),
        ("piece_bytes", c_int64),
        ("limit_ns", c_int64),
        ("spin_ns", c_int64),
        ("num_calls", c_uint64),
        ("tag", c_uint64),
        ("culprit", c_int32),
    )


class Kernels:
    """`linear(linear, x, norm, rows, epilogue, out)`, `rows(linear, ids, count, out)`,
    `layers(blocks, count, attention, step, activations)`, `plan_attention(attention, step)`,
    `attend(attention, step, layer)`, `sample(logits, rows, vocab, sampling, tokens)`, and between ranks, returning an
    Outcome of ranks.h, `all_reduce(member, x, count, is_bf16)`, `all_gather(member, x, rows, widths, out)`,
    `send(member, x, bytes, to)`, `receive(member, x, bytes, source)`: see kernels.cpp.

    Calls let other Python threads run.
    """

    STORE, ADD, SILU, FLOAT = range(4)  # Epilogue of linear.h
    FLOAT32, BFLOAT16, BFLOAT16_UNIT = range(3)  # Math of attention_math.h

    def __init__(self, threads: int) -> None:
        """Raises build.Unavailable."""
        try:
            functions: Any = ctypes.CDLL(str(library()))
        except OSError as error:
            raise Unavailable(str(error)) from error
        self.has_linear = bool(functions.shoal_has_linear())
        functions.shoal_threads(threads)
        self.threads = threads
        if self.has_linear:
            self.linear = functions.shoal_linear
            self.linear.argtypes = (POINTER(Linear), c_void_p, c_void_p, c_int, c_int, c_void_p)
            self.linear.restype = None
            self.rows = functions.shoal_rows
            self.rows.argtypes = (POINTER(Linear), c_void_p, c_int, c_void_p)
            self.layers = functions.shoal_layers
            self.layers.argtypes = (POINTER(Block), c_int, POINTER(Attention), POINTER(Step), POINTER(Activations))
            self.layers.restype = None
        self.has_attention_unit = bool(functions.shoal_attention_unit())
        self.plan_attention = functions.shoal_plan_attention
        self.plan_attention.argtypes = (POINTER(Attention), POINTER(Step))
        self.plan_attention.restype = None
        self.attend = functions.shoal_attend
        self.attend.argtypes = (POINTER(Attention), POINTER(Step), POINTER(Layer))
        self.attend.restype = None
        self.sample = functions.shoal_sample
        self.sample.argtypes = (c_void_p, c_int, c_int, POINTER(Sampling), c_void_p)
        self.sample.restype = None
        self.all_reduce = functions.shoal_all_reduce
        self.all_reduce.argtypes = (POINTER(Member), c_void_p, c_int64, c_int)
        self.all_gather = functions.shoal_all_gather
        self.all_gather.argtypes = (POINTER(Member), c_void_p, c_int64, c_void_p, c_void_p)
        self.send = functions.shoal_send
        self.send.argtypes = (POINTER(Member), c_void_p, c_int64, c_int)
        self.receive = functions.shoal_receive
        self.receive.argtypes = (POINTER(Member), c_void_p, c_int64, c_int)
