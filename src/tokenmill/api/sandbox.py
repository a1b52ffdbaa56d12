"""What is done in the sandbox process because it is heavy or hostile, and for whom: bodies are read there where that is
not quick.

Heavy is a body of more than a mebibyte or of very many values, or a text of more than 100,000 characters. Hostile is
any chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest

from ..core.errors import BodyTooLarge
from ..core.tenant import ANYONE, Tenant
from ..text.special_tokens import Rendered
from .endpoints import ENDPOINTS, parse_body
from .errors import ClientGone
from .fields import parse_object
from .jobs import Job, Read, unpack, unpack_ids
from .rules import Rules

HEAVY_BYTES = 1 << 20
HEAVY_VALUES = 20_000
HEAVY_OBJECT = 12
"""For so many values more an object counts: it is read field by field, here, where an array of numbers is not."""

T = TypeVar("T")


class Sandbox(Protocol):
    async def run(self, job: Job, client: str) -> bytes:
        """The result of `job`, in its own encoding. Jobs of different clients take turns; cancelling ends the job.
        Raises what the job raises, InvalidRequest when it takes more time or memory than it may, and Unavailable when
        there is no sandbox."""
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


Check = Callable[[dict[str, Any]], Any]


async def read_call(
    endpoint: str, body: bytes, rules: Rules, sandbox: Sandbox, caller: Caller, check_model: Check, room: int
) -> tuple[Any, list[str], Rendered | None]:
    """(the call, names of unknown fields, the conversation where it is rendered already). `check_model` refuses a body
    that names a model which is not here. `room`: tokens of context. Raises InvalidRequest naming the field."""
    if not is_heavy(body):
        fields = parse_object(body)
        check_model(fields)
        call, unknown = parse_body(endpoint, fields, rules)
        return call, unknown, None
    result = await caller.stay(sandbox.run(Read(endpoint, body, room), caller.name))
    call, unknown, prompts, rendered = unpack(endpoint, result)
    check_model({"model": call.model})
    given: list[str | tuple[int, ...]] = []
    for prompt in prompts:
        if isinstance(prompt, bytes):
            await asyncio.sleep(0)  # Between many prompts the streams of others have their turn.
            prompt = unpack_ids(prompt)
        given.append(prompt)
    return replace(call, **{ENDPOINTS[endpoint][2]: tuple(given)}), unknown, rendered


def parse_small(body: bytes) -> dict[str, Any]:
    """The object in a body that has no reason to be large. Raises BodyTooLarge, InvalidRequest."""
    if is_heavy(body):
        raise BodyTooLarge("The body is larger than this path takes.")
    return parse_object(body)
