"""Which path of Ollama's API leads where."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp

from ...api.helper import caller_of
from ...api.ollama.shape import OllamaShape, timestamp
from ..generation import Generation
from ..http import JSONReply
from ..vectors import VectorService
from .catalog import Catalog
from .vectors import Vectors


def routes(generation: Generation, service: VectorService) -> list[Route]:
    answers, catalog, vectors = _Answers(generation), Catalog(generation), Vectors(service)
    return [
        Route("/api/chat", answers.chat, methods=["POST"]),
        Route("/api/generate", answers.generate, methods=["POST"]),
        Route("/api/embed", vectors.embed, methods=["POST"]),
        Route("/api/embeddings", vectors.embeddings, methods=["POST"]),
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

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._chat = OllamaShape(generation.now, is_chat=True)
        self._generate = OllamaShape(generation.now, is_chat=False)

    async def chat(self, request: HttpRequest) -> ASGIApp:
        return await self._reply(request, "ollama_chat", self._chat)

    async def generate(self, request: HttpRequest) -> ASGIApp:
        return await self._reply(request, "ollama_generate", self._generate)

    async def _reply(self, request: HttpRequest, endpoint: str, shape: OllamaShape) -> ASGIApp:
        """As Generation.reply, but for calls without a prompt, which ask for nothing but a model that is ready."""
        generation = self._generation
        arrival_s = generation.now()
        generation.limits.refuse_when_draining()
        caller = caller_of(request)
        async with generation.limits.body(request) as data:
            call, rendered = await generation.read(endpoint, data, caller)
            if reason := call.extras.get("done_reason"):
                await generation.wait_ready(caller)
                return JSONReply(_loaded(call.model, shape, reason))
            running = await generation.begin(
                call, shape.prefix, caller, rendered=rendered, arrival_s=arrival_s, request_id=request.state.request_id
            )
            return running.reply(shape)


def _loaded(model: str, shape: OllamaShape, reason: str) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": ""}} if shape.is_chat else {"response": ""}
    return {"model": model, "created_at": timestamp(time.time()), **said, "done": True, "done_reason": reason}
