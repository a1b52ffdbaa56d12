"""The log of a stream: numbered from 1, the same however they came, and read by several at their own pace."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.types import Message
from test_resume_store import CALL

from tokenmill.core.errors import EngineFailed
from tokenmill.core.step import TokenLogprob
from tokenmill.core.tenant import Tenant
from tokenmill.server.deltas import Delta
from tokenmill.server.resume.layer import follow
from tokenmill.server.resume.registry import StreamRegistry
from tokenmill.server.resume.store import Unfinished
from tokenmill.server.resume.stream_log import StreamLog, Subscriber, split

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_a_delta_is_split_into_tokens_and_its_end_comes_last() -> None:
    logprobs = [TokenLogprob(token, -1.0, 1, ()) for token in (1, 2, 3)]
    delta = Delta("r", [1, 2, 3], logprobs, logprobs[:1], "stop", 9, num_cached=4)
    parts = list(split(delta))
    assert [each.tokens for each in parts] == [[1], [2], [3]]
    assert [each.logprobs for each in parts] == [[each] for each in logprobs]
    assert [len(each.prompt_logprobs) for each in parts] == [1, 0, 0]
    assert [(each.finish_reason, each.stop_token) for each in parts] == [(None, None)] * 2 + [("stop", 9)]
    last = Delta("r", finish_reason="stop")
    assert list(split(last)) == [last]


def test_the_count_of_cached_tokens_is_that_of_the_first_life() -> None:
    log = StreamLog()
    told = [part.num_cached for number in (5, 80) for part in log.one_by_one(Delta("r", [1, 2], num_cached=number))]
    assert told == [5, 5, 5, 5]


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3), (2,)])
def test_numbers_do_not_depend_on_how_events_came(cuts: tuple[int, ...]) -> None:
    events = [b"data: a\n\n", b"event: x\ndata: b\n\n", b"data: c\n\n", b"data: d\n\n"]
    log = StreamLog()
    log.take(START)
    for begin, end in zip((0, *cuts), (*cuts, len(events)), strict=True):
        log.take(body(b"".join(events[begin:end])))
    log.take(body(b"", more=False))
    assert log.events == [b"id: %d\n%s" % (number, event) for number, event in enumerate(events, 1)]
    assert log.is_whole and log.answer().body == b"".join(log.events)


def test_an_answer_that_is_no_stream_has_no_numbers() -> None:
    log = StreamLog()
    log.take({**START, "status": 400})
    log.take(body(b'{"error": 1}\n\n{}', more=False))
    assert log.events == [b'{"error": 1}\n\n{}']


async def read(log: StreamLog, after: int, receive: Any = None) -> bytes:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def stay() -> Message:
        return await asyncio.get_running_loop().create_future()

    await follow(StreamRegistry(None, 1.0, lambda owner: None), log, after, receive or stay, send, send)  # type: ignore[arg-type]
    assert [each["type"] for each in sent].count("http.response.start") <= 1
    return b"".join(each.get("body", b"") for each in sent)


def test_readers_at_any_place_get_the_rest_once() -> None:
    async def go() -> list[bytes]:
        log = StreamLog()
        subscribers = [asyncio.create_task(read(log, after)) for after in (0, 1, 2, 3, 7)]
        await asyncio.sleep(0)
        log.take(START)
        for number in range(3):
            log.take(body(b"data: %d\n\n" % number))
            await asyncio.sleep(0)
        log.take(body(b"", more=False))
        log.end()
        late = await read(log, 1)
        return [*(await asyncio.gather(*subscribers)), late]

    events = [b"id: %d\ndata: %d\n\n" % (number + 1, number) for number in range(3)]
    wanted = [b"".join(events[after:]) for after in (0, 1, 2, 3, 7, 1)]
    assert asyncio.run(go()) == wanted


def test_a_reader_that_leaves_holds_nobody_up() -> None:
    async def go() -> None:
        log = StreamLog()
        log.take(START)

        async def gone() -> Message:
            return {"type": "http.disconnect"}

        assert await read(log, 0, gone) == b""
        assert log.subscribers == []

    asyncio.run(go())


def test_a_stream_is_not_given_up_under_a_reader_that_came_back() -> None:
    """Whoever left it before, and whenever it began."""

    async def go() -> None:
        may_start = asyncio.Event()

        async def app(scope: Any, hear: Any, tell: Any) -> None:
            await may_start.wait()
            await tell(START)
            while (await hear())["type"] != "http.disconnect":
                pass

        async def unfinished() -> list[Unfinished]:
            return [Unfinished(1, CALL, [])]

        store: Any = SimpleNamespace(unfinished=unfinished, drop=lambda key: None)
        streams = StreamRegistry(store, 0.5, lambda owner: cast(Tenant, object()))
        streams.app = app
        await streams.restart(cast(Starlette, SimpleNamespace(middleware_stack=app)))
        log = await streams.find("me", "cmpl-1")
        assert isinstance(log, StreamLog)
        first, second = Subscriber(0), Subscriber(0)
        streams.attach(log, first)
        streams.detach(log, first)
        may_start.set()
        while log.start is None:
            await asyncio.sleep(0)
        streams.attach(log, second)
        await asyncio.sleep(1.0)  # more than the grace
        assert not log.abandoned.is_set()
        streams.detach(log, second)
        await asyncio.wait_for(log.abandoned.wait(), 30)
        await streams.close()

    asyncio.run(go())


def test_what_ended_before_it_began_is_an_error() -> None:
    async def go() -> None:
        log = StreamLog()
        log.end()
        with pytest.raises(EngineFailed):
            await read(log, 0)

    asyncio.run(go())


@pytest.mark.parametrize(("after", "wanted"), [(0, 2), (1, 1), (2, 0), (9, 1)])
def test_an_error_is_told_also_to_who_had_more_than_is_left(after: int, wanted: int) -> None:
    async def go() -> bytes:
        log = StreamLog()
        log.take(START)
        log.take(body(b"data: a\n\n"))
        reading = asyncio.create_task(read(log, after))
        await asyncio.sleep(0)
        log.has_failed = True
        log.take(body(b"data: error\n\n", more=False))
        await asyncio.sleep(0)
        log.end()
        return await reading

    assert asyncio.run(go()).count(b"id: ") == wanted
