"""Which path of llama-server's own API leads where, and what it tells of itself: /props, /slots, /lora-adapters.

What would change the server is refused: its settings are given when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ... import __version__
from ...core.errors import InvalidRequest, Unavailable
from ...core.request import SamplingParams
from ...text.calls import Input, default_max_tokens
from ..fields import said_as
from ..json_reply import JSONReply
from ..pooling import PoolingCall, floats
from ..port import Server, Vectors
from ..sandbox import caller_of
from .settings import settings
from .shape import LlamaShape


class About:
    """The endpoints of one application that tell of it."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def props(self, request: HttpRequest) -> Response:
        """The path of the model's file is not told: its name stands for it."""
        server = self._server
        text, ready = server.text, server.client.ready
        defaults = SamplingParams(**{**text.sampling_defaults, "max_tokens": None})
        given = default_max_tokens(text.sampling_defaults, None)
        chat = text.chat
        return JSONReply(
            {
                "default_generation_settings": {
                    "params": settings(defaults, seed=None, max_tokens=given) | {"stream": False},
                    "n_ctx": server.max_model_len,
                },
                "total_slots": 0 if ready is None else ready.max_num_seqs,
                "model_alias": server.model_names[0],
                "model_path": server.model_names[0],
                "modalities": {"vision": False, "audio": False},
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": True,
                "chat_template": "" if chat is None else chat.source,
                "bos_token": "" if chat is None else chat.bos_token,
                "eos_token": "" if chat is None else chat.eos_token,
                "build_info": f"tokenmill {__version__}",
                "is_sleeping": False,
            }
        )

    async def change_props(self, request: HttpRequest) -> Response:
        raise InvalidRequest("The server's properties are settled when it starts.")

    async def slots(self, request: HttpRequest) -> Response:
        """A slot is a row that a step may have. Which request has which is not told: it changes from step to step."""
        client = self._server.client
        ready = client.require_ready()
        num_busy = min(client.stats.num_running, ready.max_num_seqs)
        if request.query_params.get("fail_on_no_slot") not in (None, "0") and num_busy == ready.max_num_seqs:
            raise Unavailable("There is no free slot.")
        n_ctx = self._server.max_model_len
        slot = {"id_task": -1, "n_ctx": n_ctx, "speculative": ready.num_speculative_tokens > 0}
        rows = range(ready.max_num_seqs)
        return JSONReply([{"id": row, **slot, "is_processing": row < num_busy} for row in rows])

    async def adapters(self, request: HttpRequest) -> Response:
        """Each is asked for by its name as the model; none acts on other requests, which is what scale 0 says."""
        found = self._server.client.adapters
        return JSONReply([{"id": index, "path": each.name, "scale": 0.0} for index, each in enumerate(found)])

    async def change_adapters(self, request: HttpRequest) -> Response:
        raise InvalidRequest("Adapters are asked for by their name as the model; /v1/models lists them.")

    async def apply_template(self, request: HttpRequest) -> Response:
        server, caller = self._server, caller_of(request)
        async with server.limits.body(request) as data:
            call, rendered = await server.read("chat", data, caller)
            if rendered is None:
                rendered = await server.encoder.render(call.conversation, caller)
            with server.limits.held(len(rendered.text)):
                return JSONReply({"prompt": rendered.text})


class Embeddings:
    """The endpoint that gives vectors."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    async def embedding(self, request: HttpRequest) -> ASGIApp:
        with said_as({"input": "content"}):
            return await self._vectors.embed(request, "llama_embedding", _body)


def _body(
    head: dict[str, Any], call: PoolingCall, inputs: Sequence[Input], vectors: list[bytes]
) -> list[dict[str, Any]]:
    """A row of vectors for each input, which has one."""
    return [{"index": index, "embedding": [floats(vector)]} for index, vector in enumerate(vectors)]


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
