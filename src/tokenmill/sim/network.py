"""The network of a simulated cluster: links between front ends and workers, and wires that carry KV between hosts.

A link is two ordered streams, as TCP gives them: what is sent arrives once, in order and late, or the link breaks. What
was under way then is lost, and each end hears of it in its own time; nobody is told how much the other had received. A
partition holds a link up. When it is over, everything arrives, late; or the link has been cut meanwhile.

Bulk transfers are connections of their own. Those that leave or enter one host share its wire: they go one after the
other, so contention costs what it costs a real network card, in total.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ..core.events import FromEngine, ToEngine
from .loop import VirtualLoop

T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")


class Shape(NamedTuple):
    """latency_s    of each message
    jitter_s     mean of what comes on top, exponential
    late_rate    share of messages that are late
    late_s       by how much at most
    byte_s       seconds that a byte of a bulk transfer takes on a wire
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    late_rate: float = 0.0
    late_s: float = 0.0
    byte_s: float = 1e-9


NO_DELAY = Shape()


class Pipe(Generic[T]):
    """One direction of a link."""

    def __init__(self, loop: VirtualLoop, shape: Shape, rng: random.Random) -> None:
        self._loop = loop
        self._shape = shape
        self._rng = rng
        self._under_way: deque[tuple[float, T]] = deque()
        self._arrived: asyncio.Queue[T | None] = asyncio.Queue()
        self._last_s = 0.0
        self._held_s = 0.0
        self._is_finished = False
        self._hear: Callable[[T], None] | None = None
        self.is_cut = False

    def put(self, message: T) -> None:
        """Raises EOFError where the link has been cut."""
        if self.is_cut:
            raise EOFError("the link is cut")
        self._last_s = max(self._last_s, self._held_s, self._loop.time() + self._delay_s())
        self._under_way.append((self._last_s, message))
        self._loop.call_at(self._last_s, self._arrive)

    async def get(self) -> T:
        """The next message; raises EOFError where the link is over and what had arrived is taken."""
        message = await self._arrived.get()
        if message is None:
            self._arrived.put_nowait(None)
            raise EOFError("the link is cut")
        return message

    async def listen(self, hear: Callable[[T], None]) -> None:
        """Have `hear` get each message as it arrives; raises EOFError as `get` does."""
        while not self._arrived.empty():
            hear(await self.get())
        self._hear = hear
        await self.get()
        raise AssertionError("nothing but the end is awaited")

    def hold(self, for_s: float) -> None:
        """Nothing arrives for a while."""
        self._held_s = max(self._held_s, self._loop.time() + for_s)

    def cut(self, heard_s: float) -> None:
        """What is under way is lost; the receiver hears of it after `heard_s`."""
        if not self.is_cut:
            self.is_cut = True
            self._under_way.clear()
            self._loop.call_later(heard_s, self._arrived.put_nowait, None)

    def finish(self) -> None:
        """The sender is gone: what is under way arrives, then the end."""
        if not self.is_cut:
            self.is_cut = True
            self._last_s = max(self._last_s, self._held_s, self._loop.time())
            self._loop.call_at(self._last_s, self._arrive)
            self._is_finished = True

    def _arrive(self) -> None:
        now = self._loop.time()
        if self._held_s > now:
            self._loop.call_at(self._held_s, self._arrive)
            return
        tell = self._hear or self._arrived.put_nowait
        while self._under_way and self._under_way[0][0] <= now:
            tell(self._under_way.popleft()[1])
        if self._is_finished and not self._under_way:
            self._arrived.put_nowait(None)

    def _delay_s(self) -> float:
        shape, rng = self._shape, self._rng
        delay_s = shape.latency_s
        if shape.jitter_s:
            delay_s += rng.expovariate(1 / shape.jitter_s)
        if shape.late_rate and rng.random() < shape.late_rate:
            delay_s += rng.uniform(0.0, shape.late_s)
        return delay_s


class End(Generic[In, Out]):
    """core.ports.EngineEnd or FrontEnd over two pipes."""

    def __init__(self, inbound: Pipe[In], outbound: Pipe[Out]) -> None:
        self._inbound = inbound
        self._outbound = outbound

    async def receive(self) -> In:
        return await self._inbound.get()

    async def listen(self, hear: Callable[[In], None]) -> None:
        """core.ports.Pushing"""
        await self._inbound.listen(hear)

    async def send(self, message: Out) -> None:
        self._outbound.put(message)

    def push(self, message: Out) -> None:
        """core.ports.Pushing"""
        if not self._outbound.is_cut:
            self._outbound.put(message)

    def close(self) -> None:
        """What was sent arrives, and the end after it; nothing more is received."""
        self._outbound.finish()
        self._inbound.cut(0.0)


class Link:
    """`engine_end`, `front_end`: what the two programs hold."""

    def __init__(self, loop: VirtualLoop, shape: Shape, rng: random.Random) -> None:
        self._to_engine: Pipe[ToEngine] = Pipe(loop, shape, rng)
        self._to_front: Pipe[FromEngine] = Pipe(loop, shape, rng)
        self.engine_end: End[ToEngine, FromEngine] = End(self._to_engine, self._to_front)
        self.front_end: End[FromEngine, ToEngine] = End(self._to_front, self._to_engine)

    @property
    def is_cut(self) -> bool:
        return self._to_front.is_cut

    def hold(self, for_s: float) -> None:
        """A partition: nothing arrives on either side for a while."""
        self._to_engine.hold(for_s)
        self._to_front.hold(for_s)

    def cut(self, engine_s: float = 0.0, front_s: float = 0.0) -> None:
        """Both sides live on, and hear of it after so many seconds."""
        self._to_engine.cut(engine_s)
        self._to_front.cut(front_s)

    def die(self) -> None:
        """The engine's process is gone: what it had sent arrives, and the end after it."""
        self._to_engine.cut(0.0)
        self._to_front.finish()


class Network:
    """Links of one shape, and a wire for each host."""

    def __init__(self, loop: VirtualLoop, shape: Shape, rng: random.Random) -> None:
        self._loop = loop
        self._shape = shape
        self._rng = rng
        self._free_s: dict[str, float] = {}

    def connect(self) -> Link:
        return Link(self._loop, self._shape, self._rng)

    async def carry(self, source: str, destination: str, num_bytes: int) -> None:
        """Returns when a bulk transfer has arrived, behind those that the wires of both hosts carry already."""
        now = self._loop.time()
        begin_s = max(now, self._free_s.get(source, 0.0), self._free_s.get(destination, 0.0))
        end_s = begin_s + num_bytes * self._shape.byte_s
        self._free_s[source] = self._free_s[destination] = end_s
        await asyncio.sleep(end_s + self._shape.latency_s - now)
