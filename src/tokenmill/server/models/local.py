"""A model of this machine beside the server's own: an application of its own, in front of engines of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from ...control.models.registry import LOCAL
from ...core.errors import Unavailable
from .replay import unread


class LocalModel:
    """A ServedModel. app: of `build_app`, beside the server's own; path: where the model lies; stop: ends what is
    behind it, once."""

    kind = LOCAL

    def __init__(self, name: str, app: Starlette, path: str, stop: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self._app = app
        self._path = path
        self._stop = stop

    @property
    def num_open(self) -> int:
        num_open: int = self._app.state.client.num_open
        return num_open

    @property
    def registry(self) -> CollectorRegistry | None:
        registry: CollectorRegistry = self._app.state.client.observers.metrics.registry
        return registry

    @property
    def memory_bytes(self) -> int:
        ready = self._app.state.client.ready
        return 0 if ready is None else sum(size for _, size in ready.memory)

    @property
    def why_not(self) -> str:
        return "" if self._app.state.client.ready is not None else "no engine is ready"

    def takes(self, path: str) -> bool:
        return True

    async def answer(self, path: str, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.state.inside(*unread(scope, body, receive), send)

    async def view(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What an operator asks of it."""
        await self._app.state.inside(scope, receive, send)

    def facts(self) -> dict[str, Any]:
        ready = self._app.state.client.ready
        memory = () if ready is None else ready.memory
        return {
            "path": self._path,
            "max_model_len": None if ready is None else ready.max_model_len,
            "memory_bytes": dict(memory),
        }

    def open(self) -> None:
        """It serves since it was made."""

    def end_calls(self) -> None:
        self._app.state.client.fail_open(Unavailable("The model is unloaded."))

    async def close(self) -> None:
        await self._stop()
