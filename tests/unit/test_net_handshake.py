"""The handshake of a network link: who lacks the secret learns nothing and harms nobody, whatever it sends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from links import IDENTITY, SECRET, Stopped, certificate, credentials, listening_socket, worker_listener
from links import run as run_loop
from tokenmill.core.errors import LinkRefused
from tokenmill.core.events import Drain
from tokenmill.net.framing import Pipe
from tokenmill.net.handshake import GREETING_BYTES, PROTOCOL, Identity, greet_front_end, greet_worker
from tokenmill.net.tcp import Credentials, LinkBounds, join

CLOCK = Stopped()
QUICK = LinkBounds(greeting_s=1.0)


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


MADE: list[Pipe] = []


def pipes() -> tuple[Pipe, Pipe]:
    """Two ends; `run` closes them."""
    pair = Pipe(GREETING_BYTES), Pipe(GREETING_BYTES)
    for pipe, end in zip(pair, socket.socketpair(), strict=True):
        pipe.connect(end)
    MADE.extend(pair)
    return pair


def run(main: Coroutine[Any, Any, None], timeout_s: float = 10) -> None:
    async def main_and_end() -> None:
        try:
            await main
        finally:
            while MADE:
                MADE.pop().end()

    run_loop(main_and_end(), timeout_s)


def tap(pipe: Pipe, change: Callable[[int, bytes], bytes] = lambda place, data: data) -> list[bytes]:
    """What is sent through the pipe from now on; `change` may make another message of each, by its place."""
    sent: list[bytes] = []
    send = pipe.send

    async def listen_in(data: bytes, more: bytes = b"") -> None:
        sent.append(data)
        await send(change(len(sent) - 1, data))

    pipe.send = listen_in  # type: ignore[method-assign]
    return sent


async def meet(
    front: Pipe,
    worker: Pipe,
    *,
    judge: Callable[[Identity], str] = lambda identity: "",
    worker_secret: bytes = SECRET,
) -> list[Any]:
    """What each half of a handshake, the front end's first, gave or raised. The half that fails hangs up."""

    async def half(work: Coroutine[Any, Any, Any], pipe: Pipe) -> Any:
        try:
            return await work
        except Exception as error:
            pipe.end()
            return error

    return await asyncio.gather(
        half(greet_worker(front, SECRET, judge, 10**6), front),
        half(greet_front_end(worker, worker_secret, IDENTITY, 10**6), worker),
    )


def test_both_ends_that_know_the_secret_agree_and_never_send_it() -> None:
    async def main() -> None:
        front, worker = pipes()
        said = [tap(front), tap(worker)]
        assert await meet(front, worker) == [IDENTITY, None]
        assert SECRET not in b"".join(said[0] + said[1]) and front.max_bytes == worker.max_bytes == 10**6
        front, worker = pipes()
        again = [tap(front), tap(worker)]
        await meet(front, worker)
        assert not {*again[0][:2], *again[1][:2]} & {*said[0], *said[1]}, "nonces are fresh"

    run(main())


def test_a_wrong_secret_is_refused_at_both_ends_before_the_front_end_has_proved_itself() -> None:
    async def main() -> None:
        front, worker = pipes()
        sent = tap(front)
        said = await meet(front, worker, worker_secret=b"another secret of bytes")
        assert [type(each) for each in said] == [LinkRefused, LinkRefused]
        assert "does not have this front end's secret" in said[0].message
        assert "The secret is not this front end's" in said[1].message
        assert all(len(data) != 32 for data in sent), "a proof was given to a stranger"

    run(main())


def test_a_front_end_without_the_secret_is_refused_by_the_worker() -> None:
    async def main() -> None:
        front, worker = pipes()
        joining = asyncio.create_task(greet_front_end(worker, SECRET, IDENTITY, 10**6))
        hello = await front.receive()
        await front.send(hello.replace(b"worker", b"front end"))
        proof = await front.receive()
        await front.send(proof)  # the worker's own, sent back
        with pytest.raises(LinkRefused, match="front end does not have this worker's secret"):
            await joining

    run(main())


def test_a_hello_sent_back_and_a_replayed_handshake_are_refused() -> None:
    async def main() -> None:
        front, worker = pipes()
        joining = asyncio.create_task(greet_front_end(worker, SECRET, IDENTITY, 10**6))
        await front.send(await front.receive())
        with pytest.raises(LinkRefused, match="no front end"):
            await joining
        front, worker = pipes()
        overheard = tap(worker)
        await meet(front, worker)
        front, thief = pipes()
        taking = asyncio.create_task(greet_worker(front, SECRET, lambda identity: "", 10**6))
        for data in overheard[:2]:
            await thief.send(data)
        with pytest.raises(LinkRefused, match="secret"):
            await taking

    run(main())


def test_another_version_is_named_at_both_ends() -> None:
    async def main() -> None:
        front, worker = pipes()
        tap(worker, lambda place, data: data[:9] + b"\x07\0" + data[11:] if place == 0 else data)
        said = await meet(front, worker)
        assert all(f"version 7 of the protocol, this one {PROTOCOL}" in each.message for each in said)

    run(main())


