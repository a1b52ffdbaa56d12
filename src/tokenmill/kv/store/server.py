"""A KV store as its clients see it: a Unix socket that speaks `core.tiers`, and the memory that comes with it.

The store takes its numerics id and block sizes from the first worker that joins, and refuses workers of others from
then on. Who says no numerics id only asks. Only processes of the same user are let in, and root's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

from ...core.errors import TokenmillError
from ...core.ports import Clock
from ...core.tiers import REMOTE, Drop, FromStore, Inquire, Join, Joined, Tier, TierFacts, TierManaging, Told, ToStore
from ...net.framing import Pipe
from ..tiers.shell import TierLink, TierShell
from ..transfer.arena import SharedArena
from ..transfer.connection import MAX_MESSAGE, decode, encode, framed, peer_uid
from ..transfer.remote import RemoteTier
from .peers import PeerService

log = logging.getLogger(__name__)
OWN = ("stat", "verify", "fence")
"""Questions that are answered here."""
SEEN_BY_TIERS = {
    "corrupt": ("num_damaged", "blocks_corrupt", "blocks_short", "blocks_foreign", "blocks_stale", "saves_corrupt"),
    "errors": ("errors", "timeouts"),
    "is_down": ("is_down",),
}
"""What the manager tells of a tier -> what the tier has counted itself: the manager saw no more than a miss."""
HANDSHAKE_S = 5.0
OPEN_S = 3.0
"""So long a client that joins waits for tiers that are being opened."""
_ACCEPT_RETRY_S = 0.1
_FOREIGN = (
    "The KV store at this socket keeps KV of another model, or of the same computed otherwise (weights, --block-size,"
    " --kv-cache-dtype, kernels): its KV cannot be used here. Start another store with a socket of its own."
)
_SIZES = "The KV store at this socket has blocks of {theirs} bytes, this worker of {ours}: they cannot share it."
_EMPTY = "No worker has joined this KV store yet: it keeps nothing."


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store is made of, once it is known whose KV it keeps. serve_peers: opens it to the stores of other
    machines; raises TokenmillError"""

    manager: TierManaging
    tiers: Mapping[str, Tier]
    serve_peers: Callable[[TierShell, asyncio.AbstractEventLoop], PeerService] | None = None


