"""Builds a worker from an open checkpoint and a backend: weights, KV pool, compiled forward, executor."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..core.block import NO_BLOCK, KVGroup
from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..core.experts import ExpertLoad
from ..core.speculation import EAGLE3, MEDUSA, MTP
from ..formats.checkpoint import Checkpoint, open_checkpoint, weights_digest
from ..formats.hub import default_cache_dir
from ..kv.connector.worker.transfers import Transfers, open_folder
from ..kv.transfer.disk.folder import SharedFolder
from ..models.config import ModelConfig, config_from_checkpoint
from ..models.decoder import AuxHiddenStates
from ..models.eagle3 import Eagle3Model, load_eagle3
from ..models.encoder_config import EncoderConfig
from ..models.families import declared_elsewhere
from ..models.loader import Model, load_model
from ..models.lora import Base
from ..models.medusa import MedusaHeads, load_medusa
from ..models.mtp import MtpModel, load_mtp
from ..models.vectors import VectorModel, load_vector_model
from ..models.weights import Progress
from ..ops.api import Array, Ops, Program, StepBatch, StepLimits
from ..ops.drafts import Corpus
from ..ops.kv_pool import KVPool
from ..ops.weights import DiskWeights
from ..text.grammar.matcher import Vocabulary
from .adapters import Adapters
from .batch import DraftStates, Slots
from .draft_medusa import MedusaDrafter
from .draft_model import DraftModel, drafter_limits
from .draft_sequences import spare_blocks
from .draft_states import StateDrafter, state_limits
from .drafters import Drafters, draft_index_bytes
from .executor import ModelExecutor
from .grammars import Grammars, grammar_bytes
from .kept_outputs import KeptOutputs
from .memory import HeldBytes, MemoryPlan, plan_memory, step_limits
from .model_drafter import ModelDrafter
from .pooling import PoolingRunner
from .runner import Runner
from .spec import WorkerSpec

LAYOUT = "K[G,C,s]V[G,s,C]"
"""How a block's bytes are ordered (core/block.py): part of the numerics id."""

ROTATED = "rotated"
"""What int8 does to keys and values before they become codes (Ops.write_kv): part of the numerics id of such KV."""

PAIRS = "bf16 products"
"""How attention multiplies bf16 keys and values where there is no matrix unit, and what it rounds for it: part of the
numerics id of such KV."""

FORWARD = "forward-1"
"""The forward pass as models/ writes it: part of the numerics id. Raise it with every change there that can change a
bit of a model's results, or KV saved before would be mixed with KV computed after."""


Drafter = Model | Eagle3Model | MedusaHeads | MtpModel
"""What computes drafts."""


@dataclass(frozen=True, slots=True)
class Worker:
    """config: the spec's, with the numerics id of what was loaded: equal ids mean interchangeable KV and equal tokens.
    vector_size: values of a vector; 0 for a model that gives tokens. saved: the KV that outlives it, if it keeps some.
    pools: of each KV group. expert_load: what its experts have computed since it was made, without a number of steps;
    None: it has none. time_step: seconds of a step of so many rows with so many threads, made before any other; None:
    that would be slow, or nobody asks. Close the executor to free everything."""

    executor: ModelExecutor
    config: EngineConfig
    model_config: ModelConfig | EncoderConfig
    kv_groups: tuple[KVGroup, ...]
    memory: MemoryPlan
    vector_size: int = 0
    saved: SharedFolder | None = None
    pools: tuple[KVPool, ...] = ()
    expert_load: Callable[[], ExpertLoad | None] = lambda: None
    time_step: Callable[[int, int], float] | None = None


