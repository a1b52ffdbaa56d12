"""KV between this worker and others: the jobs PullBlocks, SendBlocks and EndMove, on threads beside the steps.

Blocks are copied where they lie. That needs no turn in the queue of steps: the engine reserves what is filled and pins
what is sent, so no step touches either before the job has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ....core.errors import EngineFailed
from ....core.moves import EndMove, PullBlocks, Pulled, SendBlocks
from ....ops.kv_pool import KVPool
from ...transfer.peer.board import BlockMemory, Board, Refused
from ...transfer.peer.client import Connect, PeerClient, connect_plainly
from ...transfer.peer.frames import BadPeer, Connection
from ...transfer.peer.server import PeerServer, Welcome

log = logging.getLogger(__name__)

SILENT_S = 30.0
"""An offer ends that no peer has asked for in so long."""

MOST_PULLS = 64
_LOOK_S = 1.0


class PeerMoves:
    """`incarnation`: of this life of the worker; `host`: as WorkerFacts has it; `may_read`: the memory of others there.
    Nothing runs before `start`."""

    def __init__(
        self,
        pools: Sequence[KVPool],
        block_size: int,
        incarnation: str,
        host: str,
        *,
        may_read: bool = True,
        welcome: Welcome = Connection,
        connect: Connect = connect_plainly,
    ) -> None:
        self._pools = pools
        self._memories = [BlockMemory(*pool.memory(), pool.group.bytes_per_block) for pool in pools]
        self._board = Board(block_size)
        self._server = PeerServer(self._board, incarnation, self._memories, welcome)
        self._client = PeerClient(incarnation, host, self._memories, block_size, connect, may_read=may_read)
        self._pullers = ThreadPoolExecutor(MOST_PULLS, "kv-pull")
        self._summer = ThreadPoolExecutor(1, "kv-sums")
        self._pulls: dict[str, threading.Event] = {}
        self._sends: dict[str, set[asyncio.Future[None]]] = {}

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve others from now on; the address. Raises OSError."""
        self._server.start(host, port)
        return self._server.address

    def close(self) -> None:
        """Wait for copies under way: the pools may go after that."""
        for is_over in self._pulls.values():
            is_over.set()
        self._board.close()
        self._server.close()
        self._client.close()
        self._pullers.shutdown(cancel_futures=True)
        self._summer.shutdown(cancel_futures=True)

    async def pull(self, job: PullBlocks) -> str:
        """Raises EngineFailed where nothing is to be had."""
        is_over = self._pulls.setdefault(job.source.ticket, threading.Event())
        try:
            loop = asyncio.get_running_loop()
            return json.dumps(await loop.run_in_executor(self._pullers, self._pull, job, is_over))
        except asyncio.CancelledError:
            is_over.set()  # its thread ends soon, and `close` waits for it
            raise
        except (Refused, BadPeer, EOFError, OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            log.info("KV of worker %s cannot be had: %s", job.source.worker, error)
            raise EngineFailed(f"KV of worker {job.source.worker} cannot be had: {error}") from error
        finally:
            if self._pulls.get(job.source.ticket) is is_over:
                del self._pulls[job.source.ticket]

    def _pull(self, job: PullBlocks, is_over: threading.Event) -> Pulled:
        """The first touch of memory is dear, and there is time for it before the first block is there."""
        for pool, ids in zip(self._pools, job.blocks, strict=True):
            pool.commit([block for block in ids if block >= 0])
        return self._client.pull(job, is_over)

    async def send(self, job: SendBlocks) -> str:
        """Raises EngineFailed where no peer comes for it, or it is over."""
        loop = asyncio.get_running_loop()
        is_had: asyncio.Future[None] = loop.create_future()
        sends = self._sends.setdefault(job.ticket, set())
        sends.add(is_had)

        def over() -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(lambda: None if is_had.done() else is_had.set_result(None))

        try:
            self._board.post(job.ticket, job.moves, job.num_tokens, job.is_last, over)
            if job.moves:
                await loop.run_in_executor(self._summer, self._sum, job)
            elif not job.is_last:
                return ""
            while not is_had.done():
                await asyncio.wait((is_had,), timeout=_LOOK_S)
                if not is_had.done() and self._board.silent_s(job.ticket) > SILENT_S:
                    raise EngineFailed(f"No peer has asked for KV in {SILENT_S:g} s.")
            is_had.result()
            return ""
        finally:
            sends.discard(is_had)
            if not sends:
                self._sends.pop(job.ticket, None)

    def end(self, job: EndMove) -> str:
        """What sends or pulls under this ticket fails; after that nobody is given its blocks."""
        self._board.withdraw(job.ticket)
        for is_had in self._sends.get(job.ticket, ()):
            if not is_had.done():
                is_had.set_exception(EngineFailed("The move is over."))
        is_over = self._pulls.get(job.ticket)
        if is_over is not None:
            is_over.set()
        return ""

    def _sum(self, job: SendBlocks) -> None:
        sums = {(group, index): zlib.crc32(self._memories[group].block(block)) for group, index, block in job.moves}
        self._board.note_sums(job.ticket, sums)
