"""The forms in which the compressed-tensors package stores a matrix, recognised by the tensors that are there.

    pack-quantized        weight_packed i32 [N, ceil(K * bits / 32)]: codes of 1 to 8 bits one behind the other along K,
                          lowest first; older files of 3, 5, 6 and 7 bits: whole codes in each word, the rest unused |
                          weight_scale [N, G] | weight_zero_point, packed alike along N | weight_shape | weight_g_idx
    int-quantized         weight i8 | weight_scale for all, a row, or [N, G]
    float-quantized       weight f8 | the same, or [ceil(N / n), ceil(K / k)] for blocks of n * k
    mxfp8-quantized       weight f8 | weight_scale u8 [N, K/32]: exponents of 2, plus 127
    nvfp4-pack-quantized  weight_packed u8 [N, K/2], the lower half first | weight_scale f8 [N, K/16] |
                          weight_global_scale, by which scales were multiplied
    mxfp4-pack-quantized  weight_packed u8 [N, K/2] | weight_scale u8 [N, K/32]: exponents of 2, plus 127
    sparse-24-bitmask,    compressed: what is not zero, row by row | bitmask u8 [N, ceil(K / 8)], lowest bit first |
    sparse-bitmask        shape. With scales beside them, of codes; else of dense values

ModelOpt stores 8-bit floats alike, but [ceil(N / 128), 1, ceil(K / 128), 1] scales of blocks, and nvfp4 as weight u8 |
weight_scale | weight_scale_2, by which scales are multiplied.

How activations were to be quantised is not read; nor are schemes of KV caches.

    N outputs  K inputs  G groups of inputs
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import BadCheckpoint
from .quantised import QuantisedTensor, expect, expect_rows
from .tensor import Tensor

SUFFIXES = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "compressed", "bitmask", "shape", "row_offsets",
)  # fmt: skip
"""Last parts of the names of tensors that belong to a matrix."""

MODELOPT = ("weight_scale", "weight_scale_2", "input_scale")
"""The same of ModelOpt's."""

_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION",
)  # fmt: skip
_SQUARE = 128
"""Of the blocks of FP8_PB_WO."""
_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
    "mxfp8-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
)  # fmt: skip
_SPARSE = ("dense", "sparse-24-bitmask", "sparse-bitmask")
_USUAL_BITS = (4, 8)


