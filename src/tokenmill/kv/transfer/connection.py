"""A client's connection to its KV store: the handshake, messages as bytes, who waits for which answer, the end.

A store that does not answer is one that has gone: then the connection is ended, and with it all that waits. The arena
stays mapped as long as somebody copies out of it or into it (`busy`).

A message is one kind byte, then msgpack of the type in `core.tiers`. The kind byte picks a decoder that knows the exact
type, so that what is damaged, or of another version, fails here. On the socket each message follows its length, 4
bytes, lowest first, as `net.framing` has it. The arena's descriptor comes with the first byte of `Joined`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from ...core.errors import ConfigError
from ...core.tiers import (
    NO_PLACE,
    Drop,
    Fetch,
    Fetched,
    Find,
    Found,
    FromStore,
    Granted,
    Inquire,
    Join,
    Joined,
    Leased,
    NoteCosts,
    Pin,
    Promote,
    Store,
    Stored,
    TierEvents,
    Told,
    ToStore,
    WatchTiers,
    Written,
)
from .arena import SharedArena

MAX_MESSAGE = 1 << 26
LENGTH = 4
_KINDS: dict[type, bytes] = {
    Join: b"J", Find: b"F", Fetch: b"G", Fetched: b"g", Store: b"S", Written: b"W", Promote: b"P", Drop: b"D",
    Pin: b"N", NoteCosts: b"C", WatchTiers: b"V", Inquire: b"I",
    Joined: b"j", Found: b"f", Leased: b"l", Granted: b"r", Stored: b"s", TierEvents: b"e", Told: b"t",
}  # fmt: skip
_DECODERS: dict[int, msgspec.msgpack.Decoder[ToStore | FromStore]] = {
    kind[0]: msgspec.msgpack.Decoder(type_) for type_, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()
HANDSHAKE_S = 5.0
PATIENCE_S = 2.0
"""After this long without a word from the store it is asked whether it lives, and has as long to answer."""
_MAX_UNSENT = 1 << 24


class Connection:
    """arena  as the store has given. `hear`: gets the events. `when_over`: called once, when nobody is busy."""

    def __init__(
        self,
        arena: SharedArena,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        hear: Callable[[TierEvents], None],
        when_over: Callable[[], None],
    ) -> None:
        self.arena = arena
        self._reader, self._writer = streams
        self._hear_event = hear
        self._when_over = when_over
        self._numbers = itertools.count(1)
        self._answers: dict[int, _Answers] = {}
        self._unfound: dict[int, float] = {}  # number of a Find that has no answer -> when it was said
        self._num_busy = 0
        self.is_over = False
        self._why_over = ""
        self._reading = asyncio.create_task(self._read(), name="kv-store-link")

    def open(self) -> int:
        """A number for a question, whose answers are kept until it is closed."""
        number = next(self._numbers)
        self._answers[number] = _Answers()
        return number

    def close(self, number: int) -> None:
        del self._answers[number]

    @contextlib.contextmanager
    def asking(self) -> Iterator[int]:
        number = self.open()
        try:
            yield number
        finally:
            self.close(number)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Somebody uses slots."""
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1
            self._finish()

    def say(self, message: ToStore) -> None:
        """Raises OSError where the store has gone."""
        if isinstance(message, Find) and not self.is_over:
            now = asyncio.get_running_loop().time()
            if self._unfound and now - next(iter(self._unfound.values())) > PATIENCE_S:
                self.end("The KV store does not answer.")
            self._unfound[message.number] = now
        if self.is_over:
            raise ConnectionError(self._why_over)
        self._writer.write(framed(message))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT:
            self.end("The KV store does not listen.")

    async def hear(self, number: int, within_s: float) -> FromStore:
        """The next answer. Raises TimeoutError where none comes in time, and OSError where the store has gone."""
        answers, left_s = self._answers[number], within_s
        while True:
            try:
                return await self._next(answers, min(PATIENCE_S, left_s))
            except TimeoutError:
                left_s -= PATIENCE_S
                if left_s <= 0:
                    raise
            await self.check()

    async def check(self) -> None:
        """Raises OSError where the store does not answer."""
        with self.asking() as number:
            self.say(Find(number, ()))
            try:
                await self._next(self._answers[number], PATIENCE_S)
            except TimeoutError as error:
                self.end("The KV store does not answer.")
                raise ConnectionError(self._why_over) from error

    def poll(self, number: int) -> FromStore | None:
        """An answer that is here already."""
        came = self._answers[number].came
        return came.popleft() if came else None

    def end(self, why: str = "The KV store has gone.") -> None:
        if self.is_over:
            return
        self.is_over, self._why_over = True, why
        self._reading.cancel()
        for answers in self._answers.values():
            answers.change.set()
        self._finish()

    async def _next(self, answers: _Answers, within_s: float) -> FromStore:
        async with asyncio.timeout(within_s):
            while not answers.came:
                if self.is_over:
                    raise ConnectionError(self._why_over)
                answers.change.clear()
                await answers.change.wait()
        return answers.came.popleft()

    def _finish(self) -> None:
        if self.is_over and not self._num_busy:
            self._writer.transport.abort()
            self.arena.close()
            when_over, self._when_over = self._when_over, lambda: None
            when_over()

    async def _read(self) -> None:
        why = "The KV store has gone."
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(LENGTH), "little")
                if size > MAX_MESSAGE:
                    raise ValueError(f"a message of {size} bytes")
                self._take(decode(await self._reader.readexactly(size)))
        except (OSError, EOFError):
            pass
        except ValueError as error:
            why = f"The KV store cannot be understood: {error}"
        self.end(why)

    def _take(self, message: ToStore | FromStore) -> None:
        if isinstance(message, TierEvents):
            self._hear_event(message)
            return
        if isinstance(message, Found):
            self._unfound.pop(message.number, None)
        answers = self._answers.get(getattr(message, "number", NO_PLACE))
        if answers is not None:
            answers.came.append(message)  # type: ignore[arg-type]
            answers.change.set()
        elif isinstance(message, Granted):  # nobody writes any more
            self.say(Written(message.number, (NO_PLACE,) * len(message.offsets)))


