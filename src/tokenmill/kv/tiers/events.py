"""What leaves the manager of a KV store: answers and jobs (`Outbox`), and events of what host memory and disk hold
(`EventLog`, `core.tiers.TierEvents`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from ...core.block import BlockKey
from ...core.kv_events import CLEARED, EventRuns
from ...core.tiers import FromStore, TierEffects, TierEvent, TierEvents, TierJob
from .replacement import TierBlock

MOST_KEYS = 16384
"""Keys in one part of what a watcher gets first."""


class Outbox:
    """What the manager has to say and to ask for, until the input that it follows from has been dealt with.

    Jobs are numbered here, over all tiers."""

    def __init__(self) -> None:
        self._answers: list[tuple[int, FromStore]] = []
        self._jobs: list[TierJob] = []
        self._num_jobs = 0

    def say(self, client: int, message: FromStore) -> None:
        self._answers.append((client, message))

    def ask(self, job: Callable[[int], TierJob]) -> int:
        """The number of the job, which is made with it."""
        number = self._num_jobs
        self._num_jobs += 1
        self._jobs.append(job(number))
        return number

    def take(self, freed: list[tuple[int, int]]) -> TierEffects:
        effects = TierEffects(tuple(self._answers), tuple(self._jobs), tuple(freed))
        self._answers, self._jobs = [], []
        freed.clear()
        return effects


class EventLog:
    """Tells who watches which blocks are held, and which no longer.

    What one input to the manager has changed goes in one message. Who asks is told at first all that there is; all
    others that watch hear it too, and take it for what it is. Nothing is kept while nobody watches. Of a block that
    came from a shared tier, what it follows and its depth may be a guess (`Contents.follow`).

    A disk of terabytes holds millions of blocks: what there is at first is told in parts, one at a time, among what
    changes meanwhile. So a block may be told of as removed that has not been told of.

    group: the place of the KV group of which is told."""

    def __init__(self, group: int, outbox: Outbox) -> None:
        self.watchers: dict[int, None] = {}
        self._group = group
        self._outbox = outbox
        self._seq = 0
        self._runs = EventRuns(TierEvent)
        self._untold: deque[tuple[str, Mapping[BlockKey, TierBlock], Iterator[TierBlock]]] = deque()

    @property
    def is_behind(self) -> bool:
        """There is more to tell of what there was at first."""
        return bool(self._untold)

    def watch(self, client: int, tiers: Iterable[tuple[str, Mapping[BlockKey, TierBlock]]]) -> None:
        """From now on; tiers: all that they hold, to be looked at."""
        self.flush()
        self.watchers[client] = None
        self._runs.events.append(TierEvent(CLEARED))
        self._untold = deque((name, blocks, iter(list(blocks.values()))) for name, blocks in tiers)
        self.tell()

    def tell(self) -> None:
        """The next part of what there was at first."""
        for _ in range(MOST_KEYS):
            if not self._untold:
                break
            name, blocks, rest = self._untold[0]
            block = next(rest, None)
            if block is None:
                self._untold.popleft()
            elif blocks.get(block.key) is block:
                self.stored(name, block)
        self.flush()

    def unwatch(self, client: int) -> None:
        self.watchers.pop(client, None)
        if not self.watchers:
            self._untold.clear()

    def stored(self, tier: str, block: TierBlock) -> None:
        if self.watchers and block.kind.group == self._group:
            self._runs.store(tier, block.key, block.parent, block.depth)

    def removed(self, tier: str, block: TierBlock) -> None:
        if self.watchers and block.kind.group == self._group:
            self._runs.remove(tier, block.key)

    def flush(self) -> None:
        """Send the events so far."""
        if self._runs.is_empty:
            return
        message = TierEvents(self._seq, self._runs.take())
        for client in self.watchers:
            self._outbox.say(client, message)
        self._seq += 1
