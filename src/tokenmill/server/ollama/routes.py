"""Which path of Ollama's API leads where."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp

from ...api.helper import caller_of
from ...api.json_reply import JSONReply
from ...api.ollama.shape import OllamaShape, timestamp
from ...api.port import Server, Vectors
from .catalog import Catalog
from .vectors import Embeddings


def routes(server: Server, vectors: Vectors) -> list[Route]:
    answers, catalog, embeddings = _Answers(server), Catalog(server), Embeddings(server, vectors)
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
                return JSONReply(_loaded(call.model, shape, reason))
            running = await server.begin(
                call, shape.prefix, caller, rendered=rendered, arrival_s=arrival_s, request_id=request.state.request_id
            )
            return running.reply(shape)


def _loaded(model: str, shape: OllamaShape, reason: str) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": ""}} if shape.is_chat else {"response": ""}
    return {"model": model, "created_at": timestamp(time.time()), **said, "done": True, "done_reason": reason}
