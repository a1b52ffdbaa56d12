"""A model loaded in this process, with its engine on an event loop in a thread of its own.

The same engine shell, client and text path as the server's, over a link of queues.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from ..core.errors import InvalidRequest
from ..core.events import Abort, Drain
from ..engine.build import build_engine
from ..engine.link import local_link
from ..formats.checkpoint import open_checkpoint
from ..formats.hub import Progress, default_cache_dir, resolve_model
from ..helper.parent import HelperProcess, materials
from ..net.clock import MonotonicClock
from ..net.entropy import new_seed, seeds_from
from ..net.loop import new_event_loop
from ..node.load import load_engine
from ..node.machine import read_machine
from ..node.options import EngineOptions, TextOptions
from ..node.text import load_text_model
from ..server.client import EngineClient

T = TypeVar("T")


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
    ) -> None:
        found = resolve_model(model, progress=progress)
        checkpoint = open_checkpoint(found.path)
        self.text, _ = load_text_model(checkpoint, text_options)
        self.engine = load_engine(checkpoint, options, read_machine(), default_cache_dir())
        checkpoint.close()
        self.ready = self.engine.ready(found.served_name, self.text.eos_token_ids)
        self.clock = MonotonicClock()
        self.client = EngineClient()
        self.helper = HelperProcess(
            str(found.path), materials(self.text, allow_special=text_options.allow_special_in_content)
        )
        self.new_seed: Callable[[], int] = new_seed if seed is None else seeds_from(seed)
        self._loop = new_event_loop()
        self._closing = asyncio.Event()
        self._door = threading.Lock()
        self._is_open = True
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="tokenmill-engine", daemon=True)
        self._thread.start()
        started.wait()

    def submit(self, work: Awaitable[T]) -> Future[T]:
        """Runs `work` on the engine's thread; to cancel what it gives cancels it there. Raises InvalidRequest once the
        model has been closed."""
        with self._door:
            if self._is_open:
                return asyncio.run_coroutine_threadsafe(_await(work), self._loop)
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
        finally:
            self._shut()
            self._loop.close()
            self.engine.close()
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        engine_end, front_end = local_link()
        await engine_end.send(self.ready)
        self.client.attach(front_end)
        # The server's bound on its queue is not one on a list that the caller holds already.
        config = replace(self.engine.config, max_num_waiting=sys.maxsize)
        first = self.engine.first_events()
        shell = build_engine(config, self.engine.worker.executor, engine_end, self.clock, first=first)
        running = asyncio.create_task(shell.run())
        running.add_done_callback(lambda _: self._closing.set())
        while self.client.ready is None:
            await asyncio.sleep(0)
        started.set()
        await self._closing.wait()
        self.client.close("The model has been closed.")
        if first:  # There is a folder to save KV in.
            shell.hear(Abort(shell.core.open_ids))
            shell.hear(Drain())
            await asyncio.wait((running,))
        front_end.close()
        await self.helper.close()
        self._shut()
        await asyncio.sleep(0)  # what was submitted before becomes tasks
        # Callers in other threads wait for tasks of this loop, which have just been told of the end.
        callers = asyncio.all_tasks() - {asyncio.current_task(), running}
        await asyncio.gather(running, *callers, return_exceptions=True)
        running.result()

    def _shut(self) -> None:
        """Nothing is submitted after this: the loop would not come to it."""
        with self._door:
            self._is_open = False


async def _await(work: Awaitable[T]) -> T:
    return await work
