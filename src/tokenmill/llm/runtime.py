"""A model loaded in this process, with its engine on an event loop in a thread of its own.

The same engine shell, client and text path as the server's, over a link of queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from ..core.errors import InvalidRequest
from ..core.events import Abort, Drain
from ..engine.build import build_engine, local_link
from ..engine.journal import Recorder
from ..formats.checkpoint import open_checkpoint
from ..formats.hub import Progress, ResolvedModel, Room, default_cache_dir, resolve_model
from ..kv.store.child import machine_beside, own_store
from ..kv.store.options import TierOptions
from ..net.system import MonotonicClock, new_event_loop, new_seed, seeds_from
from ..node.joining import join_store, joining_later
from ..node.load import load_engine
from ..node.machine import MachineFacts, read_machine
from ..node.options import EngineOptions, TextOptions
from ..node.text import load_text_model
from ..sandbox.parent import SandboxProcess, materials
from ..server.client import EngineClient

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Runtime:
    """Loads `model` when made, fetching it where needed. seed: None, or what requests without a seed draw theirs from.
    Raises ConfigError, FetchError and BadCheckpoint."""

    def __init__(
        self,
        model: str,
        options: EngineOptions,
        text_options: TextOptions,
        seed: int | None = None,
        progress: Progress | None = None,
        tiers: TierOptions | None = None,
        record: Recorder | None = None,
    ) -> None:
        tiers = tiers or TierOptions()
        room = Room(lambda: read_machine().usable_memory, _log.info)
        found = resolve_model(model, progress=progress, room=room)
        self._held = contextlib.ExitStack()
        with contextlib.ExitStack() as held:
            options, self._store = held.enter_context(own_store(tiers, options))
            self._load(found, options, text_options, machine_beside(read_machine(), tiers))
            self._held = held.pop_all()
        self.new_seed: Callable[[], int] = new_seed if seed is None else seeds_from(seed)
        self._loop = new_event_loop()
        self._closing = asyncio.Event()
        self._record = record
        self._door = threading.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_open = True
        self._failure: BaseException | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="tokenmill-engine", daemon=True)
        self._thread.start()
        started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def _load(
        self, found: ResolvedModel, options: EngineOptions, text_options: TextOptions, machine: MachineFacts
    ) -> None:
        checkpoint = open_checkpoint(found.path)
        self.text, _ = load_text_model(checkpoint, text_options)
        self.engine = load_engine(checkpoint, options, machine, default_cache_dir())
        checkpoint.close()
        self.ready = self.engine.ready(found.served_name, self.text.eos_token_ids)
        self.clock = MonotonicClock()
        self.client = EngineClient()
        self.sandbox = SandboxProcess(
            str(found.path), materials(self.text, allow_special=text_options.allow_special_in_content)
        )

    def submit(self, work: Awaitable[T]) -> Future[T]:
        """Runs `work` on the engine's thread; to cancel what it gives cancels it there. Raises InvalidRequest once the
        model has been closed."""
        with self._door:
            if self._is_open:
                return asyncio.run_coroutine_threadsafe(self._await(work), self._loop)
        if asyncio.iscoroutine(work):
            work.close()
        raise InvalidRequest("This model has been closed.")

    def wait(self, work: Awaitable[T]) -> T:
        """Awaits `work` on the engine's thread; Ctrl-C here cancels it there."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what runs and frees the model. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self, started: threading.Event) -> None:
        try:
            self._loop.run_until_complete(self._serve(started))
        except BaseException as error:
            if started.is_set():
                raise
            self._failure = error  # of the store of KV: whoever makes the model is told
        finally:
            self._shut()
            self._loop.close()
            self.engine.close()
            self._held.close()
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        watching = [] if self._store is None else [asyncio.create_task(self._store.run(), name="kv-store")]
        try:
            self.ready = await join_store(self.engine, self.ready)
            await self._serve_engine(started)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            if (copies := self.engine.worker.executor.tiers) is not None:
                await copies.leave()

    async def _serve_engine(self, started: threading.Event) -> None:
        engine_end, front_end = local_link()
        await engine_end.send(self.ready)
        self.client.attach(front_end)
        # The server's bound on its queue is not one on a list that the caller holds already.
        config = replace(self.engine.config, max_num_waiting=sys.maxsize)
        first = self.engine.first_events()
        shell = build_engine(config, self.engine.worker.executor, engine_end, self.clock, self._record, first)
        running = asyncio.create_task(shell.run())
        joining = contextlib.AsyncExitStack()
        await joining.enter_async_context(joining_later(self.engine, self.ready, shell.hear))
        running.add_done_callback(lambda _: self._closing.set())
        while self.client.ready is None:
            await asyncio.sleep(0)
        started.set()
        await self._closing.wait()
        await joining.aclose()
        self.client.close("The model has been closed.")
        if first:  # There is somewhere to save KV.
            shell.hear(Abort(shell.core.open_ids))
            shell.hear(Drain())
            await asyncio.wait((running,))
        front_end.close()
        await self.sandbox.close()
        self._shut()
        for _ in range(2):
            await asyncio.sleep(0)  # what was submitted before becomes tasks, and these begin
        # Callers in other threads wait for tasks of this loop, which have just been told of the end.
        await asyncio.gather(running, *self._calls, return_exceptions=True)
        running.result()

    def _shut(self) -> None:
        """Nothing is submitted after this: the loop would not come to it."""
        with self._door:
            self._is_open = False

    async def _await(self, work: Awaitable[T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await work
        finally:
            self._calls.discard(task)
