"""One pure function from what was asked, what the machine offers and what the model is to how the engine will run.

Every decision carries its reason, so that the start-up print explains itself. Knows nothing of flags, processes or
files; an impossible wish raises ConfigError naming the option.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from ..core.block import KVGroupSpec, full_groups, state_group, window_group
from ..core.config import (
    BLOCK_SIZE,
    EVICTION_POLICY,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    QUANTIZATIONS,
    SCHEDULING_POLICY,
    STEPS_IN_FLIGHT,
    EngineConfig,
)
from ..core.effects import WRITES
from ..core.errors import ConfigError
from ..core.speculation import BY_MODEL, MOST_DRAFT_STATES, SpeculationConfig
from ..core.units import MiB, format_bytes
from ..worker.spec import WorkerSpec
from .machine import MachineFacts
from .options import (
    DTYPES,
    KV_CACHE_DTYPES,
    KV_SHARE,
    LATENT_DTYPE,
    MAX_LORA_RANK,
    MAX_LORAS,
    SCHEDULING_POLICIES,
    EngineOptions,
)
from .speculation import read_speculation

if TYPE_CHECKING:  # a front end starts engines before it loads what only they need
    from ..models.lora import LoraLimits


def longest(groups: Sequence[KVGroupSpec], block_size: int, max_context: int) -> int:
    """Tokens of the longest sequence that the pools can hold alone, `max_context` where they can hold that."""
    bounds = (group.num_blocks * block_size for group in groups if not group.window)
    return min((max_context, *bounds))


def fewest_window_blocks(window: int, block_size: int) -> int:
    """Blocks that hold what one query sees, wherever the borders of blocks fall."""
    return 1 + -(-(window - 1) // block_size)


def split_pools(
    pool_bytes: int,
    *,
    full_block_bytes: int,
    windows: Sequence[tuple[int, int]],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_in_flight: int,
    apart: Collection[int] = (),
) -> tuple[KVGroupSpec, ...]:
    """Split KV memory between the layers that see everything and those that see a window: one group for the former, if
    there are such, and one for each window that hides something.

    Let f and v_i be the bytes of a token's KV in the pool of layers that see everything and in that of window i, and
    let a sequence of the longest context M hold c_i of its tokens in the latter. Short sequences want as many slots in
    all pools; the longest want c_i / M as many in pool i. With

        r = (f + sum of v_i * c_i / M) / (f + sum of v_i)      slots in a window's pool for each slot in the first

    both lose the same share of what a split made for them alone would hold. A window's pool never gets more than
    `max_num_seqs` sequences and the chunks of their prompts can use; the first takes the rest. Where no layer sees
    everything, the widest window takes its place: M is what it holds.

    full_block_bytes: of the layers that see everything. windows: (positions seen, block bytes) of each of the others,
    the smallest first. num_in_flight: most tokens that steps in flight write. apart: see ModelFacts; where nothing is
    to be split, the groups of these have as many blocks as the first."""
    all_bytes = full_block_bytes + sum(block_bytes for _, block_bytes in windows)
    num_all = pool_bytes // all_bytes
    beside = tuple(window_group(num_all, *each) for each in windows if each[0] in apart)
    one_pool = (*full_groups(num_all, all_bytes - sum(group.bytes_per_block for group in beside)), *beside)
    if beside and max_model_len <= max(group.window for group in beside):
        return one_pool
    full_block_bytes += sum(block_bytes for window, block_bytes in windows if window >= max_model_len)
    windows = [(window, block_bytes) for window, block_bytes in windows if window < max_model_len and block_bytes]
    if not windows:
        return one_pool
    needs = [fewest_window_blocks(window, block_size) for window, _ in windows]
    if full_block_bytes:
        first_bytes, long_blocks, others = full_block_bytes, -(-max_model_len // block_size), windows
    else:
        first_bytes, long_blocks, others = windows[-1][1], needs[-1], windows[:-1]
    flying = min(-(-max_model_len // block_size), -(-num_in_flight // block_size))
    held_bytes = (size * min(1, need / long_blocks) for need, (_, size) in zip(needs, others, strict=False))
    share = (first_bytes + sum(held_bytes)) / all_bytes
    other_bytes = all_bytes - first_bytes
    left = max(0, pool_bytes - flying * other_bytes)
    balanced = flying + int(share * left / (first_bytes + share * other_bytes))
    sizes = [max(need, min(balanced, flying + max_num_seqs * need)) for need in needs[: len(others)]]
    first = (pool_bytes - sum(n * size for n, (_, size) in zip(sizes, others, strict=True))) // first_bytes
    local = [window_group(n, window, size) for n, (window, size) in zip(sizes, others, strict=True)]
    if not full_block_bytes:
        return (*local, window_group(first, *windows[-1])) if first >= long_blocks else one_pool
    # A pool so small that no sequence outgrows the windows is better not split.
    if first * block_size <= max(windows[-1][0], one_pool[0].num_blocks * block_size):
        return one_pool
    return (*full_groups(first, full_block_bytes), *local)


_STATES_HELD = 1 + STEPS_IN_FLIGHT
_STATES_KEPT = 3
"""Of a sequence while it runs, and after it: behind its prompt, its answer, and where others leave it."""
_USUAL_TOKENS = 1024
_MOST_STATES = 1 / 2
_CHECKPOINTS = 1 / 5
"""Of the KV of a sequence, what its states may take that are kept at equal distances."""
_STATES_ALONE = 15 / 16
_APART_TOKENS = 4096
"""From one of these to the next, where there is no KV beside them."""


def split_states(pool_bytes: int, model: ModelFacts, kv_block_bytes: int, block_size: int) -> KVGroupSpec:
    """The pool of states within KV memory: as many as sequences of a usual length have, beside their KV, and half of
    the memory at most. One is kept every so many blocks (a power of two) that these take a fifth of the KV at most.
    Where no layer attends nearly all of the memory is for states."""
    state_bytes = model.state_bytes
    if not model.attends:
        most = max(_STATES_HELD, int(pool_bytes * _STATES_ALONE) // state_bytes)
        return state_group(most, max(1, _APART_TOKENS // block_size), state_bytes)
    usual = (_STATES_HELD + _STATES_KEPT) * state_bytes
    share = min(_MOST_STATES, usual / (usual + kv_block_bytes * _USUAL_TOKENS / block_size))
    interval = 1
    while interval * kv_block_bytes * _CHECKPOINTS < state_bytes:
        interval *= 2
    return state_group(max(_STATES_HELD, int(share * pool_bytes) // state_bytes), interval, state_bytes)


SPLIT_REASON = "the split loses as much for short sequences as for long ones"


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """Of a draft model: KV over all layers, 0 where it keeps none; weights on disk; positions it was made for; most
    tokens that it can draft, where that is bounded."""

    kv_bytes_per_token: int
    weights_bytes: int
    max_context: int
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """max_context: positions the model was made for. kv_bytes_per_token: over all layers; 0: it keeps no KV and sees a
    whole prompt in one step. weights_bytes: on disk. advised_len: what the model's makers cut inputs to, if they do.
    windows: (positions seen, their part of the KV) for each window that layers have, the smallest first. gives_vectors:
    instead of tokens. num_experts: routed ones of a layer that is a mixture; 0: none is. has_latents: these are kept in
    place of keys and values. attends: whether any layer does; where none does, KV is what says which prefixes are
    there. drafter: the model that drafts for it; None: none does. state_bytes: what layers keep of a sequence that keep
    a state; 0: none does. apart: the windows whose layers have other heads than those that see everything, so that they
    never share a pool."""

    max_context: int
    kv_bytes_per_token: int
    weights_bytes: int
    advised_len: int | None = None
    windows: tuple[tuple[int, int], ...] = ()
    gives_vectors: bool = False
    num_experts: int = 0
    has_latents: bool = False
    attends: bool = True
    drafter: DrafterFacts | None = None
    state_bytes: int = 0
    apart: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The resolved options: the backend with its threads, and the worker. `decisions` explains each, in the order they
    are printed."""

    threads: int
    backend: str
    spec: WorkerSpec
    decisions: tuple[Decision, ...]

    @property
    def config(self) -> EngineConfig:
        return self.spec.config

    def with_threads(self, threads: int, value: str, reason: str) -> EngineSettings:
        """The same with another number of threads."""
        decisions = tuple(
            Decision(each.name, value, reason) if each.name == "threads" else each for each in self.decisions
        )
        return replace(self, threads=threads, decisions=decisions)

    @property
    def answering(self) -> tuple[tuple[str, str], ...]:
        """Those that change answers, by the options' names (see `asked_answering`)."""
        spec = self.spec
        return (
            ("max_model_len", str(spec.config.max_model_len)),
            ("block_size", str(spec.config.block_size)),
            ("kv_cache_dtype", spec.kv_dtype),
            ("quantization", spec.quantization or "as stored"),
            ("expert_min_share", f"{spec.expert_min_share:g}"),
            ("runner", "pooling" if spec.gives_vectors else "generate"),
        )