class KVStore:
    """make  what makes the parts for the first that joins; raises TokenmillError
    host   what host memory counts
    shell, inquiries, tiers: of the store, once somebody has joined
    """

    def __init__(
        self,
        arena: SharedArena,
        make: Callable[[Join, SharedArena], Parts],
        clock: Clock,
        host: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.arena = arena
        self.inquiries: StoreInquiries | None = None
        self.shell: TierShell | None = None
        self.tiers: Mapping[str, Tier] = {}
        self._make = make
        self._host = host
        self._clock = clock
        self._identity: Join | None = None
        self._peers: PeerService | None = None
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve those who connect to `listener`, until cancelled. Raises what the store fails with."""
        self._over = asyncio.get_running_loop().create_future()
        accepting = asyncio.create_task(self._accept(listener), name="kv-store-door")
        try:
            await self._over
        finally:
            accepting.cancel()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(accepting, *self._tasks, return_exceptions=True)
            if self._peers is not None:
                self._peers.close()
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.error("Nobody can join the KV store now: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            task = asyncio.create_task(self._serve(connection), name="kv-store-client")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """One client, until it goes or says what is no message."""
        uid = peer_uid(connection)
        if uid not in (os.geteuid(), 0):
            log.warning("A process of user %d may not join the KV store.", uid)
            return connection.close()
        pipe, link = Pipe(MAX_MESSAGE), None
        pipe.connect(connection)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                link, joined = await self._join(decode(await pipe.receive()))
            if link is None:
                await pipe.send(encode(joined))
                return
            # Nothing was sent before, so that all of it fits into the socket's buffer.
            socket.send_fds(connection, [framed(joined)], [self.arena.fd])
            telling = asyncio.create_task(_tell(link, pipe), name="kv-store-answers")
            try:
                while True:
                    await self._hear(decode(await pipe.receive()), link, pipe)
            finally:
                telling.cancel()
        except ValueError as error:
            log.warning("A client of the KV store is not understood: %s", error)
        except (OSError, EOFError):
            pass
        finally:
            if link is not None:
                link.close()
            pipe.end()

    async def _hear(self, message: ToStore | FromStore, link: TierLink, pipe: Pipe) -> None:
        if isinstance(message, Inquire) and message.what in OWN:
            task = asyncio.create_task(self._answer(message, pipe), name=f"kv-store-{message.what}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, ToStore):
            await link.say(message)
        else:
            raise ValueError(f"it says {type(message).__name__}.")

    async def _answer(self, asked: Inquire, pipe: Pipe) -> None:
        assert self.inquiries is not None
        try:
            told = await self.inquiries.answer(asked)
        except (OSError, EOFError) as error:
            told = Told(asked.number, "", str(error))
        except Exception as error:
            log.exception("The KV store could not answer %s.", asked.what)
            told = Told(asked.number, "", f"{type(error).__name__}: see the log of the KV store.")
        with contextlib.suppress(EOFError):
            await pipe.send(encode(told))

    async def _join(self, join: ToStore | FromStore) -> tuple[TierLink | None, Joined]:
        """No link: it is refused."""
        if not isinstance(join, Join):
            raise ValueError("it does not say Join first.")
        refusal = await self._refusal(join)
        if refusal:
            return None, Joined(0, (), refusal)
        assert self.shell is not None and self._identity is not None
        with contextlib.suppress(TimeoutError):  # what the disk has kept is there for the first requests
            async with asyncio.timeout(OPEN_S):
                await self.shell.wait_opened()
        link = self.shell.connect()
        await link.say(replace(join, numerics_id=self._identity.numerics_id, block_bytes=self._identity.block_bytes))
        joined = await link.hear()
        assert isinstance(joined, Joined), joined
        if joined.error:
            link.close()
            return None, joined
        tiers = tuple(self._measured(facts) for facts in joined.tiers)
        return link, replace(joined, slab_bytes=self.arena.num_bytes, tiers=tiers)

    def _measured(self, usual: TierFacts) -> TierFacts:
        """What a tier has measured of itself instead of what is usual for its kind."""
        facts = getattr(self.tiers.get(usual.name), "facts", usual)
        return usual._replace(latency_s=facts.latency_s or usual.latency_s, bytes_s=facts.bytes_s or usual.bytes_s)

    async def _refusal(self, join: Join) -> str:
        """Why it may not join; "": it may, and the store is open."""
        if self._identity is None:
            return await self._open(join) if join.numerics_id else _EMPTY
        if join.numerics_id not in ("", self._identity.numerics_id):
            return _FOREIGN
        if join.numerics_id and join.block_bytes != self._identity.block_bytes:
            theirs, ours = (", ".join(map(str, each.block_bytes)) for each in (self._identity, join))
            return _SIZES.format(theirs=theirs, ours=ours)
        return ""

    async def _open(self, join: Join) -> str:
        if not join.block_bytes or min(join.block_bytes) < 1:
            return f"Blocks of {join.block_bytes} bytes cannot be kept."
        try:
            parts = self._make(join, self.arena)
            shell = TierShell(parts.manager, parts.tiers, self._clock, self.arena.free)
            if parts.serve_peers is not None:
                self._peers = parts.serve_peers(shell, asyncio.get_running_loop())
        except TokenmillError as error:
            self._end(error)
            return error.message
        self._identity, self.tiers, self.shell = join, parts.tiers, shell
        self._running = asyncio.create_task(self.shell.run(), name="kv-store")
        link = self.shell.connect()
        await link.say(join)
        self.inquiries = StoreInquiries(link, parts.tiers, self._host, self._peers)
        self._running.add_done_callback(lambda task: None if task.cancelled() else self._end(task.exception()))
        return ""

    def _end(self, error: BaseException | None) -> None:
        if self._over is not None and error is not None and not self._over.done():
            self._over.set_exception(error)


async def _tell(link: TierLink, pipe: Pipe) -> None:
    try:
        while True:
            await pipe.send(encode(await link.hear()))
    except EOFError:
        pipe.end()


def listen(path: str) -> socket.socket:
    """A socket at `path` that only its user may connect to. One that a dead process has left is replaced. Raises
    OSError, also where somebody listens there."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise FileExistsError(f"a KV store listens at {path} already")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(128)
    return listener


class StoreInquiries:
    """Answers what operators ask and the manager cannot tell alone: it knows where blocks are, and no bytes.

    stat    the manager's, with what tiers and host memory count
    verify  read what is on disk, and forget what is not as it was saved
    fence   have all other processes write nothing more to the remote store, and forget what is there

    link  of a client that is part of the store
    host     what host memory counts
    peers    who serves the stores of other machines, if they are served
    """

    def __init__(
        self,
        link: TierLink,
        tiers: Mapping[str, Tier],
        host: Callable[[], dict[str, float]],
        peers: PeerService | None = None,
    ) -> None:
        self._link = link
        self._tiers = tiers
        self._host = host
        self._peers = peers
        self._turn = asyncio.Lock()
        self._num_asked = 0

    async def answer(self, asked: Inquire) -> Told:
        """To one of OWN. Raises EOFError when the store is over."""
        if asked.what == "verify":
            return Told(asked.number, json.dumps(await self._verify()))
        if asked.what == "fence":
            return await self._fence(asked.number)
        told = await self.inquire(asked.what, asked.argument)
        if told.error:
            return Told(asked.number, "", told.error)
        stat: dict[str, Any] = json.loads(told.answer)
        stat["host_memory"] = self._host()
        if self._peers is not None:
            stat["peers_served"] = self._peers.stat()
        for name, tier in self._tiers.items():
            told_of, counts = stat.setdefault("tiers", {}).setdefault(name, {}), counts_of(tier)
            for key, names in SEEN_BY_TIERS.items():
                told_of[key] = told_of.get(key, 0) + sum(counts.get(each, 0) for each in names)
            told_of["counts"] = counts
        return Told(asked.number, json.dumps(stat))

    async def inquire(self, what: str, argument: str = "") -> Told:
        """Of the manager."""
        async with self._turn:
            self._num_asked += 1
            await self._link.say(Inquire(self._num_asked, what, argument))
            while True:
                told = await self._link.hear()
                if isinstance(told, Joined) or (isinstance(told, Told) and told.number != self._num_asked):
                    continue
                assert isinstance(told, Told), told
                return told

    async def _fence(self, number: int) -> Told:
        remote = self._tiers.get(REMOTE)
        if not isinstance(remote, RemoteTier):
            return Told(number, "", "fence: this KV store has no remote tier.")
        try:
            return Told(number, json.dumps({"epoch": await remote.fence()}))
        except OSError as error:
            return Told(number, "", f"fence: the remote store does not answer: {error}")

    async def _verify(self) -> dict[str, Any]:
        bad: dict[str, int] = {}
        for name, tier in self._tiers.items():
            verify = getattr(tier, "verify", None)
            if verify is not None:
                wrong = tuple(await verify())
                bad[name] = len(wrong)
                if wrong:
                    await self._link.say(Drop(wrong, is_near=True))
        return {"damaged": bad}


def counts_of(tier: Tier) -> dict[str, float]:
    """What a tier counts for itself."""
    stat, counts = getattr(tier, "stat", None), getattr(tier, "counts", None)
    if stat is not None:
        return dict(stat())
    return asdict(counts) if is_dataclass(counts) and not isinstance(counts, type) else {}
