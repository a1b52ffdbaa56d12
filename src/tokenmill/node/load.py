"""From a model's path to an engine ready to run in this process: settings, kernels, weights, pool.

The engine process and the in-process `LLM` both start here, so that they compute the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.config import BLOCK_SIZE, EngineConfig, most_drafted
from ..core.effects import Event, StoreOpened
from ..core.errors import BadCheckpoint, ConfigError, TokenmillError
from ..core.events import Ready
from ..core.request import PoolingParams
from ..core.speculation import DRAFT_MODEL, EAGLE3, MEDUSA, MTP
from ..core.tiers import TierEvents, TierFacts
from ..core.units import format_parts
from ..formats.checkpoint import Checkpoint, open_checkpoint
from ..formats.corpus_index import open_corpus
from ..formats.hub import resolve_model
from ..formats.sentence_transformers import read_sentence_config
from ..kv.connector.scheduler.saves import SAVE_BYTES
from ..models.config import ModelConfig, config_from_checkpoint
from ..models.eagle3 import eagle3_checkpoint, is_eagle3
from ..models.encoder_config import EncoderConfig, is_encoder
from ..models.heads import score_activation, scores_with
from ..models.kv_groups import apart_windows, kv_groups
from ..models.loader import Model
from ..models.lora import most_bytes
from ..models.medusa import is_medusa, open_medusa
from ..models.mtp import mtp_checkpoint
from ..models.roles import active_share
from ..models.rope import table_bytes
from ..models.summary import model_summary
from ..models.vectors import VectorModel, is_bare_decoder, vector_config
from ..models.weights import Progress
from ..ops.api import Ops, StepLimits
from ..ops.drafts import Corpus
from ..ops.select import select_ops
from ..sched.admission import max_running
from ..worker.build import Drafter, Worker, build_worker, load_drafter, load_weights
from ..worker.draft_model import drafter_limits
from ..worker.draft_sequences import spare_blocks
from ..worker.draft_states import state_limits
from ..worker.drafters import draft_index_bytes
from ..worker.grammars import grammar_bytes
from ..worker.kept_outputs import KeptOutputs, prepare_outputs
from ..worker.memory import HeldBytes, MemoryPlan, plan_memory, step_limits
from .machine import MachineFacts
from .model_warnings import NOTE, model_warnings
from .options import KV_CACHE_DTYPES, EngineOptions
from .processors import ThreadOptions, as_asked, choose_threads, read_processors, thread_options
from .resolve import DrafterFacts, EngineSettings, ModelFacts, resolve
from .speculation import read_speculation

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, slots=True)
class PoolingChoice:
    """reason: where the way of pooling comes from. advised_len: most tokens of an input, or None."""

    params: PoolingParams
    reason: str
    advised_len: int | None = None

    def describe(self) -> str:
        params = self.params
        if params.how == "score":
            return f"scores of pairs{', through the sigmoid' if params.activation else ''}"
        return f"{params.how}{', scaled to length 1' if params.activation else ''}"


def choose_pooling(checkpoint: Checkpoint, runner: str, pooling: str | None) -> PoolingChoice | None:
    """Whether a model is to give vectors rather than tokens, and which, by what was asked, what the model's files say,
    and what its kind is made for, in this order. None: it gives tokens. Raises ConfigError for a wish that the model
    cannot meet, and BadCheckpoint."""
    has_no_head = is_encoder(checkpoint) or is_bare_decoder(checkpoint)
    if runner == "generate":
        if has_no_head or pooling is not None:
            why = "a model that has no language head" if has_no_head else "--pooling"
            raise ConfigError(f"--runner generate does not go with {why}.", param="runner")
        return None
    sentence = read_sentence_config(checkpoint.path) if checkpoint.kind == "hf" else None
    in_gguf = _gguf_pooling(checkpoint)
    if not (has_no_head or sentence or in_gguf or pooling or runner == "pooling"):
        return None
    config = vector_config(checkpoint)
    advised_len = None if sentence is None else sentence.max_length
    is_classifier = isinstance(config, EncoderConfig) and config.has_head
    scores = "a classifier" if is_classifier else scores_with(checkpoint, sentence)
    if scores:
        if pooling is not None:
            raise ConfigError("--pooling is for models that give vectors; this one gives scores.", param="pooling")
        activation = score_activation(checkpoint.metadata, sentence)
        return PoolingChoice(PoolingParams("score", activation=activation), scores, advised_len)
    if sentence is not None:
        how, reason = sentence.pooling, "the model's modules.json"
    elif in_gguf is not None:
        how, reason = in_gguf, "the model's file"
    else:
        how, reason = "mean" if isinstance(config, EncoderConfig) else "last", "usual for its kind"
    activation = "unit" if sentence is None or sentence.normalize else ""
    params = PoolingParams(pooling or how, activation=activation)
    return PoolingChoice(params, "as asked" if pooling else reason, advised_len)


def _gguf_pooling(checkpoint: Checkpoint) -> str | None:
    architecture = checkpoint.metadata.get("general.architecture")
    kind = checkpoint.metadata.get(f"{architecture}.pooling_type")
    return _GGUF_POOLINGS.get(kind) if isinstance(kind, int) else None


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs steps, and how it was set up. `pooling`: how it pools, if it gives vectors. warnings: see
    model_warnings."""

    settings: EngineSettings
    worker: Worker
    ops: Ops
    kernels: str
    pooling: PoolingChoice | None = None
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> EngineConfig:
        return self.worker.config

    def close(self) -> None:
        """Stop the step thread and free the weights and the pool."""
        self.worker.executor.close()

    def ready(self, model: str, eos_token_ids: tuple[int, ...] = ()) -> Ready:
        """The message that tells a front end what it may send. Which tokens end an answer is known to the text side,
        which adds it where it is not in this process."""
        lora = self.settings.spec.lora
        pooled = () if self.pooling is None else (("pooling", self.pooling.params.how),)
        return Ready(
            model=model,
            max_model_len=self.config.max_model_len,
            vocab_size=self.worker.model_config.vocab_size,
            eos_token_ids=eos_token_ids,
            numerics_id=self.config.numerics_id,
            block_size=self.config.block_size,
            num_blocks=self.config.groups[0].num_blocks,
            facts=self.facts(),
            max_loras=0 if lora is None else lora.max_loras,
            pooling=None if self.pooling is None else self.pooling.params,
            vector_size=self.worker.vector_size,
            num_pool_blocks=sum(group.num_blocks for group in self.config.groups),
            memory=self.memory(),
            max_num_seqs=max_running(self.config),
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            block_bytes=sum(group.bytes_per_block for group in self.config.groups),
            expert_load=self.worker.expert_load(),
            active_share=_active_share(self.worker.model_config),
            settings=(*self.settings.answering, *pooled),
            num_speculative_tokens=most_drafted(self.config),
        )

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What was chosen and why, in the order it is printed."""
        decisions = ((each.name, f"{each.value} ({each.reason})") for each in self.settings.decisions)
        pooled = () if self.pooling is None else (("pooling", f"{self.pooling.describe()} ({self.pooling.reason})"),)
        memory = ("memory", f"at most {format_parts(self.memory())}")
        saved = () if self.worker.saved is None else (("kv_save", self.worker.saved.describe()),)
        said = ((NOTE, note) for note in self.warnings)
        return (("kernels", self.kernels), *pooled, *decisions, *saved, memory, *said)

    def first_events(self) -> tuple[Event, ...]:
        """What its core must hear of before anything else."""
        saved = self.worker.saved
        if self.tiers:
            return (StoreOpened(tiers=self.tiers, writes=self.settings.spec.kv_writes),)
        return () if saved is None else (StoreOpened(saved.keys),)

    @property
    def tiers(self) -> tuple[TierFacts, ...]:
        """Of the KV store that it has joined, nearest first."""
        copies = self.worker.executor.tiers
        return () if copies is None else copies.tiers

    def watch_tiers(self, hear: Callable[[TierEvents], None] | None) -> None:
        """Tell this one what its store has and gets, where it has joined one; None: nobody."""
        if (copies := self.worker.executor.tiers) is not None:
            copies.watch(hear)

    def memory(self) -> tuple[tuple[str, int], ...]:
        """Bytes by purpose, at most."""
        return _memory_parts(self.worker.memory, saves_kv=self.worker.saved is not None)


def _memory_parts(plan: MemoryPlan, *, saves_kv: bool) -> tuple[tuple[str, int], ...]:
    weights_bytes = plan.weights + plan.draft_weights
    always = {"weights": weights_bytes, "KV": plan.kv, "scratch": plan.scratch + plan.logits, "queue": plan.queue}
    some = {"experts": plan.experts, "layers": plan.layers, "adapters": plan.adapters, "grammars": plan.grammars}
    some |= {"draft KV": plan.draft_kv, "draft index": plan.draft_index}
    some["saving"] = SAVE_BYTES if saves_kv else 0
    return (*always.items(), *((name, size) for name, size in some.items() if size))


def planned_memory(
    model: ModelConfig,
    settings: EngineSettings,
    weights_bytes: int,
    queue_bytes: int,
    drafter: Checkpoint | None = None,
) -> tuple[tuple[str, int], ...]:
    """As `Engine.memory` of a model that gives tokens and is not loaded. weights_bytes: of its packed weights. drafter:
    of `open_drafter`. What steps need is estimated: it is known when the forward is compiled."""
    spec, config = settings.spec, settings.config
    limits = step_limits(
        model,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_drafts=config.most_drafts,
    )
    draft_weights, draft_kv = (0, 0) if drafter is None else _drafter_bytes(drafter, model, settings, limits)
    windows = {group.window for group in config.groups if group.window}
    groups = kv_groups(model, windows=windows, block_size=config.block_size, dtype=spec.kv_dtype)
    held = HeldBytes(
        weights=weights_bytes + table_bytes(model.ropes, config.max_model_len),
        queue=queue_bytes,
        adapters=0 if spec.lora is None else most_bytes(model, spec.lora),
        grammars=grammar_bytes(model.vocab_size, limits.max_seqs),
        draft_weights=draft_weights,
        draft_kv=draft_kv,
        draft_index=draft_index_bytes(config),
    )
    sizes = [config.pool_blocks(group) for group in config.groups]
    plan = plan_memory(model, groups, limits, held, sizes=sizes, program_bytes=None)
    return _memory_parts(plan, saves_kv=spec.kv_save is not None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model's weights, and how an engine that uses them is set up. Each process that is forked from this one can make
    an engine of it. drafter: the model that drafts for it, if one does; corpora: texts that are drafted from;
    kept: earlier outputs that are, not open."""

    checkpoint: Checkpoint
    settings: EngineSettings
    ops: Ops
    model: Model | VectorModel
    pooling: PoolingChoice | None
    drafter: Drafter | None = None
    corpora: tuple[Corpus, ...] = ()
    kept: KeptOutputs | None = None


