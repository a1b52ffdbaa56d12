"""Plays a plan: sends each call when it is due and keeps what came of it.

One heap of due moments drives everything: roots at the schedule's times, later turns when what they wait for has ended
and their think time has passed, and in a closed loop the next session when a slot is free. No task per request, so a
send is late only as long as the loop is busy. When the cap on requests in flight is reached, calls wait in the order
they were due, and their due moment stays what it was. A call whose predecessor failed is not sent: it fails as
"abandoned". A closed loop with a time to last begins the plan again when it has run out, with other text where calls
share none. The garbage collector is off meanwhile, because its pauses would be taken for the server's.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from .body import BodyWriter
from .giveup import GiveUp
from .http import Client
from .plan import Call, Plan, Reply
from .schedule import Schedule
from .stream import Exchange
from .timer import Timer

LEAD_S = 0.05
TICK_S = 0.01
OBSERVE_TICKS = 50


@dataclass(frozen=True, slots=True)
class Progress:
    elapsed_s: float
    num_due: int
    num_sent: int
    num_ended: int
    num_failed: int
    num_in_flight: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Played:
    """exchanges: those that became due, by index. Times are time.perf_counter's; cpu_s is this process's.
    given_up: why the run was ended before its time."""

    start_s: float
    end_s: float
    exchanges: list[Exchange]
    cpu_s: float
    num_bytes: int
    loop_lags_s: array[float]
    was_interrupted: bool
    given_up: str | None = None


class Player:
    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        writer: BodyWriter,
        client: Client,
        give_up: GiveUp | None = None,
        keep_texts: bool = False,
    ) -> None:
        self._base = plan
        self._schedule = schedule
        self._writer = writer
        self._client = client
        self._give_up = give_up or GiveUp()
        self._keep_texts = keep_texts
        self._loop = asyncio.get_running_loop()
        self._calls: list[Call] = []
        self._quoted: set[int] = set()
        self._dependents: dict[int, list[int]] = {}
        self._root_of: list[int] = []
        self._tree_left: dict[int, int] = {}
        self._waits: list[int] = []
        self._exchanges: list[Exchange | None] = []
        self._next_roots: deque[int] = deque()
        self._num_rounds = 0
        self._append(plan.calls)
        self._heap: list[tuple[float, int]] = []
        self._ready: deque[tuple[float, int]] = deque()
        self._due_timer = Timer(self._loop, self._on_due)
        self._tick_timer = Timer(self._loop, self._on_tick)
        self._tick_due_s = 0.0
        self._ticks = 0
        self._lags = array("d")
        self._observe: Callable[[Progress], None] | None = None
        self._in_flight: set[int] = set()
        self._num_due = self._num_sent = self._num_ended = self._num_failed = self._num_tokens = 0
        self._start_s = 0.0
        self._stop_s = float("inf")
        self._was_stopped = False
        self._given_up: str | None = None
        self._done = asyncio.Event()

    @property
    def plan(self) -> Plan:
        """All calls there have been, of every round."""
        return replace(self._base, calls=tuple(self._calls))

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    def _append(self, calls: Sequence[Call]) -> None:
        self._num_rounds += 1
        self._calls += calls
        self._exchanges += [None] * len(calls)
        for call in calls:
            root = self._root_of[call.after[0]] if call.after else call.index
            self._root_of.append(root)
            self._tree_left[root] = self._tree_left.get(root, 0) + 1
            self._waits.append(len(call.after))
            if not call.after:
                self._next_roots.append(call.index)
            for other in call.after:
                self._dependents.setdefault(other, []).append(call.index)
            self._quoted |= {part.index for part in call.parts if isinstance(part, Reply)}

    def _take_root(self) -> int | None:
        """The next session of a closed loop; None where there is no more."""
        if not self._next_roots and self._stop_s < float("inf"):
            if self._num_rounds > 1:
                self._writer.forget(f"round-{self._num_rounds - 1}")
            again = self._base.with_fresh_text(f"round-{self._num_rounds}")
            self._append(again.shifted(len(self._calls)))
        return self._next_roots.popleft() if self._next_roots else None

    async def play(self, observe: Callable[[Progress], None] | None = None) -> Played:
        """Play the plan to its end. `observe` is called about twice a second."""
        self._observe = observe
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            return await self._play()
        finally:
            self._due_timer.close()
            self._tick_timer.close()
            gc.enable()
            gc.unfreeze()

    def stop(self) -> None:
        """Send nothing more and do not wait for what is in flight."""
        self._was_stopped = True
        self._done.set()

    async def _play(self) -> Played:
        self._start_s = time.perf_counter() + LEAD_S
        if self._schedule.stop_after_s is not None:
            self._stop_s = self._start_s + self._schedule.stop_after_s
        cpu_s, num_bytes = time.process_time(), self._client.num_bytes
        if self._schedule.concurrency is not None:
            for _ in range(self._schedule.concurrency):
                if (root := self._take_root()) is not None:
                    self._push(self._start_s, root)
        else:
            for index in self._next_roots:
                self._push(self._start_s + self._calls[index].delay_s, index)
            self._next_roots.clear()
        self._tick_due_s = self._start_s
        self._tick_timer.set(self._tick_due_s)
        self._arm()
        await self._done.wait()
        end_s = time.perf_counter()
        if self._was_stopped:
            await self._client.close()
        exchanges = [exchange for exchange in self._exchanges if exchange is not None]
        return Played(
            self._start_s,
            end_s,
            exchanges,
            time.process_time() - cpu_s,
            self._client.num_bytes - num_bytes,
            self._lags,
            self._was_stopped and self._given_up is None,
            self._given_up,
        )

    def _push(self, due_s: float, index: int) -> None:
        if due_s < self._stop_s:
            heappush(self._heap, (due_s, index))

    def _arm(self) -> None:
        """Set the timer to the next due moment; without one, and with nothing under way, the play is over."""
        if self._heap:
            self._due_timer.set(self._heap[0][0])
        elif not self._ready and not self._in_flight:
            self._done.set()

    def _on_due(self) -> None:
        now_s = time.perf_counter()
        while self._heap and self._heap[0][0] <= now_s:
            self._num_due += 1
            self._ready.append(heappop(self._heap))
        self._send_ready()
        self._arm()

    def _send_ready(self) -> None:
        cap = self._schedule.max_concurrency
        while self._ready and (cap is None or len(self._in_flight) < cap) and not self._was_stopped:
            due_s, index = self._ready.popleft()
            exchange = Exchange(index, due_s, keep_text=self._keeps_text(index))
            self._exchanges[index] = exchange
            self._in_flight.add(index)
            self._num_sent += 1
            self._client.send(exchange, self._writer.write(self._calls[index], self._reply), self._on_done)

    def _keeps_text(self, index: int) -> bool:
        return self._keep_texts or (index in self._quoted and not self._writer.is_scripted)

    def _reply(self, index: int) -> str | None:
        exchange = self._exchanges[index]
        return exchange.text if exchange is not None else None

    def _on_done(self, exchange: Exchange) -> None:
        assert exchange.end_s is not None
        index = exchange.index
        self._in_flight.discard(index)
        self._num_ended += 1
        self._num_failed += not exchange.ok
        self._num_tokens += exchange.output_tokens or len(exchange.event_times)
        if self._was_stopped:
            return
        self._settle(index, exchange.end_s, exchange.ok)
        self._send_ready()
        self._arm()

    def _settle(self, index: int, end_s: float, ok: bool) -> None:
        """Call `index` has ended: its dependents become due, or are abandoned; a finished tree frees its slot."""
        for dependent in self._dependents.get(index, ()):
            if self._exchanges[dependent] is not None:
                continue
            self._waits[dependent] -= 1
            if not ok:
                self._abandon(dependent, index, end_s)
            elif self._waits[dependent] == 0:
                self._push(end_s + self._calls[dependent].delay_s, dependent)
        root = self._root_of[index]
        self._tree_left[root] -= 1
        if self._tree_left[root] == 0 and self._schedule.is_closed and end_s < self._stop_s:
            following = self._take_root()
            if following is not None:
                self._push(end_s, following)

    def _abandon(self, index: int, because: int, at_s: float) -> None:
        exchange = Exchange(index, at_s)
        exchange.fail("abandoned", f"request {because}, which it follows, failed")
        exchange.end_s = at_s
        self._exchanges[index] = exchange
        self._num_due += 1
        self._num_ended += 1
        self._num_failed += 1
        self._settle(index, at_s, ok=False)

    def _on_tick(self) -> None:
        now_s = time.perf_counter()
        self._lags.append(now_s - self._tick_due_s)
        self._tick_due_s = now_s + TICK_S
        self._tick_timer.set(self._tick_due_s)
        self._ticks += 1
        if self._ticks % OBSERVE_TICKS == 1:
            if self._observe is not None:
                self._observe(self.progress(now_s))
            if not self._was_stopped:
                self._given_up = self._give_up.reason(self._num_ended, self._num_failed, self._longest_wait_s(now_s))
                if self._given_up is not None:
                    self.stop()

    def _longest_wait_s(self, now_s: float) -> float:
        """Of requests that are due and have no token yet; 0 in a closed loop, where no queue can grow."""
        if self._schedule.is_closed:
            return 0.0
        sent = (e.due_s for i in self._in_flight if (e := self._exchanges[i]) is not None and not e.event_times)
        return now_s - min((*sent, *(due_s for due_s, _ in islice(self._ready, 1))), default=now_s)

    def progress(self, now_s: float) -> Progress:
        streaming = sum(len(e.event_times) for i in self._in_flight if (e := self._exchanges[i]) is not None)
        return Progress(
            max(0.0, now_s - self._start_s),
            self._num_due,
            self._num_sent,
            self._num_ended,
            self._num_failed,
            len(self._in_flight),
            self._num_tokens + streaming,
        )
