"""Folders of mixtures of experts as transformers 5 holds them (`save_original_format=False`), under the names that the
models were published with: nothing is read or moved.

    P.experts.gate_up_proj [E, 2F, D]   becomes   P.experts.{e}.gate_proj.weight and .up_proj.weight [F, D]
    P.experts.down_proj    [E, D, F]              P.experts.{e}.down_proj.weight [D, F]

Mixtral's matrices are called w1, w3 and w2, in a block_sparse_moe; Granite was published with tensors of all experts,
and Qwen3-VL-MoE with such as have their inputs first, which stay as they are here (paired.py).

    E experts  D model width  F FFN width
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import BadCheckpoint
from .config_keys import CONFIG_KEYS, model_type_of, value_of
from .tensor import Tensor

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_GRANITE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "mixtral": {".mlp.": ".block_sparse_moe."},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "ernie4_5_moe": {".mlp.gate.moe_statics.": ".mlp.moe_statics."},
}
_MAX_EXPERTS = 4096
"""More than any model has; a damaged count must not be turned into a list of that length."""


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
        if merged is None or (kind == "qwen3_vl_moe_text" and _has_inputs_first(tensor, merged[2], config)):
            found[published] = tensor
        else:
            found |= _parts(tensor, merged[1], merged[2], _MIXTRAL if kind == "mixtral" else {})
    return found


def _has_inputs_first(tensor: Tensor, matrix: str, config: Mapping[str, Any]) -> bool:
    """Where both orders have one shape, transformers takes it that outputs come first."""
    width = value_of(config, "hidden_size" if matrix == "gate_up_proj" else "moe_intermediate_size")
    return len(tensor.shape) == 3 and tensor.shape[2] != width


def _parts(tensor: Tensor, module: str, matrix: str, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
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