def refuse_unknown(settings: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint naming a format, or another setting that changes what matrices mean, that is not read."""
    groups = list(_groups(settings))
    for form in (settings.get("format"), *(group.get("format") for group in groups)):
        if form is not None and form not in _FORMATS:
            raise BadCheckpoint(
                f"compressed-tensors format {form!r} is not supported (supported: {', '.join(_FORMATS)})."
            )
    sparsity = settings.get("sparsity_config")
    form = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "dense"
    if form not in _SPARSE:
        raise BadCheckpoint(f"sparsity_config of format {form!r} is not supported (supported: {', '.join(_SPARSE)}).")
    if settings.get("transform_config"):
        raise BadCheckpoint("transform_config: matrices that were rotated are not supported.")


def refuse_unknown_algorithm(settings: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint naming an algorithm of ModelOpt that is not read. None: only the KV cache is quantised."""
    layers = settings.get("quantized_layers")
    layers = layers.values() if isinstance(layers, Mapping) else ()
    for each in (settings, *(layer for layer in layers if isinstance(layer, Mapping))):
        algorithm = each.get("quant_algo")
        if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
            raise BadCheckpoint(f"quant_algo {algorithm!r} is not supported (supported: {', '.join(_ALGORITHMS)}).")


def read_modelopt(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    """Raises ValueError and KeyError for parts that do not fit each other."""
    codes, scales = parts["weight"], parts["weight_scale"]
    num_outputs, num_inputs = codes.shape
    if codes.kind == "u8":
        return _floats4(name, parts | {"weight_packed": codes})
    if len(scales.shape) != 4:
        return _codes(name, codes, (num_outputs, num_inputs), parts, {})
    expect(scales, (-(-num_outputs // _SQUARE), 1, -(-num_inputs // _SQUARE), 1))
    squares = Tensor(scales.name, scales.kind, scales.shape[::2], scales.data)
    weights = {"strategy": "block", "block_structure": [_SQUARE, _SQUARE]}
    settings = {"config_groups": {"group_0": {"weights": weights}}}
    return _codes(name, codes, (num_outputs, num_inputs), parts | {"weight_scale": squares}, settings)


def read_form(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    """Raises ValueError and KeyError for parts that do not fit each other."""
    if "compressed" in parts:
        return _sparse(name, parts, settings)
    if "weight_packed" not in parts:
        codes = parts["weight"]
        if len(codes.shape) != 2:
            raise ValueError(f"{codes.name} of shape {codes.shape} is no matrix.")
        return _codes(name, codes, (codes.shape[0], codes.shape[1]), parts, settings)
    if parts["weight_packed"].kind == "u8":
        return _floats4(name, parts)
    return _packed(name, parts, settings)


def _packed(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    packed, scales, stated = parts["weight_packed"], parts["weight_scale"], parts["weight_shape"]
    expect(stated, (2,), "i64")
    num_outputs, num_inputs = struct.unpack("<2q", stated.data)
    if len(packed.shape) != 2 or min(num_outputs, num_inputs) < 1:
        raise ValueError(f"weight_shape {(num_outputs, num_inputs)} does not fit weight_packed {packed.shape}.")
    stated_bits = {bits for weights in _weights(settings) for bits in range(1, 9) if weights.get("num_bits") == bits}
    fitting = [
        (bits, whole)
        for bits in sorted(stated_bits or _USUAL_BITS)
        for whole in (False, True)
        if packed.shape[1] == num_words(num_inputs, bits, whole)
    ]
    if not fitting:
        tried = " or ".join(map(str, sorted(stated_bits or _USUAL_BITS)))
        raise ValueError(f"weight_packed {packed.shape} does not hold {num_inputs} codes of {tried} bits.")
    bits, whole = fitting[0]
    expect(packed, (num_outputs, num_words(num_inputs, bits, whole)), "i32")
    num_groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if len(scales.shape) == 2:
        expect(scales, (num_outputs, num_groups))
    if "weight_zero_point" in parts:
        expect(parts["weight_zero_point"], (num_words(num_outputs, bits, whole), num_groups), "i32")
    if "weight_g_idx" in parts:
        expect(parts["weight_g_idx"], (num_inputs,), "i32")
    kind = f"compressed {bits}-bit packed"
    return QuantisedTensor(name, kind, (num_outputs, num_inputs), packed.data, "packed", parts, bits, whole_codes=whole)


def num_words(num_codes: int, bits: int, whole: bool) -> int:
    """How many words of 32 bits hold the codes. whole: none lies in two words."""
    return -(-num_codes // (32 // bits)) if whole else -(-num_codes * bits // 32)


def _floats4(name: str, parts: dict[str, Tensor]) -> QuantisedTensor:
    packed, scales = parts["weight_packed"], parts["weight_scale"]
    num_outputs, num_inputs = packed.shape[0], 2 * packed.shape[1]
    whole = parts.get("weight_global_scale") or parts.get("weight_scale_2")
    form, group, kind = ("mxfp4", 32, "u8") if whole is None else ("nvfp4", 16, "f8_e4m3")
    if whole is not None and whole.num_values != 1:
        raise ValueError(f"{whole.name} is not one value.")
    expect(packed, (num_outputs, num_inputs // 2), "u8")
    expect(scales, (num_outputs, num_inputs // group), kind)
    if num_inputs % group:
        raise ValueError(f"{num_inputs} inputs do not divide into groups of {group}.")
    return QuantisedTensor(name, f"compressed {form}", (num_outputs, num_inputs), packed.data, form, parts, 4)


def _sparse(name: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    values, mask, stated = parts["compressed"], parts["bitmask"], parts["shape"]
    if stated.kind != "i64" or stated.num_values != 2:
        raise ValueError(f"{stated.name} is not a pair of sizes.")
    num_outputs, num_inputs = struct.unpack("<2q", stated.data)
    if min(num_outputs, num_inputs) < 1:
        raise ValueError(f"{stated.name} says {(num_outputs, num_inputs)}.")
    expect(mask, (num_outputs, -(-num_inputs // 8)), "u8")
    shape = num_outputs, num_inputs
    if "weight_scale" in parts:
        return _codes(name, values, shape, parts, settings)
    if values.kind not in ("f32", "f16", "bf16"):
        raise ValueError(f"{values.name} is {values.kind}, without scales.")
    return QuantisedTensor(name, f"sparse {values.kind}", shape, values.data, "sparse", parts, 16)


def _codes(
    name: str, codes: Tensor, shape: tuple[int, int], parts: dict[str, Tensor], settings: Mapping[str, Any]
) -> QuantisedTensor:
    """Of 8 bits each, integers or floats."""
    scales = parts["weight_scale"]
    if codes.kind == "i8":
        expect_rows(scales, shape[0])
        return QuantisedTensor(name, "compressed 8-bit", shape, codes.data, "int8", parts, 8)
    if not codes.kind.startswith("f8"):
        raise ValueError(f"a weight of kind {codes.kind} is not one of 8-bit codes.")
    block = next((block for block in map(_block, _weights(settings)) if block is not None), None)
    if block is not None:
        wanted = tuple(-(-size // of) for size, of in zip(shape, block, strict=True))
        if scales.shape == wanted:
            return QuantisedTensor(name, codes.kind, shape, codes.data, "float", parts, 8, block=block)
    if scales.kind == "u8":
        expect(scales, (shape[0], shape[1] // 32))
    expect_rows(scales, shape[0])
    return QuantisedTensor(name, codes.kind, shape, codes.data, "float", parts, 8)


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    sizes = weights.get("block_structure")
    if weights.get("strategy") != "block" or not isinstance(sizes, list) or len(sizes) != 2:
        return None
    rows, columns = sizes
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise ValueError(f"block_structure {sizes!r} is not a pair of sizes.")
    return rows, columns


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group


def _weights(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """How each group's weights are quantised. Which group a matrix belongs to is seen from its tensors."""
    for group in _groups(settings):
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            yield weights
