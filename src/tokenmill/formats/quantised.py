"""Matrices that other tools quantised and stored as several tensors, joined into one that reads like any other.

    gptq                 qweight i32 [K/p, N], codes packed along K | qzeros i32 [G, N/p] | scales [G, N] | g_idx [K]
    awq                  qweight i32 [K, N/8], codes packed along N in the order 0 2 4 6 1 3 5 7 | qzeros, scales
    compressed-tensors   weight_packed i32 [N, K/p] along K | weight_scale [N, G] | weight_zero_point i32 [N/p, G] |
                         weight_shape | weight_g_idx; or weight i8 or f8 with weight_scale [N, G], [N, 1] or one
    fp8                  weight f8 [N, K] | weight_scale_inv, one for each square of `weight_block_size`

with p codes in 32 bits, lowest first. All mean weight = scale * (code - zero). The layouts are those of AutoGPTQ,
AutoAWQ and the compressed-tensors package. Activations are never read from these files: what was to run with 8-bit
activations runs with ours, which have a scale for each 32 values of a row.

    N outputs  K inputs  G groups of inputs
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import BadCheckpoint
from .tensor import Tensor

_SUFFIXES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
        "input_zero_point",
    ),
    "fp8": ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
}  # fmt: skip
_CODES = ("qweight", "weight_packed", "weight")


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """Looks like a Tensor (name, kind, shape, data of its codes). What it means is read by integers.py.

    layout       "gptq", "awq", "packed", "int8" or "float"
    parts        its tensors, by the last part of their names
    bits         of a code
    zero_offset  what is to be added to stored zeros
    block        (outputs, inputs) that share a scale, where these are squares
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

    @property
    def num_values(self) -> int:
        return self.shape[0] * self.shape[1]


