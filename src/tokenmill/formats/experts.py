"""Experts that a folder has in one tensor a layer, taken apart under the names that the models were published with.
Nothing is read or moved.

As transformers 5 holds them (`save_original_format=False`):

    P.experts.gate_up_proj [E, 2F, D]   becomes   P.experts.{e}.gate_proj.weight and .up_proj.weight [F, D]
    P.experts.down_proj    [E, D, F]              P.experts.{e}.down_proj.weight [D, F]

Matrices of Mixtral, Phi-3.5-MoE, MiniMax-M2 and LFM2 are called w1, w3 and w2, but of the last in a block_sparse_moe;
Granite was published with tensors of all experts.

With inputs first, which are put last as the matrix is loaded, those of GPT-OSS

    P.gate_up_proj         dense [E, K, N]: inputs come first; rows of gate and up take turns
    P.gate_up_proj_blocks  u8 [E, N, K/32, 16], two 4-bit floats a byte, and P.gate_up_proj_scales u8 [E, N, K/32]:
                           exponents of 2, plus 127 (MXFP4)
    P.gate_up_proj_bias    [E, N]
    P.down_proj...         the same

become P.{e}.gate_up_proj.weight [N, K] and .bias [N]; those of Qwen3-VL-MoE and Llama 4, dense with all gates before
all ups, become P.{e}.gate_proj.weight, .up_proj.weight and .down_proj.weight.

    E experts  N outputs  K inputs  D model width  F FFN width
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..core.errors import BadCheckpoint
from .config_keys import CONFIG_KEYS, model_type_of, value_of
from .quantised import QuantisedTensor
from .tensor import BLOCK_LAYOUT, Tensor

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_NUMBERED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_AS_MIXTRAL = ("mixtral", "phimoe", "minimax_m2")
_GRANITE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
_RENAMED: Mapping[str, Mapping[str, str]] = {
    **{kind: {".mlp.": ".block_sparse_moe.", ".router.": ".gate."} for kind in _AS_MIXTRAL},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "exaone_moe": {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"},
    "ernie4_5_moe": {".mlp.gate.moe_statics.": ".mlp.moe_statics."},
}


def as_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """`tensors` of a folder under published names. Raises BadCheckpoint for experts of a shape that they cannot have.
    GPT-OSS was published with tensors of all experts, in another order."""
    kind = model_type_of(config)
    if kind not in CONFIG_KEYS or kind == "gpt_oss":
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        published = name
        for old, new in _RENAMED.get(kind, {}).items():
            published = published.replace(old, new)
        merged = _EXPERTS.fullmatch(published)
        if (
            merged is None
            or kind == "llama4_text"
            or (kind == "qwen3_vl_moe_text" and _has_inputs_first(tensor, merged[2], config))
        ):
            found[published] = tensor
        else:
            numbered = kind in (*_AS_MIXTRAL, "lfm2_moe")
            found |= _matrices(tensor, merged[1], merged[2], _NUMBERED if numbered else {})
    return found


def _has_inputs_first(tensor: Tensor, matrix: str, config: Mapping[str, Any]) -> bool:
    """Where both orders have one shape, transformers takes it that outputs come first."""
    width = value_of(config, "hidden_size" if matrix == "gate_up_proj" else "moe_intermediate_size")
    return len(tensor.shape) == 3 and tensor.shape[2] != width


def _matrices(tensor: Tensor, module: str, matrix: str, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """(name, matrix) of every expert."""
    roles = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
    if len(tensor.shape) != 3 or not 1 <= tensor.shape[0] <= _MAX_EXPERTS or tensor.shape[1] % len(roles):
        raise BadCheckpoint(f"{tensor.name} of shape {tuple(tensor.shape)} is not one of experts.")
    num_rows, num_cols = tensor.shape[1] // len(roles), tensor.shape[2]
    size = tensor.data.nbytes // (tensor.shape[0] * len(roles))
    for index in range(tensor.shape[0] * len(roles)):
        expert, role = divmod(index, len(roles))
        name = f"{module}.{expert}.{names.get(roles[role], roles[role])}.weight"
        data = tensor.data[index * size : (index + 1) * size]
        yield name, Tensor(name, tensor.kind, (num_rows, num_cols), data)


MODEL_TYPE = "gpt_oss"

_NAME = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?")
_DENSE_KINDS = ("f32", "f16", "bf16")
_SCALED = 32
_MAX_EXPERTS = 4096
"""More than any model has; a damaged count must not be turned into a list of that length."""


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | QuantisedTensor]:
    """`tensors` of a folder, with those of experts taken apart. Raises BadCheckpoint for shapes that do not fit."""
    split: dict[str, Tensor | QuantisedTensor] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None:
            split[name] = tensor
            continue
        module, matrix, what = found.groups()
        if what == "_scales":
            if f"{module}.{matrix}_blocks" not in tensors:
                raise BadCheckpoint(f"{name} has no {matrix}_blocks beside it.")
            continue
        for expert, part in enumerate(_parts(tensor)):
            target = f"{module}.{expert}.{matrix}"
            if what == "_bias":
                split[f"{target}.bias"] = replace(part, name=f"{target}.bias")
            elif what == "_blocks":
                scales = tensors.get(f"{module}.{matrix}_scales")
                split[f"{target}.weight"] = _floats4(f"{target}.weight", tensor, part, scales, expert)
            else:
                split[f"{target}.weight"] = _turned(f"{target}.weight", part)
    return split


def _parts(tensor: Tensor) -> list[Tensor]:
    """What a tensor holds of each expert."""
    if len(tensor.shape) < 2 or not tensor.num_values or tensor.shape[0] > _MAX_EXPERTS:
        raise BadCheckpoint(f"{tensor.name} of shape {tensor.shape} is not one of experts.")
    size = len(tensor.data) // tensor.shape[0]
    return [
        Tensor(tensor.name, tensor.kind, tensor.shape[1:], tensor.data[index * size : (index + 1) * size])
        for index in range(tensor.shape[0])
    ]


def turn_experts(tensors: Mapping[str, Tensor | QuantisedTensor]) -> dict[str, Tensor | QuantisedTensor]:
    """`tensors` of a folder with the dense ones of Qwen3-VL-MoE's and Llama 4's experts, which as_published left, taken
    apart."""
    apart: dict[str, Tensor | QuantisedTensor] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None or isinstance(tensor, QuantisedTensor):
            apart[name] = tensor
            continue
        roles = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
        for expert, part in enumerate(_parts(tensor)):
            for place, role in enumerate(roles):
                target = f"{found[1]}.{expert}.{role}.weight"
                apart[target] = _turned(target, part, place, len(roles))
    return apart


def _turned(name: str, part: Tensor, place: int = 0, count: int = 1) -> QuantisedTensor:
    """The `place`-th of `count` matrices that stand side by side in one, with a share of its bytes, so that they count
    once."""
    if len(part.shape) != 2 or part.kind not in _DENSE_KINDS or part.shape[1] % count:
        raise BadCheckpoint(f"{part.name}: {part.kind} {part.shape} is no matrix of an expert.")
    num_inputs, num_outputs = part.shape[0], part.shape[1] // count
    width = BLOCK_LAYOUT[part.kind][1]
    size = num_inputs * num_outputs * width
    shape, data = (num_outputs, num_inputs), part.data[place * size : (place + 1) * size]
    return QuantisedTensor(
        name, part.kind, shape, data, "turned", {"weight": part}, 8 * width, first=place * num_outputs
    )


def _floats4(name: str, whole: Tensor, blocks: Tensor, scales: Tensor | None, expert: int) -> QuantisedTensor:
    if whole.kind != "u8" or len(whole.shape) != 4 or whole.shape[-1] != _SCALED // 2:
        raise BadCheckpoint(f"{whole.name}: {whole.kind} {whole.shape} is not [experts, outputs, groups, 16] of u8.")
    if scales is None or scales.kind != "u8" or scales.shape != whole.shape[:-1]:
        found = "missing" if scales is None else f"{scales.kind} {scales.shape}"
        raise BadCheckpoint(f"{whole.name}: its scales are {found} instead of u8 {whole.shape[:-1]}.")
    num_outputs, num_groups = blocks.shape[0], blocks.shape[1]
    parts = {
        "weight_packed": Tensor(blocks.name, "u8", (num_outputs, num_groups * _SCALED // 2), blocks.data),
        "weight_scale": _parts(scales)[expert],
    }
    return QuantisedTensor(name, "mxfp4", (num_outputs, num_groups * _SCALED), blocks.data, "mxfp4", parts, 4)
