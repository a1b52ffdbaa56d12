"""KV between toy executors: what one sends, another pulls, over a network that is slow and loses things by seed.

Bytes are read where a pull ends, so that blocks which were given back too early hold something else by then; blocks
under way belong to no step, neither those that are filled nor those that are read. Whoever reads a block before its
bytes are in, or has it written while it is sent, is found out by the checks of `executor`.
"""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.errors import EngineFailed
from ..core.moves import EndMove, PullBlocks, Pulled, SendBlocks

SILENT_S = 30.0
"""An offer ends that no peer has asked for in so long."""

UNKNOWN_S = 0.5
"""For so long a ticket is waited for that nothing was sent under yet."""

_GARBAGE = -9


class Pool(Protocol):
    """`moving`: blocks that are filled (True) or saved (False). `sending`: how often each block is being sent."""

    positions: array[int]
    tokens: array[int]
    moving: dict[int, bool]
    sending: dict[int, int]


@dataclass(slots=True, eq=False)
class _Sent:
    """Blocks of one job: over when its future is done."""

    num_tokens: int
    is_last: bool
    over: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Board:
    """What is offered under one ticket. `reader`: the peer that it is for, once one has come; `heard_s`: when one was
    last heard of."""

    blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    num_tokens: int = 0
    is_last: bool = False
    is_over: bool = False
    reader: str = ""
    heard_s: float = 0.0
    jobs: list[_Sent] = field(default_factory=list)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


class ToyNetwork:
    """All executors that can reach each other. `is_cut`: whether nothing goes from one address to another now.
    `delays`: one of them, in seconds, is what a pull takes."""

    def __init__(
        self,
        seed: int = 0,
        failure_rate: float = 0.0,
        is_cut: Callable[[str, str], bool] = lambda one, other: False,
        delays: Sequence[float] = (0.0001, 0.003, 0.01, 0.1),
    ) -> None:
        self.rng = random.Random(f"peers of {seed}")
        self.failure_rate = failure_rate
        self.is_cut = is_cut
        self.delays = tuple(delays)
        self.peers: dict[str, ToyPeer] = {}
        self.num_pulled = 0
        self.num_lost = 0