def asked_answering(options: EngineOptions) -> tuple[tuple[str, str], ...]:
    """Of the options that change answers those that were given, as `EngineSettings.answering` has them."""
    share, runner = options.expert_min_share, "pooling" if options.pooling else options.runner
    asked = (
        ("max_model_len", options.max_model_len),
        ("block_size", options.block_size),
        ("kv_cache_dtype", None if options.kv_cache_dtype == "auto" else KV_CACHE_DTYPES[options.kv_cache_dtype]),
        ("quantization", _stored_as(options)),
        ("expert_min_share", None if share is None else f"{share:g}"),
        ("runner", None if runner == "auto" else runner),
        ("pooling", options.pooling),
    )
    return tuple((name, str(value)) for name, value in asked if value is not None)


def resolve(
    options: EngineOptions, machine: MachineFacts, model: ModelFacts, own_kv_dtype: str = KV_CACHE_DTYPES["auto"]
) -> EngineSettings:
    """own_kv_dtype: the type of 16 bits that the kernels prefer. Raises ConfigError naming the option that cannot be
    met."""
    decisions: list[Decision] = []
    keeps_kv = model.kv_bytes_per_token > 0
    threads = _given_or(decisions, "threads", options.threads, machine.usable_cores, _threads_reason(machine))
    block_size = _given_or(decisions, "block_size", options.block_size, BLOCK_SIZE, "default")
    if model.has_latents:
        own_kv_dtype = LATENT_DTYPE
    kv_dtype = _kv_dtype(options, own_kv_dtype if keeps_kv else KV_CACHE_DTYPES["auto"], decisions)
    groups = _groups(options, machine, model, block_size, decisions)
    pool_tokens = longest(groups, block_size, model.max_context) if keeps_kv else model.max_context
    max_model_len = _max_model_len(options, model, pool_tokens, decisions)
    max_num_seqs = _max_num_seqs(options, groups if keeps_kv else (), decisions)
    whole = 0 if keeps_kv else max_model_len
    max_num_batched_tokens = _max_num_batched_tokens(options, max_num_seqs, whole, decisions)
    quantization = _quantization(options, decisions)
    if options.weights_packing != "none":
        decisions.append(Decision("weights_packing", f"{options.weights_packing} for matrices of bf16", "as asked"))
    lora = _lora(options, model, decisions)
    expert_min_share = _expert_min_share(options, model, decisions)
    enable_prefix_caching = options.enable_prefix_caching and keeps_kv
    reason = "exact either way" if keeps_kv else "there is no KV to share"
    decisions.append(Decision("prefix_caching", "on" if enable_prefix_caching else "off", reason))
    scheduling_policy = SCHEDULING_POLICIES.get(options.scheduling_policy, options.scheduling_policy)
    if scheduling_policy != SCHEDULING_POLICY:
        decisions.append(Decision("scheduling_policy", scheduling_policy, "as asked"))
    if options.eviction_policy != EVICTION_POLICY:
        reason = "as asked" if enable_prefix_caching else "as asked, though nothing is cached"
        decisions.append(Decision("eviction_policy", options.eviction_policy, reason))
    kv_save, kv_store = _kv_save(options, model), _kv_store(options, model)
    config = EngineConfig(
        groups=groups,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,
        eviction_policy=options.eviction_policy,
        speculation=_speculation(options, model, decisions),
    )
    spec = WorkerSpec(
        config,
        kv_dtype,
        quantization,
        lora,
        model.gives_vectors,
        kv_save,
        kv_store,
        options.kv_write or WRITES[0],
        expert_min_share,
        options.expert_memory,
        options.weight_memory,
    )
    return EngineSettings(threads, options.backend, spec, tuple(decisions))


