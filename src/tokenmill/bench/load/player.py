"""Plays a plan: sends each call when it is due and keeps what came of it.

One heap of due moments drives everything: roots at the schedule's times, later turns when what they wait for has ended
and their think time has passed, and in a closed loop the next session when a slot is free. No task per request, so a
send is late only as long as the loop is busy. When the cap on requests in flight is reached, calls wait in the order
they were due, and their due moment stays what it was. A call whose predecessor failed is not sent: it fails as
"abandoned". Clients with a retry policy (`retries`) ask again what was refused, and leave where nothing comes. A closed
loop with a time to last begins the plan again when it has run out, with other text where calls share none. The garbage
collector is off meanwhile, because its pauses would be taken for the server's.

Time, bodies and the client that sends them are given: a simulated service is played to by the same code as a live one.
"""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, Protocol, TypeVar

from .plan import Call, Plan, Reply
from .retries import GAVE_UP, EarlyStop, RetryPolicy
from .schedule import Schedule
from .stream import Exchange
from .timer import REAL, Time

LEAD_S = 0.05

OnDone = Callable[[Exchange], None]
Take = Callable[[Call, Exchange, float], None]
"""Is given each call that has ended, with when the play began; its exchange is then let go."""
Replies = Callable[[int], str | None]
Body = TypeVar("Body")
Body_co = TypeVar("Body_co", covariant=True)
Body_contra = TypeVar("Body_contra", contravariant=True)


class Writer(Protocol[Body_co]):
    """Makes what is sent of a call (`body.BodyWriter`: JSON). is_scripted: it never asks what was answered."""

    @property
    def is_scripted(self) -> bool: ...

    def write(self, call: Call, replies: Replies) -> Body_co: ...

    def forget(self, label: str) -> None: ...


class Sender(Protocol[Body_contra]):
    """Sends it (`http.Client`). on_done is called exactly once, later."""

    num_bytes: int

    def send(self, exchange: Exchange, body: Body_contra, on_done: OnDone) -> None: ...

    def give_up(self, exchange: Exchange) -> None: ...

    async def close(self) -> None: ...


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
    """exchanges: those that became due, by index. Times are those of the play's clock; cpu_s is this process's.
    given_up: why the run was ended before its time."""

    start_s: float
    end_s: float
    exchanges: list[Exchange]
    cpu_s: float
    num_bytes: int
    loop_lags_s: array[float]
    was_interrupted: bool
    given_up: str | None = None


class Player(Generic[Body]):
    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        writer: Writer[Body],
        client: Sender[Body],
        give_up: EarlyStop | None = None,
        keep_texts: bool = False,
        time: Time = REAL,
        retry_policy: RetryPolicy | None = None,
        take: Take | None = None,
    ) -> None:
        self._base = plan
        self._schedule = schedule
        self._writer = writer
        self._client = client
        self._give_up = give_up or EarlyStop()
        self._keep_texts = keep_texts
        self._time = time
        self._manners = retry_policy or RetryPolicy()
        self._take = take
        self._gone = Exchange(-1, 0.0)
        self._gone.end_s = 0.0
        loop = asyncio.get_running_loop()
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
        self._due_timer = time.make_timer(loop, self._on_due)
        self._tick_timer = time.make_timer(loop, self._on_tick)
        self._leaving: list[tuple[float, int]] = []
        self._leave_timer = time.make_timer(loop, self._on_leave)
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
        if self._time.is_real:
            gc.collect()
            gc.freeze()
            gc.disable()
        try:
            return await self._play()
        finally:
            self._due_timer.close()
            self._tick_timer.close()
            self._leave_timer.close()
            if self._time.is_real:
                gc.enable()
                gc.unfreeze()

    def stop(self) -> None:
        """Send nothing more and do not wait for what is in flight."""
        self._was_stopped = True
        self._done.set()

    async def _play(self) -> Played:
        self._start_s = self._time.now() + LEAD_S
        if self._schedule.stop_after_s is not None:
            self._stop_s = self._start_s + self._schedule.stop_after_s
        cpu_s, num_bytes = self._time.cpu_s(), self._client.num_bytes
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
        end_s = self._time.now()
        if self._was_stopped:
            await self._client.close()
        exchanges = [each for each in self._exchanges if each is not None and each is not self._gone]
        return Played(
            self._start_s,
            end_s,
            exchanges,
            self._time.cpu_s() - cpu_s,
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
        now_s = self._time.now()
        while self._heap and self._heap[0][0] <= now_s:
            due_s, index = heappop(self._heap)
            self._ready.append((due_s, index))
            if self._exchanges[index] is None:
                self._num_due += 1
                if self._manners.patience_s is not None:
                    self._expect_by(due_s + self._manners.patience_s, index)
        self._send_ready()
        self._arm()

    def _send_ready(self) -> None:
        cap = self._schedule.max_concurrency
        while self._ready and (cap is None or len(self._in_flight) < cap) and not self._was_stopped:
            due_s, index = self._ready.popleft()
            exchange = self._exchanges[index]
            if exchange is None:
                exchange = self._exchanges[index] = Exchange(index, due_s, keep_text=self._keeps_text(index))
            elif exchange.end_s is not None:
                continue  # its client has left
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
        if not self._was_stopped and (pause_s := self._manners.pause_s(exchange, self._base.seed)) is not None:
            again_s = exchange.end_s + pause_s
            if again_s < self._stop_s:
                exchange.again()
                self._push(again_s, index)
                self._send_ready()
                self._arm()
                return
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        assert exchange.end_s is not None
        self._num_ended += 1
        self._num_failed += not exchange.ok
        self._num_tokens += exchange.output_tokens or len(exchange.event_times)
        if self._take is not None:
            self._take(self._calls[exchange.index], exchange, self._start_s)
            self._exchanges[exchange.index] = self._gone
        if self._was_stopped:
            return
        self._settle(exchange.index, exchange.end_s, exchange.ok)
        self._send_ready()
        self._arm()

    def _expect_by(self, by_s: float, index: int) -> None:
        heappush(self._leaving, (by_s, index))
        if self._leaving[0][1] == index:
            self._leave_timer.set(by_s)

    def _on_leave(self) -> None:
        """Clients whose patience is at its end leave: from the server, from the queue, or from their pause."""
        now_s = self._time.now()
        while self._leaving and self._leaving[0][0] <= now_s:
            by_s, index = heappop(self._leaving)
            exchange = self._exchanges[index]
            if index in self._in_flight and exchange is not None:
                if not exchange.event_times:
                    self._client.give_up(exchange)
            elif exchange is None or exchange.end_s is None:
                assert self._manners.patience_s is not None
                if exchange is None:
                    exchange = self._exchanges[index] = Exchange(index, by_s - self._manners.patience_s)
                exchange.fail(*GAVE_UP)
                exchange.end_s = now_s
                self._end(exchange)
        if self._leaving:
            self._leave_timer.set(self._leaving[0][0])

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
        if self._take is not None:
            self._take(self._calls[index], exchange, self._start_s)
            self._exchanges[index] = self._gone
        self._settle(index, at_s, ok=False)

    def _on_tick(self) -> None:
        now_s = self._time.now()
        if self._time.is_real:
            self._lags.append(now_s - self._tick_due_s)
        self._tick_due_s = now_s + self._time.tick_s
        self._tick_timer.set(self._tick_due_s)
        self._ticks += 1
        if self._ticks % self._time.observe_ticks == 1 % self._time.observe_ticks:
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
