"""From an open checkpoint to a model that can run on one backend, and the counts of what its experts compute.

E experts  M layers that are mixtures of experts
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.block import KVGroup
from ..core.experts import ExpertLoad
from ..formats.checkpoint import Checkpoint
from ..ops.api import Array, Ops
from ..ops.forward import ForwardOps
from . import decoder
from .config import ModelConfig, RopeConfig, config_from_checkpoint
from .decoder import AuxHiddenStates
from .kv_groups import kv_groups, layer_kvs, with_key_exponents
from .lora import LoraLimits, with_tables
from .rope import RopeTables, query_scale_table, rope_frequencies, rope_table
from .weights import LayerWeights, ModelWeights, Progress, load_weights


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """layers: numbers of those that are mixtures. counts: int64 [M, E], the rows that each expert computed; whoever
    computes adds to it, any thread may read."""

    layers: tuple[int, ...]
    counts_ME: np.ndarray

    def load(self) -> ExpertLoad:
        """So far. Costs a microsecond for each dozen of experts."""
        return ExpertLoad(self.layers, tuple(map(tuple, self.counts_ME.tolist())))


def with_expert_counts(weights: ModelWeights) -> tuple[ModelWeights, ExpertCounts | None]:
    """The same weights, whose experts count, and the counts; None of a model that has no experts."""
    moe = {index: layer.moe for index, layer in enumerate(weights.layers) if layer.moe is not None}
    if not moe:
        return weights, None
    num_experts = {each.experts.down.num_matrices for each in moe.values()}
    assert len(num_experts) == 1, f"layers of {num_experts} experts"
    tally = ExpertCounts(tuple(moe), np.zeros((len(moe), *num_experts), np.int64))
    rows = dict(zip(tally.layers, tally.counts_ME, strict=True))
    layers = tuple(
        _counting(layer, rows[index]) if index in rows else layer for index, layer in enumerate(weights.layers)
    )
    return replace(weights, layers=layers), tally


def _counting(layer: LayerWeights, counts_E: np.ndarray) -> LayerWeights:
    assert layer.moe is not None
    experts = replace(layer.moe.experts, tally=counts_E)
    return replace(layer, moe=replace(layer.moe, experts=experts))


@dataclass(frozen=True, slots=True)
class Model:
    """Packed weights and how to run them.

    ropes         each layer's RoPE tables; layers with equal settings share them
    num_bytes     memory the packed weights and tables take (an estimate made by the backend)
    rope_digest   hex digest of the RoPE tables' frequencies and scales: two models with equal weights may differ in it
    expert_counts counts what its experts compute; None: it has none
    """

    config: ModelConfig
    kv_groups: tuple[KVGroup, ...]
    weights: ModelWeights
    ropes: tuple[RopeTables | None, ...]
    rope_digest: str
    num_bytes: int
    vector_size: int = 0
    keeps_kv: bool = True
    expert_counts: ExpertCounts | None = None

    @property
    def kv_group(self) -> KVGroup:
        """The only KV group, of a model loaded without `windows`."""
        (group,) = self.kv_groups
        return group

    def forward(self, ops: ForwardOps, kv: Any, batch: Any, aux: AuxHiddenStates | None = None) -> Array:
        """Logits [L, V]; see decoder.forward. `kv`: the bound pool, or a tuple of one for each group."""
        kvs = layer_kvs(self.kv_groups, kv if isinstance(kv, tuple) else (kv,), self.config)
        return decoder.forward(ops, self.config, self.weights, self.ropes, kvs, batch, aux)


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_dtype: str = "f16",
    quantization: str | None = None,
    progress: Progress | None = None,
    lora: LoraLimits | None = None,
    windows: Collection[int] = (),
    expert_min_share: float = 0.0,
) -> Model:
    """Read and pack a model for positions [0, max_model_len) (default: the model's whole context). `quantization` and
    `progress`: see load_weights. `lora`: make room for adapters. `windows`: those whose layers are
    a KV group of their own. `expert_min_share`: see Routing.min_share; 0 for a model without experts.

    Raises BadCheckpoint for an unknown architecture and for missing, unexpected or misshaped tensors.
    """
    config = _with_min_share(config_from_checkpoint(checkpoint), expert_min_share)
    weights = load_weights(checkpoint, config, ops, quantization=quantization, progress=progress)
    weights, expert_counts = with_expert_counts(weights)
    if lora is not None:
        weights = with_tables(weights, config, ops, lora)
    ropes, rope_digest, num_table_bytes = load_ropes(config, ops, max_model_len or config.max_context)
    groups = kv_groups(config, windows=windows, block_size=block_size, dtype=kv_dtype)
    return Model(
        config=config,
        kv_groups=with_key_exponents(groups, config, weights.layers),
        weights=weights,
        ropes=ropes,
        rope_digest=rope_digest,
        num_bytes=weights.num_bytes + num_table_bytes,
        expert_counts=expert_counts,
    )


def load_ropes(config: ModelConfig, ops: Ops, num_positions: int) -> tuple[tuple[RopeTables | None, ...], str, int]:
    """Each layer's tables for positions [0, num_positions), the digest of all (see Model), and what they take, in
    bytes."""
    tables: dict[tuple[RopeConfig, int, int], RopeTables] = {}
    digest = hashlib.sha256()
    num_bytes = 0
    for rope, num_turned, head_dim in config.ropes:
        frequencies = rope_frequencies(rope, num_turned, num_positions)
        digest.update(frequencies.tobytes() + struct.pack("<d", rope.cos_scale))
        turns = rope_table(frequencies, num_positions, rope.cos_scale) if rope.share else None
        scales = query_scale_table(rope, head_dim, num_positions)
        if rope.query_beta:
            digest.update(struct.pack("<dqq", rope.query_beta, rope.original_context, rope.query_first))
        kept = [None if table is None else ops.vector(table) for table in (turns, scales)]
        tables[rope, num_turned, head_dim] = RopeTables(*kept)
        num_bytes += sum(table.nbytes for table in (turns, scales) if table is not None)
    of_layers = map(config.rope_of, range(config.num_layers))
    ropes = tuple(None if which is None else tables[which] for which in of_layers)
    return ropes, digest.hexdigest(), num_bytes


def _with_min_share(config: ModelConfig, share: float) -> ModelConfig:
    if not share:
        return config
    assert config.moe is not None, f"no experts that could be below a share of {share}"
    return replace(config, moe=replace(config.moe, routing=replace(config.moe.routing, min_share=share)))