def build_worker(
    checkpoint: Checkpoint,
    ops: Ops,
    spec: WorkerSpec,
    *,
    model: Model | VectorModel | None = None,
    drafter: Drafter | None = None,
    corpora: Sequence[Corpus] = (),
    kept: KeptOutputs | None = None,
    queue_bytes: int = 0,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Worker:
    """Make the model that `load_weights` gave ready to run steps: a forward, and what makes tokens or vectors of what
    it gives. model: None: load it now. drafter: what `load_drafter` gave; None: no model drafts. corpora: those of the
    spec. kept: keeps outputs across restarts, where that is asked for. queue_bytes: what admission lets waiting
    requests hold, for the plan. cache_dir: where weight digests are remembered (default: the user's). The checkpoint
    may be closed afterwards. Raises BadCheckpoint, and ConfigError where the folder of saved KV cannot be used."""
    model = model or load_weights(checkpoint, ops, spec, progress, cache_dir)
    config, groups = spec.config, model.kv_groups
    windows = [group.window for group in config.groups]
    assert windows == [group.window for group in groups], f"pools for windows {windows}, layers {groups}"
    limits = _step_limits(model, config)
    sizes = [config.pool_blocks(group) for group in config.groups]
    step_blocks = 0 if model.keeps_kv else -(-limits.max_tokens // groups[0].block_size) + limits.max_seqs
    pools = [ops.new_pool(group, count or step_blocks) for group, count in zip(groups, sizes, strict=True)]
    draft_model = None if drafter is None else _draft_model(ops, spec, model, drafter, limits)
    program = ops.compile(_forward(model, tuple(pool.kv for pool in pools), draft_model), limits)
    num_blocks = max(*sizes, step_blocks)
    drafters = Drafters.of(ops, config, model.config.vocab_size, corpora, kept)
    drafting = draft_model, drafters, _draft_states(config, pools)
    runner, adapters, grammars = _make_runner(checkpoint, ops, spec, model, program, limits, num_blocks, drafting)
    draft_kv = None if draft_model is None else draft_model.kv
    touched = pools if draft_kv is None else [*pools, draft_kv.pool]
    queue = ops.open_queue(lambda: any(pool.commit_ahead(runner.num_used_blocks) for pool in touched))
    model_id = numerics_id(_weights_id(checkpoint, cache_dir, spec.quantization), model, groups, ops)
    saved = None if spec.kv_save is None else open_folder(Path(spec.kv_save), model_id, pools)
    transfers = None if saved is None else Transfers(pools, saved)
    return Worker(
        executor=ModelExecutor(
            runner, queue, partial(_free, ops, touched, drafters), adapters, transfers, grammars, pools, draft_kv
        ),
        config=replace(config, numerics_id=model_id, chosen_experts=_chosen_experts(model)),
        model_config=model.config,
        kv_groups=groups,
        memory=plan_memory(
            model.config,
            groups,
            limits,
            _held_bytes(ops, model, config, limits, adapters, grammars, draft_model, queue_bytes, step_blocks),
            sizes=sizes,
            program_bytes=program.scratch_bytes,
            output_width=model.config.width if spec.gives_vectors else None,
        ),
        vector_size=model.vector_size,
        saved=saved,
        pools=tuple(pools),
        expert_load=partial(_expert_load, model, ops),
        time_step=_step_timer(ops, model, program, limits),
    )


def _step_timer(
    ops: Ops, model: Model | VectorModel, program: Program, limits: StepLimits
) -> Callable[[int, int], float] | None:
    """See Worker.time_step. A step is a prompt of so many tokens in the first blocks, which whoever gets them writes
    before reading."""
    if isinstance(model, VectorModel) or ops.disk_memory_bytes != (0, 0):
        return None
    groups, block_size = model.kv_groups, model.kv_groups[0].block_size

    def time_step(rows: int, num_threads: int) -> float:
        ops.limit_threads([(limits.max_tokens, num_threads)])
        num_blocks = -(-rows // block_size)
        tables_SB = np.arange(num_blocks, dtype=np.int32)[None].repeat(len(groups), 0)
        for table, group in enumerate(groups):
            if group.state_values:
                tables_SB[table] = [NO_BLOCK] * (num_blocks - 1) + [0]
        ends, zeros = np.array([0, rows], np.int32), np.zeros(rows, np.int32)
        positions = np.arange(rows, dtype=np.int32)
        batch = StepBatch(zeros, positions, ends, ends[1:], tables_SB, positions[-1:].copy())
        start_s = time.perf_counter()
        program(batch)
        return time.perf_counter() - start_s

    return time_step


def _forward(
    model: Model | VectorModel, kvs: tuple[Any, ...], drafter: ModelDrafter | None
) -> Callable[[Any, Any], Array]:
    """What a step computes, with what it leaves for the drafter."""
    if isinstance(model, Model) and drafter is not None and drafter.aux is not None:
        aux = drafter.aux
        return lambda recorder, batch: model.forward(recorder, kvs, batch, aux)
    return lambda recorder, batch: model.forward(recorder, kvs, batch)


def _held_bytes(
    ops: Ops,
    model: Model | VectorModel,
    config: EngineConfig,
    limits: StepLimits,
    adapters: Adapters | None,
    grammars: Grammars | None,
    draft_model: ModelDrafter | None,
    queue_bytes: int,
    step_blocks: int,
) -> HeldBytes:
    expert_bytes, layer_bytes = ops.disk_memory_bytes
    return HeldBytes(
        weights=model.num_bytes,
        queue=queue_bytes,
        step_pool=step_blocks * model.kv_groups[0].bytes_per_block,
        adapters=0 if adapters is None else adapters.most_bytes,
        grammars=0 if grammars is None else grammar_bytes(model.config.vocab_size, limits.max_seqs),
        experts=expert_bytes,
        layers=layer_bytes,
        draft_weights=0 if draft_model is None else draft_model.weights_bytes,
        draft_index=draft_index_bytes(config),
        draft_kv=0 if draft_model is None or draft_model.kv is None else draft_model.kv.num_bytes,
        draft_scratch=0 if draft_model is None else draft_model.scratch_bytes or 0,
    )


def _make_runner(
    checkpoint: Checkpoint,
    ops: Ops,
    spec: WorkerSpec,
    model: Model | VectorModel,
    program: Program,
    limits: StepLimits,
    num_blocks: int,
    drafting: tuple[ModelDrafter | None, Drafters | None, DraftStates | None],
) -> tuple[Runner | PoolingRunner, Adapters | None, Grammars | None]:
    """What makes tokens or vectors of what the forward gives; adapters and grammars are for tokens alone."""
    config, groups = spec.config, model.kv_groups
    if isinstance(model, VectorModel):
        head = None if model.head is None else _compile_head(ops, model, limits.max_seqs)
        block_size = groups[0].block_size
        pooling = PoolingRunner(model, program, limits, block_size=block_size, num_blocks=num_blocks, head=head)
        return pooling, None, None
    draft_model, drafters, draft_states = drafting
    adapters = _adapters(checkpoint, ops, spec, model)
    vocab_size = model.config.vocab_size
    load = partial(load_vocabulary, checkpoint.path, vocab_size)
    grammars = Grammars(ops, vocab_size, load, drafts=config.speculation is not None)
    runner = Runner(
        ops,
        program,
        limits,
        vocab_size=vocab_size,
        block_size=config.block_size,
        slots=Slots(limits.max_seqs, limits.max_blocks_per_seq, num_blocks, len(groups), draft_states),
        adapters=adapters,
        grammars=grammars,
        draft_model=draft_model,
        drafters=drafters,
    )
    return runner, adapters, grammars


def _draft_states(config: EngineConfig, pools: Sequence[KVPool]) -> DraftStates | None:
    for table, (spec, pool) in enumerate(zip(config.groups, pools, strict=True)):
        if pool.num_blocks > spec.num_blocks and pool.group.state_values:
            return DraftStates(pool, table, spec.num_blocks)
    return None


def load_weights(
    checkpoint: Checkpoint,
    ops: Ops,
    spec: WorkerSpec,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> Model | VectorModel:
    """Pack the model's weights onto `ops`. cache_dir: see build_worker; packed weights that are kept on disk lie there,
    too. Raises BadCheckpoint, and ConfigError where weights cannot be kept on disk as asked."""
    config = spec.config
    how: dict[str, Any] = {
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "kv_dtype": spec.kv_dtype,
        "quantization": spec.quantization,
        "progress": progress,
    }
    with kept_on_disk(checkpoint, ops, spec, cache_dir):
        if spec.gives_vectors:
            return load_vector_model(checkpoint, ops, **how)
        windows = {group.window for group in config.groups if group.window}
        return load_model(
            checkpoint, ops, lora=spec.lora, windows=windows, expert_min_share=spec.expert_min_share, **how
        )


def load_drafter(
    checkpoint: Checkpoint,
    ops: Ops,
    spec: WorkerSpec,
    progress: Progress | None = None,
    *,
    target: Model | VectorModel | None = None,
) -> Drafter:
    """Pack the weights of a model that drafts onto the `ops` of the target, those of a layer of the target's, or those
    of heads for it; an EAGLE-3 head needs the target. A model's longest context may be shorter than that. Raises
    BadCheckpoint."""
    config = spec.config
    assert config.speculation is not None, "nothing drafts"
    speculation = config.speculation
    if MEDUSA in speculation.methods:
        return load_medusa(checkpoint, ops, quantization=speculation.quantization or None)
    is_layer = MTP in speculation.methods
    how: dict[str, Any] = {
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "kv_dtype": spec.kv_dtype,
        "quantization": (spec.quantization if is_layer else speculation.quantization) or None,
    }
    if EAGLE3 in speculation.methods:
        assert isinstance(target, Model), target
        return load_eagle3(checkpoint, ops, target, **how)
    how["max_model_len"] = min(config.max_model_len, config_from_checkpoint(checkpoint).max_context)
    load: Callable[..., Model | MtpModel] = load_mtp if is_layer else load_model
    return load(checkpoint, ops, progress=progress, **how)


def _draft_model(
    ops: Ops, spec: WorkerSpec, target: Model | VectorModel, drafter: Drafter, limits: StepLimits
) -> ModelDrafter:
    """One with KV goes by the block tables of the target's layers that see everything, which come first."""
    speculation, group, block_size = spec.config.speculation, spec.config.groups[0], spec.config.block_size
    assert speculation is not None and isinstance(target, Model), speculation
    most_drafts = speculation.num_speculative_tokens
    if isinstance(drafter, MedusaHeads):
        aux = AuxHiddenStates.of(target.config, limits.max_tokens, (), is_normed=True)
        return MedusaDrafter(ops, drafter, aux, limits.max_seqs, speculation)
    assert not group.window, group
    if isinstance(drafter, Model):
        limits = drafter_limits(drafter.config, limits, block_size, most_drafts)
        make: Callable[..., ModelDrafter] = partial(DraftModel, ops, drafter, target_vocab=target.config.vocab_size)
    else:
        make = _state_drafter(ops, target, drafter, limits.max_tokens)
        limits = state_limits(limits, block_size, most_drafts)
    kv_group = drafter.kv_group
    return make(
        ops.new_pool(kv_group, group.num_blocks + limits.max_seqs * spare_blocks(most_drafts, block_size)),
        limits,
        speculation,
        num_tables=len(spec.config.groups),
    )


def _state_drafter(
    ops: Ops, target: Model, drafter: MtpModel | Eagle3Model, max_tokens: int
) -> Callable[..., ModelDrafter]:
    if isinstance(drafter, MtpModel):
        aux = AuxHiddenStates.of(target.config, max_tokens, (), is_normed=True)
        return partial(StateDrafter, ops, drafter, aux, source=MTP)
    aux = AuxHiddenStates.of(target.config, max_tokens, drafter.aux_layers)
    return partial(StateDrafter, ops, drafter, aux, source=EAGLE3, join=drafter.join)


def _step_limits(model: Model | VectorModel, config: EngineConfig) -> StepLimits:
    """Of a model that gives vectors, every token's state may be wanted."""
    if isinstance(model, Model):
        return step_limits(
            model.config,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            num_drafts=config.most_drafts,
        )
    return StepLimits(
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_blocks_per_seq=-(-config.max_model_len // model.kv_groups[0].block_size),
        max_logit_rows=config.max_num_batched_tokens,
    )


def _adapters(checkpoint: Checkpoint, ops: Ops, spec: WorkerSpec, model: Model) -> Adapters | None:
    """They may ask for the checkpoint's weights again; mapped, these take no memory meanwhile."""
    if spec.lora is None:
        return None
    kept = replace(checkpoint, tensors=dict(checkpoint.tensors))
    return Adapters(Base(kept, model.config, ops, spec.quantization), model.weights, spec.lora)


def load_vocabulary(path: Path, vocab_size: int) -> Vocabulary:
    """Of the checkpoint, for a model of so many tokens. Raises BadCheckpoint and InvalidRequest."""
    from ..text.text_model import load_text  # here, as it is needed once the engine is ready

    checkpoint = open_checkpoint(path)
    try:
        text = load_text(checkpoint)
    finally:
        checkpoint.close()
    return Vocabulary(text.tokenizer, vocab_size, text.eos_token_ids)


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


def _chosen_experts(model: Model | VectorModel) -> float:
    """See EngineConfig."""
    moe = model.config.moe if isinstance(model, Model) else None
    return 0.0 if moe is None else moe.routing.top_k / moe.routing.num_experts


def _expert_load(model: Model | VectorModel, ops: Ops) -> ExpertLoad | None:
    reads = ops.weight_reads()
    if isinstance(model, Model) and model.expert_counts is not None:
        return replace(model.expert_counts.load(), reads=reads)
    return None if reads is None else ExpertLoad((), (), reads=reads)


def _free(ops: Ops, pools: Sequence[KVPool], drafters: Drafters | None) -> None:
    """Frees what a worker's program and pools hold; `ops` goes first, as its program points into the pools."""
    if drafters is not None:
        drafters.close()
    ops.close()
    for pool in pools:
        pool.close()


def _weights_id(checkpoint: Checkpoint, cache_dir: Path | None, quantization: str | None) -> str:
    """What the weights are that steps compute with: the file's digest, and what they became at load."""
    digest = weights_digest(checkpoint.path, cache_dir or default_cache_dir())
    return f"{digest} {quantization or 'as stored'}"


def numerics_id(digest: str, model: Model | VectorModel, groups: Sequence[KVGroup], ops: Ops) -> str:
    """Digest of all that decides KV bytes and tokens, and of nothing else (not batch, threads or compiler). Which
    layers a block holds is part of it where they are not all, and adaptive top-k where it is on."""
    group = groups[0]
    facts = [digest, FORWARD, group.dtype, LAYOUT, str(group.block_size), ops.family, model.rope_digest]
    facts += [f"{group.name} {group.layers}" for group in groups if group.layers]
    if group.dtype == "int8" and not group.value_dim:
        facts.append(ROTATED)
    if group.dtype == "bf16" and not group.value_dim and ops.kv_dtype != "bf16":
        facts.append(PAIRS)
    if isinstance(model.config, ModelConfig):
        facts += declared_elsewhere(model.config.architecture, model.config.family)
    moe = model.config.moe if isinstance(model, Model) else None
    if moe is not None and moe.routing.min_share:
        facts.append(f"experts of a share of at least {moe.routing.min_share!r}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


PACKING = "packing-1"
"""How stored weights become packed ones. Raise it with every change to models/weights.py, models/repack.py or the tiles
of native/src/pack.cpp that can change a packed byte, or their order."""


def kept_on_disk(
    checkpoint: Checkpoint, ops: Ops, spec: WorkerSpec, cache_dir: Path | None
) -> AbstractContextManager[None]:
    """What is packed inside is kept on disk as the spec says. cache_dir: default, the user's. Raises ConfigError where
    the model or the backend has no use for that, or the memory given is too little."""
    experts, others = spec.expert_memory, spec.weight_memory
    if experts is None and others is None:
        return nullcontext()
    if spec.gives_vectors:
        param = "weight_memory" if experts is None else "expert_memory"
        raise ConfigError(f"--{param.replace('_', '-')} is for models that give tokens.", param=param)
    config = config_from_checkpoint(checkpoint)
    if experts is not None and config.moe is None:
        raise ConfigError("--expert-memory is for mixtures of experts; this model has none.", param="expert_memory")
    cache_dir = cache_dir or default_cache_dir()
    digest = weights_digest(checkpoint.path, cache_dir)
    kept = f"{experts is not None} {others is not None}"
    facts = [PACKING, digest, spec.quantization or "as stored", ops.family, kept]
    facts += declared_elsewhere(config.architecture, config.family)
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    path = cache_dir / "packed" / f"{digest[:16]}-{key[:16]}.weights"
    return ops.on_disk(DiskWeights(path, key, experts, others))
