"""Builds a worker from an open checkpoint and a backend: weights, KV pool, compiled forward, executor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..core.block import KVGroup, KVGroupSpec
from ..formats.checkpoint import Checkpoint, weights_digest
from ..formats.hub import default_cache_dir
from ..models.config import ModelConfig
from ..models.encoder_config import EncoderConfig
from ..models.lora import Base, LoraLimits, most_bytes
from ..models.registry import Model, load_model
from ..models.vectors import VectorModel, load_vector_model
from ..models.weights import Progress
from ..ops.api import Ops, StepBatch, StepLimits
from ..ops.pool import KVPool
from .adapters import Adapters
from .executor import ModelExecutor
from .memory import MemoryPlan, plan_memory, step_limits
from .pooling import PoolingRunner
from .runner import Runner

LAYOUT = "K[G,C,s]V[G,s,C]"
"""How a block's bytes are ordered (core/block.py): part of the numerics id."""


@dataclass(frozen=True, slots=True)
class Worker:
    """`groups`: the pools of `kv_groups` as the engine knows them. `numerics_id`: equal ids mean interchangeable KV and
    equal tokens. `vector_size`: values of a vector; 0 for a model that gives tokens. Close the executor to free
    everything."""

    executor: ModelExecutor
    model_config: ModelConfig | EncoderConfig
    kv_groups: tuple[KVGroup, ...]
    groups: tuple[KVGroupSpec, ...]
    numerics_id: str
    memory: MemoryPlan
    vector_size: int = 0


def build_worker(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    max_model_len: int,
    groups: tuple[KVGroupSpec, ...],
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 256,
    block_size: int = 16,
    kv_dtype: str = "f16",
    queue_bytes: int = 0,
    cache_dir: Path | None = None,
    quantization: str | None = None,
    progress: Progress | None = None,
    lora: LoraLimits | None = None,
) -> Worker:
    """Load the model onto `ops` and make it ready to run steps.

    groups: how many blocks the pool of each KV group has, in the order of models.kv.kv_groups; it may be more than
    max_num_seqs sequences can ever hold, for the prefix cache. Layers whose window has no group of its own are taken
    for layers that see everything. queue_bytes: what admission lets waiting requests hold, for the plan. cache_dir:
    where weight digests are remembered (default: the user's cache folder). quantization: what dense matrices become at
    load. lora: take adapters, within these limits. The checkpoint may be closed afterwards. Raises BadCheckpoint.
    """
    model = load_model(
        checkpoint,
        ops,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_dtype=kv_dtype,
        quantization=quantization,
        progress=progress,
        lora=lora,
        windows={group.window for group in groups if group.window},
    )
    config, kv_groups = model.config, model.kv_groups
    sizes = [group.num_blocks for group in groups]
    windows = [group.window for group in groups]
    assert windows == [group.window for group in kv_groups], f"pools for windows {windows}, layers {kv_groups}"
    limits = step_limits(
        config,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
    )
    pools = [ops.new_pool(group, count) for group, count in zip(kv_groups, sizes, strict=True)]
    kvs = tuple(pool.kv for pool in pools)
    program = ops.compile(lambda recorder, batch: model.forward(recorder, kvs, batch), limits)
    adapters = None
    if lora is not None:  # which may ask for weights again; mapped, these take no memory meanwhile
        kept = replace(checkpoint, tensors=dict(checkpoint.tensors))
        adapters = Adapters(Base(kept, config, ops, quantization), model.weights, lora)
    runner = Runner(
        ops,
        program,
        limits,
        vocab_size=config.vocab_size,
        block_size=block_size,
        num_blocks=max(sizes),
        num_tables=len(groups),
        adapters=adapters,
    )

    return Worker(
        executor=ModelExecutor(
            runner,
            ops.open_queue(lambda: any(pool.commit_ahead(runner.num_used_blocks) for pool in pools)),
            on_close=partial(_free, ops, pools),
            adapters=adapters,
        ),
        model_config=config,
        kv_groups=kv_groups,
        groups=groups,
        numerics_id=numerics_id(_weights_id(checkpoint, cache_dir, quantization), model, kv_groups, ops),
        memory=plan_memory(
            config,
            kv_groups,
            limits,
            weights_bytes=model.num_bytes,
            sizes=sizes,
            program_bytes=program.scratch_bytes,
            queue_bytes=queue_bytes,
            adapters_bytes=0 if lora is None else most_bytes(config, lora),
        ),
    )