def _given_or(
    decisions: list[Decision], name: str, given: int | None, default: int, reason: str, show: str = "{}"
) -> int:
    value = default if given is None else given
    decisions.append(Decision(name, show.format(value), reason if given is None else "as asked"))
    return value


def _kv_dtype(options: EngineOptions, own_kv_dtype: str, decisions: list[Decision]) -> str:
    kv_dtype = KV_CACHE_DTYPES[options.kv_cache_dtype]
    if kv_dtype == "int8":
        reason = "as asked; half the memory, not the same answers as 16 bits"
        decisions.append(Decision("kv_cache_dtype", "int8, rotated, a scale for each token and head", reason))
    elif options.kv_cache_dtype != "auto":
        decisions.append(Decision("kv_cache_dtype", kv_dtype, "as asked"))
    elif own_kv_dtype != kv_dtype:
        kv_dtype = own_kv_dtype
        decisions.append(Decision("kv_cache_dtype", kv_dtype, "what these kernels multiply fastest"))
    return kv_dtype


def _max_num_seqs(options: EngineOptions, groups: tuple[KVGroupSpec, ...], decisions: list[Decision]) -> int:
    places = [group.num_blocks // (_STATES_HELD if group.interval else 1) for group in groups]
    most_seqs = max(1, min([MAX_NUM_SEQS, *places]))
    reason = "default" if most_seqs == MAX_NUM_SEQS else "what the KV pools have blocks for"
    asked_tokens = options.max_num_batched_tokens
    if asked_tokens is not None and asked_tokens < most_seqs:
        most_seqs, reason = asked_tokens, "each running sequence needs a token of a step"
    return _given_or(decisions, "max_num_seqs", options.max_num_seqs, most_seqs, reason)


def _max_num_batched_tokens(options: EngineOptions, max_num_seqs: int, whole: int, decisions: list[Decision]) -> int:
    """whole: tokens of an input that must be seen in one step."""
    default = max(MAX_NUM_BATCHED_TOKENS, max_num_seqs, whole)
    given = options.max_num_batched_tokens
    value = _given_or(decisions, "max_num_batched_tokens", given, default, "default", "{} tokens a step")
    if value < whole:
        raise ConfigError(
            f"--max-num-batched-tokens ({value}) must be at least --max-model-len ({whole}), since"
            " this model sees a whole input in one step; raise it or lower --max-model-len.",
            param="max_num_batched_tokens",
        )
    if value < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({value}) must be at least --max-num-seqs ({max_num_seqs}),"
            " so that every running sequence can advance in a step.",
            param="max_num_batched_tokens",
        )
    return value


