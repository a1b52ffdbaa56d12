"""Which path leads where."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp

from ..port import Server
from .shape import IdsShape, SGLangShape


def routes(server: Server) -> list[Route]:
    vllm, sglang = IdsShape(), SGLangShape()

    async def generate_ids(request: HttpRequest) -> ASGIApp:
        return await server.reply(request, "ids", vllm)

    async def generate(request: HttpRequest) -> ASGIApp:
        return await server.reply(request, "sglang", sglang)

    return [
        Route("/inference/v1/generate", generate_ids, methods=["POST"]),
        Route("/generate", generate, methods=["POST"]),
    ]
