"""What goes into `EngineCore.handle` and what comes out of it.

    messages of the front end  ->  handle  ->  outputs   to clients, with the next message of the engine
    jobs that ended            ->          ->  answers   to the front end, at once
    steps that failed          ->          ->  jobs      to the executor; each ends in one `JobEnded`

A job is what the engine asks of its executor beside the steps. Whoever adds one writes a type here, its handler in the
engine and its doing in the executors; the shell runs all of them alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .block import BlockKey, BlockMove
from .events import ForgetTenants, FromEngine, LoadAdapter, Output, ToEngine
from .moves import EndMove, PullBlocks, SendBlocks
from .tiers import BlockFacts, TierFacts, TierKey

WRITE_THROUGH, WRITE_BACK, SELECTIVE = "write-through", "write-back", "selective"
WRITES = (WRITE_THROUGH, WRITE_BACK, SELECTIVE)
"""When an engine saves a block in a store with tiers: once it is computed; when nobody uses it any more and it is next
but few to be evicted; once a second sequence has used it (and as with write-back, when it is evicted)."""


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Forget an adapter after the steps submitted before; no later one names it."""

    digest: str


@dataclass(frozen=True, slots=True)
class FindBlocks:
    """Look anew which of these blocks, each the place of its KV group and its key, the store holds: others may have
    written there. The result has a digit for each: "0" where it is not there, else "1" for a store without tiers, or
    the tier's (core.tiers.TIERS). within_s: after so long what is not found by then is not there; 0: take your time."""

    number: int
    wanted: tuple[tuple[int, BlockKey], ...]
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Copy these blocks from the store into the pools. Nobody reads or writes them before the job has ended; if it
    fails, they may hold anything. The result is "" where all are in, or has a digit for each: "1" where it is in, "0"
    where it was not to be had and may hold anything. within_s: after so long what is not in by then is not to be had,
    and nothing is copied any more; 0: take your time."""

    number: int
    moves: tuple[BlockMove, ...]
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy these blocks from the pools into the store, and those of `stored` that it has given up since it got them.
    Nobody writes any of them before the job has ended. facts: of each of `moves`, for a store with tiers. is_shared: it
    ends when they are where other machines can fetch them."""

    number: int
    moves: tuple[BlockMove, ...]
    stored: tuple[BlockMove, ...] = ()
    facts: tuple[BlockFacts, ...] = ()
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class PromoteBlocks:
    """These blocks of the store will be fetched soon."""

    wanted: tuple[TierKey, ...]


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """These blocks may be wrong: the store is to forget them."""

    wanted: tuple[TierKey, ...]


@dataclass(frozen=True, slots=True)
class PinBlocks:
    """The store is to keep these blocks for so many seconds, -1: for ever, 0: as any others."""

    wanted: tuple[TierKey, ...]
    seconds: float
    owner: str = ""


@dataclass(frozen=True, slots=True)
class NoteStepCosts:
    """What a token takes, and each position that it attends to: what a stored block is worth."""

    token_s: float
    position_s: float


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The memory of these blocks, of each KV group, may go back to the system. Nobody reads or writes them before the
    job has ended; after it they may hold anything."""

    number: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Have a grammar ready for the sequences that follow it, which are introduced after the job's end. The result is
    the processor time that it took, in seconds; "" where it was ready."""

    grammar: str


Job = (
    LoadAdapter
    | DropAdapter
    | FindBlocks
    | FetchBlocks
    | SaveBlocks
    | PromoteBlocks
    | DropBlocks
    | PinBlocks
    | NoteStepCosts
    | GiveBack
    | PrepareGrammar
    | PullBlocks
    | SendBlocks
    | EndMove
    | ForgetTenants
)
"""LoadAdapter: make the adapter known to steps submitted after the job's end; the result is its digest."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """`result`: what the job says it gives. Where `error` is not "", it failed and changed nothing; `error_kind` and
    `error_param` as in Output."""

    job: Job
    result: str = ""
    error: str = ""
    error_kind: str = ""
    error_param: str = ""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The oldest step in flight had no effect."""

    step: int
    message: str


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The executor has a store of KV blocks, which holds these keys, of each KV group. Blocks may be fetched from it,
    and are saved there when the engine is drained. A store with `tiers` tells no keys: who wants blocks asks for them
    (FindBlocks); `writes` says when blocks are saved there (WRITES). Told again where the executor has lost such a
    store and has it back."""

    keys: tuple[tuple[BlockKey, ...], ...] = ()
    tiers: tuple[TierFacts, ...] = ()
    writes: str = ""


@dataclass(frozen=True, slots=True)
class Relax:
    """Memory is better used elsewhere: have up to so many bytes of blocks that nobody uses go back to the system.
    evicts: also of those that only the prefix cache has."""

    num_bytes: int
    evicts: bool = False


Event = ToEngine | Relax | JobEnded | StepFailed | StoreOpened


class Effects(NamedTuple):
    """What the shell has to do after an event or a commit."""

    outputs: tuple[Output, ...] = ()
    answers: tuple[FromEngine, ...] = ()
    jobs: tuple[Job, ...] = ()


_NOTHING = Effects()


@dataclass(slots=True, eq=False)
class Outbox:
    """Whatever part of the engine has something to say adds it here; EngineCore hands it out."""

    outputs: list[Output] = field(default_factory=list)
    answers: list[FromEngine] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def take(self) -> Effects:
        """All that was added since the last call, in order."""
        if not (self.outputs or self.answers or self.jobs):
            return _NOTHING
        effects = Effects(tuple(self.outputs), tuple(self.answers), tuple(self.jobs))
        self.outputs, self.answers, self.jobs = [], [], []
        return effects