def _stored_as(options: EngineOptions) -> str | None:
    return QUANTIZATIONS.get(options.quantization or "") or DTYPES[options.dtype]


def _quantization(options: EngineOptions, decisions: list[Decision]) -> str | None:
    quantization = _stored_as(options)
    if quantization is not None:
        decisions.append(Decision("quantization", f"{quantization} for matrices stored in 16 or 32 bits", "as asked"))
    elif options.dtype != "auto":
        decisions.append(Decision("dtype", "as stored", f"{options.dtype} is what all is computed in"))
    return quantization


def _expert_min_share(options: EngineOptions, model: ModelFacts, decisions: list[Decision]) -> float:
    share = options.expert_min_share
    if not share:
        return 0.0
    if share > 1:
        raise ConfigError(f"--expert-min-share must be from 0 to 1, got {share:g}.", param="expert_min_share")
    if not model.num_experts or model.gives_vectors:
        why = "gives vectors" if model.gives_vectors else "is no mixture of experts"
        raise ConfigError(f"--expert-min-share has nothing to drop: this model {why}.", param="expert_min_share")
    reason = "as asked; other answers than without"
    decisions.append(Decision("expert_min_share", f"{share:g} of a token's best expert", reason))
    return share


def _speculation(options: EngineOptions, model: ModelFacts, decisions: list[Decision]) -> SpeculationConfig | None:
    speculation, ignored = read_speculation(options.speculative_config)
    if speculation is None:
        return None
    if model.gives_vectors:
        if any(name in BY_MODEL for name in speculation.methods):
            raise ConfigError(
                "--speculative-config has nothing to draft for: this model gives vectors.", param="speculative_config"
            )
        decisions.append(Decision("speculation", "none", "this model gives vectors"))  # others of a server give tokens
        return None
    reason = "as asked; the same answers"
    if ignored:
        reason += f"; {', '.join(ignored)}: without effect, since what pays is measured"
    how_many = "up to" if speculation.adaptive else "always"
    shown = f"{' and '.join(speculation.methods)}, {how_many} {speculation.num_speculative_tokens} tokens a step"
    if speculation.model:
        shown += f", by {speculation.model}"
    for each in speculation.corpora:
        shown += f", from {each.path} for {'all' if each.tenants is None else ' and '.join(each.tenants)}"
    if speculation.suffix_decoding_store:
        shown += f", earlier answers in {speculation.suffix_decoding_store}"
    if model.drafter is not None and model.drafter.max_context < model.max_context:
        reason += f"; the draft model drafts up to {model.drafter.max_context} tokens of context"
    most = None if model.drafter is None else model.drafter.most_tokens
    if most is not None and most < speculation.num_speculative_tokens:
        reason += f"; there are {most} heads, for {most} tokens"
    decisions.append(Decision("speculation", shown, reason))
    return speculation


