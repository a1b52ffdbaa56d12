"""Matrices that other tools quantised and stored as several tensors, and the forms of three such tools.

    gptq                 qweight i32 [K/p, N], codes packed along K | qzeros i32 [G, N/p] | scales [G, N] | g_idx [K]
    awq                  qweight i32 [K, N/8], codes packed along N in the order 0 2 4 6 1 3 5 7 | qzeros, scales
    fp8                  weight f8 [N, K] | weight_scale_inv, one for each square of `weight_block_size`

with p codes in 32 bits, lowest first. All mean weight = scale * (code - zero). The layouts are those of AutoGPTQ
and AutoAWQ; those of compressed-tensors are in compressed.py. Activations are never read from these files: what was to
run with 8-bit activations runs with ours, which have a scale for each 32 values of a row.

    N outputs  K inputs  G groups of inputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .tensor import Tensor


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """Looks like a Tensor (name, kind, shape, data of its codes). What it means is read by integers.py.

    layout       "gptq", "awq", "packed", "int8", "float", "nvfp4", "mxfp4" or "sparse"; "turned": dense, [K, N]
    parts        its tensors, by the last part of their names
    bits         of a code
    zero_offset  what is to be added to stored zeros
    block        (outputs, inputs) that share a scale, where these are squares
    whole_codes  no packed code lies in two words
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

    @property
    def num_values(self) -> int:
        return self.shape[0] * self.shape[1]


def read_gptq(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    bits = _bits(settings.get("bits"))
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    per_word = 32 // bits
    num_inputs, num_outputs = packed.shape[0] * per_word, packed.shape[1]
    num_groups = scales.shape[0]
    expect(packed, (packed.shape[0], num_outputs), "i32")
    expect(scales, (num_groups, num_outputs))
    expect(zeros, (num_groups, -(-num_outputs // per_word)), "i32")
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


def read_fp8(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    codes = parts["weight"]
    num_outputs, num_inputs = codes.shape
    if not codes.kind.startswith("f8"):
        raise ValueError(f"a weight of kind {codes.kind} is not one of 8-bit floats.")
    block = settings.get("weight_block_size") if "weight_scale_inv" in parts else None
    if block is None:
        expect_rows(parts.get("weight_scale_inv") or parts["weight_scale"], num_outputs)
    else:
        rows, columns = (int(size) for size in block)
        if min(rows, columns) < 1:
            raise ValueError(f"weight_block_size {block!r} is not a pair of sizes.")
        expect(parts["weight_scale_inv"], (-(-num_outputs // rows), -(-num_inputs // columns)))
        block = (rows, columns)
    return QuantisedTensor(name, codes.kind, (num_outputs, num_inputs), codes.data, "float", parts, 8, block=block)


def _bits(value: Any) -> int:
    if value not in (4, 8):
        raise ValueError(f"{value!r} bits are not supported (supported: 4, 8).")
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
