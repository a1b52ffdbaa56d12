"""Matrices that other tools quantised and stored as several tensors, and the forms of some such tools.

    gptq                 qweight i32 [K/p, N], codes packed along K | qzeros i32 [G, N/p] | scales [G, N] | g_idx [K]
    awq                  qweight i32 [K, N/8], codes packed along N in the order 0 2 4 6 1 3 5 7 | qzeros, scales
    auto-round           as gptq, with bits of each matrix, or as awq: packing_format says which
    fp8                  weight f8 [N, K] | weight_scale_inv, one for each square of `weight_block_size`
    bitsandbytes         weight i8 [N, K] | SCB f32 [N], 127 times the scale of each row
                         weight u8 [N * K / 2, 1], the upper half first | weight.quant_map, the 16 values of codes |
                         weight.absmax, a scale for each run of values | weight.quant_state.*, settings in JSON |
                         where scales are quantised too, weight.nested_absmax and weight.nested_quant_map of them

with p codes in 32 bits, lowest first, one behind the other. The first four mean weight = scale * (code - zero). The
layouts are those of AutoGPTQ, AutoAWQ, AutoRound and bitsandbytes; those of compressed-tensors are in
compressed_tensors.py. Activations are never read from these files: what was to run with 8-bit activations runs with
ours, which have a scale for each 32 values of a row.

    N outputs  K inputs  G groups of inputs
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import BadCheckpoint
from .tensor import Tensor

_BITS = (2, 3, 4, 5, 6, 7, 8)
_GPTQ_PACKINGS = {
    "auto": "gptq", "auto_round:gptq": "gptq", "auto_round:auto_gptq": "gptq",
    "auto_round": "gptq_v2", "auto_round:exllamav2": "gptq_v2", "auto_round:gptqmodel": "gptq_v2",
}  # fmt: skip
_AWQ_PACKINGS = ("auto_round:awq", "auto_round:auto_awq")
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
BITSANDBYTES = (
    "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
    *_STATES,
)  # fmt: skip
"""Last parts of the names of tensors that belong to a matrix."""


@dataclass(frozen=True, slots=True)
class Runs:
    """size values share a scale; where scales are codes as well, scale_size of them share one, and offset is added."""

    size: int
    scale_size: int | None = None
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """Looks like a Tensor (name, kind, shape, data of its codes). What it means is read by integers.py.

    layout       "gptq", "awq", "packed", "int8", "float", "nvfp4", "mxfp4", "mapped" or "sparse"; "turned": dense,
                 columns of a matrix that has its inputs first
    parts        its tensors, by the last part of their names
    bits         of a code
    zero_offset  what is to be added to stored zeros
    block        (outputs, inputs) that share a scale, where these are squares
    whole_codes  no packed code lies in two words
    runs         of layout "mapped": how many values, one behind the other, share a scale
    first        where the columns of a turned matrix begin
    """

    name: str
    kind: str
    shape: tuple[int, int]
    data: memoryview
    layout: str
    parts: Mapping[str, Tensor]
    bits: int
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    whole_codes: bool = True
    runs: Runs | None = None
    first: int = 0

    @property
    def num_values(self) -> int:
        return self.shape[0] * self.shape[1]


def stored_bytes(tensor: Tensor | QuantisedTensor) -> int:
    """Of all that it is stored as."""
    if not isinstance(tensor, QuantisedTensor) or tensor.layout == "turned":  # others share what such a matrix is in
        return tensor.data.nbytes
    return sum(part.data.nbytes for part in tensor.parts.values())


def read_gptq(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    bits = _bits(settings.get("bits"))
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    num_inputs, num_outputs = packed.shape[0] * 32 // bits, packed.shape[1]
    num_groups = scales.shape[0]
    expect(packed, (packed.shape[0], num_outputs), "i32")
    if packed.shape[0] * 32 % bits:
        raise ValueError(f"{packed.name} {packed.shape} does not hold whole codes of {bits} bits.")
    expect(scales, (num_groups, num_outputs))
    expect(zeros, (num_groups, -(-num_outputs * bits // 32)), "i32")
    if "g_idx" in parts:
        expect(parts["g_idx"], (num_inputs,), "i32")
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # zeros were stored less one
    return QuantisedTensor(
        name, f"gptq {bits}-bit", (num_outputs, num_inputs), packed.data, "gptq", parts, bits, offset
    )


def read_awq(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    bits = _bits(settings.get("bits", settings.get("w_bit")))
    if bits != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
        raise ValueError("only AWQ's 4-bit gemm layout is supported.")
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    num_inputs, num_outputs = packed.shape[0], packed.shape[1] * 8
    expect(packed, (num_inputs, packed.shape[1]), "i32")
    expect(scales, (scales.shape[0], num_outputs))
    expect(zeros, (scales.shape[0], packed.shape[1]), "i32")
    return QuantisedTensor(name, "awq 4-bit", (num_outputs, num_inputs), packed.data, "awq", parts, bits)


def refuse_unknown_packing(settings: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint naming a packing of AutoRound, or another setting that changes what matrices mean, that is
    not read."""
    packing = _packing(settings)
    known = (*_GPTQ_PACKINGS, *_AWQ_PACKINGS)
    if packing not in known:
        raise BadCheckpoint(f"packing_format {packing!r} is not supported (supported: {', '.join(known)}).")
    data_type, act_bits = settings.get("data_type"), settings.get("act_bits")
    if data_type not in (None, "int"):
        raise BadCheckpoint(f"data_type {data_type!r} of AutoRound is not supported (supported: int).")
    if isinstance(act_bits, int) and act_bits < 16:
        raise BadCheckpoint(f"act_bits {act_bits} of AutoRound is not supported: matrices would have further scales.")
    for key in ("rotation_config", "spinquant_config"):
        if settings.get(key):
            raise BadCheckpoint(f"{key}: matrices that were rotated are not supported.")