def _kv_save(options: EngineOptions, model: ModelFacts) -> str | None:
    if options.kv_save == "":
        raise ConfigError("--kv-save was given no folder.", param="kv_save")
    if options.kv_save is not None and (model.gives_vectors or not options.enable_prefix_caching):
        why = "this model gives vectors" if model.gives_vectors else "prefix caching is off"
        raise ConfigError(f"--kv-save has nothing to save: {why}.", param="kv_save")
    return options.kv_save


def _kv_store(options: EngineOptions, model: ModelFacts) -> str | None:
    if options.kv_store is None:
        return None
    if options.kv_save is not None:
        raise ConfigError(
            "--kv-save says where a server keeps KV itself: the store at --kv-store has tiers of its own.",
            param="kv_save",
        )
    if model.gives_vectors or not model.kv_bytes_per_token or not options.enable_prefix_caching:
        why = "prefix caching is off" if not options.enable_prefix_caching else "this model gives vectors"
        raise ConfigError(f"KV tiers (--kv-store, --kv-host and others) have nothing to keep: {why}.", param="kv_store")
    return options.kv_store


def _lora(options: EngineOptions, model: ModelFacts, decisions: list[Decision]) -> LoraLimits | None:
    if not options.enable_lora:
        if options.max_loras is not None or options.max_lora_rank is not None:
            raise ConfigError("--max-loras and --max-lora-rank need --enable-lora.", param="max_loras")
        return None
    if model.gives_vectors:
        raise ConfigError("A model that gives vectors takes no LoRA adapters.", param="enable_lora")
    from ..models.lora import LoraLimits

    count = _given_or(decisions, "max_loras", options.max_loras, MAX_LORAS, "default", "{} adapters at once")
    return LoraLimits(count, _given_or(decisions, "max_lora_rank", options.max_lora_rank, MAX_LORA_RANK, "default"))


