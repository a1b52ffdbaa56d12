"""The endpoints /api/embed and /api/embeddings: vectors in Ollama's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from ...api.fields import said_as
from ...api.ollama.shape import nanoseconds, tagged
from ...api.pooling import PoolingCall, floats
from ...api.port import Server, Vectors
from ...text.calls import Input


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
