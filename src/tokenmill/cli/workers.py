"""Workers of `serve`: engines on other machines, which come and go by themselves (see net.tcp).

Each that joins is attached to the client as one more engine, and let go when its link ends; what it had goes on in
another. A worker must compute what the others compute, so that it does not matter which one answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cluster.likeness import unlike
from ..core.events import Ready
from ..formats.checkpoint import weights_digest
from ..net.clock import MonotonicClock
from ..net.handshake import Identity
from ..net.link import FrontLink
from ..net.tcp import Credentials, LinkBounds, WorkerListener
from ..server.client import EngineClient
from ..server.listen import listening
from .supervisor import Watched
from .worker_options import shown_address

TOKEN_BYTES = 512
"""Of a message, for each token that may be open: its id, or its logprob with 20 others and their ids."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Worker:
    """One that has joined."""

    link: FrontLink
    address: str
    leaving: asyncio.Task[None] | None = None


class Workers:
    """Takes workers in at `address` while `run` runs. They must have the model at `path`, whose digest is remembered
    in `cache_dir`."""

    def __init__(
        self, address: tuple[str, int], credentials: Credentials, path: str, cache_dir: str, max_message_bytes: int
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._path = path
        self._cache_dir = Path(cache_dir)
        self._bounds = LinkBounds(max_message_bytes)
        self._workers: dict[str, _Worker] = {}  # by incarnation

    async def run(
        self,
        client: EngineClient,
        complete: Callable[[Ready], Ready],
        on_listening: Callable[[str], None] = lambda address: None,
        like: Ready | None = None,
    ) -> None:
        """Never returns; ends when cancelled. Raises ConfigError when the address cannot be had. `like`: the facts of
        an engine that workers must agree with, also while it does not serve; None: they must agree with each other."""
        weights = await asyncio.to_thread(weights_digest, self._path, self._cache_dir)

        def judge(identity: Identity) -> str:
            if identity.weights != weights:
                return "Its model has other weights than this front end's."
            return unlike(identity.ready, like or client.ready)

        def join(identity: Identity, link: FrontLink, address: str) -> None:
            former = self._workers.get(identity.incarnation)
            if former is not None:
                former.link.close()
            worker = self._workers[identity.incarnation] = _Worker(link, address)
            worker.leaving = asyncio.create_task(self._serve(client, complete, identity.incarnation, worker))

        with listening(*self._address) as listener:
            taker = WorkerListener(listener, self._credentials, MonotonicClock(), judge, join, self._bounds)
            taker.open()
            on_listening(shown_address(*listener.getsockname()[:2]))
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                taker.close()
                for worker in self._workers.values():
                    worker.link.close()

    async def _serve(
        self, client: EngineClient, complete: Callable[[Ready], Ready], incarnation: str, worker: _Worker
    ) -> None:
        """Until its link ends."""
        _log.warning("The worker at %s has joined.", worker.address)
        client.attach(Watched(worker.link, complete), on_broken=worker.link.close, address=worker.address)
        await worker.link.wait_ended()
        worker.link.close()
        _log.warning("The worker at %s has left: %s", worker.address, worker.link.why_ended)
        if self._workers.get(incarnation) is worker:
            del self._workers[incarnation]