class ToyPeer:
    """One executor's end. `check`: raises the message it is given where the first argument is false."""

    def __init__(
        self,
        network: ToyNetwork,
        address: str,
        incarnation: str,
        pools: Sequence[Pool],
        block_size: int,
        check: Callable[[bool, str], None],
    ) -> None:
        self._network = network
        self.address = address
        self.incarnation = incarnation
        self._pools = pools
        self._size = block_size
        self._check = check
        self._boards: dict[str, _Board] = {}
        self._unknown: list[asyncio.Future[None]] = []
        self._pulling: Counter[str] = Counter()  # jobs under way, by ticket
        self._given_up: dict[str, None] = {}  # of these tickets, those that are over
        network.peers[address] = self

    def leave(self) -> None:
        """It has died: nothing is to be had from it, and nothing comes."""
        if self._network.peers.get(self.address) is self:
            del self._network.peers[self.address]
        for ticket in list(self._boards):
            self.end(EndMove(ticket))

    async def send(self, job: SendBlocks) -> str:
        board = self._boards.setdefault(job.ticket, _Board(heard_s=_now()))
        if board.is_over:
            raise EngineFailed("The move is over.")
        board.blocks |= {(group, index): block for group, index, block in job.moves}
        board.num_tokens = max(board.num_tokens, job.num_tokens)
        board.is_last |= job.is_last
        unknown, self._unknown = self._unknown, []
        board.waiting += unknown
        board.wake()
        if not job.moves and not job.is_last:
            return ""
        before = [self._content(group, block) for group, _, block in job.moves]
        for group, _, block in job.moves:
            sending = self._pools[group].sending
            sending[block] = sending.get(block, 0) + 1
        sent = _Sent(job.num_tokens, job.is_last, asyncio.get_running_loop().create_future())
        board.jobs.append(sent)
        try:
            await self._until_over(board, sent)
        finally:
            board.jobs.remove(sent)
            for group, _, block in job.moves:
                sending = self._pools[group].sending
                sending[block] -= 1
                if not sending[block]:
                    del sending[block]
        for (group, _, block), content in zip(job.moves, before, strict=True):
            self._check(self._content(group, block) == content, f"block {block} was written while it was sent")
        return ""

    async def pull(self, job: PullBlocks) -> str:
        for group, ids in enumerate(job.blocks):
            for block in ids:
                if block >= 0:
                    self._fill(group, block, is_begin=True)
        ticket = job.source.ticket
        self._pulling[ticket] += 1
        try:
            return await self._pull(job)
        finally:
            self._pulling[ticket] -= 1
            if not self._pulling[ticket]:
                del self._pulling[ticket]
                self._given_up.pop(ticket, None)
            for group, ids in enumerate(job.blocks):
                for block in ids:
                    if block >= 0:
                        self._fill(group, block, is_begin=False)

    def end(self, job: EndMove) -> str:
        """Jobs under the ticket fail, those that send and those that pull."""
        if job.ticket in self._pulling:
            self._given_up[job.ticket] = None
        for peer in self._network.peers.values():
            if job.ticket in peer._boards:
                peer._boards[job.ticket].wake()
        board = self._boards.pop(job.ticket, None)
        if board is not None:
            board.is_over = True
            for sent in board.jobs:
                if not sent.over.done():
                    sent.over.set_exception(EngineFailed("The move is over."))
            board.wake()
        return ""

    async def _pull(self, job: PullBlocks) -> str:
        network, source = self._network, job.source
        board = await self._find(job)
        if board.reader not in ("", self.incarnation):
            raise EngineFailed("The ticket is of another.")
        board.reader = self.incarnation
        while not (board.is_over or board.is_last):
            if not job.is_final and board.num_tokens // self._size > job.start:
                break
            board.heard_s = _now()
            await _wait(board.waiting, SILENT_S / 3)
            self._require_reachable(job)
        num_there = board.num_tokens
        end = min(-(-num_there // self._size), job.start + len(job.blocks[0]))
        await asyncio.sleep(network.rng.choice(network.delays))
        peer = self._require_reachable(job)
        if board.is_over or network.rng.random() < network.failure_rate:
            network.num_lost += 1
            raise EngineFailed(f"KV from {source.worker} was lost on its way.")
        holes = []
        for group, ids in enumerate(job.blocks):
            for index in range(job.start, end):
                block = ids[index - job.start]
                there = board.blocks.get((group, index))
                if block >= 0 and there is None:
                    holes.append((group, index))
                elif block >= 0 and there is not None:
                    positions, tokens = peer._content(group, there)
                    slots = self._slots(block)
                    self._pools[group].positions[slots], self._pools[group].tokens[slots] = positions, tokens
                    network.num_pulled += 1
        num_tokens = min(num_there, end * self._size)
        board.heard_s = _now()
        for sent in board.jobs:
            is_had = sent.num_tokens <= num_tokens and (not sent.is_last or board.is_last)
            if is_had and not sent.over.done():
                sent.over.set_result(None)
        return json.dumps(Pulled(num_tokens, num_there, board.is_last, tuple(holes)))

    async def _find(self, job: PullBlocks) -> _Board:
        """The source's board; it may hear of the ticket a little later than its peer."""
        until_s = _now() + UNKNOWN_S
        while True:
            peer = self._require_reachable(job)
            board = peer._boards.get(job.source.ticket)
            if board is not None:
                return board
            if _now() >= until_s:
                raise EngineFailed(f"{job.source.worker} offers nothing under this ticket.")
            await _wait(peer._unknown, until_s - _now())

    def _require_reachable(self, job: PullBlocks) -> ToyPeer:
        network, source = self._network, job.source
        peer = network.peers.get(source.address)
        if source.ticket in self._given_up:
            raise EngineFailed("The move is over.")
        is_gone = peer is None or network.peers.get(self.address) is not self
        if is_gone or peer is None or peer.incarnation != source.incarnation:
            raise EngineFailed(f"{source.worker} is gone.")
        if network.is_cut(self.address, source.address):
            raise EngineFailed(f"{source.worker} cannot be reached.")
        return peer

    async def _until_over(self, board: _Board, sent: _Sent) -> None:
        """Or until no peer has been heard of for too long."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if sent.over.done():
                return
            left_s = board.heard_s + SILENT_S - loop.time()
            if left_s <= 0:
                sent.over.set_exception(EngineFailed("No peer asks for it."))
            else:
                loop.call_later(left_s, look)

        look()
        await sent.over

    def _fill(self, group: int, block: int, *, is_begin: bool) -> None:
        pool = self._pools[group]
        if not is_begin:
            del pool.moving[block]
            return
        self._check(block not in pool.moving and block not in pool.sending, f"block {block} is moved twice at once")
        pool.moving[block] = True
        slots = self._slots(block)
        pool.positions[slots] = pool.tokens[slots] = array("q", [_GARBAGE]) * self._size

    def _slots(self, block: int) -> slice:
        return slice(block * self._size, (block + 1) * self._size)

    def _content(self, group: int, block: int) -> tuple[array[int], array[int]]:
        pool, slots = self._pools[group], self._slots(block)
        return pool.positions[slots], pool.tokens[slots]


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _wait(waiting: list[asyncio.Future[None]], most_s: float) -> None:
    """Until somebody wakes those that wait there, or for so long."""
    loop = asyncio.get_running_loop()
    change: asyncio.Future[None] = loop.create_future()
    waiting.append(change)
    timer = loop.call_later(most_s, lambda: None if change.done() else change.set_result(None))
    try:
        await change
    finally:
        timer.cancel()
