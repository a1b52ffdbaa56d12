"""What a KV store asks of its tiers, and what its pure manager hears and gives (see `tiers`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .tiers import BlockFacts, FromStore, TierEntry, TierKey, ToStore


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
