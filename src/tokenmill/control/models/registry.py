"""The models behind this front end besides its own: by name, whoever answers for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from ...core.errors import InvalidRequest, NotFound, Unavailable

MAX_NAME = 200
_POLL_S = 0.02
UPSTREAM, LOCAL = "upstream", "local"

Keep = Callable[[str, dict[str, Any] | None], Awaitable[None]]
"""Has what was loaded by this name, or nothing any more, loaded again by the next process."""


async def keep_nothing(name: str, what: dict[str, Any] | None) -> None:
    """No process comes after this one, or it begins with nothing."""


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


class Host(Protocol):
    async def load(self, name: str, model: str, kv_cache_memory_bytes: int | None) -> None:
        """Have a model of this machine in the registry, which serves then. Raises TokenmillError where it cannot be
        loaded."""
        ...


class ModelRegistry:
    """home: names of the server's own model, which answers for every name that is not here. models: the others, by
    name. aliases: names that stand for versions, with the models that these are. host: who loads more; None: nobody.
    expected: names of those that are about to be here. kept: what an earlier process had loaded at run time and nobody
    has unloaded since, by name; keep is told what this one has."""

    def __init__(self, home: Sequence[str]) -> None:
        self.home = tuple(home)
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.host: Host | None = None
        self.models: dict[str, ServedModel] = {}
        self.expected: set[str] = set()
        self.kept: dict[str, dict[str, Any]] = {}
        self.keep: Keep = keep_nothing
        self._begun_s = int(time.time())
        self._created: dict[str, int] = {}
        self._leaving: list[ServedModel] = []
        self._ending = asyncio.Lock()

    @property
    def is_alone(self) -> bool:
        """Whether every call is for the server's own model."""
        return not self.models and not self.aliases and not self.expected

    @property
    def others(self) -> list[ServedModel]:
        return list(self.models.values())

    def local(self) -> list[ServedModel]:
        """Models of this machine, but for the server's own; those that are about to go have their memory still."""
        return [each for each in self._present if each.kind == LOCAL]

    @property
    def num_open(self) -> int:
        return sum(each.num_open for each in self._present)

    @property
    def _present(self) -> list[ServedModel]:
        return [*self.models.values(), *self._leaving]

    def names(self) -> list[str]:
        return [*self.models, *self.aliases]

    def expect(self, host: Host, names: set[str]) -> None:
        """Models of these names come, and those that were kept by other names."""
        self.host = host
        self.kept = {name: what for name, what in self.kept.items() if name not in names and name not in self.home}
        self.expected |= (names | {*self.kept}) - {*self.home}

    def add(self, model: ServedModel) -> None:
        """Raises InvalidRequest for a name that cannot be had."""
        self.check_new(model.name)
        self.models[model.name] = model
        self.expected.discard(model.name)
        self._created[model.name] = int(time.time())

    def check_new(self, name: str) -> None:
        """Raises InvalidRequest."""
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidRequest(f"The name of a model must be 1 to {MAX_NAME} printable characters.", param="name")
        if name in self.home or name in self.models or name in self.aliases:
            raise InvalidRequest(f"There is a model {name!r} already.", param="name")

    def remove(self, name: str) -> ServedModel | None:
        self._created.pop(name, None)
        return self.models.pop(name, None)

    async def unload(self, name: str, within_s: float) -> int:
        """No new calls for a model; once those that are open have ended, or `within_s` is over, it is gone. The number
        that was ended. The next process does not load it again, and this one neither where it was kept and is not here.
        Raises NotFound, and InvalidRequest where a canary needs it."""
        for alias, models in self.aliases.items():
            if name in models:
                raise InvalidRequest(f"{name} is a version of {alias}: delete that first.", param="name")
        model, was_kept = self.remove(name), self.kept.pop(name, None) is not None
        if model is None:
            if not was_kept:
                raise NotFound(f"There is no model {name[:100]!r} beside this server's own.", param="name")
            self.expected.discard(name)
            await self.keep(name, None)
            return 0
        self._leaving.append(model)
        left_s = within_s
        try:
            await self.keep(name, None)
            while model.num_open and left_s > 0:
                await asyncio.sleep(_POLL_S)
                left_s -= _POLL_S
        finally:  # also where nobody waits for the answer any more
            num_ended = model.num_open
            model.end_calls()
            await self._end(model)
        return num_ended

    async def _end(self, model: ServedModel) -> None:
        """One that leaves, once."""
        async with self._ending:
            if model in self._leaving:
                await model.close()
                self._leaving.remove(model)

    def find(self, name: str | None) -> ServedModel | None:
        """None: the server's own model is to answer. A name may carry the tag "latest", as Ollama's clients write."""
        if name is None or name in self.home:
            return None
        return self.models.get(name) or self.models.get(name.removesuffix(":latest"))

    def require_loaded(self, name: str | None) -> None:
        """Raises Unavailable for a model that is about to be here."""
        if name in self.expected:
            raise Unavailable(f"The model {name} is still loading.", retry_after_s=1.0, param="model")

    def is_beside(self, name: str) -> bool:
        """Whether another than the server's own model may answer for the name."""
        return name in self.aliases or name in self.expected or self.find(name) is not None

    def card(self, name: str) -> dict[str, Any] | None:
        """As /v1/models lists a model; None: it is not one of these."""
        model = self.find(name)
        if model is None and name not in self.aliases:
            return None
        owner = UPSTREAM if model is not None and model.kind == UPSTREAM else "tokenmill"
        created = self._begun_s if model is None else self._created[model.name]
        return {"id": name, "object": "model", "created": created, "owned_by": owner}

    def cards(self) -> list[dict[str, Any]]:
        return [card for name in self.names() if (card := self.card(name)) is not None]

    def shown(self) -> list[dict[str, Any]]:
        """For /admin/models."""
        return [
            {
                "name": each.name,
                "kind": each.kind,
                "state": "down" if each.why_not else "ready",
                "why": each.why_not or None,
                "num_open": each.num_open,
                **each.facts(),
            }
            for each in self.others
        ]

    def open(self) -> None:
        for each in self.others:
            each.open()

    def registries(self) -> list[CollectorRegistry]:
        """Metrics of models of this machine."""
        return [found for each in self.others if (found := each.registry) is not None]

    async def close(self) -> None:
        for each in self.others:
            await each.close()
        for each in list(self._leaving):
            await self._end(each)

    def end_calls(self) -> None:
        for each in self._present:
            each.end_calls()
