"""A plan played in a simulation's time: by the code that plays it to a live server, to the microsecond, in no time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace

from tokenmill.bench.load.datasets import Lengths, conversations, random_prompts
from tokenmill.bench.load.plan import Call, Plan
from tokenmill.bench.load.player import LEAD_S, OnDone, Played, Player, Progress, Replies
from tokenmill.bench.load.retries import GAVE_UP, EarlyStop, RetryPolicy
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.load.stream import Exchange
from tokenmill.bench.load.timer import time_of
from tokenmill.sim.loop import VirtualLoop


class Plain:
    """Sends the call itself."""

    is_scripted = True

    def write(self, call: Call, replies: Replies) -> Call:
        return call

    def forget(self, label: str) -> None:
        pass


class Even:
    """A server that gives a token each `token_s`, to everybody at once. fails: calls that fail. It refuses a call
    `num_refusals` times, by the first word that it could say."""

    num_bytes = 0

    def __init__(
        self, token_s: float, fails: tuple[int, ...] = (), num_refusals: int = 0, retry_after_s: float | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._token_s = token_s
        self._fails = fails
        self._num_refusals = num_refusals
        self._retry_after_s = retry_after_s
        self._open: dict[int, OnDone] = {}
        self.sent_s: list[float] = []
        self.most = self.num_running = 0

    def send(self, exchange: Exchange, body: Call, on_done: OnDone) -> None:
        self.sent_s.append(self._loop.time())
        exchange.sent_s = exchange.sent_s or self._loop.time()
        self._open[exchange.index] = on_done
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        self._loop.call_later(self._token_s, self._token, exchange, body.output_tokens, on_done)

    def _token(self, exchange: Exchange, num_left: int, on_done: OnDone) -> None:
        if exchange.index not in self._open:
            return
        if exchange.index in self._fails:
            exchange.fail("http_500")
        elif exchange.num_refused < self._num_refusals:
            exchange.fail("http_429")
            exchange.retry_after_s = self._retry_after_s
        else:
            exchange.event_times.append(self._loop.time())
            exchange.event_tokens.append(1)
        if num_left > 1 and exchange.ok:
            self._loop.call_later(self._token_s, self._token, exchange, num_left - 1, on_done)
            return
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        exchange.end_s = self._loop.time()
        self.num_running -= 1
        self._open.pop(exchange.index)(exchange)

    def give_up(self, exchange: Exchange) -> None:
        exchange.fail(*GAVE_UP)
        self._end(exchange)

    async def close(self) -> None:
        pass


def play(
    plan: Plan, schedule: Schedule, token_s: float, fails: tuple[int, ...] = (), max_wait_s: float | None = None
) -> tuple[Played, list[Progress], int]:
    loop = VirtualLoop(limit_s=1e9)
    seen: list[Progress] = []

    async def main() -> tuple[Played, int]:
        client = Even(token_s, fails)
        give_up = EarlyStop(max_wait_s=max_wait_s)
        player = Player(schedule.apply(plan), schedule, Plain(), client, give_up, time=time_of(loop))
        return await player.play(seen.append), client.most

    played, most = loop.run(main())
    return played, seen, most


def test_an_open_loop_is_due_and_answered_to_the_microsecond() -> None:
    """Sends are never late in virtual time, and every latency is what the server took."""
    plan = random_prompts(200, 1, Lengths(8, 4))
    schedule = Schedule(request_rate=2.0)
    played, seen, _ = play(plan, schedule, 0.25)
    times_s = schedule.arrival_times(200, 1)
    assert [round(e.due_s - LEAD_S, 9) for e in played.exchanges] == [round(at, 9) for at in times_s]
    for exchange in played.exchanges:
        assert exchange.sent_s is not None and exchange.end_s is not None
        assert abs(exchange.sent_s - exchange.due_s) < 1e-6
        assert abs(exchange.end_s - exchange.due_s - 1.0) < 1e-6
    assert played.cpu_s == 0.0 and not played.loop_lags_s
    assert seen[-1].num_ended > 190 and seen == sorted(seen, key=lambda each: each.elapsed_s)


def test_a_closed_loop_of_a_week_keeps_its_slots() -> None:
    """Think times pass on the virtual clock, and never more than the asked-for sessions run."""
    plan = conversations(400, 2, Lengths(8, 3), 4, think_time_s=3600.0)
    played, _, most = play(plan, Schedule(concurrency=3), 1.0)
    assert len(played.exchanges) == 400 and most <= 3
    assert played.end_s - played.start_s > 7 * 24 * 3600.0 / 3


def test_what_follows_a_failure_is_abandoned_and_a_play_can_be_given_up() -> None:
    """The rules of live plays hold in virtual time, those by the clock too."""
    plan = conversations(8, 3, Lengths(8, 3), 4, think_time_s=1.0)
    played, _, _ = play(plan, Schedule(), 1.0, fails=(1,))
    assert [e.error for e in played.exchanges] == [None, "http_500", "abandoned", "abandoned", *[None] * 4]
    slow = random_prompts(50, 4, Lengths(8, 2))
    played, _, _ = play(slow, Schedule(request_rate=1.0), 30.0, max_wait_s=5.0)
    assert played.given_up is not None and played.end_s - played.start_s < 10.0


def test_the_collector_is_left_alone() -> None:
    """A simulation's pauses show in no figure, and a long one needs the collector."""
    loop = VirtualLoop()
    states: list[bool] = []

    async def main() -> None:
        schedule = Schedule(request_rate=1.0)
        plan = schedule.apply(random_prompts(3, 1, Lengths(8, 2)))
        player = Player(plan, schedule, Plain(), Even(1.0), time=replace(time_of(loop), tick_s=0.5))
        await player.play(lambda progress: states.append(gc.isenabled()))

    loop.run(main())
    assert states and all(states)


