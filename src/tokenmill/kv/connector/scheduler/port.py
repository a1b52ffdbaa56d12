"""What the scheduler's side of the connector needs of the engine whose KV it moves: its blocks, its sequences and their
moves between states. `engine.state` is the one behind it; nothing else of the engine is known here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ....core.block import BlockKey, BlockTable
from ....core.config import EngineConfig
from ....core.cost import CostFitter
from ....core.effects import Outbox
from ....core.events import Output
from ....core.sequence import Sequence
from ....sched.policies import Policies
from ....sched.queue import WaitingQueue
from ....sched.steps import Counters, Step
from ...blocks.encoder import EncoderLedger
from ...blocks.groups import KVBlocks, Match
from ...events.publisher import KVEventPublisher


class EnginePort(Protocol):
    """What the fields hold, and when listeners are called, is said in `engine.state`."""

    config: EngineConfig
    policies: Policies
    costs: CostFitter
    blocks: KVBlocks
    encoder: EncoderLedger
    stored: tuple[set[BlockKey], ...]
    has_tiers: bool
    outbox: Outbox
    kv_events: KVEventPublisher
    counters: Counters
    by_id: dict[str, Sequence]
    waiting: WaitingQueue
    running: list[Sequence]
    loading: dict[int, Sequence]
    in_flight: deque[Step]
    moving: list[Sequence]
    arrivals: list[Callable[[Sequence, float], None]]
    departures: list[Callable[[Sequence], None]]
    borders: list[Callable[[float], None]]

    @property
    def has_store(self) -> bool: ...

    def load(self, seq: Sequence) -> None: ...

    def run_loaded(self, seq: Sequence, tables: tuple[BlockTable, ...], num_tokens: int) -> None: ...

    def stop_loading(self, seq: Sequence) -> None: ...

    def export(self, seq: Sequence, last: Output) -> tuple[BlockTable, ...]: ...

    def leave(self, seq: Sequence) -> None: ...

    def find_match(self, seq: Sequence) -> Match: ...

    def num_shareable(self, seq: Sequence) -> int: ...

    def publish(self, seq: Sequence, num_full: int, step: Step | None) -> None: ...


class Entrance(Protocol):
    """Requests that were let in and have not become sequences yet."""

    def __contains__(self, request_id: str) -> bool: ...

    def give_up(self, request_id: str, attempt: int, now: float) -> None: ...