def build_vector_worker(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    max_model_len: int,
    groups: tuple[KVGroupSpec, ...],
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 256,
    block_size: int = 16,
    kv_dtype: str = "f16",
    queue_bytes: int = 0,
    cache_dir: Path | None = None,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> Worker:
    """As build_worker, for a model that is to give vectors. groups: one, without blocks for an encoder, whose pool is
    sized by the step."""
    (spec,) = groups
    num_blocks = spec.num_blocks
    model = load_vector_model(
        checkpoint,
        ops,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_dtype=kv_dtype,
        quantization=quantization,
        progress=progress,
    )
    group = model.kv_group
    pool_blocks = num_blocks if model.keeps_kv else -(-max_num_batched_tokens // group.block_size) + max_num_seqs
    limits = StepLimits(
        max_tokens=max_num_batched_tokens,
        max_seqs=max_num_seqs,
        max_blocks_per_seq=-(-max_model_len // group.block_size),
        max_logit_rows=max_num_batched_tokens,
    )
    pool = ops.new_pool(group, pool_blocks)
    program = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits)
    head = None if model.head is None else _compile_head(ops, model, max_num_seqs)
    runner = PoolingRunner(model, program, limits, block_size=group.block_size, num_blocks=pool_blocks, head=head)

    return Worker(
        executor=ModelExecutor(runner, ops.open_queue(lambda: False), on_close=partial(_free, ops, [pool])),
        model_config=model.config,
        kv_groups=(group,),
        groups=groups,
        numerics_id=numerics_id(_weights_id(checkpoint, cache_dir, quantization), model, (group,), ops),
        memory=plan_memory(
            model.config,
            (group,),
            limits,
            weights_bytes=model.num_bytes,
            sizes=(num_blocks,),
            program_bytes=program.scratch_bytes,
            queue_bytes=queue_bytes,
            output_width=model.config.width,
            step_pool_bytes=0 if model.keeps_kv else pool_blocks * group.bytes_per_block,
        ),
        vector_size=model.vector_size,
    )


def _compile_head(ops: Ops, model: VectorModel, max_seqs: int) -> Callable[[np.ndarray], np.ndarray]:
    """A model's head as a program on an array of its own: pooled states [S, D] -> [S, vector_size], S <= max_seqs."""
    head, pooled_SD = model.head, np.zeros((max_seqs, model.config.width), np.float32)
    assert head is not None
    program = ops.compile(lambda recorder, batch: head(recorder, pooled_SD), StepLimits(max_seqs, 1, 1, 0))

    def run(states_SD: np.ndarray) -> np.ndarray:
        num_seqs = len(states_SD)
        pooled_SD[:num_seqs] = states_SD
        zeros = np.zeros(num_seqs, np.int32)
        ends = np.array([0, num_seqs], np.int32)
        batch = StepBatch(zeros, zeros, ends, ends[1:], np.zeros((1, 1), np.int32), zeros[:0])
        return program(batch)[:num_seqs]

    return run


def _free(ops: Ops, pools: Sequence[KVPool]) -> None:
    """All that a worker's program and pools hold; `ops` goes first, as its program points into the pools."""
    ops.close()
    for pool in pools:
        pool.close()


def _weights_id(checkpoint: Checkpoint, cache_dir: Path | None, quantization: str | None) -> str:
    """What the weights are that steps compute with: the file's digest, and what they became at load."""
    digest = weights_digest(checkpoint.path, cache_dir or default_cache_dir())
    return f"{digest} {quantization or 'as stored'}"


def numerics_id(digest: str, model: Model | VectorModel, groups: Sequence[KVGroup], ops: Ops) -> str:
    """Digest of all that decides KV bytes and tokens, and of nothing else (not batch, threads or compiler). Which
    layers a block holds is part of it where they are not all."""
    group = groups[0]
    facts = [digest, group.dtype, LAYOUT, str(group.block_size), ops.family, model.rope_digest]
    facts += [f"{group.name} {group.layers}" for group in groups if group.layers]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