def _threads_reason(machine: MachineFacts) -> str:
    if machine.num_sharing > 1:
        return f"{machine.granted_cores} usable cores for {machine.num_sharing} engines"
    if machine.cpu_quota is not None and machine.usable_cores < (machine.num_cores or machine.num_cpus):
        return f"the container grants {machine.cpu_quota:g} of {machine.num_cpus} CPUs"
    return "one for each usable core"


def _groups(
    options: EngineOptions, machine: MachineFacts, model: ModelFacts, block_size: int, decisions: list[Decision]
) -> tuple[KVGroupSpec, ...]:
    if not model.kv_bytes_per_token:
        decisions.append(Decision("kv_cache", "none", "this model sees a whole input in one step"))
        return full_groups(0)
    usable, asked = machine.usable_memory, options.kv_cache_memory_bytes
    draft_bytes = 0 if model.drafter is None else model.drafter.kv_bytes_per_token * block_size
    block_bytes = model.kv_bytes_per_token * block_size + draft_bytes
    if draft_bytes and model.kv_bytes_per_token == sum(num_bytes for _, num_bytes in model.windows):
        raise ConfigError(
            "A draft model goes by the blocks of layers that see everything, and this model has none.",
            param="speculative_config",
        )
    each = f" for each of {machine.num_sharing} engines" if machine.num_sharing > 1 else ""
    if asked is not None and asked > usable:
        raise ConfigError(
            f"--kv-cache-memory-bytes {format_bytes(asked)} is more than the {format_bytes(usable)} free{each}.",
            param="kv_cache_memory_bytes",
        )
    whole = pool = int(usable * KV_SHARE) if asked is None else asked
    pool -= _num_draft_states(options) * model.state_bytes
    states = _states(options, pool, model, block_bytes, block_size) if model.state_bytes else None
    pool = _beside_states(pool, states, model, options.max_model_len or model.max_context, block_size)
    if pool // block_bytes < 2:
        _refuse_pool(whole, block_bytes, states)
    reason = "as asked" if asked is not None else _share_of(machine) + each
    windows = [(window, num_bytes * block_size) for window, num_bytes in model.windows]
    max_num_seqs = options.max_num_seqs or MAX_NUM_SEQS
    groups = split_pools(
        pool,
        full_block_bytes=block_bytes - sum(num_bytes for _, num_bytes in windows),
        windows=windows,
        block_size=block_size,
        max_model_len=options.max_model_len or model.max_context,
        max_num_seqs=max_num_seqs,
        num_in_flight=STEPS_IN_FLIGHT * (options.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, max_num_seqs)),
        apart=model.apart,
    )
    kept = f"of {format_bytes(whole)} for all pools, {reason}" if len(groups) > 1 or states else reason
    for index, group in enumerate(groups):
        size = f"{group.num_blocks} blocks = {group.num_blocks * block_size} tokens = {format_bytes(group.num_bytes)}"
        sees = f" for layers that see {group.window} tokens" if group.window else ""
        name = "kv_window" if group.window else "kv_cache"
        decisions.append(Decision(name, size + sees, kept if not index else SPLIT_REASON))
    if states is not None:
        decisions.append(_states_decision(states, block_size, _num_draft_states(options)))
        groups = (*groups, states)
    if draft_bytes:
        shown = format_bytes(groups[0].num_blocks * draft_bytes)
        decisions.append(Decision("draft_kv", shown, "of the pool, for the draft model: as many blocks"))
        groups = (replace(groups[0], bytes_per_block=groups[0].bytes_per_block - draft_bytes), *groups[1:])
    left = usable - whole - model.weights_bytes - (model.drafter.weights_bytes if model.drafter is not None else 0)
    if left < 256 * MiB:
        decisions.append(
            Decision("memory", f"{format_bytes(max(0, left))} spare", "weights and pool nearly fill memory")
        )
    return groups


