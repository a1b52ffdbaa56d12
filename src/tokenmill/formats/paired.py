"""Experts that a folder has all of a layer's in one tensor, inputs first, taken apart: those of GPT-OSS into one matrix
for each expert,

    P.gate_up_proj         dense [E, K, N]: inputs come first; rows of gate and up take turns
    P.gate_up_proj_blocks  u8 [E, N, K/32, 16], two 4-bit floats a byte, and P.gate_up_proj_scales u8 [E, N, K/32]:
                           exponents of 2, plus 127 (MXFP4)
    P.gate_up_proj_bias    [E, N]
    P.down_proj...         the same

become P.{e}.gate_up_proj.weight [N, K] and .bias [N]; those of Qwen3-VL-MoE, dense with all gates before all ups, into
P.{e}.gate_proj.weight, .up_proj.weight and .down_proj.weight. Nothing is read: what has its inputs first is turned
round when it is loaded.

    E experts  N outputs  K inputs
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..core.errors import BadCheckpoint
from .quantised import QuantisedTensor
from .tensor import BLOCK_LAYOUT, Tensor

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
    """`tensors` of a folder with the dense ones of Qwen3-VL-MoE's experts, which as_published left, taken apart."""
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
