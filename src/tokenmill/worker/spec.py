"""What a worker is built for, besides the checkpoint and the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.config import EngineConfig
from ..core.effects import WRITE_THROUGH

if TYPE_CHECKING:
    from ..models.lora import LoraLimits


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """config         how the engine above batches and caches, with the KV groups and their blocks in the order of
                   models.kv.kv_groups; layers whose window has no group of its own are taken for layers that see
                   everything. A model that sees a whole input in one step has one group without blocks
    kv_dtype       of the KV pools
    quantization   what dense matrices become at load; None: they stay as stored
    lora           take adapters, within these limits
    gives_vectors  the model gives vectors instead of tokens
    kv_save        folder of KV that outlives the worker; None: none does
    kv_store       socket of the KV store with tiers; None: there is none
    expert_min_share  experts whose weight is below this share of the token's greatest are dropped; 0: none is
    kv_writes      when blocks are saved there (core.effects.WRITES)
    expert_memory  bytes for routed experts, which are kept on disk; None: all are in memory
    weight_memory  bytes for the other weights of layers, likewise
    """

    config: EngineConfig
    kv_dtype: str = "f16"
    quantization: str | None = None
    lora: LoraLimits | None = None
    gives_vectors: bool = False
    kv_save: str | None = None
    kv_store: str | None = None
    kv_writes: str = WRITE_THROUGH
    expert_min_share: float = 0.0
    expert_memory: int | None = None
    weight_memory: int | None = None
