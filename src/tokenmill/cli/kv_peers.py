"""Opens a worker to others: where they get KV from it, and how it gets theirs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..worker.moves import PeerMoves

if TYPE_CHECKING:
    from ..core.events import WorkerFacts
    from ..node.load import Engine

log = logging.getLogger(__name__)


def open_to_peers(engine: Engine, facts: WorkerFacts, host: str) -> WorkerFacts:
    """The same worker, with the address where KV of it can be had: on `host`, unless that is "" or it keeps no KV."""
    if not host or engine.pooling is not None or not engine.config.keeps_kv:
        return facts
    moves = PeerMoves(engine.worker.pools, engine.config.block_size, facts.incarnation, facts.host)
    try:
        address = moves.start(host)
    except OSError as error:
        log.warning("Other workers get no KV from this one: %s cannot be listened on (%s).", host, error.strerror)
        moves.close()
        return facts
    engine.worker.executor.reach_peers(moves)
    return facts._replace(kv_address=address)
