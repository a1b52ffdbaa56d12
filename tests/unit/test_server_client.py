"""The engine client: deltas reach their streams, merge while nobody reads, and nothing hangs when the engine goes."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from dataclasses import replace
from typing import Any

import pytest

from scripted import READY, attached
from tokenmill.cluster.events import Cause, Left
from tokenmill.cluster.slots import Room
from tokenmill.control.observe.request_log import REQUEST_LOGGER, RequestLog
from tokenmill.core.errors import Unavailable
from tokenmill.core.events import (
    Abort,
    AdapterLoaded,
    Drain,
    EngineStats,
    ForgetTenants,
    Leaving,
    LoadAdapter,
    Output,
    StepOutputs,
    Submit,
    Timing,
    ToEngine,
    UnloadAdapter,
)
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.build import LocalEngineEnd, local_link
from tokenmill.server.adapters import ServedAdapter
from tokenmill.server.client import EngineClient


def request(name: str, arrival_s: float = 0.0, num_tokens: int = 3) -> Request:
    return Request(name, tuple(range(num_tokens)), SamplingParams(), 16, seed=1, arrival_s=arrival_s)


async def step(engine: LocalEngineEnd, number: int, *outputs: Output) -> None:
    await engine.send(StepOutputs(outputs, EngineStats(num_steps=number), float(number)))
    for _ in range(3):
        await asyncio.sleep(0)


@attached
async def test_one_message_carries_all_requests_of_a_turn(client: EngineClient, engine: LocalEngineEnd) -> None:
    client.open([request("a"), request("b")])
    client.open([request("c")])
    message = await engine.receive()
    assert isinstance(message, Submit) and [each.id for each in message.requests] == ["a", "b", "c"]
    assert (client.num_open, client.request_queue.num_tokens) == (3, 9)


@attached
async def test_deltas_merge_while_nobody_reads(client: EngineClient, engine: LocalEngineEnd) -> None:
    stream = client.open([request("a"), request("b")])
    for number in range(1, 101):
        await step(engine, number, Output("a", (number,)), Output("b", (number, number)))
    await step(engine, 101, Output("a", finish_reason="length", num_output=100))
    deltas = {delta.request_id: delta for delta in await stream.take()}
    assert deltas["a"].tokens == list(range(1, 101)) and deltas["a"].finish_reason == "length"
    assert len(deltas["b"].tokens) == 200 and deltas["b"].finish_reason is None
    assert client.num_open == 1


@attached
async def test_a_finished_reader_aborts_and_hears_no_more(client: EngineClient, engine: LocalEngineEnd) -> None:
    stream = client.open([request("a"), request("b")])
    await engine.receive()
    stream.finish("a", "stop")
    assert await engine.receive() == Abort(("a",))
    assert client.num_open == 2, "open until the engine confirms"
    await step(engine, 1, Output("a", (7,)), Output("b", (8,)))
    assert [delta.request_id for delta in await stream.take()] == ["b"]
    await step(engine, 2, Output("a", finish_reason="abort"))
    assert client.num_open == 1
    assert client.observers.metrics is not None
    labels = {"model_name": "m", "engine": "0", "finished_reason": "stop"}
    assert client.observers.metrics.registry.get_sample_value("vllm:request_success_total", labels) == 1


@attached
async def test_closing_a_stream_aborts_what_is_left(client: EngineClient, engine: LocalEngineEnd) -> None:
    stream = client.open([request("a"), request("b"), request("c")])
    await engine.receive()
    await step(engine, 1, Output("b", (1,), finish_reason="stop"))
    stream.close()
    stream.close()
    assert await engine.receive() == Abort(("a", "c"))


@attached
async def test_choices_wait_for_places_and_an_adapter_is_unloaded_behind_them(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    client.request_queue.share(Room(1, 10))
    requests = [replace(request(name), adapter="d") for name in "abcd"]
    stream = client.open(requests)
    client._tell(UnloadAdapter("d"), 0)
    message = await engine.receive()
    assert isinstance(message, Submit) and [each.id for each in message.requests] == ["a", "b"]
    assert (client.num_open, client.request_queue.num_waiting) == (4, 2)
    await step(engine, 1, Output("a", (1,), finish_reason="length", num_output=1))
    assert [each.id for each in (await engine.receive()).requests] == ["c"]  # type: ignore[union-attr]
    stream.finish("d", "abort")
    assert (client.num_open, client.request_queue.num_waiting) == (2, 0), "the engine never heard of it"
    assert await engine.receive() == UnloadAdapter("d")
    stream.close()
    assert await engine.receive() == Abort(("b", "c"))


@attached
async def test_an_engine_that_drafts_is_told_of_deleted_tenants(client: EngineClient, engine: LocalEngineEnd) -> None:
    """Of those that were when it came, and then of others, once; one that does not draft of none."""

    async def told(end: LocalEngineEnd, last: type) -> list[ToEngine]:
        """All that it is told up to a message of that type."""
        messages = [await end.receive()]
        while not isinstance(messages[-1], last):
            messages.append(await end.receive())
        return messages

    deleted = frozenset(("ann", "bob"))
    client.deleted_tenants = lambda: deleted
    other, front = local_link()
    client.attach(front)
    await other.send(replace(READY, num_speculative_tokens=4))
    assert (await told(other, ForgetTenants))[-1] == ForgetTenants(("ann", "bob"))
    deleted |= {"eve"}
    assert (await told(other, ForgetTenants))[-1] == ForgetTenants(("eve",))
    client.open([request(name) for name in "abcd"])
    assert not any(isinstance(message, ForgetTenants) for message in await told(engine, Submit))


@attached
async def test_an_engine_leaves_while_an_adapter_stays_for_requests_that_wait(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    client.request_queue.share(Room(1, 10))
    client.open([replace(request(name), adapter="d") for name in "abcd"])
    client._tell(UnloadAdapter("d"), 0)
    assert isinstance(await engine.receive(), Submit)
    await engine.send(Leaving())
    async with asyncio.timeout(30):
        assert await engine.receive() == Drain()


@attached
async def test_an_engine_that_leaves_before_it_has_its_adapters_gets_nothing(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    loading = asyncio.create_task(client.adapters.load(ServedAdapter("fr", "/fr")))
    message = await engine.receive()
    assert isinstance(message, LoadAdapter)
    await engine.send(AdapterLoaded(message.number, "d"))
    await loading
    other, front = local_link()
    attached_other = client.attach(front)
    await other.send(READY)
    message = await other.receive()
    assert isinstance(message, LoadAdapter)
    await other.send(Leaving())
    assert await other.receive() == Drain()
    await other.send(AdapterLoaded(message.number, "d"))
    for _ in range(20):
        await asyncio.sleep(0)
    client.open([request(name) for name in "ab"])
    message = await engine.receive()
    assert isinstance(message, Submit) and [each.id for each in message.requests] == ["a", "b"]
    assert attached_other.num_open == 0


@attached
async def test_an_adapter_with_another_name_is_unloaded_at_once(client: EngineClient, engine: LocalEngineEnd) -> None:
    """Choices that name it may wait at all times, and what is to be loaded waits behind it."""
    loading = asyncio.create_task(client.adapters.load(ServedAdapter("other", "folder")))
    message = await engine.receive()
    assert isinstance(message, LoadAdapter)
    await engine.send(AdapterLoaded(message.number, "d"))
    await loading
    client.request_queue.share(Room(1, 10))
    client.open([replace(request(name), adapter="d") for name in "abcd"])
    client._tell(UnloadAdapter("d"), 0)
    await engine.receive()
    assert client.request_queue.num_waiting == 2
    assert await engine.receive() == UnloadAdapter("d")


def test_choices_that_end_before_the_engine_has_them_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)

    @attached
    async def main(client: EngineClient, engine: LocalEngineEnd) -> None:
        client.observers.request_log = RequestLog("m", str)
        client.request_queue.share(Room(1, 10))
        client.open([request(name) for name in "abcd"]).finish("d", "abort")

    main()
    ends = [record.message for record in caplog.records if record.message.startswith("ended d")]
    assert ends == ["ended d: abort, before the engine had it"]


@attached
async def test_a_stream_goes_on_where_it_was_when_a_new_engine_has_come(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    stream = client.open([request("a")])
    await engine.receive()
    timing = Timing(0.0, 1.0, 2.0, -1.0)
    await step(engine, 1, Output("a", (5, 6), num_output=2, num_cached=2, timing=timing))
    engine.close()
    await asyncio.sleep(0.01)
    assert client.ready is None and client.num_open == 1
    with pytest.raises(Unavailable, match="another is awaited"):
        client.require_ready()
    waiting = asyncio.create_task(client.wait_ready(5.0))
    engine, front = local_link()
    link = client.attach(front)
    assert link.num_open == 0, "an engine that loads has no work"
    await engine.send(READY)
    assert await waiting == READY
    message = await engine.receive()
    assert isinstance(message, Submit) and message.requests == (
        replace(request("a"), output_tokens=(5, 6), is_resumed=True, attempt=1),
    )
    timing = replace(timing, scheduled_s=8, finished_s=9)
    end = Output("a", (7,), finish_reason="length", num_output=3, timing=timing, attempt=1)
    await step(engine, 1, end)
    (delta,) = await stream.take()
    assert (delta.tokens, delta.num_cached, delta.error) == ([5, 6, 7], 2, "")
    assert client.num_open == client.request_queue.num_tokens == 0
    assert client.stats.num_steps == 2


async def answer(end: LocalEngineEnd, digest: str) -> None:
    """To the front end's next message, which is to load an adapter."""
    message = await end.receive()
    assert isinstance(message, LoadAdapter)
    await end.send(AdapterLoaded(message.number, digest))


