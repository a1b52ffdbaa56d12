"""What the load generator's client makes of connections that end and of answers that are none."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from raw_server import WHOLE, ask_raw, read_request
from tokenmill.bench.load import http
from tokenmill.bench.load.http import Client, parse_url
from tokenmill.bench.load.stream import Exchange


@pytest.mark.parametrize(("at_once_s", "hold_s", "error"), [(60.0, 0.0, None), (0.005, 0.3, "disconnected")])
def test_a_reset_is_made_good_only_if_the_server_cannot_have_begun(
    monkeypatch: pytest.MonkeyPatch, at_once_s: float, hold_s: float, error: str | None
) -> None:
    """A kept connection that is lost at once is replaced, and that is counted; one that is lost after a while of work
    is a failure, and the request is not sent again. What counts as at once is set, since a busy machine may take longer
    than the few milliseconds that it is."""
    monkeypatch.setattr(http, "LOST_AT_ONCE_S", at_once_s)
    num_requests = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        with suppress(asyncio.IncompleteReadError):
            await read_request(reader)
            num_requests += 1
            writer.write(WHOLE)
            await read_request(reader)
            num_requests += 1
            await asyncio.sleep(hold_s)
        writer.transport.abort()

    exchanges = ask_raw(answer_once, num=2)
    assert [exchange.error for exchange in exchanges] == [None, error]
    assert [exchange.num_retries for exchange in exchanges] == [0, 1 if error is None else 0]
    assert num_requests == (3 if error is None else 2)
    sent_s, end_s = exchanges[1].sent_s, exchanges[1].end_s
    assert sent_s is not None and end_s is not None and end_s - sent_s >= hold_s


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_answer_that_the_server_gave_up_is_a_failure(reason: str) -> None:
    """Status 200 and some tokens do not make a success of it."""
    events = (
        b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
        b'data: {"choices":[{"text":"b","finish_reason":"%b"}]}\n\ndata: [DONE]\n\n' % reason.encode()
    )

    async def give_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(events))
        writer.write(events)
        writer.close()

    (exchange,) = ask_raw(give_up)
    assert exchange.error == f"finish_{reason}" and not exchange.ok


def test_an_answer_has_its_time_from_when_its_call_was_sent_last() -> None:
    """One that was refused and told to come back after longer than that is not given up as it comes."""

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(1)  # the client has looked meanwhile
        writer.write(WHOLE)
        writer.close()

    async def go() -> Exchange:
        server = await asyncio.start_server(answer_late, "127.0.0.1", 0)
        client = Client(parse_url(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), "/completions", timeout_s=60)
        exchange, ended = Exchange(0, 0.0), asyncio.Event()
        exchange.sent_s = time.perf_counter() - 1000
        client.send(exchange, b"{}", lambda exchange: ended.set())
        await ended.wait()
        await client.close()
        server.close()
        return exchange

    assert asyncio.run(go()).ok
