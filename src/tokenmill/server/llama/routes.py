"""Which path of llama-server's own API leads where."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp

from ...api.llama.shape import LlamaShape
from ...api.port import Server, Vectors
from .server import About, Embeddings


def routes(server: Server, vectors: Vectors) -> list[Route]:
    about, embeddings = About(server), Embeddings(vectors)
    shape = LlamaShape(server.now)

    async def completion(request: HttpRequest) -> ASGIApp:
        return await server.reply(request, "llama_completion", shape)

    async def infill(request: HttpRequest) -> ASGIApp:
        return await server.reply(request, "llama_infill", shape)

    return [
        *(Route(path, completion, methods=["POST"]) for path in ("/completion", "/completions")),
        Route("/infill", infill, methods=["POST"]),
        Route("/apply-template", about.apply_template, methods=["POST"]),
        *(Route(path, embeddings.embedding, methods=["POST"]) for path in ("/embedding", "/embeddings")),
        Route("/props", about.props),
        Route("/props", about.change_props, methods=["POST"]),
        Route("/slots", about.slots),
        Route("/lora-adapters", about.adapters),
        Route("/lora-adapters", about.change_adapters, methods=["POST"]),
    ]