def read_auto_round(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    if _packing(settings) in _AWQ_PACKINGS:
        return read_awq(name, parts, {"bits": 4})
    num_outputs = parts["scales"].shape[1]
    bits = parts["qzeros"].shape[1] * 32 // max(num_outputs, 1)  # a matrix may have its own
    return read_gptq(name, parts, {"bits": bits, "checkpoint_format": _GPTQ_PACKINGS[_packing(settings)]})


def _packing(settings: Mapping[str, Any]) -> str:
    """As said by the key of today or that of older files."""
    return str(settings.get("packing_format") or settings.get("backend") or "auto").lower()


def read_fp8(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    codes = parts["weight"]
    num_outputs, num_inputs = codes.shape
    if not codes.kind.startswith("f8"):
        raise ValueError(f"a weight of kind {codes.kind} is not one of 8-bit floats.")
    block = settings.get("weight_block_size") if "weight_scale_inv" in parts else None
    if block is None:
        expect_rows(parts.get("weight_scale_inv") or parts["weight_scale"], num_outputs)
    else:
        sizes = block if isinstance(block, list) and all(type(size) is int for size in block) else []
        if len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(f"weight_block_size {block!r} is not a pair of sizes.")
        rows, columns = sizes
        expect(parts["weight_scale_inv"], (-(-num_outputs // rows), -(-num_inputs // columns)))
        block = (rows, columns)
    return QuantisedTensor(name, codes.kind, (num_outputs, num_inputs), codes.data, "float", parts, 8, block=block)


def read_bitsandbytes(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    codes = parts["weight"]
    if "SCB" in parts:
        num_outputs, num_inputs = codes.shape
        expect(codes, (num_outputs, num_inputs), "i8")
        expect(parts["SCB"], (num_outputs,), "f32")
        if "weight_format" in parts and any(parts["weight_format"].data):
            raise ValueError("codes in the order of a GPU's tiles (weight_format) are not supported.")
        shape = num_outputs, num_inputs
        return QuantisedTensor(name, "bitsandbytes 8-bit", shape, codes.data, "int8", parts, 8)
    kind, shape, runs = _read_state(parts[next((state for state in _STATES if state in parts), _STATES[0])])
    num_values = shape[0] * shape[1]
    num_scales = -(-num_values // runs.size)
    if codes.data.nbytes != -(-num_values // 2):
        raise ValueError(f"{codes.name} of {codes.data.nbytes} bytes does not hold {num_values} codes of 4 bits.")
    expect(parts["weight.quant_map"], (16,), "f32")
    expect(parts["weight.absmax"], (num_scales,), "f32" if runs.scale_size is None else "u8")
    if runs.scale_size is not None:
        expect(parts["weight.nested_absmax"], (-(-num_scales // runs.scale_size),), "f32")
        expect(parts["weight.nested_quant_map"], (256,), "f32")
    return QuantisedTensor(name, f"bitsandbytes {kind}", shape, codes.data, "mapped", parts, 4, runs=runs)


def _read_state(tensor: Tensor) -> tuple[str, tuple[int, int], Runs]:
    """(kind of codes, shape, runs) of a matrix. Raises ValueError."""
    state = json.loads(bytes(tensor.data))
    if not isinstance(state, dict):
        raise ValueError(f"{tensor.name} does not hold a JSON object.")
    sizes = state.get("shape"), state.get("blocksize"), state.get("nested_blocksize"), state.get("nested_offset", 0.0)
    match sizes:
        case [[int(rows), int(columns)], int(size), int() | None as scale_size, int() | float() as offset] if (
            min(rows, columns, size, 1 if scale_size is None else scale_size) > 0
        ):
            return str(state.get("quant_type")), (rows, columns), Runs(size, scale_size, float(offset))
    raise ValueError(f"{tensor.name} says shape, blocks of values and of scales, and offset {sizes!r}.")


def _bits(value: Any) -> int:
    if value not in _BITS:
        raise ValueError(f"{value!r} bits are not supported (supported: {', '.join(map(str, _BITS))}).")
    return int(value)


def expect(tensor: Tensor, shape: tuple[int, ...], kind: str | None = None) -> None:
    """Raises ValueError for another shape or kind."""
    if tensor.shape != shape or not tensor.num_values or (kind is not None and tensor.kind != kind):
        wanted = f"{kind} {shape}" if kind else str(shape)
        raise ValueError(f"{tensor.name} is {tensor.kind} {tensor.shape} instead of {wanted}.")


def expect_rows(tensor: Tensor, num_outputs: int) -> None:
    """One value for all, or some for each row."""
    if tensor.num_values != 1 and (len(tensor.shape) not in (1, 2) or tensor.shape[0] != num_outputs):
        raise ValueError(f"{tensor.name} of shape {tensor.shape} does not fit {num_outputs} outputs.")
