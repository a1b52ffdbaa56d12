"""The port to the helper process: heavy and hostile input is worked on there, never on this event loop.

What is heavy: a body of more than a mebibyte or of very many values, a text of more than 100,000 characters. What is
hostile: any chat template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest

from ..api.errors import ClientGone
from ..api.jobs import Job
from ..control.tenants.tenant import ANYONE, Tenant

HEAVY_BYTES = 1 << 20
HEAVY_VALUES = 20_000
HEAVY_OBJECT = 12
"""For so many values more an object counts: it is read field by field, here, where an array of numbers is not."""

T = TypeVar("T")


class Helper(Protocol):
    async def run(self, job: Job, client: str) -> bytes:
        """The result of `job`, in its own encoding. Jobs of different clients take turns; cancelling ends the job.
        Raises what the job raises, InvalidRequest when it takes more time or memory than it may, and Unavailable when
        there is no helper."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a job is done. `name`: clients take turns by it. `request`: None where nobody can leave. `key`: the id
    of the API key, "" where none is known. `once`: a name under which the call counts once in what is billed, however
    often it is answered; "": each answer counts."""

    name: str = ""
    request: HttpRequest | None = None
    tenant: Tenant = ANYONE
    key: str = ""
    once: str = ""

    async def stay(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives. It is cancelled, and ClientGone raised, when the client leaves."""
        if self.request is None:
            return await work
        task = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            task.cancel()
            leaving.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)

    async def _left(self) -> None:
        assert self.request is not None
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


def caller_of(request: HttpRequest) -> Caller:
    state = request.scope["state"]
    return Caller(state["client"], request, state["tenant"], state.get("key", ""), state.get("once", ""))


def is_heavy(body: bytes) -> bool:
    """Whether reading a body takes long enough to be felt by others."""
    if len(body) > HEAVY_BYTES:
        return True
    return sum(map(body.count, (b",", b":", b"["))) + (1 + HEAVY_OBJECT) * body.count(b"{") > HEAVY_VALUES
