"""Models of this machine beside the server's own, started and ended while it runs: engines, sandbox and application.

Memory is planned from what was free when the server started, less what all engines said they may take: a pool of KV
that nobody has touched yet counts as taken. Processors are divided by the models that there will be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, NotFound, TokenmillError
from ..core.events import Ready
from ..node.machine import MachineFacts, left_of
from ..node.options import TextOptions
from ..server.config import ServerConfig
from .engine_process import Launch
from .local import LocalEngines
from .models import resolve_model

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..control.models.registry import ModelRegistry
    from ..sandbox.parent import SandboxProcess
    from ..server.client import EngineClient
    from ..server.models import LocalModel

log = logging.getLogger(__name__)


class Hosting:
    """A control.models.registry.Host.

    launch, text, config  as the server's own model has them
    machine     as it was before that was loaded
    new_client  given what is told of its first engine, and why there is none yet
    build       the application of a model, given its configuration, text model, client and sandbox
    own         the facts of the server's own engines on this machine, once there is one; None: there are none
    models      where the others are
    """

    def __init__(
        self,
        launch: Launch,
        text: TextOptions,
        config: ServerConfig,
        *,
        machine: MachineFacts,
        new_client: Callable[[Callable[[TokenmillError | None], None], str], EngineClient],
        engine_timeout_s: float,
        build: Callable[..., Starlette],
        own: asyncio.Future[Ready] | None,
        models: ModelRegistry,
    ) -> None:
        self._launch = launch
        self._text = text
        self._config = config
        self._machine = machine
        self._new_client = new_client
        self._engine_timeout_s = engine_timeout_s
        self._build = build
        self._own = own
        self._models = models
        self._turn = asyncio.Lock()

    async def load_all(self, named: Sequence[tuple[str, str]]) -> None:
        """One after the other, then those that the registry has kept; what memory is left is divided equally. Raises
        ConfigError naming the model."""
        for index, (name, model) in enumerate(named):
            try:
                await self.load(name, model, None, len(named) - index)
            except TokenmillError as error:
                raise ConfigError(f"--add-model {name}: {error.message}", param="add_model") from error
        for name, what in list(self._models.kept.items()):
            try:
                async with self._turn:
                    if name in self._models.kept:
                        await self._load_in_turn(name, what["model"], what["kv_cache_memory_bytes"], 1)
            except TokenmillError as error:
                log.error("The model %s, loaded before this server was started again, is not: %s", name, error.message)

    async def load(self, name: str, model: str, kv_cache_memory_bytes: int | None, num_to_come: int = 1) -> None:
        """num_to_come: models that share what memory is left, this one included. One is loaded after the other."""
        async with self._turn:
            await self._load_in_turn(name, model, kv_cache_memory_bytes, num_to_come)

    async def _load_in_turn(self, name: str, model: str, kv_cache_memory_bytes: int | None, num_to_come: int) -> None:
        self._models.check_new(name)
        self._models.expected.add(name)
        try:
            found = await self._load(name, model, kv_cache_memory_bytes, num_to_come)
            try:
                self._models.check_new(name)
                if name not in self._models.expected:
                    raise NotFound(f"The model {name} was unloaded while it was being loaded.", param="name")
                self._models.add(found)
            except TokenmillError:  # also where the name has been given to a canary meanwhile
                await found.close()
                raise
        finally:
            self._models.expected.discard(name)

    async def _load(self, name: str, model: str, kv_cache_memory_bytes: int | None, num_to_come: int) -> LocalModel:
        from ..server.models import LocalModel

        found = await asyncio.to_thread(resolve_model, model, True)
        text = await asyncio.to_thread(self._load_text, str(found.path))
        options = replace(
            self._launch.options,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_save=None,
            kv_store=None,
            enable_lora=False,
            expert_min_share=None,
        )
        num_models = 1 + len(self._models.local()) + num_to_come
        if options.threads is None:
            options = replace(options, threads=max(1, self._machine.granted_cpus // num_models))
        machine = replace(left_of(self._machine, await self._taken_bytes()), num_sharing=num_to_come)
        launch = replace(
            self._launch,
            path=str(found.path),
            model=name,
            options=options,
            journal="",
            step_log="",
            kv_events=None,
            machine=machine,
        )
        prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def note_prepared(error: TokenmillError | None) -> None:
            if not prepared.done():
                prepared.set_result(None)

        client = self._new_client(note_prepared, f"Loading {name}")
        held = contextlib.AsyncExitStack()
        try:
            engines = held.enter_context(LocalEngines(launch, ("mixed",), self._engine_timeout_s))
            sandbox = self._sandbox(str(found.path), text)
            held.push_async_callback(sandbox.close)
            held.callback(client.close, f"The model {name} is unloaded.")

            def complete(ready: Ready) -> Ready:
                return replace(ready, eos_token_ids=text.eos_token_ids, model=name)

            app = self._build(self._config_of(name), text, client, sandbox)
            running = asyncio.create_task(engines.run(client, complete), name=f"engines of {name}")
            held.push_async_callback(_ended, running)
            await asyncio.wait([prepared, running], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            running.add_done_callback(lambda done: _tell(name, done))
            return LocalModel(name, app, str(found.path), held.pop_all().aclose)
        finally:
            await held.aclose()

    async def _taken_bytes(self) -> int:
        """What engines of all models here may take. Waits for the server's own."""
        own = () if self._own is None else (await asyncio.shield(self._own)).memory
        return sum(size for _, size in own) + sum(each.memory_bytes for each in self._models.local())

    def _load_text(self, path: str) -> Any:
        from ..formats.checkpoint import open_text
        from ..node.text import load_text_model

        checkpoint = open_text(path)
        try:
            return load_text_model(checkpoint, self._text)[0]
        finally:
            checkpoint.close()

    def _sandbox(self, path: str, text: Any) -> SandboxProcess:
        from ..sandbox.parent import SandboxProcess, materials

        allowed = {
            "trust_templates": self._config.allow_chat_template,
            "allow_special": self._text.allow_special_in_content,
        }
        return SandboxProcess(path, materials(text, **allowed))

    def _config_of(self, name: str) -> ServerConfig:
        return replace(self._config, model_names=(name,), files_dir="", lora_dir="", result_cache=0)


async def _ended(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _tell(name: str, done: asyncio.Task[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("The engines of %s have ended: %s", name, done.exception())
