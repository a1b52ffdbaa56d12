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

from ..cluster.links import incompatibility, unasked
from ..core.events import Ready, WorkerFacts
from ..formats.checkpoint import weights_digest
from ..net.handshake import Identity
from ..net.link import FrontLink
from ..net.system import MonotonicClock
from ..net.tcp import Credentials, LinkBounds, WorkerListener
from ..server.client import EngineClient
from ..server.engine_link import AttachedEngine
from ..server.listen import listening
from .supervisor import Watched
from .worker_options import shown_address

TOKEN_BYTES = 512
"""Of a message, for each token that may be open: its id, or its logprob with 20 others and their ids."""

MOST_FENCED = 4096
"""Incarnations that are remembered as replaced."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Worker:
    """One that has joined."""

    facts: WorkerFacts
    link: FrontLink
    address: str
    attached: AttachedEngine
    leaving: asyncio.Task[None] | None = None


class Workers:
    """Takes workers in at `address` while `run` runs. They must have the model at `path`, whose digest is remembered
    in `cache_dir`, and the settings that were `asked` for (node.resolve.asked_answering)."""

    def __init__(
        self,
        address: tuple[str, int],
        credentials: Credentials,
        path: str,
        cache_dir: str,
        max_message_bytes: int,
        asked: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._path = path
        self._cache_dir = Path(cache_dir)
        self._asked = asked
        self._bounds = LinkBounds(max_message_bytes)
        self._workers: dict[str, _Worker] = {}  # by id
        self._fenced: dict[str, None] = {}  # incarnations that later lives have replaced

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
            namesake = client.roster.find(identity.ready.worker.id)
            if namesake is not None and namesake.owner is not None:
                return f"An engine that this server starts itself is called {identity.ready.worker.id!r}, too."
            if identity.ready.worker.incarnation in self._fenced:
                return f"A later life of the worker {identity.ready.worker.id!r} has joined."
            return unasked(identity.ready, self._asked) or incompatibility(identity.ready, like or client.ready)

        def join(identity: Identity, link: FrontLink, address: str) -> None:
            facts = identity.ready.worker
            former = self._workers.get(facts.id)
            if former is not None:
                self._replace(client, former, facts)
            _log.warning("The worker %s at %s has joined.", facts.id, address)
            attached = client.attach(Watched(link, complete), on_broken=link.close, address=address)
            worker = self._workers[facts.id] = _Worker(facts, link, address, attached)
            worker.leaving = asyncio.create_task(self._see_off(worker))

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

    def _replace(self, client: EngineClient, former: _Worker, facts: WorkerFacts) -> None:
        """A worker has joined anew: nothing more is heard of its former link, nor of its former life."""
        if former.facts.incarnation != facts.incarnation:
            self._fenced[former.facts.incarnation] = None
            while len(self._fenced) > MOST_FENCED:
                del self._fenced[next(iter(self._fenced))]
        client.detach(former.attached, "The worker has been replaced by its next life.")
        former.link.close()

    async def _see_off(self, worker: _Worker) -> None:
        """When its link ends."""
        await worker.link.wait_ended()
        worker.link.close()
        _log.warning("The worker %s at %s has left: %s", worker.facts.id, worker.address, worker.link.why_ended)
        if self._workers.get(worker.facts.id) is worker:
            del self._workers[worker.facts.id]
