"""The front end's registry of LoRA adapters: name -> folder and digest, and how engines are told of them.

Requests carry an adapter's digest, which an engine found in its files; names are known here only. A new engine is
given these adapters before it counts as ready, with those that have no name any more and are used by requests that it
will resume. One whose files have changed since is dropped, because answers must not change under its name. Knows
nothing of HTTP.

Parts of an adapter's files go to workers on other machines (see core.files). What a worker may ask for is what the
engine of this machine would read: two files by name, and where the adapter must lie in a folder, only if they do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..api.errors import from_engine
from ..control.models.registry import Keep, keep_nothing
from ..core.errors import BadCheckpoint, InvalidRequest, ModelNotFound, TokenmillError, Unavailable
from ..core.events import ADAPTER_FILES, PART_BYTES, AdapterLoaded, FilePart, LoadAdapter, UnloadAdapter, WantPart


class NoPart(Exception):
    """With a sentence for whoever asked for the adapter."""


def read_part(path: str, inside: str, name: str, offset: int) -> tuple[int, bytes]:
    """(size of the file, its bytes from `offset` on, at most PART_BYTES). Blocks for a read. Raises NoPart."""
    if name not in ADAPTER_FILES or offset < 0:
        raise NoPart(f"An adapter has no file {name[:100]!r}.")
    file = Path(path) / name
    try:
        if inside and not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(inside)):
            raise NoPart(f"{path} does not lie inside {inside}, the only folder that adapters are taken from.")
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise NoPart(f"{file} is not a file.")
            return found.st_size, os.pread(fd, PART_BYTES, offset)
        finally:
            os.close(fd)
    except OSError as error:
        raise NoPart(
            f"{path} has no {name} that can be read ({error.strerror}): no LoRA adapter in PEFT's format."
        ) from None


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


class AdapterRegistry:
    """send    queues a message for one engine
    is_used   whether an open request names the adapter with this digest
    wanted    adapters to load into the first engine
    keep      is told of adapters that come and go while the server runs
    """

    def __init__(
        self,
        send: Callable[[LoadAdapter | UnloadAdapter, int], None],
        is_used: Callable[[str], bool],
        wanted: Sequence[ServedAdapter] = (),
    ) -> None:
        self._send = send
        self._is_used = is_used
        self._wanted = list(wanted)
        self._served: dict[str, ServedAdapter] = {}
        self._leaving: dict[str, ServedAdapter] = {}  # by digest: without a name, but requests may still use them
        self._links: dict[int, None] = {}  # engines that have all adapters, in the order they came
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[int, asyncio.Future[AdapterLoaded]]] = {}
        self._asked: dict[int, ServedAdapter] = {}  # whose answer is awaited, by number
        self.keep: Keep = keep_nothing

    def __iter__(self) -> Iterator[ServedAdapter]:
        """Those that requests may name, in the order they were loaded."""
        return iter([adapter for adapter in self._served.values() if adapter.digest])

    def get(self, name: str) -> ServedAdapter | None:
        adapter = self._served.get(name)
        return adapter if adapter is not None and adapter.digest else None

    def is_loading(self, name: str) -> bool:
        """Whether requests may name it soon: no engine has read it yet."""
        adapter = self._served.get(name)
        return not adapter.digest if adapter is not None else any(each.name == name for each in self._wanted)

    def take_up(self, kept: Iterable[tuple[str, dict[str, str]]], folder: str) -> None:
        """Adapters that an earlier process had loaded, as it had them kept, for the engines that come. Those that lie
        elsewhere than in `folder` are not loaded again, and wanted ones win over those of their names."""
        for name, what in kept:
            if any(each.name == name for each in self._wanted):
                continue
            if folder and Path(what["path"]).is_relative_to(folder):
                self._served.setdefault(name, ServedAdapter(name, what["path"], folder, what["digest"]))
            else:
                _log.warning("The adapter %r is not loaded again: it is not in --lora-dir.", name)

    def name_of(self, digest: str) -> str:
        """A name of the adapter with this digest; "" where it has none any more."""
        return next((adapter.name for adapter in self if adapter.digest == digest), "")

    async def load(self, adapter: ServedAdapter, *, replace_loaded: bool = False) -> ServedAdapter:
        """Have all engines load it and enter it in the registry. Raises InvalidRequest, among others."""
        name = adapter.name
        if name in self._served and not (replace_loaded and self._served[name].digest):
            raise InvalidRequest(f"The adapter {name!r} is loaded already; unload it first.", param="lora_name")
        self._served.setdefault(name, adapter)  # holds the name while the engines read
        try:
            loaded = await self._load_everywhere(adapter)
        except BaseException:
            if self._served.get(name) is adapter:
                del self._served[name]
            raise
        before = self._served.get(name)
        self._served[name] = loaded
        if before is not None and before.digest:
            self._forget(before)
        await self.keep(name, {"path": loaded.path, "digest": loaded.digest})
        return loaded

    def unload(self, name: str) -> ServedAdapter:
        """Take it out of the registry; requests that use it run to their end. Raises ModelNotFound."""
        adapter = self.get(name)
        if adapter is None:
            raise ModelNotFound(f"There is no adapter {name[:200]!r} to unload.", param="lora_name")
        del self._served[name]
        self._forget(adapter)
        return adapter

    async def restore(self, link: int) -> None:
        """Give a new engine all adapters of the registry, and those that requests still use. Raises what keeps a wanted
        one from its first load."""
        given: list[ServedAdapter] = []
        for adapter in [each for each in self._wanted if each.name not in self._served]:
            given.append(replace(adapter, digest=await self._ask(adapter, link)))
            if self._served.setdefault(adapter.name, given[-1]) is given[-1]:
                await self.keep(adapter.name, None)  # what an earlier process had loaded in its place
        self._wanted = []
        tried = set(given)
        while each := next((one for one in (*self, *self._used_leaving()) if one not in tried), None):
            tried.add(each)
            try:
                await self._load_again(each, link)
                given.append(each)
            except TokenmillError as error:
                if self.get(each.name) != each:
                    continue  # the engine refuses what names it
                if self._links:  # others serve it
                    raise InvalidRequest(f"Its adapter {each.name!r} is not served here: {error.message}") from error
                _log.error("The adapter %r is not served any more: %s", each.name, error.message)
                del self._served[each.name]
        for adapter in given:
            if self.get(adapter.name) != adapter:
                self._send(UnloadAdapter(adapter.digest), link)

    def join(self, link: int) -> None:
        """The engine has been given all adapters, and is to be told of what comes and goes."""
        self._links[link] = None

    def answer(self, message: AdapterLoaded) -> None:
        link, answer = self._answers.pop(message.number, (-1, None))
        if answer is not None and not answer.done():
            answer.set_result(message)
        elif answer is not None and message.digest:  # whoever asked has gone
            self._send(UnloadAdapter(message.digest), link)

    async def read_part(self, link: int, wanted: WantPart) -> FilePart:
        """Of an adapter that the engine has been asked to load and has not loaded yet."""
        number = wanted.number
        adapter, (asked, _) = self._asked.get(number), self._answers.get(number, (-1, None))
        if adapter is None or asked != link:
            return FilePart(number, error="Nobody wants this adapter any more.")
        try:
            where = adapter.path, adapter.inside, wanted.name, wanted.offset
            return FilePart(number, *await asyncio.to_thread(read_part, *where))
        except NoPart as refusal:
            return FilePart(number, error=str(refusal))

    def lose(self, link: int, failure: TokenmillError) -> None:
        """An engine is gone, and with it every answer that it owes."""
        self._links.pop(link, None)
        for number in [number for number, (owes, _) in self._answers.items() if owes == link]:
            _, answer = self._answers.pop(number)
            if not answer.done():
                answer.set_exception(failure)

    def _forget(self, adapter: ServedAdapter) -> None:
        """The engines drop it when its last request is over."""
        for link in self._links:  # not to one that is still being given adapters: see restore
            self._send(UnloadAdapter(adapter.digest), link)
        self._leaving[adapter.digest] = adapter
        self._used_leaving()

    def _used_leaving(self) -> list[ServedAdapter]:
        """Forgets those that no request uses."""
        self._leaving = {digest: each for digest, each in self._leaving.items() if self._is_used(digest)}
        return list(self._leaving.values())

    async def _load_again(self, adapter: ServedAdapter, link: int) -> None:
        """Raises InvalidRequest where its files have changed: answers must not change under its name."""
        digest = await self._ask(adapter, link)
        if digest != adapter.digest:
            self._send(UnloadAdapter(digest), link)
            raise InvalidRequest("its files have changed since they were loaded")

    async def _load_everywhere(self, adapter: ServedAdapter) -> ServedAdapter:
        """In all engines or in none. Raises Unavailable where no engine is left that has it."""
        loaded: dict[int, str] = {}
        try:
            while missing := [link for link in self._links if link not in loaded]:
                for link in missing:
                    try:
                        loaded[link] = await self._ask(adapter, link)
                    except Unavailable:
                        if link in self._links or not self._links:
                            raise
            digests = {loaded[link] for link in self._links}
            if len(digests) != 1:
                raise Unavailable("The engines have gone, or found different files.")
        except BaseException:
            for link, digest in loaded.items():
                self._send(UnloadAdapter(digest), link)
            raise
        return replace(adapter, digest=digests.pop())

    async def _ask(self, adapter: ServedAdapter, link: int) -> str:
        number = next(self._numbers)
        answer: asyncio.Future[AdapterLoaded] = asyncio.get_running_loop().create_future()
        self._answers[number], self._asked[number] = (link, answer), adapter
        self._send(LoadAdapter(number, adapter.path, adapter.inside, adapter.digest), link)
        try:
            said = await answer
        finally:
            del self._asked[number]
        if said.error_kind == BadCheckpoint.kind:
            raise InvalidRequest(said.error, param="lora_path")
        if said.error:
            raise from_engine(said.error, said.error_kind, said.error_param)
        return said.digest
