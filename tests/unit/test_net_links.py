"""Links, of every kind alike: ordered and bounded, each end notices the other's death, and times cross as ages."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from links import KINDS, Stopped, linked, listening_socket, run
from tokenmill.core.events import Abort, Drain, EngineStats, Output, StepOutputs, Submit, Timing
from tokenmill.core.request import Request, SamplingParams
from tokenmill.net import tcp
from tokenmill.net.tcp import LinkBounds
from tokenmill.net.unix import UnixEngineEnd, UnixFrontEnd, private_address

CLOCK = Stopped()


def outputs(number: int) -> StepOutputs:
    return StepOutputs((Output("r", tokens=(number,)),), EngineStats(num_steps=number), float(number))


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_in_order_both_ways(kind: str) -> None:
    async def main() -> None:
        async with linked(kind) as (front, engine):
            for number in range(500):
                await engine.send(outputs(number))
                await front.send(Abort((str(number),)))
            for number in range(500):
                assert await front.receive() == outputs(number)
                assert await engine.receive() == Abort((str(number),))

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_arrive_whole(kind: str) -> None:
    """More than a TLS record and more than any buffer, both ways at once."""

    async def main() -> None:
        async with linked(kind) as (front, engine):
            step = StepOutputs((Output("r", vector=bytes(range(256)) * 20_000),), EngineStats(), 0.0)
            abort = Abort(tuple(f"request-{number}" for number in range(200_000)))
            sending = [asyncio.create_task(engine.send(step)), asyncio.create_task(front.send(abort))]
            assert await engine.receive() == abort
            assert await front.receive() == step
            await asyncio.gather(*sending)

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrived_before_the_end_is_read_before_eof(kind: str) -> None:
    async def main() -> None:
        async with linked(kind) as (front, engine):
            for number in range(700):
                await engine.send(outputs(number))
            engine.close()
            for number in range(700):
                assert await front.receive() == outputs(number)
            with pytest.raises(EOFError):
                await front.receive()
            with pytest.raises(EOFError):
                await front.send(Drain())

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_does_not_read_makes_the_sender_wait(kind: str) -> None:
    """And it is not taken for dead: silence that this end makes itself does not count."""

    async def main() -> None:
        async with linked(kind, bounds=LinkBounds(beat_s=0.05, silence_s=0.1)) as (front, engine):
            sent = 0

            async def flood() -> None:
                nonlocal sent
                big = StepOutputs((Output("r", error="x" * 10_000),), EngineStats(), 0.0)
                while True:
                    await engine.send(big)
                    sent += 1

            flooding = asyncio.create_task(flood())
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.3)
            assert 0 < sent < 20_000
            for _ in range(1000):
                await front.receive()
            while sent <= before:
                await asyncio.sleep(0.01)
            flooding.cancel()

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_cancelled_inside_a_message_ends_the_link(kind: str) -> None:
    async def main() -> None:
        async with linked(kind) as (front, engine):
            await engine.send(outputs(1))
            assert await front.receive() == outputs(1)
            huge = StepOutputs((Output("r", error="x" * 50_000_000),), EngineStats(), 0.0)
            sending = asyncio.create_task(engine.send(huge))
            await asyncio.sleep(0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            with pytest.raises(EOFError):
                await front.receive()

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_times_cross_between_clocks_that_are_hours_apart(kind: str) -> None:
    """Both clocks stand still, so that a time is as old on one side as on the other."""

    async def main() -> None:
        async with linked(kind, front_clock=Stopped(10.0), engine_clock=Stopped(50_000.0)) as (front, engine):
            await front.send(Submit((Request("r", (1,), SamplingParams(), 1, 0, arrival_s=8.5),)))
            (request,) = (await engine.receive()).requests
            assert request.arrival_s == 49_998.5
            timing = Timing(request.arrival_s, 49_999.0, -1.0, 49_999.75)
            await engine.send(StepOutputs((Output("r", timing=timing),), EngineStats(), 50_000.0))
            step = await front.receive()
            assert step.now_s == 10.0 and step.outputs[0].timing == Timing(8.5, 9.0, -1.0, 9.75)

    run(main())


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_peer_that_is_silent_has_gone(kind: str) -> None:
    """Signs of life keep an idle link open for longer than the silence that ends one."""

    async def main() -> None:
        async with linked(kind, bounds=LinkBounds(beat_s=0.05, silence_s=0.3)) as (front, engine):
            await asyncio.sleep(0.6)
            await front.send(Drain())
            assert await engine.receive() == Drain()
            engine._keeper.cancel()  # as if its process were stopped
            with pytest.raises(EOFError, match=r"silent for 0\.3 s"):
                await front.receive()
            with pytest.raises(EOFError):
                await engine.receive()

    run(main())


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_message_beyond_the_bound_ends_the_link(kind: str) -> None:
    async def main() -> None:
        async with linked(kind, bounds=LinkBounds(max_message_bytes=10_000)) as (front, engine):
            await engine.send(StepOutputs((Output("r", error="x" * 9_000),), EngineStats(), 0.0))
            await front.receive()
            await engine.send(StepOutputs((Output("r", error="x" * 10_000),), EngineStats(), 0.0))
            with pytest.raises(EOFError, match="at most 10000 are taken"):
                await front.receive()

    run(main())


def test_the_unix_socket_is_in_a_private_folder_and_leaves_nothing() -> None:
    async def main(address: str) -> None:
        front, engine = UnixFrontEnd(address, CLOCK), UnixEngineEnd(address, CLOCK)
        front.open()
        await engine.send(outputs(1))
        await front.receive()
        engine.close()
        front.close()

    with private_address() as address:
        folder = Path(address).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        run(main(address))
        assert not folder.exists() or not list(folder.iterdir())
    assert not folder.exists()


def test_an_engine_gives_up_when_no_front_end_is_there() -> None:
    async def main(address: str) -> None:
        engine = UnixEngineEnd(address, CLOCK, connect_timeout_s=0.1)
        with pytest.raises(EOFError):
            await engine.receive()
        engine.close()

    with private_address() as address:
        run(main(address))


PEER = """
import asyncio, sys
from tokenmill.net.system import MonotonicClock
from tokenmill.core.events import Drain, EngineStats, StepOutputs
from tokenmill.net.unix import UnixEngineEnd, UnixFrontEnd
CLOCK = MonotonicClock()
async def main():
    if sys.argv[1] == "engine":
        end, hello = UnixEngineEnd(sys.argv[2], CLOCK), StepOutputs((), EngineStats(), 0.0)
    else:
        end, hello = UnixFrontEnd(sys.argv[2], CLOCK), Drain()
    await end.send(hello)
    await end.receive()
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["engine", "front"])
def test_kill_9_of_one_process_is_eof_at_the_other(victim: str) -> None:
    async def main(address: str) -> None:
        end = UnixFrontEnd(address, CLOCK) if victim == "engine" else UnixEngineEnd(address, CLOCK)
        end.open()
        peer = subprocess.Popen([sys.executable, "-c", PEER, victim, address])
        try:
            await end.receive()
            peer.send_signal(signal.SIGKILL)
            with pytest.raises(EOFError):
                await end.receive()
        finally:
            peer.kill()
            peer.wait()
            end.close()
        assert not Path(address).exists()

    with private_address() as address:
        run(main(address))


def test_a_worker_tries_all_addresses_of_a_name() -> None:
    """Of localhost the first is often ::1, where a front end at 127.0.0.1 does not listen."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with listening_socket() as (_, port), listening_socket() as (closed, other):
            closed.close()
            found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each)) for each in (other, port)]
            loop.getaddrinfo = AsyncMock(return_value=found)  # type: ignore[method-assign]
            end = await tcp._connect("localhost", port)
            assert end.getpeername()[1] == port
            end.close()
            loop.getaddrinfo.return_value = found[:1]
            with pytest.raises(ConnectionRefusedError):
                await tcp._connect("localhost", port)

    asyncio.run(main())
