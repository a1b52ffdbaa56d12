"""Which path of Ollama's API leads where, and which models there are in its words.

The server's own model is there under its names and those of its adapters, and beside it those that this machine has
loaded or would load for a call. What would fetch, make or delete models is refused, with what to do instead."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.errors import InvalidRequest
from ...text.calls import Input, context_limit
from ...text.text_model import ModelInfo
from ..fields import Fields, said_as
from ..json_reply import JSONReply
from ..pooling import PoolingCall, floats
from ..port import Beside, Described, Listing, Server, Vectors
from ..sandbox import caller_of, parse_small
from .shape import API_VERSION, OllamaShape, capabilities, details, nanoseconds, tagged, timestamp

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
    listing: Listing

    async def live(self, request: HttpRequest) -> Response:
        """What clients ask for to know that somebody is there; some look for these words. Browsers get the console."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("console/", 307, {"vary": "accept"})
        return PlainTextResponse("Ollama is running: its API is spoken here by tokenmill.\n")

    async def version(self, request: HttpRequest) -> Response:
        return JSONReply({"version": API_VERSION})

    async def tags(self, request: HttpRequest) -> Response:
        await self.listing.refresh()
        others = [_card_beside(each) for each in self.listing.others()]
        return JSONReply({"models": [self._card(name) for name in self._names()] + others})

    async def ps(self, request: HttpRequest) -> Response:
        ready, found = self.server.client.ready, []
        if ready is not None:
            size_bytes, expires_s = sum(size for _, size in ready.memory), self.listing.expires_s(self._names()[0])
            loaded = _loaded_card((size_bytes, context_limit(ready)), expires_s)
            found += [self._card(name) | loaded for name in self._names()]
        for each in self.listing.others():
            if each.loaded is not None:
                found.append(_card_beside(each) | _loaded_card(each.loaded, each.expires_s))
        return JSONReply({"models": found})

    async def show(self, request: HttpRequest) -> Response:
        async with self.server.limits.body(request) as data:
            fields = Fields(parse_small(data))
        name = fields.text("model") or fields.required_text("name")
        told = await self.listing.describe(name)
        if told is None:
            self.server.check_model({"model": name})
            ready = self.server.client.ready
            gives_vectors = ready is not None and ready.pooling is not None
            told = Described.of(self.server.text, self.server.max_model_len, gives_vectors=gives_vectors)
        return JSONReply(_shown(name, told))

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


def _card_beside(model: Beside) -> dict[str, Any]:
    return {
        "name": tagged(model.name),
        "model": tagged(model.name),
        "modified_at": timestamp(model.modified_s),
        "size": model.size_bytes,
        "digest": hashlib.sha256(f"{model.name} {model.size_bytes} {model.modified_s}".encode()).hexdigest(),
        "details": details(model.info or ModelInfo()),
    }


def _loaded_card(loaded: tuple[int, int], expires_s: float | None) -> dict[str, Any]:
    size_bytes, context_length = loaded
    expires_at = _NEVER if expires_s is None else timestamp(expires_s)
    return {"size": size_bytes, "size_vram": 0, "expires_at": expires_at, "context_length": context_length}


def _shown(name: str, told: Described) -> dict[str, Any]:
    about = told.info
    return {
        "license": "",
        "modelfile": f"FROM {tagged(name)}\n",
        "parameters": "\n".join(f"{setting:<30} {value}" for setting, value in told.sampling_defaults.items()),
        "template": told.template,
        "details": details(about),
        "model_info": {
            "general.architecture": about.architecture,
            "general.parameter_count": about.num_parameters,
            f"{about.architecture}.context_length": told.max_model_len,
            f"{about.architecture}.embedding_length": about.width,
            f"{about.architecture}.block_count": about.num_layers,
        },
        "capabilities": capabilities(told),
        "modified_at": timestamp(about.modified_s),
    }


