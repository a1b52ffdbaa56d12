"""The pure manager of a KV store: which blocks its tiers keep, what moves, and who may look at what.

    clients   Find, Fetch, Store, ...    ->  lookups, fetches, stores  ->  answers
    tiers     jobs that ended, opened    ->  arrivals, saves            ->  jobs
    time      Tick                       ->  pins, rates, what has waited too long

It knows no bytes and no clock. After each input all that can go on goes on; what cannot is asked for by `next_s`, or
waits for a job or a client. Whatever fails is a miss with a count.
"""

from __future__ import annotations

from ...core.tiers import (
    DISK,
    HOST,
    REMOTE,
    Drop,
    Fetch,
    Fetched,
    Find,
    Gone,
    HostResized,
    Inquire,
    Join,
    Joined,
    LoadFrom,
    LookIn,
    NoteCosts,
    Pin,
    Promote,
    Said,
    SaveTo,
    Store,
    Tick,
    TierEffects,
    TierInput,
    TierJobEnded,
    TierKey,
    TierOpened,
    ToStore,
    WatchTiers,
    Written,
)
from .admin import Admin
from .arrivals import Arrivals
from .config import TierConfig
from .contents import Contents
from .events import Outbox
from .fetches import Fetches
from .lookup import Lookups, SharedLookups
from .pins import FOR_EVER
from .replacement import TierBlock
from .saves import Saver, Touches
from .stores import Stores


