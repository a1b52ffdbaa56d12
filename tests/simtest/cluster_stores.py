"""KV stores of a simulated cluster, one on each machine: they crash and come back, their tiers fail, and what they tell
front ends may be wrong. None of it may change an answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenmill.core.block import KEY_BYTES
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import WRITES, StoreOpened
from tokenmill.core.kv_events import STORED
from tokenmill.core.tiers import DISK, HOST, REMOTE, TierEvent, TierEvents, TierFacts
from tokenmill.kv.events.relay import Watch
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.tier_store import TierWatch, ToyMachine
from tokenmill.sim.tiers import Medium, Pace, TierFaults

BLOCK_BYTES = 4096
FACTS = (TierFacts(HOST, 0, 1e-4, 1e9), TierFacts(DISK, 0, 1e-3, 1e8), TierFacts(REMOTE, 0, 1e-3, 1e7))


class Stores:
    """Of a cluster whose workers are divided among `number` machines. lies: share of messages to front ends with
    something in them that is not so."""

    def __init__(self, number: int, config: EngineConfig, loop: VirtualLoop, rng: random.Random, lies: float) -> None:
        self._loop = loop
        self._rng = rng
        self._lies = lies
        self._writes = rng.choice(WRITES)
        self.num_crashes = 0
        groups = len(config.groups)
        most = groups * max(group.num_blocks for group in config.groups)
        sizes = (BLOCK_BYTES,) * groups
        shared = Medium(1 << 40, sizes, is_shared=True, pace=Pace(0.001, 1e7))
        self.machines: list[ToyMachine] = []
        for _ in range(number):
            made = TierConfig(
                config.numerics_id, sizes, max(groups, most) * BLOCK_BYTES, (DISK, REMOTE), 4 * most * BLOCK_BYTES,
                admissions={DISK: "all", REMOTE: "all"},
            )  # fmt: skip
            faults = TierFaults(*(rng.choice([0.0, 0.0, 0.1]) for _ in TierFaults._fields))
            media = {DISK: Medium(4 * most * BLOCK_BYTES, sizes, pace=Pace(0.001, 1e8)), REMOTE: shared}
            self.machines.append(ToyMachine(made, media, loop, rng, dict.fromkeys(media, faults)))

    def start(self) -> None:
        for machine in self.machines:
            machine.start()

    def of(self, worker: str) -> ToyMachine:
        return self.machines[int(worker[1:]) % len(self.machines)]

    def opened(self) -> StoreOpened:
        return StoreOpened(tiers=FACTS, writes=self._writes)

    def watches(self, workers: Sequence[str]) -> dict[str, tuple[str, Watch]]:
        """By worker: the name of its store, and what tells of it."""
        return {each: (f"s{self.machines.index(self.of(each))}", self._watch(self.of(each))) for each in workers}

    async def crash(self, gap_s: float) -> None:
        """One after the other, for as long as this runs."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.0, 2 * gap_s))
            machine = self._rng.choice(self.machines)
            machine.crash()
            self.num_crashes += 1
            await asyncio.sleep(self._rng.choice([0.001, 0.1, 0.5]))
            machine.start()

    def _watch(self, machine: ToyMachine) -> Watch:
        told = TierWatch(machine, self._loop.spawn)

        def watch(hear: Callable[[TierEvents], None] | None) -> None:
            told(None if hear is None else lambda message: hear(self._bent(message)))

        return watch

    def _bent(self, message: TierEvents) -> TierEvents:
        if not message.events or self._rng.random() >= self._lies:
            return message
        events = list(message.events)
        nth = self._rng.randrange(len(events))
        event = events[nth]
        choice = self._rng.randrange(4)
        if choice == 0:
            events.append(TierEvent(STORED, HOST, self._rng.randbytes(4 * KEY_BYTES), b"", self._rng.randrange(9)))
        elif choice == 1:
            events[nth] = event._replace(tier=self._rng.choice([HOST, DISK, REMOTE, "tape"]))
        elif choice == 2:
            events[nth] = event._replace(depth=event.depth + self._rng.randrange(5))
        else:
            return replace(message, seq=message.seq + self._rng.choice([-1, 1, 7]))
        return replace(message, events=tuple(events))
