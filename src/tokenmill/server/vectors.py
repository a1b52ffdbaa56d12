"""Endpoints that answer with vectors and scores, for engines whose model gives vectors.

A call becomes one pooling request for each input; its answer is built when all have ended. Scores of pairs come from
the model where it is a classifier of pairs, and are cosines of two vectors where it is not.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from ..api.common_fields import with_class
from ..api.conversations import Conversation
from ..api.encoder import Encoder
from ..api.errors import from_engine
from ..api.json_reply import JSONReply
from ..api.pooling import Embedded, PoolingCall, Scored, floats, usage_of
from ..api.rules import Rules
from ..api.sandbox import Caller, Sandbox, caller_of, read_call
from ..cluster.request_queue import newcomer
from ..control.usage.journal import Account
from ..control.usage.meter import Meter
from ..core.errors import InvalidRequest, Unavailable
from ..core.events import FINISH_ABORT, FINISH_ERROR, Ready
from ..core.policy import Newcomer
from ..core.ports import Clock
from ..core.request import PoolingParams, Request
from ..text.calls import Input, context_limit, make_pooling_requests, pair_messages, require_vectors, with_prompt
from ..text.text_model import TextModel
from .client import EngineClient
from .config import ServerConfig
from .deltas import Stream
from .limits import Limits, wait_ready
from .result_cache import HEADER as HIT
from .result_cache import ResultCache
from .stream import watched


async def take_vectors(stream: Stream, requests: Sequence[Request]) -> list[bytes]:
    """The vectors of all requests, in their order. Raises what ends one of them early."""
    vectors: dict[str, bytes] = {}
    while len(vectors) < len(requests):
        for delta in await stream.take():
            if delta.finish_reason == FINISH_ERROR:
                raise from_engine(delta.error, delta.error_kind, delta.error_param)
            if delta.finish_reason == FINISH_ABORT:
                raise Unavailable("The server gave up this request; it may be sent again.")
            vectors[delta.request_id] = delta.vector
    return [vectors[request.id] for request in requests]


def cosine(first: bytes, second: bytes) -> float:
    """Of two vectors of length 1."""
    return sum(map(mul, array("f", first), array("f", second)))


class VectorReply:
    """The ASGI application that answers one call when all of its vectors have come. count: told the tokens of all
    inputs before the answer goes out; headers: further ones of the answer."""

    def __init__(
        self,
        stream: Stream,
        requests: Sequence[Request],
        build: Callable[[list[bytes]], Any],
        count: Callable[[int], None] = lambda num_tokens: None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._stream = stream
        self._requests = requests
        self._build = build
        self._count = count
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(self._stream, receive):
            vectors = await take_vectors(self._stream, self._requests)
        reply = JSONReply(self._build(vectors))
        reply.raw_headers += self._headers
        self._count(sum(len(request.prompt_tokens) for request in self._requests))
        await reply(scope, receive, send)


@dataclass(frozen=True, slots=True)
class VectorService:
    """Answers the calls of one application. check_model: refuses another model's name; note_unknown: hears of unknown
    fields."""

    config: ServerConfig
    text: TextModel
    client: EngineClient
    sandbox: Sandbox
    clock: Clock
    new_id: Callable[[str], str]
    limits: Limits
    encoder: Encoder
    check_model: Callable[[dict[str, Any]], object]
    note_unknown: Callable[[list[str]], None]
    meter: Meter | None = None
    results: ResultCache | None = None

    async def embed(self, request: HttpRequest, endpoint: str, body: Embedded) -> ASGIApp:
        """What answers a call whose body is of `endpoint`, a key of jobs.ENDPOINTS that gives a PoolingCall."""
        arrival_s = self.clock.now()
        call = await self._read(request, endpoint)
        ready = await wait_ready(self.client, self.config, caller_of(request))
        params = _asked(require_vectors(ready), call.activate, "unit")
        if call.dimensions > ready.vector_size:
            raise InvalidRequest(
                f"dimensions must be at most {ready.vector_size}, which this model gives, got {call.dimensions}.",
                param="dimensions",
            )
        inputs = await self._encode(call, with_prompt(self.text, call.prompt_name, call.inputs), ready, request)
        params = replace(params, dimensions=call.dimensions)
        head = self._head(call, request, "embd")
        if not inputs:
            return JSONReply(body(head, call, (), []))
        return await self._reply(
            call,
            inputs,
            params,
            ready,
            head,
            arrival_s,
            caller_of(request),
            lambda vectors: body(head, call, inputs, vectors),
        )

    async def score(self, request: HttpRequest, endpoint: str, body: Scored) -> ASGIApp:
        """As `embed`, of pairs of texts, each of which gets a score."""
        arrival_s = self.clock.now()
        call = await self._read(request, endpoint)
        ready = await wait_ready(self.client, self.config, caller_of(request))
        params = require_vectors(ready, scores=True)
        head = self._head(call, request, endpoint)
        if params.how == "score":
            params = _asked(params, call.activate, "sigmoid")
            encode = self._render_pairs if self.text.renders_pairs else self._encode
            pairs = await encode(call, call.inputs, ready, request)

            def from_scores(vectors: list[bytes]) -> dict[str, Any]:
                return body(head, call, [floats(vector)[0] for vector in vectors], usage_of(pairs))

            name_of = f"{call.names[1]}[{{}}]".format
            return await self._reply(
                call, pairs, params, ready, head, arrival_s, caller_of(request), from_scores, name_of
            )
        texts = list(dict.fromkeys((*call.inputs, *call.seconds)))
        places = {text: place for place, text in enumerate(texts)}
        inputs = await self._encode(replace(call, seconds=()), with_prompt(self.text, None, texts), ready, request)

        def from_vectors(vectors: list[bytes]) -> dict[str, Any]:
            pairs = zip(call.inputs, call.seconds, strict=True)
            scores = [cosine(vectors[places[first]], vectors[places[second]]) for first, second in pairs]
            return body(head, call, scores, usage_of(inputs))

        names = {text: f"{call.names[1]}[{place}]" for place, text in reversed(list(enumerate(call.seconds)))}
        return await self._reply(
            call,
            inputs,
            replace(params, activation="unit"),
            ready,
            head,
            arrival_s,
            caller_of(request),
            from_vectors,
            lambda number: names.get(str(texts[number]), call.names[0]),
        )

    async def _read(self, request: HttpRequest, endpoint: str) -> PoolingCall:
        self.limits.refuse_when_draining()
        async with self.limits.body(request) as data:
            rules = Rules(self.text.tokenizer.vocab_size)
            ready = self.client.ready
            room = self.text.max_context if ready is None else context_limit(ready)
            call, unknown, _ = await read_call(
                endpoint, data, rules, self.sandbox, caller_of(request), self.check_model, room
            )
            self.note_unknown(unknown)
        self.limits.admit(Newcomer(request.state.client, call.priority))
        self.limits.check_quota(caller_of(request))
        assert isinstance(call, PoolingCall)
        return call

    async def _encode(
        self, call: PoolingCall, given: Sequence[str | Sequence[int]], ready: Ready, request: HttpRequest
    ) -> list[Input]:
        """Texts encoded together, ids as they are, in the order given."""
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        found: Sequence[Input] = ()
        if texts:
            with self.limits.held(sum(map(len, texts)) + sum(map(len, call.seconds))):
                found = await self.encoder.encode_inputs(
                    texts,
                    call.seconds,
                    limit=context_limit(ready),
                    truncate_to=call.truncate_to,
                    keep_end=call.keep_end,
                    caller=caller_of(request),
                )
        encoded = iter(found)
        return [next(encoded) if isinstance(prompt, str) else (_cut(prompt, call, ready), 0) for prompt in given]

    async def _render_pairs(
        self, call: PoolingCall, firsts: Sequence[str | Sequence[int]], ready: Ready, request: HttpRequest
    ) -> list[Input]:
        """As `_encode`, of pairs that the model's chat template makes one text of, which must not be cut."""
        caller = caller_of(request)
        room = context_limit(ready)
        if call.truncate_to is not None and call.truncate_to > 0:
            room = min(room, call.truncate_to)
        pairs: list[Input] = []
        with self.limits.held(sum(map(len, firsts)) + sum(map(len, call.seconds))):
            for first, second in zip(firsts, call.seconds, strict=True):
                messages = pair_messages(self.text, str(first), second)
                conversation = Conversation(messages=messages, add_generation_prompt=self.text.opens_answer)
                rendered = await self.encoder.render(conversation, caller)
                encoded = await self.encoder.encode(
                    rendered, add_special=False, shared=False, room=room, param=call.names[1], caller=caller
                )
                if call.truncate_to is not None and len(encoded.tokens) > room:
                    raise InvalidRequest(
                        f"truncate_prompt_tokens is {call.truncate_to}, but this model's pairs cannot be cut; "
                        f"{call.names[1]}[{len(pairs)}] makes one of {len(encoded.tokens)} tokens.",
                        param="truncate_prompt_tokens",
                    )
                pairs.append((encoded.tokens, 0))
        return pairs

    async def _reply(
        self,
        call: PoolingCall,
        inputs: Sequence[Input],
        params: PoolingParams,
        ready: Ready,
        head: dict[str, Any],
        arrival_s: float,
        caller: Caller,
        build: Callable[[list[bytes]], Any],
        name_of: Callable[[int], str] = "input[{}]".format,
    ) -> ASGIApp:
        self.limits.check_possible(len(inputs), "input")
        requests = make_pooling_requests(
            inputs,
            params,
            ready,
            root_id=self.new_id("pool"),
            arrival_s=arrival_s,
            priority=call.priority,
            terms=with_class(caller.tenant.terms, call.priority_class),
            cache_salt=caller.tenant.salt_with(call.cache_salt),
            name_of=name_of,
        )
        await self.limits.take_quota(caller, requests, call.names[0])
        stream, headers = self._open(requests, ready, caller, head["id"])
        if self.meter is None:
            return VectorReply(stream, requests, build, headers=headers)
        account = Account(caller.tenant.id, caller.key, self.config.model_names[0])
        count = partial(self.meter.charge, account, once=caller.once)
        return VectorReply(stream, requests, build, count, headers)

    def _open(
        self, requests: Sequence[Request], ready: Ready, caller: Caller, name: str
    ) -> tuple[Stream, list[tuple[bytes, bytes]]]:
        """The stream of a call, and headers of its answer."""
        if self.results is not None:
            kept = self.results.find(requests, ready)
            if kept is not None:
                self.limits.settle_quota(requests, 0)
                return self.results.replay(kept, requests), [HIT]
        with self.limits.dropping_quota(requests):
            self.limits.admit(newcomer(caller.name, requests))
            if self.results is not None:
                self.results.record(requests)
            stream = self.client.open(requests, caller.name)
        if self.client.observers.request_log is not None:
            self.client.observers.request_log.came(requests, name)
        return stream, []

    def _head(self, call: PoolingCall, request: HttpRequest, prefix: str) -> dict[str, Any]:
        given_id = call.request_id or request.state.request_id
        name = f"{prefix}-{given_id}" if given_id else self.new_id(prefix)
        model = self.config.model_names[0]
        request.state.answered_by = (model, None)
        return {"id": name, "created": int(time.time()), "model": model}


def _asked(params: PoolingParams, activate: bool | None, activation: str) -> PoolingParams:
    if activate is None:
        return params
    return replace(params, activation=activation if activate else "")


def _cut(tokens: Sequence[int], call: PoolingCall, ready: Ready) -> Sequence[int]:
    if call.truncate_to is None:
        return tokens
    most = context_limit(ready) if call.truncate_to < 0 else min(call.truncate_to, context_limit(ready))
    return tokens[-most:] if call.keep_end else tokens[:most]