class TierManager:
    """core.tiers.TierManaging."""

    def __init__(self, config: TierConfig) -> None:
        self._config = config
        self._now = 0.0
        self._outbox = outbox = Outbox()
        self.contents = contents = Contents(config, outbox)
        self.shared_lookups = SharedLookups(contents, outbox)
        self.arrivals = Arrivals(contents, self.shared_lookups, outbox)
        self.savers = {tier: Saver(tier, contents, outbox) for tier in config.tiers if tier in (DISK, REMOTE)}
        touches = Touches(contents, self.savers.values())
        self.lookups = Lookups(contents, self.shared_lookups, outbox)
        self.fetches = Fetches(contents, self.arrivals, touches, outbox)
        self.stores = Stores(contents, self.arrivals, touches, self.savers, outbox)
        self.admin = Admin(contents, self.arrivals, self.fetches, self.stores, self.savers, outbox)
        contents.evicted = self._evicted

    @property
    def next_s(self) -> float | None:
        """When it wants a Tick; None: never."""
        parts = [self.lookups.next_s, self.fetches.next_s, self.stores.next_s, self.contents.pins.next_s]
        parts += [saver.next_s for saver in self.savers.values()]
        parts += [self._now] if self.contents.log.is_behind else []
        return min((part for part in parts if part is not None), default=None)

    def handle(self, event: TierInput, now: float) -> TierEffects:
        match event:
            case Said():
                self._said(event.client, event.message, now)
            case TierJobEnded():
                self._job_ended(event, now)
            case Gone():
                self._gone(event.client, now)
            case TierOpened():
                self._opened(event, now)
            case HostResized():
                self.contents.resize_host(event.num_bytes, now)
            case Tick():
                self.contents.log.tell()
        self._now = now
        self._go_on(now)
        return self._outbox.take(self.contents.slots.freed)

    def _said(self, client: int, message: ToStore, now: float) -> None:
        match message:
            case Find():
                self.lookups.find(client, message, now)
            case Fetch():
                self.fetches.fetch(client, message, now)
            case Fetched():
                self._distrust(self.fetches.fetched(client, message, now), now)
            case Store():
                self.stores.store(client, message, now)
            case Written():
                self.stores.written(client, message, now)
            case Promote():
                self._promote(message, now)
            case Drop():
                self._drop(message.wanted, "dropped", now, message.is_near)
            case Pin():
                self._pin(message, now)
            case NoteCosts():
                self.contents.note_costs(message)
            case WatchTiers():
                self._watch(client, message.is_wanted)
            case Inquire():
                self.admin.inquire(client, message, now)
            case Join():
                self._outbox.say(client, self._join(message))

    def _job_ended(self, event: TierJobEnded, now: float) -> None:
        match event.job:
            case LookIn():
                self.shared_lookups.ended(event.job, event.result, now)
            case LoadFrom():
                self.arrivals.ended(event.job, event.result, event.error, now)
            case SaveTo():
                self.savers[event.job.tier].ended(event.job, event.result, event.error, now)

    def _go_on(self, now: float) -> None:
        """Whatever can. Fetches that begin want slots, and slots that are taken let nothing begin: once each is
        enough, but that a block which is missing at once may let the next fetch begin."""
        contents = self.contents
        contents.pins.lapse(now)
        self.lookups.lapse(now)
        self.fetches.lapse(now)
        self.stores.lapse(now)
        self.fetches.step(now)
        self.arrivals.step(now)
        for saver in self.savers.values():
            saver.step(now)
        self.shared_lookups.flush()
        self.fetches.flush()
        self.admin.step()
        contents.log.flush()

    def _join(self, message: Join) -> Joined:
        config = self._config
        error = ""
        if message.numerics_id and message.numerics_id != config.numerics_id:
            error = f"This KV store keeps blocks of {config.numerics_id}, not of {message.numerics_id}."
        elif message.block_bytes and message.block_bytes != config.block_bytes:
            error = f"Blocks of this KV store have {config.block_bytes} bytes, not {message.block_bytes}."
        if error:
            return Joined(0, (), error)
        facts = tuple(config.tier_facts(tier) for tier in self.contents.counts)
        return Joined(config.host_bytes, facts)

    def _gone(self, client: int, now: float) -> None:
        self.contents.log.unwatch(client)
        self.lookups.gone(client)
        self.fetches.gone(client, now)
        self.stores.gone(client, now)
        self.admin.gone(client)

    def _opened(self, event: TierOpened, now: float) -> None:
        if event.tier == DISK:
            self.contents.open_disk(event.entries, now)
        if event.tier in self.savers:
            self.savers[event.tier].is_open = True

    def _promote(self, message: Promote, now: float) -> None:
        contents, arrivals = self.contents, self.arrivals
        most = int(self._config.promote_share * contents.slots.num_bytes)
        for nth, found in contents.follow(message.wanted):
            if isinstance(found, TierBlock):
                contents.host.refresh(found, now)
            elif arrivals.ahead_bytes + contents.kinds[found.block[0]].num_bytes > most:
                contents.host.counts["promotes_refused"] += 1
            else:
                arrivals.bring(found, None, nth, False, now)

    def _distrust(self, blocks: tuple[TierKey, ...], now: float) -> None:
        """A worker found them wrong. What others share stays, since it may be this machine that errs; for now it is not
        asked for, so that they are computed, and written there anew."""
        self._drop(blocks, "corrupt", now, is_near=True)
        wanted = [block for block in blocks if self.contents.is_valid(block)]
        for tier in self.contents.shared:
            self.contents.lose(tier, wanted, now)

    def _drop(self, blocks: tuple[TierKey, ...], why: str, now: float, is_near: bool) -> None:
        wanted = [block for block in dict.fromkeys(blocks) if self.contents.is_valid(block)]
        if wanted:
            for block in wanted:
                found = self.contents.host.find(block)
                tier = HOST if found is None or why != "corrupt" else found.origin or HOST
                self.contents.counts[tier][why] += 1
                self.arrivals.stop(block, now)
            self.contents.forget(wanted, is_near)

    def _pin(self, message: Pin, now: float) -> None:
        seconds = message.seconds
        until = FOR_EVER if seconds < 0 else now + seconds if seconds > 0 else now  # not a number: no pin
        for block in message.wanted:
            if not self.contents.is_valid(block) or not self.contents.pins.pin(block, until, message.owner, now):
                continue
            found = self.contents.host.find(block)
            if found is not None:
                for saver in self.savers.values():
                    saver.consider(found, now)

    def _watch(self, client: int, is_wanted: bool) -> None:
        contents = self.contents
        contents.log.unwatch(client)
        if is_wanted:
            group = contents.config.told_group
            tiers = [(space.name, space.blocks[group]) for space in contents.spaces] if group >= 0 else []
            contents.log.watch(client, tiers)

    def _evicted(self, block: TierBlock) -> None:
        for saver in self.savers.values():
            saver.evicted(block)
