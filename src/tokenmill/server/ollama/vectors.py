"""The endpoints /api/embed and /api/embeddings: vectors in Ollama's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from ...api.fields import said_as
from ...api.ollama.shape import nanoseconds, tagged
from ...api.pooling import PoolingCall
from ...text.calls import Input
from ..vectors import VectorService, floats


class Vectors:
    """The endpoints of one application."""

    def __init__(self, service: VectorService) -> None:
        self._service = service

    async def embed(self, request: HttpRequest) -> ASGIApp:
        arrival_s = self._service.clock.now()

        def body(
            head: dict[str, Any], call: PoolingCall, inputs: Sequence[Input], vectors: list[bytes]
        ) -> dict[str, Any]:
            return {
                "model": call.model or tagged(head["model"]),
                "embeddings": [floats(vector) for vector in vectors],
                "total_duration": nanoseconds(self._service.clock.now() - arrival_s),
                "load_duration": 0,
                "prompt_eval_count": sum(len(tokens) for tokens, _ in inputs),
            }

        with said_as({"truncate_prompt_tokens": "truncate"}):
            return await self._service.embed(request, "ollama_embed", body)

    async def embeddings(self, request: HttpRequest) -> ASGIApp:
        def body(
            head: dict[str, Any], call: PoolingCall, inputs: Sequence[Input], vectors: list[bytes]
        ) -> dict[str, Any]:
            return {"embedding": floats(vectors[0]) if vectors else []}

        with said_as({"input[0]": "prompt", "input": "prompt", "truncate_prompt_tokens": "/api/embed"}):
            return await self._service.embed(request, "ollama_embeddings", body)