def play_with(
    client_of: Callable[[], Even], retry_policy: RetryPolicy, schedule: Schedule, num: int = 6
) -> list[Exchange]:
    loop = VirtualLoop(limit_s=1e9)

    async def main() -> Played:
        plan = schedule.apply(random_prompts(num, 5, Lengths(8, 2)))
        player = Player(plan, schedule, Plain(), client_of(), time=time_of(loop), retry_policy=retry_policy)
        return await player.play()

    return loop.run(main()).exchanges


def test_what_was_refused_is_asked_again() -> None:
    """After the server's own pause, or after half a second that doubles; no more often than the client will."""
    told = play_with(lambda: Even(1.0, (), 2, 7.0), RetryPolicy(3), Schedule(request_rate=1.0))
    assert [(e.num_refused, e.error) for e in told] == [(2, None)] * 6
    assert all(abs((e.end_s or 0.0) - e.due_s - (2 * (1.0 + 7.0) + 2.0)) < 1e-6 for e in told)
    alone = play_with(lambda: Even(1.0, (), 2), RetryPolicy(3), Schedule(request_rate=1.0))
    pauses = [(e.end_s or 0.0) - e.due_s - 4.0 for e in alone]
    assert all(0.75 * 1.5 < pause <= 1.5 for pause in pauses) and len(set(pauses)) == 6
    assert [e.end_s for e in play_with(lambda: Even(1.0, (), 2), RetryPolicy(3), Schedule(request_rate=1.0))] == [
        e.end_s for e in alone
    ]
    refused = play_with(lambda: Even(1.0, (), 2), RetryPolicy(1), Schedule(request_rate=1.0))
    assert [(e.num_refused, e.error) for e in refused] == [(1, "http_429")] * 6


def test_a_client_leaves_when_nothing_comes() -> None:
    """From the server, from its pause between two tries, and from the queue before a cap; never once it has a token."""
    busy = play_with(lambda: Even(3.0), RetryPolicy(0, 2.0), Schedule(request_rate=1.0))
    assert [e.error for e in busy] == ["gave_up"] * 6
    assert all(abs((e.end_s or 0.0) - e.due_s - 2.0) < 1e-6 for e in busy)
    paused = play_with(lambda: Even(0.1, (), 9, 5.0), RetryPolicy(9, 2.0), Schedule(request_rate=1.0))
    assert [e.error for e in paused] == ["gave_up"] * 6
    slow = play_with(lambda: Even(1.5), RetryPolicy(0, 2.0), Schedule(request_rate=1.0))
    assert [e.error for e in slow] == [None] * 6
    capped = play_with(lambda: Even(1.5), RetryPolicy(0, 2.0), Schedule(request_rate=10.0, max_concurrency=1))
    assert [e.error for e in capped] == [None, *["gave_up"] * 5]
    assert [e.sent_s is None for e in capped] == [False, *[True] * 5]


def test_the_last_to_leave_ends_the_play() -> None:
    """A closed loop gives the slot of a client that left to the next."""
    left = play_with(lambda: Even(3.0), RetryPolicy(0, 2.0), Schedule(concurrency=2), 10)
    assert [e.error for e in left] == ["gave_up"] * 10
    assert abs(max(e.end_s or 0.0 for e in left) - LEAD_S - 10.0) < 1e-6
