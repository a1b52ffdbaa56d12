"""The executor of a simulated worker where only time counts: steps take what a cost model says of their rows, one after
the other, and tokens mean nothing. Drafts are right as `acceptance` says. KV that moves takes its bytes over the
network. A `Trace` is told steps and transfers with their virtual times.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ..core.config import EngineConfig
from ..core.cost import CostModel, Work, work_of
from ..core.effects import Job
from ..core.errors import EngineFailed
from ..core.moves import EndMove, PullBlocks, SendBlocks
from ..core.step import Drafts, RowResult, StepPlan, StepResult
from .acceptance import Acceptance
from .cores import Process
from .loop import VirtualLoop
from .peers import ToyNetwork, ToyPeer
from .timed_tiers import TimedTiers


class Trace(Protocol):
    def step(self, worker: str, work: Work, begin_s: float, end_s: float) -> None:
        """A worker computes from begin_s to end_s; told when that is known, in the order of each worker's steps."""
        ...

    def carried(self, source: str, destination: str, num_bytes: int, begin_s: float, end_s: float) -> None:
        """KV has come from worker to worker."""
        ...


END_TOKEN = 256
"""Ends an answer. Prompts are made of lower ones, and answers of 1."""

DRAWN = 1
"""All others of an answer."""

_WRONG = 2
"""Drafted, and never drawn."""

_ENDS, _DRAWS = (END_TOKEN,), (DRAWN,)
_ENDLESS = 2**62


class _Nowhere(array):  # type: ignore[type-arg]
    """Slots that hold nothing."""

    def __getitem__(self, where: object) -> array[int]:
        return array("q")

    def __setitem__(self, where: object, what: object) -> None:
        pass


class _NoPool:
    def __init__(self) -> None:
        self.positions: array[int] = _Nowhere("q")
        self.tokens: array[int] = _Nowhere("q")
        self.moving: dict[int, bool] = {}
        self.sending: dict[int, int] = {}


class _Drawing(NamedTuple):
    """A sequence. last: of how many tokens its last is drawn; draws, ends: what its rows give before, and then. seed:
    of its request, whose prompt has so many tokens."""

    last: int
    draws: RowResult
    ends: RowResult
    seed: int
    num_prompt: int


class UnderWay(NamedTuple):
    """A step: when it ends, what it takes, and what tells of its end."""

    end_s: float
    took_s: float
    timer: asyncio.TimerHandle


class Foreseen(NamedTuple):
    """Steps that will be: when each ends, what it takes, and when the next one can begin."""

    ends: list[float]
    tooks: list[float]
    frees: list[float]


class Carrier(Protocol):
    """Bulk transfers: `network.Network` with one wire a host, `shared_links.SharedLinks` with links that flows
    share."""

    async def carry(self, source: str, destination: str, num_bytes: int) -> None:
        """Returns when they have arrived."""
        ...


