"""Which models there are, in Ollama's words: /api/tags, /api/show, /api/ps, /api/version, and what is refused.

One model is served, under its names and those of its adapters. It is loaded when the server starts and stays so; what
would fetch, make or delete models is refused, with what to do instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from ...api.fields import Fields
from ...api.helper import parse_small
from ...api.json_reply import JSONReply
from ...api.ollama.shape import API_VERSION, details, tagged, timestamp
from ...api.port import Server
from ...core.errors import InvalidRequest
from ...text.calls import context_limit

_NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays loaded."""

_INSTEAD = {
    "/api/push": "Models are not pushed from here.",
    "/api/create": "Models are not made over HTTP here; give the server a model when it starts.",
    "/api/copy": "A model has the names that --served-model-name gives it.",
    "/api/delete": "Models are not deleted over HTTP here; use tokenmill rm.",
    "/api/blobs": "Files of models are not taken over HTTP here; give the server a model when it starts.",
}


@dataclass(frozen=True, slots=True)
class Catalog:
    """The endpoints of one application."""

    server: Server

    async def live(self, request: HttpRequest) -> Response:
        """What clients ask for to know that somebody is there; some look for these words. Browsers get the console."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("console/", 307, {"vary": "accept"})
        return PlainTextResponse("Ollama is running: its API is spoken here by tokenmill.\n")

    async def version(self, request: HttpRequest) -> Response:
        return JSONReply({"version": API_VERSION})

    async def tags(self, request: HttpRequest) -> Response:
        return JSONReply({"models": [self._card(name) for name in self._names()]})

    async def ps(self, request: HttpRequest) -> Response:
        ready = self.server.client.ready
        if ready is None:
            return JSONReply({"models": []})
        loaded = {
            "size": sum(size for _, size in ready.memory),
            "size_vram": 0,
            "expires_at": _NEVER,
            "context_length": context_limit(ready),
        }
        return JSONReply({"models": [self._card(name) | loaded for name in self._names()]})

    async def show(self, request: HttpRequest) -> Response:
        async with self.server.limits.body(request) as data:
            fields = Fields(parse_small(data))
        name = fields.text("model") or fields.required_text("name")
        self.server.check_model({"model": name})
        about, chat = self.server.text.info, self.server.text.chat
        defaults = self.server.text.sampling_defaults
        return JSONReply(
            {
                "license": "",
                "modelfile": f"FROM {tagged(name)}\n",
                "parameters": "\n".join(f"{setting:<30} {value}" for setting, value in defaults.items()),
                "template": "" if chat is None else chat.source,
                "details": details(about),
                "model_info": {
                    "general.architecture": about.architecture,
                    "general.parameter_count": about.num_parameters,
                    f"{about.architecture}.context_length": self.server.max_model_len,
                    f"{about.architecture}.embedding_length": about.width,
                    f"{about.architecture}.block_count": about.num_layers,
                },
                "capabilities": self._capabilities(),
                "modified_at": timestamp(about.modified_s),
            }
        )

    async def pull(self, request: HttpRequest) -> Response:
        """A model that is served needs no pulling: that is a success. Any other cannot be had here."""
        async with self.server.limits.body(request) as data:
            fields = Fields(parse_small(data))
        name = fields.text("model") or fields.required_text("name")
        if name not in self._names() and tagged(name) not in map(tagged, self._names()):
            raise InvalidRequest(
                f"Models are not pulled over HTTP here: use tokenmill pull, and serve {name[:200]!r} then.",
                param="model",
            )
        return Response(b'{"status":"success"}\n', media_type="application/x-ndjson")

    async def refuse(self, request: HttpRequest) -> Response:
        path = next(path for path in _INSTEAD if request.url.path.endswith(path) or path + "/" in request.url.path)
        raise InvalidRequest(_INSTEAD[path])

    def _names(self) -> list[str]:
        return [*self.server.model_names, *(adapter.name for adapter in self.server.client.adapters)]

    def _card(self, name: str) -> dict[str, Any]:
        about, ready = self.server.text.info, self.server.client.ready
        adapter = self.server.client.adapters.get(name)
        identity = f"{'' if ready is None else ready.numerics_id} {'' if adapter is None else adapter.digest}"
        return {
            "name": tagged(name),
            "model": tagged(name),
            "modified_at": timestamp(about.modified_s),
            "size": about.size_bytes,
            "digest": hashlib.sha256(identity.encode()).hexdigest(),
            "details": details(about),
        }

    def _capabilities(self) -> list[str]:
        ready, chat = self.server.client.ready, self.server.text.chat
        if ready is not None and ready.pooling is not None:
            return ["embedding"]
        found = ["completion"]
        found += ["tools"] * (chat is not None)
        found += ["thinking"] * bool(self.server.text.chat_format.reasoning)
        found += ["insert"] * (self.server.text.fim is not None)
        return found
