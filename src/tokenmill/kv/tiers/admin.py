"""What operators ask a KV store, and tell it; questions and answers are JSON.

stat   {}                               numbers of each tier and owner; counts never go down
list   {prefix?, tier?, owner?, limit?} blocks; prefix: of the key, in hex
pins   {limit?}                         what is pinned, for how long
clear  {tier?, owner?}                  forget what host memory and the disk hold
evict  {tier?, owner?, bytes}           give up so much, as if there were no room
quota  {owner, bytes, tier?}            a limit for an owner, none with null
flush  {}                               answered when all that is queued for lower tiers is written
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from ...core.tiers import DISK, HOST, Inquire, Told
from .arrivals import Arrivals
from .contents import Contents
from .events import Outbox
from .fetches import Fetches
from .pins import FOR_EVER
from .saves import Saver
from .space import TierSpace
from .stores import Stores

USUAL_LIMIT, MOST_LIMIT = 100, 100_000
MOST_OWNERS = 1000
"""That `stat` tells of: those with most."""

COUNTS = (
    "hits", "misses", "missing", "found", "not_found", "loads", "load_bytes", "load_misses", "load_errors", "saves",
    "save_bytes", "save_misses", "save_errors", "evictions", "refused", "lost", "no_room", "corrupt", "dropped",
    "looks", "pins_refused", "promotes_refused", "fetch_timeouts", "find_timeouts",
)  # fmt: skip


class Admin:
    def __init__(
        self,
        contents: Contents,
        arrivals: Arrivals,
        fetches: Fetches,
        stores: Stores,
        savers: Mapping[str, Saver],
        outbox: Outbox,
    ) -> None:
        self._contents = contents
        self._arrivals = arrivals
        self._fetches = fetches
        self._stores = stores
        self._savers = savers
        self._outbox = outbox
        self._flushing: list[tuple[int, int]] = []
        self._answers: Mapping[str, Callable[[Mapping[str, Any], float], object]] = {
            "stat": self._stat,
            "list": self._list,
            "pins": self._pins,
            "clear": self._clear,
            "evict": self._evict,
            "quota": self._quota,
        }

    def inquire(self, client: int, message: Inquire, now: float) -> None:
        if message.what == "flush":
            self._hurry(now)
            self._flushing.append((client, message.number))
            return
        try:
            asked = json.loads(message.argument or "{}")
            if not isinstance(asked, dict):
                raise ValueError("an object is needed")
            if message.what not in self._answers:
                raise ValueError(f"no such question; there are {', '.join((*self._answers, 'flush'))}")
            answer = json.dumps(self._answers[message.what](asked, now))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            self._outbox.say(client, Told(message.number, "", f"{message.what}: {error}"))
        else:
            self._outbox.say(client, Told(message.number, answer))

    def gone(self, client: int) -> None:
        self._flushing = [one for one in self._flushing if one[0] != client]

    def step(self) -> None:
        """Answer those that wait until all is written."""
        if self._flushing and all(saver.is_idle or not saver.is_open for saver in self._savers.values()):
            for client, number in self._flushing:
                self._outbox.say(client, Told(number, "{}"))
            self._flushing = []

    def _hurry(self, now: float) -> None:
        for saver in self._savers.values():
            saver.is_hurried = True
        disk = self._savers.get(DISK)
        if disk is not None:
            for block in sorted(
                self._contents.host, key=lambda block: -block.num_uses
            ):  # stable: prompts stay together
                disk.consider(block, now, True)

    def _stat(self, asked: Mapping[str, Any], now: float) -> object:
        contents = self._contents
        owners: dict[str, dict[str, Any]] = {}
        for space in contents.spaces:
            most = sorted(space.owners.items(), key=lambda item: (-item[1].num_bytes, item[0]))[:MOST_OWNERS]
            for owner, owned in most:
                kept = {"bytes": owned.num_bytes, "blocks": owned.num_blocks, "hits": owned.num_hits}
                owners.setdefault(owner, {})[space.name] = {**kept, "quota": space.quota(owner)}
        return {
            "numerics_id": contents.config.numerics_id,
            "block_bytes": list(contents.config.block_bytes),
            "block_size": contents.config.block_size,
            "token_s": contents.costs.token_s,
            "position_s": contents.costs.position_s,
            "tiers": {tier: self._stat_of(tier) for tier in contents.counts},
            "owners": owners,
            "pins": len(contents.pins),
            "leases": len(self._fetches.leases()),
            "leased_bytes": self._fetches.leased_bytes,
            "granted_bytes": self._stores.granted_bytes,
            "fetches": len(self._fetches),
            "fetches_waiting": self._fetches.num_waiting,
            "stores": len(self._stores),
            "loading": self._arrivals.num_loading,
            "coming": len(self._arrivals),
            "remembered": len(contents.remembered),
            "watchers": len(contents.log.watchers),
        }

    def _stat_of(self, tier: str) -> dict[str, Any]:
        counts = self._contents.counts[tier]
        told: dict[str, Any] = {name: counts[name] for name in COUNTS}
        told["errors"] = counts["load_errors"] + counts["save_errors"]
        told["load_s"], told["save_s"] = counts["load_ms"] / 1000, counts["save_ms"] / 1000
        for space in self._contents.spaces:
            if space.name == tier:
                told |= {"bytes": space.used_bytes, "blocks": space.num_blocks, "max_bytes": space.num_bytes}
                told["pinned_bytes"] = space.pinned_bytes
                told["quotas"] = dict(space.quotas)
        if tier == HOST:
            told["slot_bytes"] = self._contents.slots.used_bytes
        if tier == DISK:
            told["room_bytes"] = self._contents.disk_room
        if tier in self._savers:
            told["queued"] = self._savers[tier].num_queued
            told["is_open"] = self._savers[tier].is_open
        return told

    def _list(self, asked: Mapping[str, Any], now: float) -> object:
        contents = self._contents
        prefix, owner = str(asked.get("prefix", "")).lower(), asked.get("owner")
        limit = max(0, min(MOST_LIMIT, int(asked.get("limit", USUAL_LIMIT))))

        spaces = self._spaces(asked)

        def suits() -> Iterator[dict[str, Any]]:
            for space in spaces:
                for block in space:
                    others = [one for one in contents.spaces if one.find(block.block) is not None]
                    is_told = others[0] is not space and others[0] in spaces
                    if not is_told and block.key.hex().startswith(prefix) and owner in (None, block.owner):
                        yield {
                            "group": block.kind.group,
                            "key": block.key.hex(),
                            "parent": block.parent.hex(),
                            "depth": block.depth,
                            "owner": block.owner,
                            "tiers": [one.name for one in others],
                            "bytes": block.num_bytes,
                            "uses": block.num_uses,
                            "idle_s": round(now - block.used_s, 3),
                            "pinned": block.block in contents.pins,
                        }

        found = list(islice(suits(), limit + 1))
        return {"blocks": found[:limit], "more": len(found) > limit}

    def _pins(self, asked: Mapping[str, Any], now: float) -> object:
        limit = max(0, min(MOST_LIMIT, int(asked.get("limit", USUAL_LIMIT))))
        pins = [
            {
                "group": block[0],
                "key": block[1].hex(),
                "owner": owner,
                "seconds": None if until == FOR_EVER else round(until - now, 3),
                "tiers": [space.name for space in self._contents.spaces if space.find(block) is not None],
            }
            for block, until, owner in islice(self._contents.pins, limit)
        ]
        return {"pins": pins, "num": len(self._contents.pins), "refused": self._contents.pins.num_refused}

    def _clear(self, asked: Mapping[str, Any], now: float) -> object:
        owner = asked.get("owner")
        return {"blocks": sum(self._contents.clear(space.name, owner) for space in self._spaces(asked))}

    def _evict(self, asked: Mapping[str, Any], now: float) -> object:
        num_bytes = int(asked["bytes"])
        num_blocks = sum(self._contents.give_up(space.name, num_bytes, now) for space in self._spaces(asked))
        return {"blocks": num_blocks}

    def _quota(self, asked: Mapping[str, Any], now: float) -> object:
        limit = asked.get("bytes")
        num_bytes = None if limit is None else int(limit)
        if num_bytes is not None and num_bytes < 0:
            raise ValueError(f"bytes must be 0 or more, got {num_bytes}")
        owner = asked["owner"]
        if not isinstance(owner, str):
            raise ValueError("owner must be a string")
        for space in self._spaces(asked):
            self._contents.set_quota(space, owner, num_bytes, now)
        return {}

    def _spaces(self, asked: Mapping[str, Any]) -> list[TierSpace]:
        tier = asked.get("tier")
        spaces = [space for space in self._contents.spaces if tier in (None, "", space.name)]
        if not spaces:
            raise ValueError(
                f"tier must be one of {', '.join(space.name for space in self._contents.spaces)}, got {tier}"
            )
        return spaces
