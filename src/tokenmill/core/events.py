"""What front end and engine tell each other. One message a step each way carries a batch of these.

Front end -> engine: `ToEngine`, which `EngineCore.handle` takes. Engine -> front end: `FromEngine`.
Times are seconds on the monotonic clock of whoever holds the message; a link between processes translates them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from .cost import UNKNOWN, Costs
from .experts import ExpertLoad
from .kv_events import KeepKV, KVEvents, PoolCounts, PrefixSummary, PromoteKV, WatchKV
from .moves import Continue, Moved, Offer, Prefetch, Prefetched, Release, Staged, Yield
from .request import DRAW_VERSION, PoolingParams, Request
from .speculation import DraftStats
from .step import TokenLogprob
from .tiers import TierEvents, TierFacts, WatchTiers

# Files of an adapter over the link, for a worker that has none of the front end's disks: it asks for one part after
# the other, so neither end holds more than a part, and messages of steps pass in between.
#
#     front end                            worker
#     LoadAdapter(number, ...)        ->
#                                     <-   WantPart(number, name, offset)
#     FilePart(number, ...)           ->   ... until it has all files; then its engine loads them
#                                     <-   AdapterLoaded(number, ...)
#
# A worker that has an adapter of that digest asks for nothing.


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PART_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class WantPart:
    """Of the adapter whose LoadAdapter has this number: file `name`, from byte `offset` on."""

    number: int
    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """Up to PART_BYTES of a file of `size` bytes; or why there is none, for whoever asked for the adapter."""

    number: int
    size: int = 0
    data: bytes = b""
    error: str = ""


FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"
FINISH_MOVED = "moved"
"""It goes on in another engine."""

TIMEOUT = "timeout"
"""Why an answer ended with FINISH_LENGTH that could have gone on."""


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel requests by id; unknown or finished ids are ignored. In effect at the next step border."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what is admitted, then stop."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load the LoRA adapter in folder `path`, which must lie under `inside` unless that is "". The answer is an
    `AdapterLoaded` with the same `number`. `digest`: of its content, where that is known already."""

    number: int
    path: str
    inside: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Take one load of the adapter with this digest back. After the last, no further request may name it, and it is
    freed when those that do are done."""

    digest: str


@dataclass(frozen=True, slots=True)
class ShowCache:
    """Tell what the prefix cache holds, the `most_runs` largest runs of its tree. The answer is a `CacheShown` with the
    same `number`."""

    number: int
    most_runs: int


@dataclass(frozen=True, slots=True)
class CacheShown:
    """pools: one for each KV group. summary: of the first that sees everything; empty where all have a window."""

    number: int
    block_size: int
    pools: tuple[PoolCounts, ...] = ()
    summary: PrefixSummary = field(default_factory=PrefixSummary)


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Requests may name `digest` from now on; or why not, in `error`, `error_kind` and `error_param` (see Output)."""

    number: int
    digest: str = ""
    error: str = ""
    error_kind: str = ""
    error_param: str = ""


@dataclass(frozen=True, slots=True)
class SetPool:
    """Put the engine into another pool. Of several front ends the one with the highest `epoch` decides: one that is not
    higher than the last changes nothing. The answer, to all, is a PoolChanged."""

    pool: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PoolChanged:
    """In which pool the engine is, since which `epoch`."""

    pool: str
    epoch: int


