"""From an open checkpoint to a model that can run on one backend."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ..core.block import KVGroup
from ..formats.checkpoint import Checkpoint
from ..ops.api import Array, Ops
from . import decoder
from .config import ModelConfig, config_from_checkpoint
from .rope import rope_frequencies, rope_table
from .weights import ModelWeights, load_weights


@dataclass(frozen=True, slots=True)
class Model:
    """Packed weights and how to run them.

    num_bytes     memory the packed weights and tables take (an estimate made by the backend)
    rope_digest   hex digest of the RoPE frequencies: two models with equal weights may differ in it
    """

    config: ModelConfig
    kv_group: KVGroup
    weights: ModelWeights
    rope_PC: Array
    rope_digest: str
    num_bytes: int

    def forward(self, ops: Ops, kv: Any, batch: Any) -> Array:
        """Logits [L, V]; see decoder.forward."""
        return decoder.forward(ops, self.config, self.weights, self.rope_PC, kv, batch)


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_dtype: str = "f16",
) -> Model:
    """Read and pack a model for positions [0, max_model_len) (default: the model's whole context).

    Raises BadCheckpoint for an unknown architecture and for missing, unexpected or misshaped tensors.
    """
    config = config_from_checkpoint(checkpoint)
    weights = load_weights(checkpoint, config, ops)
    frequencies = rope_frequencies(config.rope, config.head_dim, weights.rope_factors)
    table = rope_table(frequencies, max_model_len or config.max_context)
    return Model(
        config=config,
        kv_group=KVGroup("full", config.num_layers, config.num_kv_heads, config.head_dim, block_size, kv_dtype),
        weights=weights,
        rope_PC=ops.vector(table),
        rope_digest=hashlib.sha256(frequencies.tobytes()).hexdigest(),
        num_bytes=weights.num_bytes + table.nbytes,
    )
