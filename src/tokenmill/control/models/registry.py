"""The models behind this front end besides its own: by name, whoever answers for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from ...cluster.on_demand import State
from ...core.errors import InvalidRequest, NotFound, Unavailable
from .on_demand import OnDemand
from .served import LOCAL, UPSTREAM, ServedModel

MAX_NAME = 200
_POLL_S = 0.02

Keep = Callable[[str, dict[str, Any] | None], Awaitable[None]]
"""Has what was loaded by this name, or nothing any more, loaded again by the next process."""


async def keep_nothing(name: str, what: dict[str, Any] | None) -> None:
    """No process comes after this one, or it begins with nothing."""


class Host(Protocol):
    async def load(self, name: str, model: str, kv_cache_memory_bytes: int | None) -> None:
        """Have a model of this machine in the registry, which serves then. Raises TokenmillError where it cannot be
        loaded."""
        ...


class ModelRegistry:
    """home: names of the server's own model, which answers for every name that is not here. models: the others, by
    name. on_demand: those that calls load, which are among the others while they are loaded, but for the server's own.
    aliases: names that stand for versions, with the models that these are. host: who loads more; None: nobody.
    expected: names of those that are about to be here. kept: what an earlier process had loaded at run time and nobody
    has unloaded since, by name; keep is told what this one has."""

    def __init__(self, home: Sequence[str]) -> None:
        self.home = tuple(home)
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.host: Host | None = None
        self.on_demand: OnDemand | None = None
        self.models: dict[str, ServedModel] = {}
        self.expected: set[str] = set()
        self.kept: dict[str, dict[str, Any]] = {}
        self.keep: Keep = keep_nothing
        self._begun_s = int(time.time())
        self._created: dict[str, int] = {}
        self._own: ServedModel | None = None
        self._leaving: list[ServedModel] = []
        self._ending = asyncio.Lock()

    @property
    def is_alone(self) -> bool:
        """Whether every call is for the server's own model."""
        return not self.models and not self.aliases and not self.expected and self.on_demand is None

    @property
    def others(self) -> list[ServedModel]:
        return list(self.models.values())

    def local(self) -> list[ServedModel]:
        """Models of this machine, but for the server's own where that is always loaded; those that are about to go have
        their memory still."""
        return [each for each in self._present if each.kind == LOCAL]

    @property
    def num_open(self) -> int:
        """Calls of others than the server's own model."""
        return sum(each.num_open for each in self._present if each is not self._own)

    @property
    def _present(self) -> list[ServedModel]:
        own = [] if self._own is None else [self._own]
        return [*own, *self.models.values(), *self._leaving]

    def names(self) -> list[str]:
        """Of all that calls may name besides the server's own model."""
        return [*dict.fromkeys((*self.models, *self.unloaded(), *self.aliases))]

    def unloaded(self) -> list[str]:
        """Models that a call would load."""
        names = () if self.on_demand is None else self.on_demand.schedule.models
        return [name for name in names if name not in self.models and name not in self.home]

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
        if name in self.home or name in self.names():
            raise InvalidRequest(f"There is a model {name!r} already.", param="name")

    def remove(self, name: str) -> ServedModel | None:
        self._created.pop(name, None)
        return self.models.pop(name, None)

    async def unload(self, name: str, within_s: float) -> int:
        """No new calls for a model; once those that are open have ended, or `within_s` is over, it is gone. The number
        that was ended. The next process does not load it again, and this one neither where it was kept and is not here.
        Raises NotFound, and InvalidRequest where a canary needs it."""
        if self.on_demand is not None and self.on_demand.find(name) == name:
            return await self.on_demand.unload(name, within_s)
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

    def taken(self) -> set[str]:
        """Names that a model of a folder cannot have."""
        return {*self.aliases, *self.expected, *self.home, *self.models}

    def put_on_demand(self, model: ServedModel) -> None:
        """One that was loaded for a call, until it is to `end`."""
        if model.name in self.home:
            self._own = model
        else:
            self.models[model.name] = model
            self._created.setdefault(model.name, int(time.time()))

    async def end(self, model: ServedModel) -> None:
        """One that has no calls is unloaded; its name stays known to those who load."""
        if model is self._own:
            self._own = None
        else:
            del self.models[model.name]
        self._leaving.append(model)
        await self._end(model)

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
        is_listed = self.on_demand is not None and self.on_demand.find(name) is not None
        return is_listed or name in self.aliases or name in self.expected or self.find(name) is not None

    def card(self, name: str) -> dict[str, Any] | None:
        """As /v1/models lists a model; None: it is not one of these."""
        model, listed = self.find(name), None if self.on_demand is None else self.on_demand.find(name)
        if (model is None and name not in self.aliases and listed is None) or name in self.home:
            return None
        owner = UPSTREAM if model is not None and model.kind == UPSTREAM else "tokenmill"
        created = self._begun_s if model is None else self._created[model.name]
        return {"id": name, "object": "model", "created": created, "owned_by": owner, **self.status(name)}

    def status(self, name: str) -> dict[str, Any]:
        """Whether a model that calls load is loaded, as llama-server's router says it; nothing of others."""
        on_demand = self.on_demand
        found = None if on_demand is None else on_demand.find(name)
        if on_demand is None or found is None:
            return {}
        failure = on_demand.failure(found)
        failed = {"failed": True, "reason": failure} if failure else {}
        return {"status": {"value": on_demand.shown_state(found), **failed}}

    def cards(self) -> list[dict[str, Any]]:
        return [card for name in self.names() if (card := self.card(name)) is not None]

    def is_asleep(self, name: str) -> bool:
        """Whether a model has no engine because no call needs it."""
        found = None if self.on_demand is None else self.on_demand.find(name)
        return self.on_demand is not None and found is not None and self.on_demand.state(found) is not State.LOADED

    def shown(self) -> list[dict[str, Any]]:
        """For /admin/models."""
        unloaded = [
            {"name": name, "kind": LOCAL, "state": self.status(name)["status"]["value"], "why": None, "num_open": 0}
            for name in self.unloaded()
        ]
        return unloaded + [
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
        if self.on_demand is not None:
            await self.on_demand.close()
        for each in (*self.others, *([] if self._own is None else [self._own])):
            await each.close()
        for each in list(self._leaving):
            await self._end(each)

    def end_calls(self) -> None:
        for each in self._present:
            each.end_calls()
