"""The endpoints that generate nothing and belong to no single API: models, adapters, health, metrics; and refusals."""

from __future__ import annotations

import os
import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from .. import __version__
from ..api.errors import anthropic_style
from ..api.fields import Fields
from ..api.json_reply import JSONReply
from ..api.messages.shape import model_body, page_body
from ..api.sandbox import parse_small
from ..control.kv_store import TierMetrics
from ..control.models.registry import ModelRegistry
from ..control.observe.metrics import render
from ..control.workers.metrics import WorkerMetrics
from ..core.errors import InvalidRequest, Overloaded, TokenmillError, Unavailable
from ..core.tenant import ADMIN
from .adapters import ServedAdapter
from .callers import require_adapters
from .generation import Generation
from .http import error_reply, style_for

_MAX_NAME = 200


class Service:
    """The endpoints of one application. tiers: of its KV store; None: there is none."""

    def __init__(self, generation: Generation, models: ModelRegistry, tiers: TierMetrics | None = None) -> None:
        self._tiers = tiers
        self._models = models
        self._generation = generation
        self._config = generation.config
        self._text = generation.text
        self._client = generation.client
        self._metrics = generation.metrics
        assert generation.client.observers.monitor is not None
        self._monitor = generation.client.observers.monitor
        self._limits = generation.limits
        self._workers = WorkerMetrics(self._config.model_names[0], self._client.roster, self._client.gateway)
        self._created = int(time.time())

    def serves(self, name: str) -> bool:
        """Whether a body may name this model."""
        return self._models.card(name) is not None or self._generation.serves(name)

    async def models(self, request: HttpRequest) -> Response:
        if self._models.on_demand is not None:
            await self._models.on_demand.refresh()
        cards = [self._card(name) for name in self._config.model_names]
        cards += [self._card(adapter.name, adapter) for adapter in self._client.adapters]
        cards += self._models.cards()
        if style_for(request.scope) is anthropic_style:
            return JSONReply(page_body(cards))
        return JSONReply({"object": "list", "data": cards})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        card = self._models.card(name) or self._card(name, self._generation.check_model({"model": name}))
        return JSONReply(model_body(card) if style_for(request.scope) is anthropic_style else card)

    async def load_adapter(self, request: HttpRequest) -> Response:
        """vLLM's: {"lora_name", "lora_path", "load_inplace"}. Only from folders under the configured one."""
        require_adapters(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data))
        name, path = fields.required_text("lora_name"), fields.required_text("lora_path")
        in_place = bool(fields.flag("load_inplace"))
        self._generation.log_unknown(fields.unread())
        if not path.isprintable():
            raise InvalidRequest("lora_path must be the path of a folder.", param="lora_path")
        if not self._config.lora_dir:
            raise InvalidRequest(
                "Adapters cannot be loaded over HTTP here; start the server with --lora-dir.", param="lora_path"
            )
        if name in self._config.model_names or not name.isprintable() or len(name) > _MAX_NAME:
            raise InvalidRequest(
                f"lora_name must be printable, of at most {_MAX_NAME} characters and not the model's own.",
                param="lora_name",
            )
        self._client.require_ready()
        folder = os.path.join(self._config.lora_dir, path)
        adapter = ServedAdapter(name, folder, inside=self._config.lora_dir)
        await self._client.adapters.load(adapter, replace_loaded=in_place)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """vLLM's: {"lora_name"}. Requests that use the adapter run to their end."""
        require_adapters(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data))
        name = fields.required_text("lora_name")
        self._generation.log_unknown(fields.unread())
        if not self._config.lora_dir:
            raise InvalidRequest(
                "Adapters cannot be unloaded over HTTP here; start the server with --lora-dir.", param="lora_name"
            )
        try:
            self._client.adapters.unload(name)
        finally:  # also where it is kept and could not be loaded again
            await self._client.adapters.keep(name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def health(self, request: HttpRequest) -> Response:
        """200 only while an engine is ready and, if it has work, makes steps; also while calls would load it."""
        self._limits.refuse_when_draining()
        if self._models.is_asleep(self._config.model_names[0]):
            return JSONReply({"status": "ok"})
        self._client.require_ready()
        stalled_s = self._client.stalled_s(self._generation.clock.now())
        if stalled_s > self._config.stall_after_s:
            raise Unavailable(f"The engine has work but has made no step for {stalled_s:.0f} s.")
        return JSONReply({"status": "ok"})

    async def load(self, request: HttpRequest) -> Response:
        return JSONReply({"server_load": self._client.num_open})

    async def show_metrics(self, request: HttpRequest) -> Response:
        """Series by tenant only with an admin key."""
        more = [self._monitor.tenants.registry] if ADMIN in request.state.scopes else []
        more += self._models.registries()
        if self._tiers is not None:
            await self._tiers.refresh()
        body, content_type = self._metrics.render(request.headers.get("accept", ""), more)
        return Response(body, headers={"content-type": content_type})

    async def show_worker_metrics(self, request: HttpRequest) -> Response:
        """Of each worker; /metrics has what they are together."""
        body, content_type = render(self._workers.registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: HttpRequest) -> Response:
        return JSONReply({"version": __version__})

    async def refuse(self, request: HttpRequest, error: Exception) -> Response:
        """An expected failure, before the answer had begun."""
        assert isinstance(error, TokenmillError)
        self._metrics.call_refused(error.status)
        reason = error.reason if isinstance(error, Overloaded) else ""
        self._monitor.refused(request.state.tenant.id, reason or str(error.status))
        return error_reply(error, request.scope)

    async def note_gone(self, request: HttpRequest, error: Exception) -> Response:
        """The client left; nobody reads this. 499 is what access logs know for it."""
        self._metrics.client_gone()
        return Response(status_code=499)

    def _card(self, name: str, adapter: ServedAdapter | None = None) -> dict[str, Any]:
        """OpenAI's fields, vLLM's, and llama-server's `meta`."""
        about = self._text.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokenmill",
            "root": self._config.model_names[0] if adapter is None else adapter.path,
            "parent": None if adapter is None else self._config.model_names[0],
            "max_model_len": self._generation.max_model_len,
            "meta": {
                "n_vocab": self._text.tokenizer.vocab_size,
                "n_ctx_train": self._text.max_context,
                "n_embd": about.width,
                "n_params": about.num_parameters,
                "size": about.size_bytes,
            },
            **self._models.status(name),
        }
