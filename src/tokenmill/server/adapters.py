"""The front end's book of LoRA adapters: name -> folder and digest, and how an engine is told of them.

Requests carry an adapter's digest, which the engine found in its files; names are known here only. A new engine is
given the book's adapters again before it counts as ready: one whose files have changed since is dropped, because
answers must not change under its name. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..core.errors import BadCheckpoint, InvalidRequest, ModelNotFound, TokenmillError
from ..core.events import AdapterLoaded, LoadAdapter, UnloadAdapter
from .errors import from_engine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """name     what requests call it
    path     its folder, as given
    inside   the folder it must lie under; "" for one that the operator named
    digest   of its content; "" until an engine has read it
    """

    name: str
    path: str
    inside: str = ""
    digest: str = ""


class AdapterBook:
    """send    queues a message for the engine
    wanted  adapters to load into the first engine
    """

    def __init__(
        self, send: Callable[[LoadAdapter | UnloadAdapter], None], wanted: Sequence[ServedAdapter] = ()
    ) -> None:
        self._send = send
        self._wanted = list(wanted)
        self._served: dict[str, ServedAdapter] = {}
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[AdapterLoaded]] = {}

    def __iter__(self) -> Iterator[ServedAdapter]:
        """Those that requests may name, in the order they were loaded."""
        return iter([adapter for adapter in self._served.values() if adapter.digest])

    def get(self, name: str) -> ServedAdapter | None:
        adapter = self._served.get(name)
        return adapter if adapter is not None and adapter.digest else None

    def name_of(self, digest: str) -> str:
        """A name of the adapter with this digest; "" where it has none any more."""
        return next((adapter.name for adapter in self if adapter.digest == digest), "")

    async def load(self, adapter: ServedAdapter, *, replace_loaded: bool = False) -> ServedAdapter:
        """Have the engine load it and enter it in the book. Raises InvalidRequest, among others."""
        name = adapter.name
        if name in self._served and not (replace_loaded and self._served[name].digest):
            raise InvalidRequest(f"The adapter {name!r} is loaded already; unload it first.", param="lora_name")
        self._served.setdefault(name, adapter)  # holds the name while the engine reads
        try:
            loaded = replace(adapter, digest=await self._ask(adapter))
        except BaseException:
            if self._served.get(name) is adapter:
                del self._served[name]
            raise
        before = self._served.get(name)
        self._served[name] = loaded
        if before is not None and before.digest:
            self._send(UnloadAdapter(before.digest))
        return loaded

    def unload(self, name: str) -> ServedAdapter:
        """Take it out of the book; requests that use it run to their end. Raises ModelNotFound."""
        adapter = self.get(name)
        if adapter is None:
            raise ModelNotFound(f"There is no adapter {name[:200]!r} to unload.", param="lora_name")
        del self._served[name]
        self._send(UnloadAdapter(adapter.digest))
        return adapter

    async def restore(self) -> None:
        """Give a new engine all adapters of the book. Raises what keeps a wanted one from its first load."""
        served = list(self._served.values())
        while self._wanted:
            await self.load(self._wanted[0])
            del self._wanted[0]
        for adapter in served:
            if not adapter.digest:
                continue
            try:
                digest = await self._ask(adapter)
                if digest != adapter.digest:
                    self._send(UnloadAdapter(digest))
                    raise InvalidRequest("its files have changed since they were loaded")
            except TokenmillError as error:
                _log.error("The adapter %r is not served any more: %s", adapter.name, error.message)
                del self._served[adapter.name]

    def answer(self, message: AdapterLoaded) -> None:
        answer = self._answers.pop(message.number, None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def lose(self, failure: TokenmillError) -> None:
        """The engine is gone, and with it every answer that is awaited."""
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(failure)

    async def _ask(self, adapter: ServedAdapter) -> str:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(LoadAdapter(number, adapter.path, adapter.inside))
        said = await answer
        if said.error_kind == BadCheckpoint.kind:
            raise InvalidRequest(said.error, param="lora_path")
        if said.error:
            raise from_engine(said.error, said.error_kind, said.error_param)
        return said.digest
