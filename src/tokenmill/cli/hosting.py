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

from ..core.errors import ConfigError, Infeasible, NotFound, TokenmillError
from ..core.events import Ready
from ..core.units import format_bytes
from ..node.machine import MachineFacts, left_of
from ..node.options import KV_SHARE, EngineOptions, TextOptions
from ..node.speculation import without_models
from ..server.config import ServerConfig
from .engine_process import Launch
from .local import LocalEngines
from .models import resolve_model
from .supervisor import EngineCrashed

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..control.models.on_demand import Listed
    from ..control.models.registry import ModelRegistry
    from ..sandbox.parent import SandboxProcess
    from ..server.client import EngineClient
    from ..server.models import LocalModel
    from ..text.text_model import TextModel

JOIN_S = 60.0
"""An engine that has said it is ready serves long before that."""

log = logging.getLogger(__name__)


class Hosting:
    """A control.models.registry.Host.

    launch, text, config  as the server's own model has them
    machine     as it was before that was loaded
    new_client  given what is told of its first engine, and why there is none yet
    build       the application of a model, given its configuration, text model, client and sandbox
    own         the facts of the server's own engines on this machine, once there is one; None: there are none
    models      where the others are
    own_front   application and text of the server's own model, where that is loaded as others are
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
        self.own_front: tuple[Starlette, TextModel] | None = None

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

    async def load_listed(self, listed: Listed, num_sharing: int) -> LocalModel:
        """A control.models.on_demand.Load. All processors are each model's: seldom do two compute at a time.
        --max-model-len bounds all, also those that were made for less."""
        async with self._turn:
            left = left_of(self._machine, await self._taken_bytes())
            options = replace(self._launch.options, threads=self._launch.options.threads or left.granted_cores)
            machine = replace(left, num_sharing=_sharing(listed, options, left, num_sharing))
            if options.max_model_len is not None:
                text = await asyncio.to_thread(self._load_text, listed.path)
                options = replace(options, max_model_len=min(options.max_model_len, text.max_context))
            try:
                return await self._start(listed.name, listed.path, options, machine)
            except EngineCrashed:  # not for what it found: another may do better
                return await self._start(listed.name, listed.path, options, machine)

    async def _load(self, name: str, model: str, kv_cache_memory_bytes: int | None, num_to_come: int) -> LocalModel:
        found = await asyncio.to_thread(resolve_model, model, True)
        options = replace(self._launch.options, kv_cache_memory_bytes=kv_cache_memory_bytes)
        num_models = 1 + len(self._models.local()) + num_to_come
        if options.threads is None:
            options = replace(options, threads=max(1, self._machine.granted_cores // num_models))
        machine = replace(left_of(self._machine, await self._taken_bytes()), num_sharing=num_to_come)
        return await self._start(name, str(found.path), options, machine)

    async def _start(self, name: str, path: str, options: EngineOptions, machine: MachineFacts) -> LocalModel:
        """The model, when it serves."""
        from ..server.models import LocalModel

        drafting = without_models(options.speculative_config)  # a draft model has the tokenizer of the server's own
        options = replace(options, speculative_config=drafting, expert_min_share=None)
        options = replace(options, kv_save=None, kv_store=None, enable_lora=False)
        launch = replace(
            self._launch,
            path=path,
            model=name,
            options=options,
            journal="",
            step_log="",
            kv_events=None,
            machine=machine,
        )
        held = contextlib.AsyncExitStack()
        try:
            engines = held.enter_context(LocalEngines(launch, ("mixed",), self._engine_timeout_s))
            is_own = name in self._models.home
            app, text = self.own_front if is_own and self.own_front else await self._front(name, path, held)
            client: EngineClient = app.state.client
            has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def complete(ready: Ready) -> Ready:
                if not has_come.done():
                    has_come.set_result(None)
                return replace(ready, eos_token_ids=text.eos_token_ids, model=name)

            running = asyncio.create_task(engines.run(client, complete), name=f"engines of {name}")
            held.push_async_callback(_ended, running)
            await asyncio.wait([has_come, running], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await client.wait_ready(JOIN_S)
            running.add_done_callback(lambda done: _tell(name, done))
            return LocalModel(name, app, path, held.pop_all().aclose)
        finally:
            await held.aclose()

    async def _front(self, name: str, path: str, held: contextlib.AsyncExitStack) -> tuple[Starlette, TextModel]:
        """The application of a model and what reads for it; `held` ends them."""
        text = await asyncio.to_thread(self._load_text, path)
        client = self._new_client(lambda error: None, f"Loading {name}")
        sandbox = self._sandbox(path, text)
        held.push_async_callback(sandbox.close)
        held.callback(client.close, f"The model {name} is unloaded.")
        return self._build(self._config_of(name), text, client, sandbox), text

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

    def read(self, listed: Listed) -> tuple[TextModel, bool]:
        """A control.models.on_demand.Read."""
        from ..formats.checkpoint import open_text
        from ..node.load import choose_pooling

        options = self._launch.options
        checkpoint = open_text(listed.path)
        try:
            pooling = choose_pooling(checkpoint, options.runner, options.pooling)
        finally:
            checkpoint.close()
        return self._load_text(listed.path), pooling is not None

    def _sandbox(self, path: str, text: Any) -> SandboxProcess:
        from ..sandbox.parent import SandboxProcess, materials

        allowed = {
            "trust_templates": self._config.allow_chat_template,
            "allow_special": self._text.allow_special_in_content,
        }
        return SandboxProcess(path, materials(text, **allowed))

    def _config_of(self, name: str) -> ServerConfig:
        return replace(self._config, model_names=(name,), files_dir="", lora_dir="", result_cache=0)


def _sharing(listed: Listed, options: EngineOptions, left: MachineFacts, num_sharing: int) -> int:
    """Into how many parts the memory that is left is divided, of which a model takes one: into as many as there may be
    models to come, or it takes all where a part is too little for its weights. Raises Infeasible where all is."""
    kv_bytes = options.kv_cache_memory_bytes

    def holds(memory_bytes: int) -> bool:
        return listed.size_bytes <= (memory_bytes * (1 - KV_SHARE) if kv_bytes is None else memory_bytes - kv_bytes)

    if holds(left.usable_memory // num_sharing):
        return num_sharing
    if holds(left.usable_memory):
        return 1
    raise Infeasible(
        f"The model {listed.name} has {format_bytes(listed.size_bytes)} of weights, and with its KV cache that is too "
        f"much for the {format_bytes(left.usable_memory)} that are left.",
        param="model",
    )


async def _ended(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _tell(name: str, done: asyncio.Task[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("The engines of %s have ended: %s", name, done.exception())
