"""A model behind a front end, whoever answers for it."""

from __future__ import annotations

from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

UPSTREAM, LOCAL = "upstream", "local"


class ServedModel(Protocol):
    """name: as calls say it. kind: UPSTREAM or LOCAL. num_open: calls of now."""

    name: str
    kind: str

    @property
    def num_open(self) -> int: ...

    @property
    def registry(self) -> CollectorRegistry | None:
        """Its metrics, where these are not the server's own."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What engines of this machine may take for it."""
        ...

    @property
    def why_not(self) -> str:
        """Why no call can be answered now; "": it can."""
        ...

    def takes(self, path: str) -> bool:
        """Whether it answers calls of this path."""
        ...

    async def answer(self, path: str, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises TokenmillError before the answer has begun, and ClientGone."""
        ...

    def facts(self) -> dict[str, Any]:
        """What its entry in /admin/models says besides name, kind and open calls."""
        ...

    def open(self) -> None: ...

    async def close(self) -> None: ...

    def end_calls(self) -> None:
        """All that are open, with an error."""
        ...