@attached
async def test_an_adapter_that_is_unloaded_while_an_engine_is_being_started_is_given_to_it_and_taken_back(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    """Whether the engine has been given it or not: what is resumed still needs it."""
    for name, digest in (("one", "d"), ("two", "e")):
        loading = asyncio.create_task(client.adapters.load(ServedAdapter(name, "folder")))
        await answer(engine, digest)
        await loading
    client.open([replace(request("a"), adapter="d"), replace(request("b"), adapter="e")])
    engine.close()
    await asyncio.sleep(0.01)
    engine, front = local_link()
    client.attach(front)
    client.adapters.unload("two")
    await engine.send(READY)
    await answer(engine, "d")
    client.adapters.unload("one")
    async with asyncio.timeout(30):
        await answer(engine, "e")
        message = await engine.receive()
        assert isinstance(message, Submit) and [each.id for each in message.requests] == ["a", "b"]
        assert [await engine.receive(), await engine.receive()] == [UnloadAdapter("d"), UnloadAdapter("e")]


@attached
async def test_a_new_engine_gets_an_adapter_without_a_name_for_the_requests_that_still_use_it(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    loading = asyncio.create_task(client.adapters.load(ServedAdapter("gone", "folder")))
    await answer(engine, "d")
    await loading
    client.open([replace(request("a"), adapter="d")])
    client.adapters.unload("gone")
    assert isinstance(await engine.receive(), Submit) and await engine.receive() == UnloadAdapter("d")
    engine.close()
    await asyncio.sleep(0.01)
    engine, front = local_link()
    client.attach(front)
    await engine.send(READY)
    await answer(engine, "d")
    message = await engine.receive()
    assert isinstance(message, Submit) and message.requests[0].adapter == "d"
    assert await engine.receive() == UnloadAdapter("d"), "behind the request"
    assert client.adapters.get("gone") is None


@attached
async def test_a_closed_client_ends_what_is_open_and_opens_no_more(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    stream = client.open([request("a")])
    client.close("over")
    (delta,) = await stream.take()
    assert (delta.finish_reason, delta.error, delta.error_kind) == ("error", "over", "unavailable_error")
    for ask in (lambda: client.open([request("b")]), client.require_ready):
        with pytest.raises(Unavailable, match="over"):
            ask()
    with pytest.raises(Unavailable, match="over"):
        await client.wait_ready(100.0)


@attached
async def test_a_call_waits_no_longer_than_it_may_and_not_at_all_for_what_is_far(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    link = next(iter(client._links.values()))
    client.detach(link, "down", 400.0)
    with pytest.raises(Unavailable, match="down"):
        await client.wait_ready(100.0)
    client.detach(link, "down")
    with pytest.raises(Unavailable, match="down"):
        await client.wait_ready(0.01)


@attached
async def test_a_stall_counts_from_the_last_step_and_only_while_there_is_work(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    assert client.stalled_s(1000.0) == 0
    client.open([request("a", arrival_s=100.0)])
    assert client.stalled_s(130.0) == 30
    await step(engine, 120, Output("a", (1,)))
    assert client.stalled_s(130.0) == 10
    await engine.send(StepOutputs((), EngineStats(num_steps=120), 129.0))
    await asyncio.sleep(0)
    assert client.stalled_s(130.0) == 10, "a message without a step is no progress"
    await step(engine, 140, Output("a", finish_reason="length", num_output=1))
    assert client.stalled_s(1000.0) == 0


@attached
async def test_a_message_that_cannot_be_read_is_the_end_of_the_engine(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    client.open([request("a")])
    await engine.send(StepOutputs((None,), EngineStats(), 0.0))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert client.ready is None and client.num_open == 1


def test_whoever_runs_the_engine_hears_of_a_broken_link_but_not_of_a_closed_one() -> None:
    async def main(*messages: Any) -> bool:
        client, broken = EngineClient(), asyncio.Event()
        engine, front = local_link()
        client.attach(front, on_broken=broken.set)
        await engine.send(READY)
        while client.ready is None:
            await asyncio.sleep(0)
        for message in messages:
            await engine.send(message)
        engine.close()
        while client._links:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return broken.is_set()

    assert asyncio.run(main(StepOutputs((None,), EngineStats(), 0.0)))  # type: ignore[arg-type]
    assert not asyncio.run(main(StepOutputs((), EngineStats(), 0.0)))


def test_a_client_that_ends_before_its_link_is_read_leaves_no_coroutine_unawaited() -> None:
    """So it is where the port of a server is taken."""

    async def main() -> None:
        client, (_, front) = EngineClient(), local_link()
        client.attach(front)
        client.close("over")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert not [each for each in told if "never awaited" in str(each.message)]


def test_the_end_of_a_process_tells_how_it_died_however_late_it_is_heard_of() -> None:
    """No clock takes an end of which the maker will know the cause for one of an unknown cause; but a process that
    lives on without its link is ended."""

    async def main() -> list[Any]:
        client, broken, told = EngineClient(), asyncio.Event(), []
        handle = client.gateway.handle

        def hear(event: Any, now: float) -> Any:
            told.extend([event] if isinstance(event, Left) else [])
            return handle(event, now)

        client.gateway.handle = hear  # type: ignore[method-assign]
        engine, front = local_link()
        link = client.attach(front, on_broken=broken.set, explained_s=0.001)
        await engine.send(READY)
        while client.ready is None:
            await asyncio.sleep(0)
        engine.close()
        await asyncio.wait_for(broken.wait(), 20)
        told.append("the process is ended")
        client.detach(link, "gone", cause=Cause.OUTSIDE)
        return told

    assert asyncio.run(main()) == ["the process is ended", Left(0, Cause.OUTSIDE)]


@attached
async def test_an_engine_that_lacks_an_adapter_is_let_go_and_the_adapter_stays(
    client: EngineClient, engine: LocalEngineEnd
) -> None:
    """It may be on another machine, where the files are others."""
    loading = asyncio.create_task(client.adapters.load(ServedAdapter("fr", "/fr")))
    message = await engine.receive()
    assert isinstance(message, LoadAdapter)
    await engine.send(AdapterLoaded(message.number, "d"))
    await loading
    for is_leaving, answer in (
        (False, AdapterLoaded(0, "", "no such folder", "bad_checkpoint")),
        (False, AdapterLoaded(0, "other")),
        (True, AdapterLoaded(0, "other")),
    ):
        if is_leaving:
            await engine.send(Leaving())
            assert await engine.receive() == Drain()
        let_go: list[bool] = []
        other, front = local_link()
        client.attach(front, on_broken=lambda let_go=let_go: let_go.append(True))
        await other.send(READY)
        message = await other.receive()
        assert isinstance(message, LoadAdapter)
        await other.send(replace(answer, number=message.number))
        while not let_go:
            await asyncio.sleep(0)
        assert client.adapters.get("fr") is not None and (client.ready is None) == is_leaving
