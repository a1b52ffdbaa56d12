"""Queues of work: one piece after another in the order of submission, each end told on the loop that submitted it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.work_queue import ThreadQueue

native = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture(params=["thread", pytest.param("native", marks=native)])
def open_queue(request):
    opened = []
    ops = NativeOps(1) if request.param == "native" else None

    def make(when_idle=lambda: False):
        opened.append(ThreadQueue(when_idle) if ops is None else ops.open_queue(when_idle))
        return opened[-1]

    yield make
    for queue in opened:
        queue.close()
    if ops is not None:
        ops.close()


async def _ends(queue, works) -> list:
    """The tickets of all, in the order in which their ends were told."""
    told, last = [], asyncio.Event()

    def note(ticket):
        told.append(ticket)
        if len(told) == len(works):
            last.set()

    for work in works:
        queue.submit(work, note)
    await asyncio.wait_for(last.wait(), 20)
    return told


def test_work_is_done_and_told_in_order_on_the_loop(open_queue):
    """One that fails raises where its outcome is asked for, and stops none."""
    queue, done, threads = open_queue(), [], set()

    def work(number):
        threads.add(threading.current_thread())
        done.append(number)
        return 1 // (number - 3)

    works = [lambda number=number: work(number) for number in range(8)]
    told = asyncio.run(_ends(queue, works))
    assert [ticket.work for ticket in told] == works and done == list(range(8))
    assert len(threads) == 1 and threading.main_thread() not in threads
    assert [ticket.outcome() for ticket in told[4:]] == [1, 0, 0, 0]
    with pytest.raises(ZeroDivisionError):
        told[3].outcome()
    assert all(0 < ticket.began_s <= ticket.ended_s for ticket in told)


def test_waiting_for_work_needs_no_loop_and_keeps_the_order(open_queue):
    """Far more pieces than ends fit into a pipe, were they written there."""
    queue, done = open_queue(), []
    for number in range(500):
        assert queue.run(lambda number=number: done.append(number)).outcome() is None
    asyncio.run(_ends(queue, [lambda: done.append(500)]))
    assert done == list(range(501))


def test_an_end_is_told_while_nothing_follows_and_while_much_does(open_queue):
    """The loop hears of a piece although the next one never ends by itself."""
    queue, gate = open_queue(), threading.Event()

    async def run():
        (first,) = await _ends(queue, [lambda: 1])
        heard = asyncio.Event()
        queue.submit(lambda: 2, lambda ticket: heard.set())
        queue.submit(gate.wait, lambda ticket: None)
        await asyncio.wait_for(heard.wait(), 20)
        return first.outcome()

    try:
        assert asyncio.run(run()) == 1
    finally:
        gate.set()


def test_closing_drops_what_has_not_begun_and_tells_of_it(open_queue):
    queue, began, gate = open_queue(), threading.Event(), threading.Event()

    def hold():
        began.set()
        gate.wait()
        return "held"

    async def run():
        told = []
        queue.submit(hold, told.append)
        queue.submit(lambda: "too late", told.append)
        began.wait(20)
        threading.Timer(0.05, gate.set).start()
        queue.close()
        queue.close()
        await asyncio.sleep(0)
        return told

    held, dropped = asyncio.run(run())
    assert held.outcome() == "held"
    with pytest.raises(AssertionError, match="closed before it began"):
        dropped.outcome()
    with pytest.raises(AssertionError, match="closed"):
        queue.run(int)


def test_idle_work_is_done_piece_by_piece_and_again_after_other_work(open_queue):
    left, reached = [0], threading.Event()

    def when_idle():
        left[0] -= 1
        if left[0] <= 0:
            reached.set()
        return left[0] > 0

    queue = open_queue(when_idle)
    for pieces in (3, 1):
        left[0] = pieces
        reached.clear()
        queue.run(int)
        assert reached.wait(20) and left[0] == 0