class _Answers:
    def __init__(self) -> None:
        self.came: deque[FromStore] = deque()
        self.change = asyncio.Event()


def shake_hands(path: str, join: Join) -> tuple[socket.socket, Joined, SharedArena]:
    """Join the store that listens at `path`; to be called beside the event loop. Raises OSError where none answers, and
    ConfigError where it refuses."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(HANDSHAKE_S)
        end.connect(path)
        if peer_uid(end) not in (os.geteuid(), 0):
            raise ConfigError(f"The KV store at {path} is another user's: its KV cannot be trusted.", param="kv_store")
        end.sendall(framed(join))
        head, fds, _, _ = socket.recv_fds(end, LENGTH, 1)
        with _closing(fds):
            joined = decode(_receive(end, int.from_bytes(head + _receive(end, LENGTH - len(head)), "little")))
            if not isinstance(joined, Joined):
                raise ConnectionError("What answers is no KV store.")
            if joined.error:
                raise ConfigError(joined.error, param="kv_store")
            if not fds:
                raise ConnectionError("The KV store has given no memory.")
            arena = SharedArena.attach(fds.pop(), joined.slab_bytes)
        return end, joined, arena
    except ValueError as error:
        end.close()
        raise ConnectionError(str(error)) from error
    except BaseException:
        end.close()
        raise


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, or of this one where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.geteuid()
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", data)[1]


def _receive(end: socket.socket, num_bytes: int) -> bytes:
    if num_bytes > MAX_MESSAGE:
        raise ValueError(f"What answers is no KV store: it announces {num_bytes} bytes.")
    data = bytearray()
    while len(data) < num_bytes:
        piece = end.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("The KV store has gone.")
        data += piece
    return bytes(data)


@contextlib.contextmanager
def _closing(fds: list[int]) -> Iterator[None]:
    """Those that are left in the end."""
    try:
        yield
    finally:
        for fd in fds:
            socket.close(fd)


def encode(message: ToStore | FromStore) -> bytes:
    return _KINDS[type(message)] + _ENCODER.encode(message)


def decode(data: bytes) -> ToStore | FromStore:
    """The message that `encode` was given. Raises ValueError for anything else."""
    if not data or data[0] not in _DECODERS:
        raise ValueError(f"Not a message of a KV store: it starts with {data[:1]!r}.")
    try:
        return _DECODERS[data[0]].decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(f"Damaged message of kind {data[:1]!r}: {error}") from error


def framed(message: ToStore | FromStore) -> bytes:
    """With its length."""
    data = encode(message)
    return len(data).to_bytes(LENGTH, "little") + data
