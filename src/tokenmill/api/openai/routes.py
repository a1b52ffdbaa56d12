"""Which path of OpenAI's API leads where, with what vLLM and others have beside it: scores, /tokenize, /detokenize."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import NotFound
from ...text.special_tokens import Rendered
from ..json_reply import JSONReply
from ..pooling import embedding_body, rerank_body, score_body
from ..port import Server, Vectors
from ..sandbox import caller_of
from .shape import OpenAIShape
from .tokenize import tokenizer_info

_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
_CHAT, _COMPLETION = OpenAIShape("chatcmpl-"), OpenAIShape("cmpl-")


def routes(server: Server, vectors: Vectors, tells_tokenizer: bool) -> list[Route]:
    """tells_tokenizer: whether anybody wants /tokenizer_info."""
    api = OpenAI(server, vectors, tells_tokenizer)
    return [
        *(Route(path, api.chat, methods=["POST"]) for path in ("/v1/chat/completions", "/chat/completions")),
        Route("/v1/completions", api.completion, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        *(Route(path, api.score, methods=["POST"]) for path in ("/v1/score", "/score")),
        *(Route(path, api.rerank, methods=["POST"]) for path in _RERANK_PATHS),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/tokenizer_info", api.tokenizer_info),
    ]


class OpenAI:
    """The endpoints of one application."""

    def __init__(self, server: Server, vectors: Vectors, tells_tokenizer: bool) -> None:
        self._server = server
        self._vectors = vectors
        self._tells_tokenizer = tells_tokenizer

    async def chat(self, request: HttpRequest) -> ASGIApp:
        return await self._server.reply(request, "chat", _CHAT)

    async def completion(self, request: HttpRequest) -> ASGIApp:
        return await self._server.reply(request, "completion", _COMPLETION)

    async def embeddings(self, request: HttpRequest) -> ASGIApp:
        return await self._vectors.embed(request, "embedding", embedding_body)

    async def score(self, request: HttpRequest) -> ASGIApp:
        return await self._vectors.score(request, "score", score_body)

    async def rerank(self, request: HttpRequest) -> ASGIApp:
        return await self._vectors.score(request, "rerank", rerank_body)

    async def tokenize(self, request: HttpRequest) -> ASGIApp:
        server, caller = self._server, caller_of(request)
        async with server.limits.body(request) as data:
            call, rendered = await server.read("tokenize", data, caller)
            if call.conversation is None:
                (prompt,), param = call.prompts, "content" if call.form in ("ids", "pieces") else "prompt"
                if not call.parse_special:
                    prompt = Rendered((prompt,), is_split=True)
            else:
                prompt = rendered or await server.encoder.render(call.conversation, caller)
                param = "messages"
            body = await server.encoder.tokenize(
                prompt,
                add_special=call.add_special,
                form=call.form,
                max_model_len=server.max_model_len,
                param=param,
                caller=caller,
            )
        reply = Response(body, media_type="application/json")

        async def send_held(scope: Scope, receive: Receive, send: Send) -> None:
            with server.limits.held(len(body)):
                await reply(scope, receive, send)

        return send_held

    async def detokenize(self, request: HttpRequest) -> Response:
        server = self._server
        async with server.limits.body(request) as data:
            call, _ = await server.read("detokenize", data, caller_of(request))
        text = await server.encoder.decode(call.prompts[0])
        return JSONReply({"prompt": text, "content": text})

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        if not self._tells_tokenizer:
            raise NotFound("/tokenizer_info is off here; start the server with --enable-tokenizer-info-endpoint.")
        return JSONReply(tokenizer_info(self._server.text, self._server.max_model_len))
