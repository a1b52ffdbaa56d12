"""The models beside the server's own, as clients of Ollama ask for them: all that may be called, what is in memory, and
what a model is like, without loading it."""

from __future__ import annotations

from collections.abc import Iterator

from ..api.port import Beside, Described
from ..cluster.on_demand import State
from ..control.models.on_demand import Listed
from ..control.models.registry import ModelRegistry
from .models import LocalModel


class Listing:
    """An api.port.Listing."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._described: dict[Listed, Described] = {}

    async def refresh(self) -> None:
        if self._models.on_demand is not None:
            await self._models.on_demand.refresh()

    def others(self) -> Iterator[Beside]:
        on_demand = self._models.on_demand
        for name in self._models.names():
            model = self._models.find(name)
            listed = None if on_demand is None else on_demand.listed.get(name)
            if isinstance(model, LocalModel):
                info = model.text.info
                size_bytes = info.size_bytes if listed is None else listed.size_bytes
                loaded = (model.memory_bytes, model.context_length)
                yield Beside(name, info, size_bytes, info.modified_s, loaded, self.expires_s(name))
            elif listed is not None:
                yield Beside(name, listed.info, listed.size_bytes, listed.modified_s, None, None)

    def expires_s(self, name: str) -> float | None:
        on_demand = self._models.on_demand
        found = None if on_demand is None else on_demand.find(name)
        if on_demand is None or found is None or on_demand.state(found) is not State.LOADED:
            return None
        return on_demand.expires_s(found)

    async def describe(self, name: str) -> Described | None:
        on_demand = self._models.on_demand
        found = None if on_demand is None else on_demand.find(name)
        if on_demand is None or found is None or found == on_demand.home:
            return None
        listed, there = on_demand.listed[found], on_demand.listed.values()
        if listed not in self._described:
            text, gives_vectors = await on_demand.read(listed)
            self._described = {each: told for each, told in self._described.items() if each in there}
            self._described[listed] = Described.of(text, text.max_context, gives_vectors=gives_vectors)
        return self._described[listed]