class Embeddings:
    """The endpoints of one application."""

    def __init__(self, server: Server, vectors: Vectors) -> None:
        self._now = server.now
        self._vectors = vectors

    async def embed(self, request: HttpRequest) -> ASGIApp:
        arrival_s = self._now()

        def body(
            head: dict[str, Any], call: PoolingCall, inputs: Sequence[Input], vectors: list[bytes]
        ) -> dict[str, Any]:
            return {
                "model": call.model or tagged(head["model"]),
                "embeddings": [floats(vector) for vector in vectors],
                "total_duration": nanoseconds(self._now() - arrival_s),
                "load_duration": 0,
                "prompt_eval_count": sum(len(tokens) for tokens, _ in inputs),
            }

        with said_as({"truncate_prompt_tokens": "truncate"}):
            return await self._vectors.embed(request, "ollama_embed", body)

    async def embeddings(self, request: HttpRequest) -> ASGIApp:
        def body(
            head: dict[str, Any], call: PoolingCall, inputs: Sequence[Input], vectors: list[bytes]
        ) -> dict[str, Any]:
            return {"embedding": floats(vectors[0]) if vectors else []}

        with said_as({"input[0]": "prompt", "input": "prompt", "truncate_prompt_tokens": "/api/embed"}):
            return await self._vectors.embed(request, "ollama_embeddings", body)


def routes(server: Server, vectors: Vectors, listing: Listing) -> list[Route]:
    answers, catalog, embeddings = _Answers(server), Catalog(server, listing), Embeddings(server, vectors)
    return [
        Route("/api/chat", answers.chat, methods=["POST"]),
        Route("/api/generate", answers.generate, methods=["POST"]),
        Route("/api/embed", embeddings.embed, methods=["POST"]),
        Route("/api/embeddings", embeddings.embeddings, methods=["POST"]),
        Route("/", catalog.live),
        Route("/api/version", catalog.version),
        Route("/api/tags", catalog.tags),
        Route("/api/ps", catalog.ps),
        Route("/api/show", catalog.show, methods=["POST"]),
        Route("/api/pull", catalog.pull, methods=["POST"]),
        Route("/api/push", catalog.refuse, methods=["POST"]),
        Route("/api/create", catalog.refuse, methods=["POST"]),
        Route("/api/copy", catalog.refuse, methods=["POST"]),
        Route("/api/delete", catalog.refuse, methods=["DELETE", "POST"]),
        Route("/api/blobs/{digest}", catalog.refuse, methods=["GET", "POST"]),
    ]


class _Answers:
    """The endpoints that generate."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._chat = OllamaShape(server.now, is_chat=True)
        self._generate = OllamaShape(server.now, is_chat=False)

    async def chat(self, request: HttpRequest) -> ASGIApp:
        return await self._reply(request, "ollama_chat", self._chat)

    async def generate(self, request: HttpRequest) -> ASGIApp:
        return await self._reply(request, "ollama_generate", self._generate)

    async def _reply(self, request: HttpRequest, endpoint: str, shape: OllamaShape) -> ASGIApp:
        """As Server.reply, but for calls without a prompt, which ask for nothing but a model that is ready."""
        server = self._server
        arrival_s = server.now()
        server.limits.refuse_when_draining()
        caller = caller_of(request)
        async with server.limits.body(request) as data:
            call, rendered = await server.read(endpoint, data, caller)
            if reason := call.extras.get("done_reason"):
                await server.wait_ready(caller)
                return JSONReply(_loaded(call.model, shape.is_chat, reason))
            running = await server.begin(
                call, shape.prefix, caller, rendered=rendered, arrival_s=arrival_s, request_id=request.state.request_id
            )
            return running.reply(shape)


def unloaded_reply(path: str, model: str) -> Response:
    """To a call of this path that wants a model unloaded."""
    return JSONReply(_loaded(model, path == "/api/chat", "unload"))


def _loaded(model: str, is_chat: bool, reason: str) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": timestamp(time.time()), **said, "done": True, "done_reason": reason}