class EngineStats(NamedTuple):
    """Snapshot after a step. Counters are totals since the engine started; blocks are those of all pools. `kv_usage`:
    the share of blocks that sequences hold (cached, evictable ones do not count), of the pool where it is largest.
    Adapters are digests, each once. `num_expired`: ended because they waited too long. `num_prompt_left`: tokens to be
    computed before all that it has can draw. Of a store of KV: `external_hits`, tokens that came from
    it, `tier_hits`, from each of core.tiers.TIERS, `external_recomputed`, that it had and that were computed all the
    same; `external_missed`, blocks that it had said to have; `fetch_s`, what its jobs took together; `kv_written`,
    `kv_unwritten`: blocks that it was given, and that were evicted before. `in_flight_s`: what the steps under way
    take, as predicted; `costs`, `cost_error`: what steps take, and by which share that was off lately. `num_drafts`:
    rows that verified drafts, `num_draft_tokens` of them together; `accepted_per_pos`: how many were accepted of those
    that were first in their row, second, and so on; `drafting`: by what their number is chosen, None where nothing
    drafts."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_held_blocks: int = 0
    num_blocks: int = 0
    kv_usage: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    last_step_tokens: int = 0
    last_step_s: float = 0.0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    num_corrupted: int = 0
    num_constrained: int = 0
    num_grammar_failures: int = 0
    num_expired: int = 0
    num_prompt_left: int = 0
    in_flight_s: float = 0.0
    costs: Costs = UNKNOWN
    cost_error: float = 0.0
    external_queries: int = 0
    external_hits: int = 0
    tier_hits: tuple[int, ...] = ()
    external_recomputed: int = 0
    external_missed: int = 0
    fetch_s: float = 0.0
    kv_written: int = 0
    kv_unwritten: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    drafting: DraftStats | None = None


class WorkerFacts(NamedTuple):
    """Which worker an engine is.

    id           its name in a cluster, which its next life has too
    incarnation  random, one for each life
    pid          of its process
    pool         in which it serves until it is put into another
    epoch        of the last such change
    host         equal for processes that can read each other's memory
    kv_address   where other workers get KV from it, as HOST:PORT or a path; "": nowhere
    kv_store     equal for workers that use the same KV store; "": it uses none
    """

    id: str = ""
    incarnation: str = ""
    pid: int = 0
    pool: str = "mixed"
    host: str = ""
    kv_address: str = ""
    epoch: int = 0
    kv_store: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded and takes requests. `facts`: printable name -> value pairs (backend, kernels, blocks...).
    `pooling`: the vectors it gives, and how requests want them unless they say otherwise; None: it gives tokens.
    `vector_size`: values of a vector before `dimensions` cuts it. `num_blocks`: in the pool of layers that see
    everything, or where all have a window, in theirs; 0: it keeps no KV. `num_pool_blocks`: in all pools together.
    `max_loras`: most LoRA adapters at once. `memory`: bytes that it takes at most, by purpose. `max_num_seqs`,
    `max_num_batched_tokens`: of a step; 0: unknown. `draw_version`: what seeds mean to it (core/request.py).
    `stats`: what it has done for others before. `worker`: which one it is. `tiers`: of its KV store.
    `block_bytes`: of a block, in all pools together; 0: unknown. `expert_load`: what its experts have computed for
    others before; None: its model has none. `active_share`: of the model's parameters, what a token goes through.
    `settings`: of the options that change answers, each by its name, with what it was resolved to.
    `num_speculative_tokens`: most that it drafts for a request in a step; 0: none."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    numerics_id: str
    block_size: int
    num_blocks: int
    facts: tuple[tuple[str, str], ...] = ()
    pooling: PoolingParams | None = None
    vector_size: int = 0
    max_loras: int = 0
    num_pool_blocks: int = 0
    memory: tuple[tuple[str, int], ...] = ()
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    draw_version: int = DRAW_VERSION
    stats: EngineStats = field(default_factory=EngineStats)
    worker: WorkerFacts = field(default_factory=WorkerFacts)
    tiers: tuple[TierFacts, ...] = ()
    block_bytes: int = 0
    expert_load: ExpertLoad | None = None
    active_share: float = 1.0
    settings: tuple[tuple[str, str], ...] = ()
    num_speculative_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Leaving:
    """The engine wants no new requests. The front end sends none after this, and says so by a Drain."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life from an engine that has work, whether or not a step ends. `num_ticks` changes while its kernels
    get on; None: it cannot tell. `num_in_flight` steps are under way and take `in_flight_s`, as predicted; 0.0 where
    nothing is known of them. `num_jobs` run beside them."""

    num_ticks: int | None
    num_in_flight: int
    in_flight_s: float
    num_jobs: int = 0


@dataclass(frozen=True, slots=True)
class ForgetTenants:
    """These tenants, by id, are deleted: nothing that they were told is to be kept in order to draft from it. What they
    have running goes on."""

    tenants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """When a request passed each gate (seconds, monotonic; -1 = never), and how often its engine preempted it."""

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    num_preemptions: int = 0


class Output(NamedTuple):
    """Progress of one request. `finish_reason` None: more will come.

    The stop token that ended it (by id: an end token or one of stop_token_ids) is `stop_token`; it is not in `tokens`
    or `logprobs` but is counted in `num_output`. `prompt_logprobs` come whole, with the first token: one entry for
    each prompt token but the first. `vector` is the one output of a pooling request and comes with its end.
    `num_cached`: prompt tokens served from the prefix cache. `is_saved`: all KV that its engine had of it lies in the
    store, as its request wanted; it comes with the end. `attempt`: of its request. `timing`
    comes with the first and the last output. Where `finish_reason` is "error", `error` is a sentence for
    the user, `error_kind` the `kind` of the matching class of core.errors (invalid_request_error, overloaded_error,
    unavailable_error, internal_error, timeout_error) and `error_param` the field at fault ("" = none). Where it is
    "length", `error` may be TIMEOUT, or REPETITION (core/loop_guard.py). `num_drafted`: drafts that the step verified
    for it; `is_predicted`: they are of its prediction.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    num_output: int = 0
    num_cached: int = 0
    error: str = ""
    error_kind: str = ""
    error_param: str = ""
    vector: bytes = b""
    timing: Timing | None = None
    is_saved: bool = False
    attempt: int = 0
    num_drafted: int = 0
    is_predicted: bool = False

    @property
    def draft_steps(self) -> tuple[tuple[int, int], ...]:
        """Drafts that were verified for these tokens, and how many of them were accepted; none: no drafts."""
        if not self.num_drafted:
            return ()
        return ((self.num_drafted, len(self.tokens) + (self.stop_token is not None) - 1),)

    @property
    def predicted(self) -> tuple[int, int]:
        """Drafts of the request's prediction that were accepted for these tokens, and that were not."""
        if not (self.num_drafted and self.is_predicted):
            return (0, 0)
        ((num_drafted, num_accepted),) = self.draft_steps
        return num_accepted, num_drafted - num_accepted


output_of: Callable[[tuple[Any, ...]], Output] = partial(tuple.__new__, Output)
"""An output of all its fields in order, at a third of what calling the class costs."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All outputs of one step, the engine's state after it, and the clock (`now`), so that a front end can tell a
    working engine from a stuck one."""

    outputs: tuple[Output, ...]
    stats: EngineStats
    now_s: float


ToEngine = (
    Submit
    | Abort
    | Drain
    | LoadAdapter
    | UnloadAdapter
    | ShowCache
    | SetPool
    | Offer
    | Yield
    | Continue
    | Release
    | Prefetch
    | WatchKV
    | WatchTiers
    | KeepKV
    | PromoteKV
    | ForgetTenants
)
FromEngine = (
    Ready
    | StepOutputs
    | AdapterLoaded
    | Leaving
    | CacheShown
    | Beat
    | PoolChanged
    | Staged
    | Moved
    | Prefetched
    | WantPart
    | KVEvents
    | TierEvents
    | ExpertLoad
)