def join_quantised(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor | QuantisedTensor]:
    """`tensors` of a folder with the parts of each quantised matrix replaced by one `<module>.weight`. Raises
    BadCheckpoint for a method that is not known, and for parts that do not fit each other."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return dict(tensors)
    if not isinstance(settings, Mapping):
        raise BadCheckpoint("quantization_config is not an object.")
    method = str(settings.get("quant_method", "compressed-tensors")).lower()
    if method not in _SUFFIXES:
        raise BadCheckpoint(f"quantisation method {method!r} is not supported (supported: {', '.join(_SUFFIXES)}).")
    suffixes = _SUFFIXES[method]
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in suffixes:
            modules.setdefault(module, {})[suffix] = tensor
    joined: dict[str, Tensor | QuantisedTensor] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module not in modules or (suffix not in suffixes and suffix != "weight"):
            joined[name] = tensor
        elif suffix in _CODES:
            parts = modules[module] | {suffix: tensor}
            joined[f"{module}.weight"] = _join(f"{module}.weight", method, parts, settings)
    return joined


def _join(name: str, method: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    read = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _floats}[method]
    try:
        return read(name, parts, settings)
    except KeyError as error:
        raise BadCheckpoint(f"{name}: tensor {error} of its {method} form is missing.") from None
    except (ValueError, IndexError) as error:
        raise BadCheckpoint(f"{name}: {error}") from None


def _gptq(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    bits = _bits(settings.get("bits"))
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    per_word = 32 // bits
    num_inputs, num_outputs = packed.shape[0] * per_word, packed.shape[1]
    num_groups = scales.shape[0]
    _expect(packed, (packed.shape[0], num_outputs), "i32")
    _expect(scales, (num_groups, num_outputs))
    _expect(zeros, (num_groups, -(-num_outputs // per_word)), "i32")
    if "g_idx" in parts:
        _expect(parts["g_idx"], (num_inputs,), "i32")
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # zeros were stored less one
    return QuantisedTensor(
        name, f"gptq {bits}-bit", (num_outputs, num_inputs), packed.data, "gptq", parts, bits, offset
    )


def _awq(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    bits = _bits(settings.get("bits", settings.get("w_bit")))
    if bits != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
        raise ValueError("only AWQ's 4-bit gemm layout is supported.")
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    num_inputs, num_outputs = packed.shape[0], packed.shape[1] * 8
    _expect(packed, (num_inputs, packed.shape[1]), "i32")
    _expect(scales, (scales.shape[0], num_outputs))
    _expect(zeros, (scales.shape[0], packed.shape[1]), "i32")
    return QuantisedTensor(name, "awq 4-bit", (num_outputs, num_inputs), packed.data, "awq", parts, bits)


def _compressed(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    if "weight_packed" not in parts:
        return _floats(name, parts, settings) if parts["weight"].kind.startswith("f8") else _int8(name, parts)
    packed, scales, stated = parts["weight_packed"], parts["weight_scale"], parts["weight_shape"]
    _expect(stated, (2,), "i64")
    num_outputs, num_inputs = struct.unpack("<2q", stated.data)
    if len(packed.shape) != 2 or min(num_outputs, num_inputs) < 1:
        raise ValueError(f"weight_shape {(num_outputs, num_inputs)} does not fit weight_packed {packed.shape}.")
    bits = 4 if packed.shape[1] == -(-num_inputs // 8) else 8
    per_word = 32 // bits
    _expect(packed, (num_outputs, -(-num_inputs // per_word)), "i32")
    num_groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if len(scales.shape) == 2:
        _expect(scales, (num_outputs, num_groups))
    if "weight_zero_point" in parts:
        _expect(parts["weight_zero_point"], (-(-num_outputs // per_word), num_groups), "i32")
    if "weight_g_idx" in parts:
        _expect(parts["weight_g_idx"], (num_inputs,), "i32")
    kind = f"compressed {bits}-bit packed"
    return QuantisedTensor(name, kind, (num_outputs, num_inputs), packed.data, "packed", parts, bits)


def _int8(name: str, parts: dict[str, Tensor]) -> QuantisedTensor:
    codes = parts["weight"]
    num_outputs, num_inputs = codes.shape
    _expect(codes, (num_outputs, num_inputs), "i8")
    _expect_rows(parts["weight_scale"], num_outputs)
    return QuantisedTensor(name, "compressed 8-bit", (num_outputs, num_inputs), codes.data, "int8", parts, 8)


def _floats(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    codes = parts["weight"]
    num_outputs, num_inputs = codes.shape
    if not codes.kind.startswith("f8"):
        raise ValueError(f"a weight of kind {codes.kind} is not one of 8-bit floats.")
    block = settings.get("weight_block_size") if "weight_scale_inv" in parts else None
    if block is None:
        _expect_rows(parts.get("weight_scale_inv") or parts["weight_scale"], num_outputs)
    else:
        rows, columns = (int(size) for size in block)
        if min(rows, columns) < 1:
            raise ValueError(f"weight_block_size {block!r} is not a pair of sizes.")
        _expect(parts["weight_scale_inv"], (-(-num_outputs // rows), -(-num_inputs // columns)))
        block = (rows, columns)
    return QuantisedTensor(name, codes.kind, (num_outputs, num_inputs), codes.data, "float", parts, 8, block=block)


def _bits(value: Any) -> int:
    if value not in (4, 8):
        raise ValueError(f"{value!r} bits are not supported (supported: 4, 8).")
    return int(value)


def _expect(tensor: Tensor, shape: tuple[int, ...], kind: str | None = None) -> None:
    if tensor.shape != shape or not tensor.num_values or (kind is not None and tensor.kind != kind):
        wanted = f"{kind} {shape}" if kind else str(shape)
        raise ValueError(f"{tensor.name} is {tensor.kind} {tensor.shape} instead of {wanted}.")


def _expect_rows(tensor: Tensor, num_outputs: int) -> None:
    """One value for all, or some for each row."""
    if tensor.num_values != 1 and (len(tensor.shape) not in (1, 2) or tensor.shape[0] != num_outputs):
        raise ValueError(f"{tensor.name} of shape {tensor.shape} does not fit {num_outputs} outputs.")
