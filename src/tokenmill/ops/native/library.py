"""Finds the shared library and binds its C interface (native/include/tokenmill_native.h) with ctypes.

The environment variable TOKENMILL_NATIVE_LIB names a library to use instead of the one installed beside this file.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, cast

from ...core.sampling import COLUMNS, PENALTIES, native_layout


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


ABI_VERSION = 22
_REBUILD = "build it again (pip install -e .)"

KINDS = {
    **{"f32": 0, "f16": 1, "bf16": 2, "q4_0": 3, "q4_1": 4, "q8_0": 5, "q8_m": 6, "q8_h": 7, "q8_hm": 8, "q2_k": 9},
    **{"q3_k": 10, "q4_k": 11, "q5_k": 12, "q6_k": 13, "q5_0": 14, "w4": 15, "w4m": 16, "w8": 17, "bf16p": 18},
    **{"mxfp4": 19, "iq4_nl": 20},
}
INTEGER_KINDS = {"q4_0": "w4", "q4_1": "w4m", "q8_0": "w8"}
"""What variants with tiles pack a kind as, where its scales allow that."""
PLAIN_KINDS = {"q4_k": "q4_1", "iq4_nl": "q8_0"}
"""Of others: the kind with the same values that such variants take instead."""
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3}
STORED = (
    "q5_0", "q5_1", "q8_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k", "iq4_nl", "iq4_xs", "mxfp4", "tq2_0",
    "tq1_0", "nvfp4", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
)  # fmt: skip
"""Block formats that the library can recode, by number."""
CODE_LAYOUTS = {"by row": 0, "by column": 1, "awq": 2}
PROBES = {"read": 0, "int8": 1, "f32": 2, "bf16": 3, "phase": 4}
ISAS = ("avx512bf16", "avx512", "avxvnni", "avx2", "neoni8mm", "neon", "scalar")
TILE_ISAS = ("amx", "scalartiles")
"""Of another arithmetic: for a matrix unit, and its definition in plain loops. Those of one tuple agree in bits."""


class PartStruct(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("column0", c_int32),
        ("num_rows", c_int32),
        ("num_cols", c_int32),
        ("data", c_void_p),
        ("num_bytes", c_int64),
    )


class CodesStruct(ctypes.Structure):
    _fields_ = (
        ("words", c_void_p),
        ("order", c_void_p),
        ("line_words", c_int64),
        ("num_words", c_int64),
        ("layout", c_int32),
        ("bits", c_int32),
        ("minus", c_int32),
        ("num_rows", c_int32),
        ("num_cols", c_int32),
        ("group_size", c_int32),
        ("scales", c_void_p),
        ("minima", c_void_p),
    )


class WeightStruct(ctypes.Structure):
    _fields_ = (
        ("num_rows", c_int32),
        ("num_cols", c_int32),
        ("num_parts", c_int32),
        ("place", c_int32),
        ("parts", POINTER(PartStruct)),
        ("store", c_void_p),
    )


class KVStruct(ctypes.Structure):
    _fields_ = (
        ("pool", c_void_p),
        ("num_blocks", c_int64),
        ("bytes_per_block", c_int64),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("table", c_int32),
        ("value_dim", c_int32),
        ("reserved", c_int32),
        ("key_factors", c_void_p),
    )


class StackStruct(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("num_matrices", c_int32),
        ("num_rows", c_int32),
        ("num_cols", c_int32),
        ("data", c_void_p),
        ("stride", c_int64),
        ("store", c_void_p),
        ("extents", POINTER(ExtentStruct)),
    )


class MoeStruct(ctypes.Structure):
    _fields_ = (
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("score", c_int32),
        ("num_groups", c_int32),
        ("top_groups", c_int32),
        ("group_score", c_int32),
        ("normalise", c_int32),
        ("reserved", c_int32),
        ("floor", c_float),
        ("scale", c_float),
        ("min_share", c_float),
        ("limit", c_float),
        ("alpha", c_float),
        ("margin", c_float),
        ("bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("tally", c_void_p),
    )


class LatentStruct(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int32),
        ("nope_dim", c_int32),
        ("rope_dim", c_int32),
        ("latent_dim", c_int32),
        ("value_dim", c_int32),
    )


class BufferStruct(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_bytes", c_int64),
        ("rows", c_int32),
        ("max_rows", c_int32),
        ("width", c_int32),
        ("form", c_int32),
    )


class LowRankStruct(ctypes.Structure):
    _fields_ = (("rank", c_int32), ("scale", c_float), ("a", PartStruct), ("b", PartStruct), ("factors", c_void_p))


class LoraStruct(ctypes.Structure):
    _fields_ = (
        ("num_slots", c_int32),
        ("num_matrices", c_int32),
        ("num_cols", c_int32),
        ("max_rank", c_int32),
        ("by_token", c_int32),
        ("columns", c_void_p),
        ("changes", POINTER(LowRankStruct)),
    )


class StateStruct(ctypes.Structure):
    _fields_ = (
        ("conv_width", c_int32),
        ("taps", c_int32),
        ("num_heads", c_int32),
        ("num_key_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("is_delta", c_int32),
        ("decay", c_int32),
        ("low", c_float),
        ("high", c_float),
        ("rates", c_void_p),
        ("dt_bias", c_void_p),
        ("skip", c_void_p),
    )


class OpStruct(ctypes.Structure):
    _fields_ = (
        ("kind", c_char_p),
        ("rows", c_int32),
        ("in0", c_int32),
        ("in1", c_int32),
        ("in2", c_int32),
        ("out", c_int32),
        ("width", c_int32),
        ("layer", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("activation", c_int32),
        ("window", c_int32),
        ("num_turned", c_int32),
        ("by_place", c_int32),
        ("whole", c_int32),
        ("value", c_float),
        ("cap", c_float),
        ("weight", POINTER(WeightStruct)),
        ("vector", c_void_p),
        ("vector_rows", c_int64),
        ("vector2", c_void_p),
        ("vector2_rows", c_int64),
        ("kv", POINTER(KVStruct)),
        ("lora", POINTER(LoraStruct)),
        ("order", c_void_p),
        ("stack", POINTER(StackStruct)),
        ("stack2", POINTER(StackStruct)),
        ("moe", POINTER(MoeStruct)),
        ("latent", POINTER(LatentStruct)),
        ("state", POINTER(StateStruct)),
    )


class LimitsStruct(ctypes.Structure):
    _fields_ = (
        ("max_tokens", c_int32),
        ("max_seqs", c_int32),
        ("max_blocks_per_seq", c_int32),
        ("max_logit_rows", c_int32),
    )


_C_TYPES: dict[str, Any] = {"float": c_float, "int32_t": c_int32}


class SamplingStruct(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in COLUMNS)


class AdjustmentStruct(ctypes.Structure):
    _fields_ = (
        ("history", c_void_p),
        ("num_prompt", c_int32),
        ("min_tokens", c_int32),
        *((name, _C_TYPES[c_type]) for name, (c_type, _) in PENALTIES.items()),
        ("num_dry_breakers", c_int32),
        ("num_bias", c_int32),
        ("num_held_back", c_int32),
        ("num_bad_words", c_int32),
        ("mask_wait_us", c_int32),
        ("dry_breakers", c_void_p),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("mask", c_void_p),
        ("mask_until", c_void_p),
        ("held_back", c_void_p),
        ("bad_tokens", c_void_p),
        ("bad_starts", c_void_p),
    )


STEP = struct.Struct("9P4i")
"""tm_step: tokens, positions, row_starts, context_lens, block_tables, logit_rows, adapters, places, state_blocks;
num_tokens, num_seqs, table_width, num_logit_rows. Packed as bytes, because one is made for every call."""

DRAWS = struct.Struct(f"{len(COLUMNS) + 10}P4i")
"""tm_draws: tm_sampling, adjustments, num_top, logprobs, ranks, top_ids, top_logprobs, slots, tokens,
drawn, scratch; num_rows, num_slots, logits, top_width."""


CALL_END = struct.Struct("2i2q2P200x")
"""The rest of tm_call: has_draws, tells; began_ns, ended_ns; program, next; error."""


class CallStruct(ctypes.Structure):
    """tm_call: the bytes of STEP, DRAWS and CALL_END."""

    _fields_ = (
        ("step_and_draws", ctypes.c_byte * (STEP.size + DRAWS.size)),
        ("has_draws", c_int32),
        ("tells", c_int32),
        ("began_ns", c_int64),
        ("ended_ns", c_int64),
        ("program", c_void_p),
        ("next", c_void_p),
        ("error", ctypes.c_char * 200),
    )


_SIGNATURES = {
    "tm_abi_version": (c_int32, ()),
    "tm_sampling_layout": (c_char_p, ()),
    "tm_adjustment_layout": (c_char_p, ()),
    "tm_publish": (None, (c_void_p, c_int32)),
    "tm_last_error": (c_char_p, ()),
    "tm_isa_available": (c_int32, (c_char_p,)),
    "tm_team_new": (c_void_p, (c_int32, c_char_p)),
    "tm_team_free": (None, (c_void_p,)),
    "tm_team_limit": (c_int32, (c_void_p, c_int32, c_void_p, c_void_p)),
    "tm_team_place": (None, (c_void_p, c_int32, c_void_p, c_int32)),
    "tm_team_isa": (c_char_p, (c_void_p,)),
    "tm_team_progress": (c_uint64, (c_void_p,)),
    "tm_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "tm_pack": (c_int32, (c_void_p, c_int32, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_int64)),
    "tm_integer_fits": (c_int64, (c_int32, c_int64)),
    "tm_fits_integer": (c_int32, (c_void_p, c_int32, c_int64, c_int32, c_void_p, c_void_p, c_void_p)),
    "tm_quantise": (c_int32, (c_void_p, c_int32, c_int32, c_int64, c_int64, c_void_p, c_void_p)),
    "tm_recode": (
        c_int32,
        (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_int64, POINTER(c_int32), c_void_p, c_int64),
    ),
    "tm_recode_integers": (c_int32, (c_void_p, POINTER(CodesStruct), c_int32, c_void_p, c_int64)),
    "tm_buffer_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "tm_program_new": (
        c_void_p,
        (c_void_p, c_void_p, c_int32, c_void_p, c_int32, POINTER(LimitsStruct), c_void_p, c_int64),
    ),
    "tm_program_free": (None, (c_void_p,)),
    "tm_call_run": (None, (POINTER(CallStruct),)),
    "tm_program_time": (None, (c_void_p, c_void_p)),
    "tm_program_record": (c_int32, (c_void_p, c_int32, c_void_p, c_int64)),
    "tm_program_recorded": (c_int64, (c_void_p,)),
    "tm_queue_new": (c_void_p, ()),
    "tm_queue_push": (None, (c_void_p, POINTER(CallStruct))),
    "tm_queue_run": (c_void_p, (c_void_p, c_int32, c_int64)),
    "tm_queue_is_empty": (c_int32, (c_void_p,)),
    "tm_queue_wait": (None, (c_void_p, POINTER(CallStruct))),
    "tm_queue_close": (None, (c_void_p,)),
    "tm_queue_free": (None, (c_void_p,)),
    "tm_probe": (c_double, (c_void_p, c_int32, c_void_p, c_int64, c_int64)),
    **STORE_SIGNATURES,
    "tm_drafter_new": (c_void_p, (c_void_p,)),
    "tm_drafter_free": (None, (c_void_p,)),
    "tm_drafter_add_corpus": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32)),
    "tm_drafter_begin": (c_int32, (c_void_p, c_int64, c_char_p, c_int32, c_int32)),
    "tm_drafter_use_corpora": (c_int32, (c_void_p, c_int64, c_void_p, c_int32)),
    "tm_drafter_end": (c_int32, (c_void_p, c_int64)),
    "tm_drafter_propose": (
        c_int32,
        (
            *(c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
            *(c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
        ),
    ),
    "tm_sample_scratch": (c_int64, (c_int64,)),
    "tm_sample": (
        c_int32,
        (c_void_p, c_void_p, c_int64, c_int64, POINTER(SamplingStruct), c_void_p, c_void_p),
    ),
    "tm_token_logprobs": (
        c_int32,
        (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
}


def library_path() -> Path:
    """Where the library is, or would be. An editable installation gives this package two folders: that of its sources
    and, for what was built, one in site-packages."""
    given = os.environ.get("TOKENMILL_NATIVE_LIB")
    if given:
        return Path(given)
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    name = f"libtokenmill_native.{suffix}"
    folders = [Path(__file__).parent, *map(Path, sys.modules[__name__.rpartition(".")[0]].__path__)]
    return next((folder / name for folder in folders if (folder / name).exists()), folders[0] / name)


@functools.lru_cache(maxsize=4)
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    found = library.tm_abi_version()
    if found != ABI_VERSION:
        raise OSError(f"{path} speaks version {found} of the border, this package speaks {ABI_VERSION}; {_REBUILD}")
    missing = next((name for name in _SIGNATURES if not hasattr(library, name)), None)
    if missing is not None:
        raise OSError(f"{path} is older than this package: it has no {missing}; {_REBUILD}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    _check_layout(path, library.tm_sampling_layout(), COLUMNS)
    _check_layout(path, library.tm_adjustment_layout(), PENALTIES)
    return library


def _check_layout(path: Path, found: bytes, members: Mapping[str, tuple[str, float]]) -> None:
    told, wanted = found.decode(), native_layout(members)
    if told != wanted:
        other = ", ".join(sorted({*told.split(";")} ^ {*wanted.split(";")})) or "in another order"
        raise OSError(f"{path} was built for other settings of draws than this package ({other}); {_REBUILD}")


def load_library() -> ctypes.CDLL:
    """The bound library. Raises OSError, with the reason, where there is none that fits."""
    path = library_path()
    if not path.exists():
        raise OSError(f"no native library at {path}")
    return _load(path)


def keeping_interpreter(name: str) -> Callable[..., None]:
    """A function of the library that is over so soon that letting other threads of Python in would cost more."""
    function = getattr(ctypes.PyDLL(str(library_path())), name)
    function.restype, function.argtypes = _SIGNATURES[name]
    return cast(Callable[..., None], function)


def available() -> str | None:
    """None where the native backend can be used, else the reason why not."""
    try:
        load_library()
    except (OSError, AttributeError) as error:
        return str(error)
    return None


def available_isas(among: Sequence[str] = ISAS) -> tuple[str, ...]:
    """Variants that can run on this machine, widest first."""
    library = load_library()
    return tuple(isa for isa in among if library.tm_isa_available(isa.encode()))


def replaced_kinds() -> Mapping[str, str]:
    """The kinds in place of which the variant that this machine would run takes others with the same values."""
    isa = os.environ.get("TOKENMILL_ISA") or next(iter(available_isas(TILE_ISAS[:1])), "")
    return PLAIN_KINDS if isa in TILE_ISAS else {}


def family_isas(isa: str) -> tuple[str, ...]:
    """The variants that agree in bits with `isa`."""
    return TILE_ISAS if isa in TILE_ISAS else ISAS


def check(library: ctypes.CDLL, succeeded: object) -> None:
    """Raise what the library said where a call failed: the caller broke the border's contract."""
    if not succeeded:
        raise AssertionError(library.tm_last_error().decode())
