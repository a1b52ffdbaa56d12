"""Multi-token prediction: the layer behind a checkpoint's own that guesses one token further (DeepSeek-V3, arXiv
2412.19437; GLM-4.5 and later; `nextn` in GGUF files).

The target has seen the tokens up to position p, and token p + 1 has been drawn. The layer is given both:

    x       W [norm(embedding of token p + 1), norm(the target's last state at p, behind its final norm)]
    h       what a decoder layer of the target's own form makes of x
    logits  head(norm(h)), of token p + 2

To go on, h takes the place of the target's state. Of several such layers the first one guesses again and again, as
where there is one.

In here it is a model of one layer, with a checkpoint of its own that is a view of the target's: so its weights, KV and
configuration are read and checked as those of any other model.

    T tokens  L rows of logits  D width
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.block import KVGroup
from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import Tensor
from ..ops.api import Array, Ops, Weight
from ..ops.forward import ForwardOps
from . import decoder
from .config import config_from_checkpoint
from .kv_groups import layer_kvs
from .loader import Model, load_model
from .repack import as_matrix
from .tensor_names import GLOBAL_NAMES, LAYER_NAMES
from .weights import as_run

_OWN = "mtp."
"""Before the names of what a model of one layer does not have."""

_PARTS = {
    "hf": {
        "embed": "embed_tokens",
        "final_norm": "shared_head.norm",
        "head": "shared_head.head",
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
    },
    "gguf": {
        "embed": "nextn.embed_tokens",
        "final_norm": "nextn.shared_head_norm",
        "head": "nextn.shared_head_head",
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "eh_proj": "nextn.eh_proj",
    },
}
"""What such a layer has beside that of a decoder. What is missing of the first three is the target's own."""


def mtp_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """A view of its first layer that predicts another token, as of a model of this layer alone. Raises BadCheckpoint
    where it has none."""
    kind, tensors = checkpoint.kind, checkpoint.tensors
    layer = config_from_checkpoint(checkpoint).num_layers
    before = ("blk.{}." if kind == "gguf" else "model.layers.{}.").format
    parts, names = _PARTS[kind], GLOBAL_NAMES[kind]
    own = {name.removeprefix(before(layer)): each for name, each in tensors.items() if name.startswith(before(layer))}
    lacking = [parts[part] for part in ("enorm", "hnorm", "eh_proj") if f"{parts[part]}.weight" not in own]
    if lacking:
        raise BadCheckpoint(
            f"{checkpoint.path} has no layer that predicts further tokens (MTP): behind its {layer} layers there is no "
            f"{before(layer)}{lacking[0]}.weight. Many files are published without it."
        )
    found: dict[str, Tensor | QuantisedTensor] = {}
    for part, name in parts.items():
        as_called = f"{names[part]}.weight" if part in names else f"{_OWN}{part}.weight"
        each = own.pop(f"{name}.weight", None) or tensors.get(as_called)
        if each is not None:
            found[as_called] = each
    found |= {before(0) + name: each for name, each in own.items()}
    has_experts = f"{LAYER_NAMES[kind]['router'].format(0)}.weight" in found
    return Checkpoint(kind, checkpoint.path, _of_one_layer(checkpoint, has_experts), found)


def _of_one_layer(checkpoint: Checkpoint, has_experts: bool) -> dict[str, Any]:
    given = checkpoint.metadata
    if checkpoint.kind == "gguf":
        prefix = f"{given['general.architecture']}."
        said: dict[str, Any] = {f"{prefix}block_count": 1, f"{prefix}nextn_predict_layers": 0}
        return {**given, **said}
    said = {"num_hidden_layers": 1, "first_k_dense_replace": int(not has_experts)}
    lists = {"mlp_layer_types": ["sparse" if has_experts else "dense"], "layer_types": ["full_attention"]}
    none = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
    return {**given, **said, **{key: value for key, value in (lists | none).items() if given.get(key) is not None}}


@dataclass(frozen=True, slots=True)
class MtpModel:
    """model: the layer, as a model of it alone, whose final norm and head are those of the guess. enorm, hnorm, join:
    what makes its input."""

    model: Model
    enorm: Array
    hnorm: Array
    join: Weight

    @property
    def num_bytes(self) -> int:
        return self.model.num_bytes + int(self.join.num_bytes)

    @property
    def width(self) -> int:
        return self.model.config.width

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def kv_group(self) -> KVGroup:
        return self.model.kv_group

    def forward(self, ops: ForwardOps, kv: Any, batch: Any, states: np.ndarray, made: np.ndarray) -> Array:
        """Logits [L, V]; writes the KV of all its tokens. Of the token of each row, which is at the position behind
        the row's: states, float32 [max_tokens, D]: what the target, or this layer, made at the row's position. made:
        what it makes is written there."""
        config, weights = self.model.config, self.model.weights
        e_TD = ops.rms_norm(ops.embed(weights.embed, batch.tokens_T), self.enorm, config.norm_eps)
        h_TD = ops.rms_norm(ops.load_rows(states, batch.tokens_T), self.hnorm, config.norm_eps)
        x_TD = ops.linear(ops.join_columns([e_TD, h_TD]), self.join)
        (layer,), (rope,) = weights.layers, self.model.ropes
        (layer_kv,) = layer_kvs(self.model.kv_groups, (kv,), config)
        x_TD = ops.add(x_TD, decoder.attention(ops, config, 0, layer, rope, layer_kv, batch, x_TD))
        x_TD = ops.add(x_TD, decoder.ffn(ops, config, layer, batch, x_TD))
        ops.store_rows(x_TD, made)
        x_LD = ops.rms_norm(ops.gather_rows(x_TD, batch.logit_rows_L), weights.final_norm.weight, config.norm_eps)
        return ops.linear(x_LD, weights.head)


def load_mtp(checkpoint: Checkpoint, ops: Ops, *, quantization: str | None = None, **how: Any) -> MtpModel:
    """Of what mtp_checkpoint gave. quantization, how: see load_model. Raises BadCheckpoint."""
    tensors = {name.removeprefix(_OWN): each for name, each in checkpoint.tensors.items() if name.startswith(_OWN)}
    others = {name: each for name, each in checkpoint.tensors.items() if not name.startswith(_OWN)}
    model = load_model(replace(checkpoint, tensors=others), ops, quantization=quantization, **how)
    width = model.config.width
    _check(checkpoint, tensors, {"enorm": (width,), "hnorm": (width,), "eh_proj": (width, 2 * width)})
    enorm, hnorm = (
        ops.vector(dequantise(each.kind, each.data, each.num_values))
        for each in (tensors["enorm.weight"], tensors["hnorm.weight"])
    )
    join = ops.pack([as_run(as_matrix(tensors["eh_proj.weight"]), ops, quantization)])
    return MtpModel(model, enorm, hnorm, join)


def _check(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor | QuantisedTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for name, shape in shapes.items():
        if (found := tuple(tensors[f"{name}.weight"].shape)) != shape:
            raise BadCheckpoint(f"{checkpoint.path}: {name}.weight of its MTP layer is {found} instead of {shape}.")
