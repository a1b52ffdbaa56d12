"""KV blocks below an engine's pools: the tiers that keep them, and what is said of them.

    engine, worker                     KV store of the machine                     its tiers
    FindBlocks   -- Find  ---------->  which tier has each block      -- look -->  remote, peer
                 <- Found -----------
    FetchBlocks  -- Fetch ---------->  a slot of host memory for each -- load -->  disk, remote, peer
                 <- Leased ----------  (as they come in)
       copies out of the slots, compares checksums
                 -- Fetched -------->  the slots are free to go
    SaveBlocks   -- Store ---------->  slots to fill
                 <- Granted ---------
       copies into the slots
                 -- Written -------->  they are in host memory        -- save -->  disk, remote (when the policy says)
                 <- Stored ----------

A KV store serves one numerics id. Every block that it touches passes through a slot of its host memory, which workers
of the machine map: messages carry offsets, never bytes. A slot that was handed out is leased until the worker has said
so or has gone. A block is known by its KV group and its key; equal ones are interchangeable, so that all here may be
said twice. The checksum is made by the worker that computed the block (`kv.transfer.checksum`), travels with it through
every tier, and is compared by the worker that takes it, after its last copy: what is wrong is a miss, and is dropped.

Which block is where, and what moves, is decided in `kv.tiers`; bytes are in `kv.transfer`. What a KV store has its
tiers do is a `TierJob`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .block import BlockKey

HOST, DISK, REMOTE, PEER = "host", "disk", "remote", "peer"
TIERS = (HOST, DISK, REMOTE, PEER)
"""Nearest first. A digit of a result is the place here, plus one; 0: in none."""

TierKey = tuple[int, BlockKey]
"""The place of a KV group, and a key in it."""

NO_PLACE = -1


class BlockFacts(NamedTuple):
    """A block that is given to a store.

    parent  key of the block before it, b"" for the first
    depth   blocks before it in its prompt
    owner   whose quota it counts against: the salt of its requests; "": everybody's
    """

    block: TierKey
    parent: BlockKey = b""
    depth: int = 0
    owner: str = ""


class TierFacts(NamedTuple):
    """A tier as its users know it. latency_s, bytes_s: what loading takes as such, and bytes a second after that, as
    measured or as is usual for its kind."""

    name: str
    num_bytes: int = 0
    latency_s: float = 0.0
    bytes_s: float = 0.0


USUAL_FACTS: Mapping[str, TierFacts] = {
    HOST: TierFacts(HOST, 0, 0.0002, 4e9),
    DISK: TierFacts(DISK, 0, 0.0005, 1e9),
    REMOTE: TierFacts(REMOTE, 0, 0.002, 5e8),
    PEER: TierFacts(PEER, 0, 0.002, 5e8),
}
"""Of tiers that do not say, or are not known."""


class TierEntry(NamedTuple):
    """A block that a tier has kept over a restart, and where; `sum`: its checksum."""

    facts: BlockFacts
    place: int
    sum: int


class TierEvent(NamedTuple):
    """kind: STORED, REMOVED or CLEARED of `core.kv_events`, here of one tier (CLEARED: of all). Fields as there."""

    kind: str
    tier: str = ""
    keys: bytes = b""
    parent: BlockKey = b""
    depth: int = 0


# ---- client -> KV store ----


@dataclass(frozen=True, slots=True)
class Join:
    """The first message. A store of another numerics id, or with blocks of other sizes, refuses. block_bytes: of each
    KV group. name, incarnation: of the worker; "" for one who only asks."""

    numerics_id: str
    block_bytes: tuple[int, ...]
    name: str = ""
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Find:
    """Where are these blocks, those of one prefix in its order? `is_near`: in host memory or on disk; others are not
    asked, as they may be the ones that ask."""

    number: int
    wanted: tuple[TierKey, ...]
    is_near: bool = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have these blocks ready in host memory. `is_near`: as in Find."""

    number: int
    wanted: tuple[TierKey, ...]
    is_near: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """A Fetch is over, also one that has not been answered whole: its slots are not looked at any more. `bad`: places
    in `wanted` of blocks whose checksums were wrong."""

    number: int
    bad: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Store:
    """These blocks are to be kept. `is_shared`: they must have reached the farthest tier that others share before
    `Stored` is said."""

    number: int
    blocks: tuple[BlockFacts, ...]
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """The granted slots are filled, and these are the checksums, one for each block of `Store`; NO_PLACE where nothing
    was written."""

    number: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """These blocks will be wanted soon: have them in host memory. Not answered."""

    wanted: tuple[TierKey, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget these blocks in every tier: they may be wrong, or somebody wants them gone. `is_near`: in host memory and
    on disk alone. Not answered."""

    wanted: tuple[TierKey, ...]
    is_near: bool = False


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep these blocks whatever else is wanted, until they are pinned with `seconds` 0 or so long has passed; -1: for
    ever. A pin that lasts longer stays. Not answered. Blocks that are not here are pinned when they come."""

    wanted: tuple[TierKey, ...]
    seconds: float
    owner: str = ""


@dataclass(frozen=True, slots=True)
class NoteCosts:
    """What a token takes to compute, and each position that it attends to, as an engine measures it."""

    token_s: float
    position_s: float


@dataclass(frozen=True, slots=True)
class WatchTiers:
    """Tell of what is stored and removed from now on, at first all that there is; or no more."""

    is_wanted: bool


@dataclass(frozen=True, slots=True)
class Inquire:
    """For operators. what: one of `stat`, `list`, `verify`, `clear`, ...; argument, answer (`Told`): JSON."""

    number: int
    what: str
    argument: str = ""


ToStore = Join | Find | Fetch | Fetched | Store | Written | Promote | Drop | Pin | NoteCosts | WatchTiers | Inquire


# ---- KV store -> client ----


@dataclass(frozen=True, slots=True)
class Joined:
    """slab_bytes: of the host memory that offsets are in, to be mapped at once: it does not grow beyond that. tiers:
    nearest first. Where `error` is not "", the client was refused."""

    slab_bytes: int
    tiers: tuple[TierFacts, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A digit for each block (see TIERS)."""

    number: int
    digits: str


class Lease(NamedTuple):
    """A block that lies in host memory: its place in `wanted`, the offset of its slot, its checksum."""

    nth: int
    offset: int
    sum: int


@dataclass(frozen=True, slots=True)
class Leased:
    """Blocks of a Fetch that are ready, and places in `wanted` of those that are not to be had. More will be said
    until `is_last`."""

    number: int
    leases: tuple[Lease, ...]
    missing: tuple[int, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """Offsets of the slots to fill; NO_PLACE for a block that is here already or has no room."""

    number: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A Store is over. `is_kept`: all its blocks are in the tier that was asked for."""

    number: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class TierEvents:
    """What has happened since the message numbered one less."""

    seq: int
    events: tuple[TierEvent, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """Answers Inquire. Where `error` is not "", it could not be done."""

    number: int
    answer: str = ""
    error: str = ""


FromStore = Joined | Found | Leased | Granted | Stored | TierEvents | Told


@dataclass(frozen=True, slots=True)
class LookIn:
    """Which of these does a tier have that others write to, too? Result: a place for each, NO_PLACE where it has it
    not."""

    number: int
    tier: str
    wanted: tuple[TierKey, ...]


@dataclass(frozen=True, slots=True)
class LoadFrom:
    """Fill slots: (block, place in the tier, offset of the slot). Result: the checksum of each, as it was saved;
    NO_PLACE where it is not to be had."""

    number: int
    tier: str
    blocks: tuple[tuple[TierKey, int, int], ...]


@dataclass(frozen=True, slots=True)
class SaveTo:
    """Keep what is in these slots: (block, offset of the slot, checksum). Result: the place of each in the tier, a
    number of the tier's own choosing; NO_PLACE where it was not kept."""

    number: int
    tier: str
    blocks: tuple[tuple[BlockFacts, int, int], ...]


@dataclass(frozen=True, slots=True)
class DropFrom:
    """Forget blocks by (block, place). No result."""

    number: int
    tier: str
    blocks: tuple[tuple[TierKey, int], ...]


TierJob = LookIn | LoadFrom | SaveTo | DropFrom


class Tier(Protocol):
    """Where blocks are kept below host memory: kv.transfer (disk, remote), sim. All calls may overlap and be
    repeated; slots are neither read nor written after a call has returned. What fails for single blocks is in the
    result; what fails for all raises OSError."""

    async def open(self) -> Sequence[TierEntry]:
        """Be ready; what a tier that is ours alone has kept."""
        ...

    async def look(self, job: LookIn) -> Sequence[int]: ...

    async def load(self, job: LoadFrom) -> Sequence[int]: ...

    async def save(self, job: SaveTo) -> Sequence[int]: ...

    async def drop(self, job: DropFrom) -> None: ...

    async def close(self) -> None: ...


# ---- what the pure manager of a KV store hears and gives (kv.tiers) ----


@dataclass(frozen=True, slots=True)
class Said:
    """A client, by the number of its connection."""

    client: int
    message: ToStore


@dataclass(frozen=True, slots=True)
class Gone:
    """A client: its leases lapse, and what it was to write is not written."""

    client: int


@dataclass(frozen=True, slots=True)
class TierJobEnded:
    """`result` as the job says; empty where `error` is not "": then nothing was done."""

    job: TierJob
    result: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class TierOpened:
    """A tier is ready, and has kept these."""

    tier: str
    entries: tuple[TierEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class HostResized:
    """Host memory may take so much from now on, at most the size of the arena: what is beyond it is given up as it
    can be."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: pins lapse, writes that were held back go on."""


TierInput = Said | Gone | TierJobEnded | TierOpened | HostResized | Tick


class TierEffects(NamedTuple):
    """What the KV store's shell is to do. freed: (offset, bytes) of host memory that holds nothing any more and may go
    back to the system."""

    answers: tuple[tuple[int, FromStore], ...] = ()
    jobs: tuple[TierJob, ...] = ()
    freed: tuple[tuple[int, int], ...] = ()


class TierManaging(Protocol):
    """kv.tiers.manager.TierManager."""

    def handle(self, event: TierInput, now: float) -> TierEffects: ...

    @property
    def next_s(self) -> float | None:
        """When it wants a Tick; None: never."""
        ...