def test_a_worker_that_is_not_wanted_hears_why() -> None:
    async def main() -> None:
        said = await meet(*pipes(), judge=lambda identity: f"{identity.ready.model} is not served here.")
        assert [type(each) for each in said] == [LinkRefused, LinkRefused]
        assert all("model is not served here." in each.message for each in said)

    run(main())


def test_no_change_of_any_message_of_the_handshake_is_overlooked() -> None:
    """Each byte of the two hellos and the two proofs, seeded: then no half believes the other."""
    rng = random.Random(11)

    async def main() -> None:
        for who in (0, 1):
            for place in (0, 1):
                for _ in range(12):

                    def change(number: int, data: bytes, place: int = place) -> bytes:
                        if number != place:
                            return data
                        at = rng.randrange(len(data))
                        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]

                    ends = pipes()
                    tap(ends[who], change)
                    said = await meet(*ends)
                    assert all(isinstance(each, (LinkRefused, EOFError)) for each in said), (who, place, said)

    run(main())


def test_garbage_never_gets_in_and_leaves_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    """Seeded junk of every size, right beginnings of frames, and no bytes at all; a worker joins between and after."""
    rng = random.Random(5)

    def junk(number: int) -> bytes:
        data = rng.randbytes(rng.choice((1, 3, 4, 5, 40, 300, 5000)))
        if number % 3 == 0:
            return frame(data[:GREETING_BYTES])
        if number % 3 == 1:
            return frame(b"tokenmill\x01\0worker" + rng.randbytes(32)) + frame(data[:100])
        return data

    async def main() -> None:
        async with worker_listener(bounds=QUICK) as (port, joined):
            for number in range(60):
                raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                raw.sendall(junk(number))
                if number % 2:
                    raw.close()
                elif number % 20 == 0:
                    link = await join("127.0.0.1", port, Credentials(SECRET), IDENTITY, CLOCK)
                    front = await joined.get()
                    await front.send(Drain())
                    assert await link.receive() == Drain()
                    link.close(), front.close()
                await asyncio.sleep(0)
            await asyncio.sleep(1.5)  # nobody is still at it
            assert joined.empty()
            link = await join("127.0.0.1", port, Credentials(SECRET), IDENTITY, CLOCK)
            link.close(), (await joined.get()).close()

    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        run(main())
    assert len(caplog.records) == 60 and not any(record.exc_info for record in caplog.records)


def test_garbage_identities_are_refused() -> None:
    """From one who knows the secret: of another version, say."""

    async def main() -> None:
        for garbage in (b"\xc0", b"\x90", b"x" * 3000):
            front, worker = pipes()
            tap(worker, lambda place, data, garbage=garbage: garbage if place == 2 else data)
            said = await meet(front, worker)
            assert "does not say who it is" in said[0].message and isinstance(said[1], EOFError)

    run(main())


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_who_does_not_finish_is_dropped_in_time_and_the_oldest_gives_way(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with worker_listener(kind, bounds=LinkBounds(greeting_s=1.5, max_greeting=4)) as (port, joined):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
            for reader, _ in idle[:5]:
                assert await reader.read() == b"", "more than four were at it at once"
            mine = credentials(kind, is_front_end=False)
            link = await join("127.0.0.1", port, mine, IDENTITY, CLOCK)
            (await joined.get()).close(), link.close()
            for reader, writer in idle:
                assert await reader.read() == b""
                writer.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    lines = [record.getMessage() for record in caplog.records]
    assert sum("too many are at it" in line for line in lines) == 6
    assert sum("did not finish the handshake" in line for line in lines) == 3


def test_large_messages_of_strangers_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with worker_listener() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((GREETING_BYTES + 1).to_bytes(4, "little"))
            assert await reader.read() == b""
            writer.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert f"at most {GREETING_BYTES} are taken" in caplog.text


def test_clear_text_no_certificate_and_another_name_than_the_certificates_are_refused() -> None:
    async def main() -> None:
        async with worker_listener("tls", bounds=QUICK) as (port, joined):
            with pytest.raises((EOFError, OSError)):
                await join("127.0.0.1", port, Credentials(SECRET), IDENTITY, CLOCK, QUICK)
            bare = ssl.create_default_context(cadata=certificate().partition("-----END PRIVATE KEY-----")[2])
            with pytest.raises((EOFError, OSError)):
                await join("127.0.0.1", port, Credentials(SECRET, bare), IDENTITY, CLOCK, QUICK)
            with pytest.raises(LinkRefused, match="certificate"):
                await join("127.1", port, credentials("tls", is_front_end=False), IDENTITY, CLOCK, QUICK)
            assert joined.empty()

    run(main())


def test_nobody_there_is_an_error_that_another_attempt_may_mend() -> None:
    async def main() -> None:
        with listening_socket() as (_, port):
            pass
        with pytest.raises(OSError, match="Connect call failed"):
            await join("127.0.0.1", port, Credentials(SECRET), IDENTITY, CLOCK)
        with pytest.raises(LinkRefused, match="cannot be the name of a host"):
            await join("a..b", port, Credentials(SECRET), IDENTITY, CLOCK)

    run(main())


def test_credentials_do_not_show_the_secret() -> None:
    assert SECRET.decode() not in repr(Credentials(SECRET))
    assert isinstance(IDENTITY, Identity)
