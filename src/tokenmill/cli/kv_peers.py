"""Opens a worker to others: where they get KV from it, and how it gets theirs (`kv.transfer.peer.client`)."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from ..kv.connector.worker.moves import PeerMoves
from ..kv.transfer.peer.client import NONCE_BYTES, PeerAuth

if TYPE_CHECKING:
    from ..core.events import WorkerFacts
    from ..node.load import Engine

log = logging.getLogger(__name__)

TRANSFERS = MEMORY, TCP, TIER = ("memory", "tcp", "tier")
LOOPBACK = ("127.0.0.1", 0)


def open_to_peers(
    engine: Engine, facts: WorkerFacts, where: tuple[str, int], transfer: str, auth: PeerAuth | None = None
) -> WorkerFacts:
    """The same worker, with the address where KV of it can be had: at `where`, if it keeps KV. `auth` None: it meets
    workers of this machine alone."""
    if engine.pooling is not None or not engine.config.keeps_kv or transfer == TIER:
        return facts
    auth = auth or PeerAuth(secrets.token_bytes(NONCE_BYTES))
    moves = PeerMoves(
        engine.worker.pools,
        engine.config.block_size,
        facts.incarnation,
        facts.host,
        may_read=transfer == MEMORY,
        welcome=auth.welcome,
        connect=auth.connect,
    )
    try:
        address = moves.start(*where)
    except OSError as error:
        log.warning("Other workers get no KV from this one: %s:%d cannot be had (%s).", *where, error.strerror)
        moves.close()
        return facts
    engine.worker.executor.reach_peers(moves)
    return facts._replace(kv_address=address)
