"""Whatever bytes come over a link: frames are cut as they were sent, and what is no message is refused as such."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_net import MESSAGE

from links import run
from tokenmill.net import codec
from tokenmill.net.framing import Pipe

MOST = 4096
KINDS = sorted(kind[0] for kind in codec._KINDS.values())


@given(st.sampled_from(KINDS), st.binary(max_size=200))
@settings(max_examples=400)
def test_bytes_of_no_message_are_refused_as_such(kind: int, data: bytes) -> None:
    """Never another error than ValueError, which ends one link and nothing else."""
    try:
        message = codec.decode(bytes([kind]) + data, 0.0)
    except ValueError:
        return
    assert codec._KINDS[type(message)][0] == kind


@given(MESSAGE, st.data())
@settings(max_examples=300)
def test_damaged_messages_are_refused_or_are_messages(message: Any, data: st.DataObject) -> None:
    whole = bytearray(codec.encode(message, 0.0))
    for _ in range(data.draw(st.integers(1, 4))):
        what, place = data.draw(st.sampled_from("xdi")), data.draw(st.integers(0, max(0, len(whole) - 1)))
        byte = data.draw(st.integers(0, 255))
        if what == "i":
            whole.insert(place, byte)
        elif whole and what == "x":
            whole[place] = byte
        elif whole:
            del whole[place]
    with contextlib.suppress(ValueError):
        codec.decode(bytes(whole), 0.0)


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), min_size=1), st.binary(max_size=3))
@settings(max_examples=60)
def test_frames_arrive_as_they_were_sent_however_the_bytes_are_cut(
    messages: list[bytes], cuts: list[int], half: bytes
) -> None:
    """Empty ones are signs of life and are not delivered; the half of one at the end is not, either."""

    async def main() -> None:
        near, far = socket.socketpair()
        pipe = Pipe(MOST)
        pipe.connect(near)
        stream = b"".join(len(each).to_bytes(4, "little") + each for each in messages) + half
        at = 0
        for place in range(len(stream)):
            if at >= len(stream):
                break
            size = cuts[place % len(cuts)]
            far.sendall(stream[at : at + size])
            at += size
            await asyncio.sleep(0)
        far.close()
        got: list[bytes] = []
        with pytest.raises(EOFError):
            while True:
                got.append(await pipe.receive())
        assert got == [each for each in messages if each]

    run(main())


@given(st.integers(MOST + 1, 2**32 - 1), st.binary(max_size=100))
@settings(max_examples=30)
def test_a_length_beyond_the_bound_ends_the_pipe_before_anything_is_stored(size: int, more: bytes) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        pipe = Pipe(MOST)
        pipe.connect(near)
        far.sendall(size.to_bytes(4, "little") + more)
        with pytest.raises(EOFError):
            await pipe.receive()
        assert pipe.why_ended == f"A message of {size} bytes was announced; at most {MOST} are taken."
        assert len(pipe._received) <= len(more) + 4
        far.close()

    run(main())


class Hasty(socket.socket):
    """Its peer reads what it sends, answers, and goes, all within the call that sends the last byte of a message."""

    peer: socket.socket
    heard = b""

    def send(self, data: Any, flags: int = 0) -> int:
        num_bytes = super().send(data, flags)
        self.heard += self.peer.recv(num_bytes) if num_bytes else b""
        if len(self.heard) == 4 + int.from_bytes(self.heard[:4], "little"):
            self.peer.sendall((2).to_bytes(4, "little") + b"ok")
            self.peer.close()
        return num_bytes


@pytest.mark.parametrize("more", [b"", b"and more"])
def test_a_peer_may_go_as_soon_as_it_has_the_last_byte(more: bytes) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        pipe, end = Pipe(), Hasty(fileno=near.detach())
        end.peer = far
        pipe.connect(end)
        await pipe.send(b"a message", more)
        assert await pipe.receive() == b"ok" and end.heard[4:] == b"a message" + more
        pipe.end()

    run(main())
