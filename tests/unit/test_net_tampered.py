"""A network link without TLS, by way of somebody who changes, repeats, moves and sends back what passes: no message is
taken that the other end did not send, and the link ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from links import IDENTITY, SECRET, Stopped, credentials, run, worker_listener
from tokenmill.core.events import Abort, EngineStats, Output, StepOutputs
from tokenmill.core.mac import TAG_BYTES, TAMPERED, connection_macs
from tokenmill.net.framing import Pipe
from tokenmill.net.tcp import LinkBounds, join

CLOCK = Stopped()
NO_BEATS = LinkBounds(beat_s=60.0, silence_s=600.0)
NUM_PLAIN = 2
"""Messages of each end before tags begin: its hello and its proof."""
NUM_BEFORE = 5
"""Messages of each end before a test begins: hello, proof, identity or answer, a keepalive, and one to see it work."""

Frames = list[bytes]
Change = Callable[[int, bytes], Frames]
"""What passes on instead of a frame, by its number in its direction."""


def unchanged(number: int, frame: bytes) -> Frames:
    return [frame]


async def read_frame(reader: asyncio.StreamReader, number: int) -> bytes:
    tag_bytes = 0 if number < NUM_PLAIN else TAG_BYTES
    head = await reader.readexactly(4 + tag_bytes)
    return head + await reader.readexactly(int.from_bytes(head[:4], "little") + tag_bytes)


class Wire:
    """What stands between the two ends: `up` changes what the worker sends, `down` what the front end sends."""

    def __init__(self, up: Change = unchanged, down: Change = unchanged) -> None:
        self.up, self.down = up, down
        self.to_worker: asyncio.StreamWriter
        self.to_front: asyncio.StreamWriter
        self.num_passed = {"up": 0, "down": 0}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def before(self, port: int) -> AsyncIterator[int]:
        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            self.to_worker, self.to_front = writer, far_writer
            for source, target, name in ((reader, far_writer, "up"), (far_reader, writer, "down")):
                self._tasks.add(asyncio.create_task(self._pass(source, target, name)))

        server = await asyncio.start_server(meet, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in (self.to_worker, self.to_front):
                writer.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, name: str) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = await read_frame(source, self.num_passed[name])
                for each in getattr(self, name)(self.num_passed[name], frame):
                    target.write(each)
                self.num_passed[name] += 1
        target.close()


@contextlib.asynccontextmanager
async def linked_by(wire: Wire) -> AsyncIterator[tuple[Any, Any]]:
    """The front end's end of a link and the worker's, when NUM_BEFORE messages have passed each way."""
    async with worker_listener(bounds=NO_BEATS) as (port, joined), wire.before(port) as near:
        worker = await join("127.0.0.1", near, credentials("tcp", is_front_end=False), IDENTITY, CLOCK, NO_BEATS)
        front = await joined.get()
        try:
            await worker.send(outputs(0))
            await front.send(abort(0))
            assert await front.receive() == outputs(0) and await worker.receive() == abort(0)
            while min(wire.num_passed.values()) < NUM_BEFORE:
                await asyncio.sleep(0)
            yield front, worker
        finally:
            worker.close()
            front.close()


def outputs(number: int) -> StepOutputs:
    return StepOutputs((Output("r", tokens=(number,)),), EngineStats(), 0.0)


def abort(number: int) -> Abort:
    return Abort((f"r{number}",))


async def ends_without_a_word(end: Any) -> None:
    with pytest.raises(EOFError):
        await end.receive()
    assert end.why_ended == TAMPERED


def test_a_changed_bit_anywhere_in_a_frame_ends_the_link() -> None:
    """A random bit of each byte, of the length and the tags too, both ways."""
    rng = random.Random(7)

    async def one(way: str, at: int) -> int:
        """Bytes of the frame whose byte `at` was changed."""
        size = 0

        def change(number: int, frame: bytes) -> Frames:
            nonlocal size
            if number < NUM_BEFORE:
                return [frame]
            size = len(frame)
            return [frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1 :]]

        async with linked_by(Wire(**{way: change})) as (front, worker):
            if way == "up":
                await worker.send(outputs(1))
                await ends_without_a_word(front)
            else:
                await front.send(abort(1))
                await ends_without_a_word(worker)
        return size

    async def main() -> None:
        for way in ("up", "down"):
            at = 0
            while at < await one(way, at) - 1:
                at += 1
            assert at > 2 * TAG_BYTES

    run(main(), 120)


@pytest.mark.parametrize("what", ["again", "left out", "in another order", "sent back"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_frames_that_are_not_the_next_one_end_the_link(way: str, what: str) -> None:
    """Those before it arrive."""
    held: Frames = []

    def change(number: int, frame: bytes) -> Frames:
        if number < NUM_BEFORE:
            return [frame]
        held.append(frame)
        if what == "again":
            return [frame, frame]
        if what == "left out":
            return [] if len(held) == 1 else [frame]
        if what == "in another order":
            return held[::-1] if len(held) == 2 else []
        (wire.to_worker if way == "up" else wire.to_front).write(frame)
        return []

    wire = Wire(**{way: change})

    async def main() -> None:
        async with linked_by(wire) as (front, worker):
            sender, receiver, message = (worker, front, outputs) if way == "up" else (front, worker, abort)
            await sender.send(message(1))
            if what == "sent back":
                return await ends_without_a_word(sender)
            await sender.send(message(2))
            if what == "again":
                assert await receiver.receive() == message(1)
            await ends_without_a_word(receiver)

    run(main())


def test_frames_of_another_connection_end_the_link() -> None:
    """At the same place of a link between the same two."""
    captured: Frames = []

    def capture(number: int, frame: bytes) -> Frames:
        captured.append(frame)
        return [frame]

    async def main() -> None:
        async with linked_by(Wire(up=capture)) as (front, worker):
            await worker.send(outputs(1))
            assert await front.receive() == outputs(1)
        place = len(captured) - 1
        async with linked_by(Wire(up=lambda number, frame: [captured[place] if number == place else frame])) as ends:
            front, worker = ends
            await worker.send(outputs(1))
            await ends_without_a_word(front)

    run(main())


def test_what_is_slipped_in_before_tags_begin_is_not_taken() -> None:
    """A plain answer behind the front end's proof, of the form that takes a worker in."""

    def slip(number: int, frame: bytes) -> Frames:
        return [frame + (1).to_bytes(4, "little") + b"="] if number == NUM_PLAIN - 1 else [frame]

    async def main() -> None:
        wire = Wire(down=slip)
        async with worker_listener(bounds=NO_BEATS) as (port, _), wire.before(port) as near:
            with pytest.raises(EOFError):
                await join("127.0.0.1", near, credentials("tcp", is_front_end=False), IDENTITY, CLOCK, NO_BEATS)

    run(main())


def test_a_message_that_was_cancelled_before_its_first_byte_leaves_no_gap() -> None:
    """The other end has not seen it, and takes the next one for the next one."""

    async def main() -> None:
        near, far = socket.socketpair()
        sender, receiver = Pipe(), Pipe()
        sender.connect(near)
        sender.protect(*connection_macs(SECRET, b"nonces", b"one", b"other"))
        num_sent = 0
        while True:  # until nothing more fits
            try:
                await asyncio.wait_for(sender.send(b"x" * 36), 0.2)
            except TimeoutError:
                break
            num_sent += 1
        assert not sender.is_gone, "a message was cut in two"
        receiver.connect(far)
        receiver.protect(*connection_macs(SECRET, b"nonces", b"other", b"one"))
        await sender.send(b"last")
        for _ in range(num_sent):
            assert await receiver.receive() == b"x" * 36
        assert await receiver.receive() == b"last"
        sender.end(), receiver.end()

    run(main())