def load_engine(
    checkpoint: Checkpoint,
    options: EngineOptions,
    machine: MachineFacts,
    cache_dir: Path,
    queue_bytes: int = 0,
    progress: Progress | None = None,
) -> Engine:
    """Loads the weights and makes the pool; the checkpoint may be closed afterwards. Raises ConfigError and
    BadCheckpoint. queue_bytes: what waiting requests may hold, for the printed plan."""
    threads = _thread_options(options, machine)
    loaded = load_model(checkpoint, options, machine, threads, progress, cache_dir)
    return make_engine(loaded, cache_dir, queue_bytes, threads)


def _thread_options(options: EngineOptions, machine: MachineFacts) -> ThreadOptions:
    """Engines that share a machine cannot be timed: nobody knows what the others do meanwhile."""
    if options.threads is not None or machine.num_sharing > 1 or options.backend == "numpy":
        return as_asked(options.threads or machine.usable_cores)
    return thread_options(read_processors(), machine.cpu_quota)


def load_model(
    checkpoint: Checkpoint,
    options: EngineOptions,
    machine: MachineFacts,
    threads: ThreadOptions,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> Loaded:
    """Packs the weights with the most of these threads; with one, there is none beside the caller's afterwards.
    cache_dir: see build_worker. Raises ConfigError and BadCheckpoint."""
    pooling = choose_pooling(checkpoint, options.runner, options.pooling)
    ops = select_ops(options.backend, threads.most, lossless=options.weights_packing == "lossless")
    ops.use_threads(threads.most, threads.places)
    drafts = open_drafter(checkpoint, options, cache_dir)
    try:
        facts = model_facts(checkpoint, pooling, options, drafts)
        settings = resolve(options, machine, facts, ops.kv_dtype)
        corpora = open_corpora(checkpoint, settings.config)
        kept = kept_outputs(checkpoint, settings.config)
        model = load_weights(checkpoint, ops, settings.spec, progress, cache_dir)
        drafter = None if drafts is None else load_drafter(drafts, ops, settings.spec, progress, target=model)
    finally:
        if drafts is not None:
            drafts.close()
    return Loaded(checkpoint, settings, ops, model, pooling, drafter, corpora, kept)


def open_drafter(checkpoint: Checkpoint, options: EngineOptions, cache_dir: Path | None = None) -> Checkpoint | None:
    """The checkpoint of the model that is to draft for that of `checkpoint`, fetched if need be, or the part of this
    that is; None: none is. Raises ConfigError where it cannot."""
    speculation, _ = read_speculation(options.speculative_config)
    if speculation is not None and MTP in speculation.methods:
        return _open_mtp(checkpoint)
    if speculation is None or not speculation.model:
        return None
    name = speculation.model
    try:
        path = resolve_model(name, cache_dir=cache_dir).path
        if MEDUSA in speculation.methods:
            return None if _gives_vectors(checkpoint) else open_medusa(path, checkpoint)
        found = open_checkpoint(path)
        if EAGLE3 in speculation.methods:
            return None if _gives_vectors(checkpoint) else eagle3_checkpoint(found, checkpoint)
        for is_head, method in ((is_eagle3, EAGLE3), (is_medusa, MEDUSA)):
            if is_head(found.metadata):
                raise ConfigError(f"it is a head; name {method} as method.")
        if _gives_vectors(found):
            raise ConfigError("it gives vectors and no tokens.")
        config_from_checkpoint(found)
        _check_vocabulary(checkpoint, found)
    except TokenmillError as error:
        raise ConfigError(f"{name} cannot draft: {error.message}", param="speculative_config") from error
    return found


def open_corpora(checkpoint: Checkpoint, config: EngineConfig) -> tuple[Corpus, ...]:
    """Map the indices of texts that are drafted from, for the tokenizer of this checkpoint. Each is read once. Raises
    ConfigError."""
    asked = () if config.speculation is None else config.speculation.corpora
    if not asked:
        return ()
    tokenizer = _tokenizer(checkpoint).digest()
    found = (open_corpus(Path(each.path), tokenizer) for each in asked)
    return tuple(Corpus(each.tokens, each.places) for each in found)


def kept_outputs(checkpoint: Checkpoint, config: EngineConfig) -> KeptOutputs | None:
    """Where outputs are to survive restarts, in a file that can be used. Raises ConfigError."""
    path = "" if config.speculation is None else config.speculation.suffix_decoding_store
    if not path:
        return None
    prepare_outputs(path)
    return KeptOutputs(path, _tokenizer(checkpoint).digest())


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    from ..text.text_model import load_text  # here, as most engines have no need of it before they are ready

    return load_text(checkpoint).tokenizer


def _open_mtp(checkpoint: Checkpoint) -> Checkpoint | None:
    if _gives_vectors(checkpoint):
        return None  # said by `resolve`
    try:
        return mtp_checkpoint(checkpoint)
    except BadCheckpoint as error:
        raise ConfigError(f"{MTP} cannot draft: {error.message}", param="speculative_config") from error


def _gives_vectors(checkpoint: Checkpoint) -> bool:
    return is_encoder(checkpoint) or is_bare_decoder(checkpoint)


MOST_OTHER_TOKENS = 128
"""That one of two vocabularies may have behind those of the other: what fills it up, or marks that one of two models
has. None of them is ever drafted, or drafted from."""


def _check_vocabulary(target: Checkpoint, drafter: Checkpoint) -> None:
    """Whether a token means the same to both."""
    one, other = _tokenizer(target), _tokenizer(drafter)
    least, most = sorted((one.vocab_size, other.vocab_size))
    if most - least > MOST_OTHER_TOKENS:
        raise ConfigError(
            f"it has another tokenizer, of {other.vocab_size} tokens; the model that it is to draft for has one of "
            f"{one.vocab_size}."
        )
    for token in range(least):
        if (text := other.token_text(token)) != (expected := one.token_text(token)):
            raise ConfigError(
                f"it has another tokenizer: its token {token} is {text!r}, that of the model that it is to draft for "
                f"{expected!r}."
            )


def make_engine(loaded: Loaded, cache_dir: Path, queue_bytes: int = 0, threads: ThreadOptions | None = None) -> Engine:
    """An engine of this process with these weights; see load_engine. threads: that it has been loaded with; None: none
    but those of the settings are wanted."""
    checkpoint, settings, ops = loaded.checkpoint, loaded.settings, loaded.ops
    if threads is None:
        threads = as_asked(settings.threads)
        ops.use_threads(threads.most)
    worker = build_worker(
        checkpoint,
        ops,
        settings.spec,
        model=loaded.model,
        drafter=loaded.drafter,
        corpora=loaded.corpora,
        kept=loaded.kept,
        queue_bytes=queue_bytes,
        cache_dir=cache_dir,
    )
    settings = _choose_threads(settings, ops, worker, threads)
    said = tuple(model_warnings(checkpoint, settings.spec.quantization))
    return Engine(settings, worker, ops, describe_kernels(ops), loaded.pooling, said)


def _choose_threads(settings: EngineSettings, ops: Ops, worker: Worker, threads: ThreadOptions) -> EngineSettings:
    """Where there is a choice, that of steps that are timed; the settings say so."""
    if len(threads.counts) == 1 or worker.time_step is None:
        ops.limit_threads([] if threads.default == threads.most else [(2**31 - 1, threads.default)])
        return settings
    plan = choose_threads(threads, worker.time_step, time.perf_counter, settings.config.max_num_batched_tokens)
    ops.limit_threads([*plan.limits, (2**31 - 1, plan.num_threads)])
    counts = ", ".join(map(str, threads.counts))
    return settings.with_threads(plan.num_threads, str(plan), f"of {counts}, measured at start; {threads.about}")


def model_facts(
    checkpoint: Checkpoint, pooling: PoolingChoice | None, options: EngineOptions, drafter: Checkpoint | None = None
) -> ModelFacts:
    """What `resolve` needs to know of the model, and of the one that drafts for it."""
    weights_bytes = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
    if on_disk := [size for size in (options.expert_memory, options.weight_memory) if size is not None]:
        weights_bytes = min(weights_bytes, sum(on_disk))
    model = config_from_checkpoint(checkpoint) if pooling is None else vector_config(checkpoint)
    advised_len = None if pooling is None else pooling.advised_len
    gives_vectors = pooling is not None
    if isinstance(model, EncoderConfig) or not model.is_causal:
        return ModelFacts(model.max_context, 0, weights_bytes, advised_len, gives_vectors=gives_vectors)
    block_size, dtype = options.block_size or BLOCK_SIZE, KV_CACHE_DTYPES[options.kv_cache_dtype]
    groups = kv_groups(model, block_size=block_size, dtype=dtype)
    windows = tuple((group.window, group.bytes_per_token) for group in groups if group.window and group.bytes_per_token)
    apart = apart_windows(model)
    if gives_vectors:  # Vectors are of short inputs: one pool holds all layers.
        windows = tuple(each for each in windows if each[0] in apart)
    num_bytes = sum(group.bytes_per_token for group in groups)
    num_experts = 0 if model.moe is None else model.moe.routing.num_experts
    return ModelFacts(
        model.max_context,
        num_bytes,
        weights_bytes,
        advised_len,
        windows,
        gives_vectors,
        num_experts,
        has_latents=model.latent is not None,
        attends=any(layer.attends for layer in model.layers),
        state_bytes=sum(group.bytes_per_block for group in groups if group.state_values),
        drafter=None if drafter is None else _drafter_facts(drafter, model, block_size, dtype),
        apart=apart,
    )


def _drafter_facts(drafter: Checkpoint, target: ModelConfig, block_size: int, kv_dtype: str) -> DrafterFacts:
    weights_bytes = sum(tensor.data.nbytes for tensor in drafter.tensors.values())
    if is_medusa(drafter.metadata):
        return DrafterFacts(0, weights_bytes, target.max_context, drafter.metadata["num_heads"])
    config = config_from_checkpoint(drafter)
    if config.mixer is not None:
        raise ConfigError(
            f"{drafter.path} cannot draft: its layers keep states, which drafts that were wrong would have to leave.",
            param="speculative_config",
        )
    group, *others = kv_groups(config, windows=(), block_size=block_size, dtype=kv_dtype)
    if others:
        raise ConfigError(
            f"{config.family.title} cannot draft: not all of its layers keep the same of a token.",
            param="speculative_config",
        )
    return DrafterFacts(group.bytes_per_token, weights_bytes, config.max_context)


def _drafter_bytes(
    drafter: Checkpoint, target: ModelConfig, settings: EngineSettings, limits: StepLimits
) -> tuple[int, int]:
    """What its weights will take, those of a layer or head of the target's as stored, and its KV. limits: of the
    target's steps."""
    config, speculation = settings.config, settings.config.speculation
    assert speculation is not None, "nothing drafts"
    facts = _drafter_facts(drafter, target, config.block_size, settings.spec.kv_dtype)
    weights, most_drafts = facts.weights_bytes, speculation.num_speculative_tokens
    if DRAFT_MODEL in speculation.methods:
        found = model_summary(drafter, quantization=speculation.quantization or None)
        assert isinstance(found.config, ModelConfig), found.config
        max_len = min(config.max_model_len, facts.max_context)
        weights = found.packed_bytes + table_bytes(found.config.ropes, max_len)
        limits = drafter_limits(found.config, limits, config.block_size, most_drafts)
    else:
        limits = state_limits(limits, config.block_size, most_drafts)
    num_blocks = config.groups[0].num_blocks + limits.max_seqs * spare_blocks(most_drafts, config.block_size)
    return weights, facts.kv_bytes_per_token * config.block_size * num_blocks


def _active_share(config: ModelConfig | EncoderConfig) -> float:
    return 1.0 if isinstance(config, EncoderConfig) else active_share(config)


def describe_kernels(ops: Ops) -> str:
    """'native, instruction set avx512, threads 2'."""
    facts = dict(ops.describe())
    return ", ".join((facts.pop("backend", ops.name), *(f"{name} {value}" for name, value in facts.items())))