def _share_of(machine: MachineFacts) -> str:
    headroom, usable = machine.cgroup_headroom, machine.usable_memory
    is_whole = headroom is None or headroom // machine.num_sharing > usable
    return f"{KV_SHARE:.0%} of the {format_bytes(usable)} {'free' if is_whole else 'left in the container'}"


def _beside_states(
    pool_bytes: int, states: KVGroupSpec | None, model: ModelFacts, max_model_len: int, block_size: int
) -> int:
    """What the other pools get. Where no layer attends that is what prefixes of as many sequences need."""
    if states is None:
        return pool_bytes
    most = -(-(max_model_len + states.num_blocks * _USUAL_TOKENS) // block_size) * block_size
    left = pool_bytes - states.num_bytes
    return left if model.attends else min(left, most * model.kv_bytes_per_token)


def _refuse_pool(pool_bytes: int, block_bytes: int, states: KVGroupSpec | None) -> NoReturn:
    beside = f" beside {states.num_blocks} states of {format_bytes(states.bytes_per_block)}" if states else ""
    raise ConfigError(
        f"a KV pool of {format_bytes(pool_bytes)} holds fewer than two blocks of {format_bytes(block_bytes)}{beside};"
        " give --kv-cache-memory-bytes a larger size or free some memory.",
        param="kv_cache_memory_bytes",
    )


def _states(
    options: EngineOptions, pool_bytes: int, model: ModelFacts, block_bytes: int, block_size: int
) -> KVGroupSpec:
    states = split_states(pool_bytes, model, block_bytes, block_size)
    asked = options.mamba_block_size
    return states if asked is None else replace(states, interval=-(-asked // block_size))


def _num_draft_states(options: EngineOptions) -> int:
    """Beside the pool of a model with states (EngineConfig.pool_blocks)."""
    return 0 if read_speculation(options.speculative_config)[0] is None else MOST_DRAFT_STATES


def _states_decision(states: KVGroupSpec, block_size: int, num_drafts: int) -> Decision:
    shown = f"{states.num_blocks} of {format_bytes(states.bytes_per_block)} = {format_bytes(states.num_bytes)}"
    every = f"one stays every {states.interval * block_size} tokens, and where prompts and answers end"
    every += f"; {num_drafts} more behind drafts" if num_drafts else ""
    return Decision("kv_states", shown, every)


def _max_model_len(options: EngineOptions, model: ModelFacts, pool_tokens: int, decisions: list[Decision]) -> int:
    asked = options.max_model_len
    if asked is not None and not 1 <= asked <= model.max_context:
        raise ConfigError(
            f"--max-model-len must be between 1 and {model.max_context}, which is what the model was made for;"
            f" got {asked}.",
            param="max_model_len",
        )
    if asked is not None and asked > pool_tokens:
        raise ConfigError(
            f"--max-model-len {asked} does not fit the KV pool, which holds {pool_tokens} tokens;"
            " lower it or raise --kv-cache-memory-bytes.",
            param="max_model_len",
        )
    advised = min(model.max_context, model.advised_len or model.max_context)
    value = min(advised, pool_tokens) if asked is None else asked
    if asked is not None:
        reason = "as asked"
    elif value < min(model.max_context, pool_tokens):
        reason = f"what its makers cut inputs to; the model could take {model.max_context}"
    elif value < model.max_context:
        reason = f"all the KV pool holds; the model could take {model.max_context}"
    else:
        reason = "the model's context"
    decisions.append(Decision("max_model_len", f"{value} tokens", reason))
    return value