class TimedExecutor:
    """Steps that take time by `cost_model`. `lengths`: seed of a request -> tokens that it draws, its end token among
    them; those that are not there end at their limits. num_steps: that were made; busy_s: what they took; unseen: of a
    cost model that knows what it was measured on (`is_seen`), kinds of steps beyond that, as (rows, tokens) rounded up
    to powers of two -> how many. process: computes the steps where cores are shared, None where they are its own.
    slowness: how many times as long as by the cost model steps take now. acceptance: what comes of drafts, of which
    most_drafted are proposed at a time; None: nothing drafts. num_draws: rows that drew where something drafts, whose
    num_drafted drafts were verified and num_accepted were right. A cost model with `gap_s` says what the engine
    itself takes after a step, on one core; one with `crowd_s`, what a step takes longer beside steps of others that
    have all other cores; one with `predict_decodes` knows steps of decodes at once."""

    def __init__(
        self,
        config: EngineConfig,
        cost_model: CostModel,
        lengths: Mapping[int, int],
        loop: VirtualLoop,
        network: Carrier,
        peers: ToyNetwork,
        address: str,
        incarnation: str,
        tiers: TimedTiers | None = None,
        process: Process | None = None,
    ) -> None:
        self.busy_s = 0.0
        self.num_steps = 0
        self.unseen: Counter[tuple[int, int]] = Counter()
        self.tiers = tiers
        self.process = process
        self.slowness = 1.0
        self.trace: Trace | None = None
        self.acceptance: Acceptance | None = None
        self.num_draws = self.num_drafted = self.num_accepted = 0
        self._most_drafted = 0
        if config.speculation is not None:  # what is proposed loses its first tokens to steps that are under way
            self._most_drafted = config.speculation.num_speculative_tokens + config.steps_in_flight - 1
        self._gap_s: Callable[[Work], float] | None = getattr(cost_model, "gap_s", None)
        self._crowd_s = float(getattr(cost_model, "crowd_s", 0.0))
        self._predict = cost_model.predict
        self._predict_decodes: Callable[[int, int, int], list[float]] | None = getattr(
            cost_model, "predict_decodes", None
        )
        self._is_seen: Callable[[Work], bool] | None = getattr(cost_model, "is_seen", None)
        self._lengths = lengths
        self._loop = loop
        self._network = network
        self._address = address
        self._block_bytes = sum(group.bytes_per_block for group in config.groups)
        self.under_way: deque[UnderWay] = deque()
        self._free_s = 0.0
        self._awaited: list[asyncio.Future[None]] = []
        self._sequences: dict[int, _Drawing] = {}
        pools = [_NoPool() for _ in config.groups]
        self._peer = ToyPeer(peers, address, incarnation, pools, config.block_size, lambda holds, message: None)

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        for number in plan.released:
            self._sequences.pop(number, None)
        for row in plan.rows:
            if row.intro is not None:
                num_prompt, seed = len(row.intro.prompt_tokens), row.intro.seed
                last = num_prompt + self._lengths.get(seed, _ENDLESS) - 1
                draws, ends = RowResult(row.seq, _DRAWS), RowResult(row.seq, _ENDS)
                self._sequences[row.seq] = _Drawing(last, draws, ends, seed, num_prompt)
        work = work_of(plan.rows)
        if self.process is not None:
            return self._execute_shared(plan, work, self.process)
        took_s, gap_s = self._cost(work)
        end_s = max(self._free_s, self._loop.time() + self._waiting_s(bool(self.under_way))) + took_s
        self.note(work, end_s, took_s, end_s + gap_s)
        return self._begin(plan, end_s, took_s)

    def _waiting_s(self, is_busy: bool) -> float:
        """By how much a step is late that is handed over now, for want of one before it."""
        return 0.0 if is_busy or self.acceptance is None else self.acceptance.wait_s

    def _cost(self, work: Work) -> tuple[float, float]:
        """What a step takes, and the engine after it."""
        gap_s = self._gap_s(work) * self.slowness if self._gap_s is not None else 0.0
        return self._predict(work) * self.slowness, gap_s

    def _count(self, work: Work) -> None:
        self.num_steps += 1
        if self._is_seen is not None and not self._is_seen(work):
            self.unseen[_power(work.num_rows), _power(work.num_tokens)] += 1

    def _rows(self, plan: StepPlan) -> tuple[RowResult, ...]:
        rows, sequences = [], self._sequences
        for seq, start, tokens, from_step, _, _, is_drawing, _, drafts in plan.rows:
            if is_drawing:
                known = sequences[seq]
                at = start + (1 if from_step >= 0 else len(tokens))
                if self.acceptance is not None:
                    rows.append(self._drafted(known, at, drafts, self.acceptance))
                else:
                    rows.append(known.draws if at < known.last else known.ends)
            else:
                rows.append(RowResult(seq))
        return tuple(rows)

    def _drafted(self, known: _Drawing, at: int, drafts: tuple[int, ...], acceptance: Acceptance) -> RowResult:
        """What a row draws at position `at` and, as far as its drafts are right, behind; with what may follow."""
        num_right = min(drafts.index(_WRONG) if _WRONG in drafts else len(drafts), known.last - at)
        self.num_draws += 1
        self.num_drafted += len(drafts)
        self.num_accepted += num_right
        at += num_right
        if at >= known.last:
            return known.ends._replace(tokens=_DRAWS * num_right + _ENDS)
        row = known.draws._replace(tokens=_DRAWS * (num_right + 1))
        proposed = acceptance.proposed(known.seed, at + 1 - known.num_prompt)
        if proposed is None:
            return row
        source, chances, num_right = proposed
        chances = chances[: self._most_drafted]
        num_right = min(num_right, len(chances))
        tokens = _DRAWS * num_right + (_WRONG,) * (len(chances) - num_right)
        return row._replace(drafts=Drafts(tokens, source, chances))

    async def _execute_shared(self, plan: StepPlan, work: Work, process: Process) -> StepResult:
        self._count(work)
        rows = self._rows(plan)
        if waiting_s := self._waiting_s(bool(self._awaited)):
            await asyncio.sleep(waiting_s)
        took_s = await self._compute(process, *self._cost(work))
        self.busy_s += took_s
        if self.trace is not None:
            self.trace.step(self._address, work, self._loop.time() - took_s, self._loop.time())
        return StepResult(plan.step, rows, took_s)

    def _begin(self, plan: StepPlan, end_s: float, took_s: float) -> asyncio.Future[StepResult]:
        ended: asyncio.Future[StepResult] = self._loop.create_future()
        result = StepResult(plan.step, self._rows(plan), took_s)
        self.under_way.append(UnderWay(end_s, took_s, self._loop.call_at(end_s, self._end, ended, result)))
        return ended

    def _end(self, ended: asyncio.Future[StepResult], result: StepResult) -> None:
        self.under_way.popleft()
        if not ended.done():
            ended.set_result(result)

    # ---- `fast_forward`, of an executor with cores of its own ----

    def num_left(self, number: int, num_computed: int) -> int:
        """Tokens that a sequence draws before its last."""
        return self._sequences[number].last - 1 - num_computed

    @property
    def free_s(self) -> float:
        """When a step that is handed over now begins."""
        return self._free_s

    def foresee(self, num_rows: int, num_context: int, num_steps: int, free_s: float) -> Foreseen:
        """Of decodes that are handed over before `free_s`, when those before them are over; the first reads so many
        positions, and each further one another of each row."""
        ends: list[float] = []
        if self._predict_decodes is not None and self._gap_s is None and self.slowness == 1:
            tooks = self._predict_decodes(num_rows, num_context, num_steps)
            for took_s in tooks:
                free_s += took_s
                ends.append(free_s)
            return Foreseen(ends, tooks, ends)
        tooks, frees = [], []
        for context in range(num_context, num_context + num_steps * num_rows, num_rows):
            took_s, gap_s = self._cost(Work(num_rows, num_rows, context, context, num_rows))
            tooks.append(took_s)
            ends.append(free_s + took_s)
            free_s = ends[-1] + gap_s
            frees.append(free_s)
        return Foreseen(ends, tooks, frees)

    def note_decodes(self, num_rows: int, num_context: int, steps: Foreseen) -> None:
        """These have been handed over, one after the other."""
        ends, tooks, frees = steps
        if self._is_seen is not None or self.trace is not None:
            for at, (end_s, took_s, free_s) in enumerate(zip(ends, tooks, frees, strict=True)):
                context = num_context + at * num_rows
                self.note(Work(num_rows, num_rows, context, context, num_rows), end_s, took_s, free_s)
            return
        self.num_steps += len(ends)
        busy_s = self.busy_s
        for took_s in tooks:
            busy_s += took_s
        self.busy_s, self._free_s = busy_s, frees[-1]

    def note(self, work: Work, end_s: float, took_s: float, free_s: float) -> None:
        """A step has been handed over; the next one begins at `free_s`."""
        self._count(work)
        self._free_s = free_s
        self.busy_s += took_s
        if self.trace is not None:
            self.trace.step(self._address, work, end_s - took_s, end_s)

    def pause(self) -> None:
        """Tell of no end of those under way before `go_on`."""
        for each in self.under_way:
            each.timer.cancel()
        self.under_way.clear()

    def go_on(self, plans: Sequence[tuple[StepPlan, float, float]]) -> list[asyncio.Future[StepResult]]:
        """These (a step, when it ends, what it takes) are under way now; they have been noted."""
        return [self._begin(*each) for each in plans]

    async def _compute(self, process: Process, took_s: float, gap_s: float) -> float:
        """Seconds that a step takes on cores that others want, too."""
        asked_s = self._loop.time()
        ended = self._loop.create_future()
        process.submit(took_s, partial(_set, ended), crowded_s=self._crowd_s * self.slowness)
        if gap_s:
            process.submit(gap_s, self._end_gap, threads=1)
        self._awaited.append(ended)
        await ended
        self._awaited.remove(ended)
        began_s = max(asked_s, self._free_s)
        self._free_s = self._loop.time()
        return self._free_s - began_s

    def _end_gap(self) -> None:
        self._free_s = self._loop.time()

    def leave(self) -> None:
        """Its process is gone, in the middle of whatever it did."""
        if self.process is not None:
            self.process.kill()
            for ended in self._awaited:
                _set(ended)  # nobody hears of it
        if self.tiers is not None:
            self.tiers.leave()

    async def run(self, job: Job) -> str:
        match job:
            case PullBlocks():
                result = await self._peer.pull(job)
                num_bytes = sum(block >= 0 for block in job.blocks[0]) * self._block_bytes
                begin_s = self._loop.time()
                await self._network.carry(job.source.address, self._address, num_bytes)
                if self.trace is not None:
                    self.trace.carried(job.source.address, self._address, num_bytes, begin_s, self._loop.time())
                return result
            case SendBlocks():
                return await self._peer.send(job)
            case EndMove():
                return self._peer.end(job)
            case _ if self.tiers is not None:
                return await self.tiers.run(job)
            case _:
                raise EngineFailed("There are only steps and moves here.")


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _power(number: float) -> int:
    return 1 << max(0, int(number) - 1).bit_length()
