"""Faults of a cluster by seed: who is hit by what, and when.

crash   at once, or in one of the next steps              freeze  shorter or longer than a worker may be stuck
slow    steps take many times as long                     cut     both sides live on
hold    a partition that heals: all arrives, late         leave   a drain, and a fresh life
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.sim.front import Front
from tokenmill.sim.worker import Worker

CRASH, FREEZE, SLOW, CUT, HOLD, LEAVE, FLIP = "crash", "freeze", "slow", "cut", "hold", "leave", "flip"
KINDS = (CRASH, FREEZE, SLOW, CUT, HOLD, LEAVE)


@dataclass(frozen=True, slots=True)
class Faults:
    """`number` of them, each of one of `kinds`, the next after at most `gap_s`. `still_s`: for how long workers and
    links may stand still."""

    number: int = 0
    kinds: tuple[str, ...] = KINDS
    gap_s: float = 0.3
    still_s: tuple[float, ...] = (0.05, 0.5, 0.8, 3.0)


async def strike(
    faults: Faults, workers: Sequence[Worker], fronts: Sequence[Front], rng: random.Random, counts: Counter[str]
) -> None:
    """Let them happen, and count those of each kind."""
    left = faults.number
    while left:
        worker, kind = rng.choice(workers), rng.choice(faults.kinds)
        at_step = rng.choice([0, 1, 2, 3, rng.randint(4, 40)]) if kind == CRASH else 0
        if not at_step:
            await asyncio.sleep(rng.uniform(0.0, faults.gap_s))
        if not worker.is_up:
            await asyncio.sleep(0.02)
            continue
        left -= 1
        counts[kind] += 1
        hardware = worker.hardware
        if kind == CRASH:
            worker.crash(at_step)
            if at_step:
                await asyncio.sleep(rng.uniform(0.0, faults.gap_s))
        elif kind == FREEZE:
            hardware.freeze(rng.choice(faults.still_s))
        elif kind == SLOW:
            hardware.slow(rng.choice([0.2, 1.0]), rng.choice([3.0, 30.0]))
        elif kind == CUT:
            worker.cut()
        elif kind == HOLD:
            worker.hold(rng.choice(faults.still_s))
        elif kind == FLIP:
            place = rng.randrange(len(fronts))
            fronts[place].put(worker.numbers.get(place, -1), rng.choice(["prefill", "decode", "mixed"]))
        else:
            worker.leave()
