"""What the C border says of stores: see native/include/tokenmill_native.h."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint64, c_void_p


class ExtentStruct(ctypes.Structure):
    _fields_ = (("offset", c_int64), ("num_bytes", c_int64), ("sum", c_uint64))


class RingItemStruct(ctypes.Structure):
    _fields_ = (("extent", ExtentStruct), ("to", c_void_p), ("stays", c_int64))


class StoreFactsStruct(ctypes.Structure):
    _fields_ = (
        ("num_slots", c_int64),
        ("slot_bytes", c_int64),
        ("hits", c_int64),
        ("misses", c_int64),
        ("guesses_read", c_int64),
        ("guess_hits", c_int64),
        ("bytes_read", c_int64),
        ("waited_ns", c_int64),
        ("damaged", c_int64),
    )


STORE_SIGNATURES = {
    "tm_store_new": (c_void_p, (c_int32, c_int32, c_void_p, c_int64)),
    "tm_store_set_ring": (c_int32, (c_void_p, c_void_p, c_int32)),
    "tm_store_facts_of": (None, (c_void_p, c_void_p)),
    "tm_store_free": (None, (c_void_p,)),
    "tm_range_sum": (c_uint64, (c_void_p, c_int64)),
    "tm_store_fetch": (
        c_int32,
        (c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p),
    ),
    "tm_store_use": (c_int32, (c_void_p, c_int32)),
    "tm_replay_experts": (c_int64, (c_void_p, c_int64, c_int32, c_int32, c_int32, c_int32)),
}
