"""The order of steps of every call that generates, whatever its API: read, render, encode, admit, submit, answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from ..api.answer import Answer, Shape
from ..api.call import Call
from ..api.common_fields import with_drafts
from ..api.encoder import Encoded, Encoder, prompt_text, text_call
from ..api.fields import Fields
from ..api.logprobs import TokenNames
from ..api.parsers import constraint_of, parsers_of
from ..api.pieces import in_turns
from ..api.rules import rules_of
from ..api.sandbox import Caller, Sandbox, caller_of, read_call
from ..cluster.keys import num_keys, with_keys
from ..cluster.request_queue import newcomer
from ..cluster.router import Router
from ..control.observe.overload import SHORTENED, Shadow, shortened
from ..control.slo.objectives import Objectives
from ..control.slo.scorer import Scorer
from ..control.usage.journal import Account
from ..control.usage.meter import Meter, Tab
from ..core.errors import InvalidRequest, ModelNotFound, Unavailable
from ..core.events import Ready
from ..core.policy import ENTERS, Newcomer, Verdict
from ..core.ports import Clock
from ..core.request import IDLE_PRIORITY, Request
from ..text.calls import context_limit, make_requests, require_tokens
from ..text.choice import Choice
from ..text.special_tokens import Rendered
from ..text.text_model import TextModel
from .adapters import ServedAdapter
from .beam_search import search_call
from .client import EngineClient
from .config import SHADOW, ServerConfig
from .deltas import Stream
from .grammars import GrammarCompiler
from .kv.hints import KVRetention
from .limits import Limits, wait_ready
from .qos import bounded, terms_of
from .result_cache import HEADER as HIT
from .result_cache import Kept, ResultCache
from .resume.store import KeptCall
from .resume.stream_log import StreamLog, ended_stream, ready_at_last, stream_log_of
from .stream import RunningCall

SESSION = "x-session-id"
_MAX_SESSION_CHARS = 256
_MANY = 2048
"""Keys that take a millisecond: more of them are made by a thread."""


async def routed(router: Router, requests: Sequence[Request], ready: Ready, call: HttpRequest | None) -> list[Request]:
    """The requests with what the router looks at, where there is a choice between engines."""
    session = "" if call is None else call.headers.get(SESSION, "")[:_MAX_SESSION_CHARS]
    if session:
        requests = [replace(each, session=session) for each in requests]
    if not router.has_keys:
        return list(requests)
    if num_keys(requests, ready) > _MANY:
        return await asyncio.to_thread(with_keys, requests, ready)
    return with_keys(requests, ready)


_log = logging.getLogger(__name__)
_MAX_LOGGED = 1000
_MAX_LOGGED_OF_BODY = 50
_MAX_IGNORED = 1000
"""Characters."""
IGNORED = b"x-tokenmill-ignored"


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A call that may be submitted.

    headers  of its response
    verdict  what the admission said of it
    kept     the results of its choices, where they were kept from an earlier call
    tab      on which it is counted; None: it is not
    """

    answer: Answer
    headers: Sequence[tuple[bytes, bytes]]
    verdict: Verdict
    kept: Sequence[Kept] | None
    tab: Tab | None


class Generation:
    """What the endpoints of one application share. `limits`, `encoder`, `text`, `config`, `client` and `clock` are for
    them to use. `meter`, `results`: None where nothing is counted, or no results are kept."""

    def __init__(
        self,
        config: ServerConfig,
        text: TextModel,
        client: EngineClient,
        sandbox: Sandbox,
        clock: Clock,
        new_seed: Callable[[], int],
        new_id: Callable[[str], str],
        meter: Meter | None = None,
        results: ResultCache | None = None,
    ) -> None:
        assert client.observers.metrics is not None
        self.config = config
        self._mask = config.mask
        self.text = text
        self.client = client
        self.metrics = client.observers.metrics
        self.clock = clock
        self.new_id = new_id
        self.sandbox = sandbox
        self.encoder = Encoder(text, sandbox)
        self.grammars = GrammarCompiler(sandbox, client.observers.metrics)
        self.limits = Limits(config, client, clock)
        self.objectives = Objectives(
            config.slo, lambda: client.stats.costs, self._step_tokens, lambda: client.stats.num_steps
        )
        self.scorer = Scorer(config.model_names[0], lambda: self.objectives.effective)
        client.observers.added.append(self.scorer)
        self.retention = KVRetention(client.kv_hints, config.kv_keep_tools_s)
        client.observers.added.append(self.retention)
        self.metrics.registry.register(self.scorer)
        self._shadow: Shadow | None = None
        if config.admission == SHADOW:
            self._shadow = Shadow(client.observers.metrics.overload)
            client.observers.added.append(self._shadow)
        self._new_seed = new_seed
        self._meter = meter
        self._results = results
        self._rules = rules_of(text, config.allow_chat_template)
        self._logged_fields: set[str] = set()
        self.other_names: Callable[[], Sequence[str]] = tuple

    @property
    def max_model_len(self) -> int:
        ready = self.client.ready
        return self.text.max_context if ready is None else context_limit(ready)

    @property
    def model_names(self) -> Sequence[str]:
        return self.config.model_names

    @property
    def max_body_bytes(self) -> int:
        return self.config.max_body_bytes

    def now(self) -> float:
        return self.clock.now()

    async def wait_ready(self, caller: Caller) -> Ready:
        """The engines' facts, as soon as there is an engine. Raises Unavailable, and ClientGone."""
        return await wait_ready(self.client, self.config, caller)

    def _step_tokens(self) -> int:
        ready = self.client.ready
        return 0 if ready is None else ready.max_num_batched_tokens

    async def reply(self, request: HttpRequest, endpoint: str, shape: Shape) -> ASGIApp:
        """What answers a call whose body is of `endpoint`, a key of ENDPOINTS."""
        arrival_s = self.clock.now()
        self.limits.refuse_when_draining()
        caller = caller_of(request)
        async with self.limits.body(request) as data:
            call, rendered = await self.read(endpoint, data, caller)
            given_id = request.state.request_id
            if call.beams is None:
                running = await self.begin(
                    call,
                    shape.prefix,
                    caller,
                    rendered=rendered,
                    arrival_s=arrival_s,
                    request_id=given_id,
                    media_type=shape.media_type,
                )
                return running.reply(shape)
            admitted = await self._prepare(call, shape.prefix, caller, rendered, arrival_s, given_id)
        answer = admitted.answer
        requests = [choice.request for choice in answer.choices]
        try:
            pieces = await caller.stay(search_call(self.client, answer, self.clock.now, caller.name))
        finally:
            self.limits.settle_quota(requests, sum(choice.num_tokens for choice in answer.choices))
        self.metrics.call_done(max(choice.num_tokens for choice in answer.choices))
        body = await in_turns(shape.whole(answer, pieces))
        if admitted.tab is not None:
            admitted.tab.note()
        return Response(body, media_type="application/json")

    async def read(self, endpoint: str, data: bytes, caller: Caller) -> tuple[Any, Rendered | None]:
        """(the validated call, its conversation where that is rendered already). Raises InvalidRequest naming the
        field, and ModelNotFound."""
        call, unknown, rendered = await read_call(
            endpoint, data, self._rules, self.sandbox, caller, self.check_model, self.max_model_len
        )
        self.log_unknown(unknown)
        return call, rendered

    async def begin(
        self,
        call: Call,
        prefix: str,
        caller: Caller,
        *,
        rendered: Rendered | None,
        arrival_s: float,
        request_id: str = "",
        media_type: str = "",
        new_name: Callable[[], str] | None = None,
    ) -> RunningCall:
        """Encode a call and submit it to the engine. What runs is the caller's to close. `prefix`: of the answer's id;
        `request_id`: the client's own name of the call; `media_type`: of its stream, where that may be kept to be
        resumed; `new_name`: gives the answer's id, instead of prefix and request_id."""
        if call.beams is not None:
            raise InvalidRequest("use_beam_search is not available here.", param="use_beam_search")
        log = stream_log_of(caller.request, media_type) if media_type and caller.request is not None else None
        if log is not None and log.call is not None:
            return await self._go_on(call, caller, rendered, log, log.call)
        admitted = await self._prepare(call, prefix, caller, rendered, arrival_s, request_id)
        answer, kept, tab = admitted.answer, admitted.kept, admitted.tab
        if new_name is not None:
            answer.id = new_name()
        interval = (call.stream_interval or self.config.stream_interval) if call.stream else 1
        requests = [choice.request for choice in answer.choices]
        if self._results is not None:
            if kept is not None:
                self.limits.settle_quota(requests, sum(one.num_output for one in kept))
                return self._running(admitted, self._results.replay(kept, requests, interval))
            self._results.record(requests)
        if self._shadow is not None:
            self._shadow.note(requests, admitted.verdict)
        if log is not None and not (call.stream and len(requests) == 1):
            log.forget()
        elif log is not None and log.keep(answer, self.client):
            interval = 1
            if tab is not None:
                tab.defer(requests[0].id)
        with self.limits.dropping_quota(requests):
            stream = self.client.open(requests, caller.name, interval, admitted.verdict)
        self.retention.watch(requests, call.keep_s)
        if self.client.observers.request_log is not None:
            self.client.observers.request_log.came(requests, answer.id)
        return self._running(admitted, stream, self.retention)

    def _running(self, admitted: _Admitted, stream: Stream, retention: KVRetention | None = None) -> RunningCall:
        return RunningCall(admitted.answer, stream, self.metrics, admitted.headers, admitted.tab, retention)

    async def _go_on(
        self, call: Call, caller: Caller, rendered: Rendered | None, log: StreamLog, kept: KeptCall
    ) -> RunningCall:
        """`begin` of a call that an earlier process had let in: with its names, its request and what had come of it.
        It waits for an engine as long as it takes."""
        adapter = self.check_model({"model": call.model})
        ready = await caller.stay(ready_at_last(self.client, self.limits))
        prompts = await self.encoder.encode_call(call, context_limit(ready), rendered=rendered, caller=caller)
        request = replace(kept.request, arrival_s=self.clock.now())
        prompts = [replace(prompts[0], tokens=request.prompt_tokens)]
        answer, tab = self._shaped(kept.id, call, caller, prompts, [request], adapter, ready)
        if tab is not None:
            tab.defer(request.id)
        answer.created = kept.created
        if answer.fingerprint != kept.fingerprint or any(each.finish_reason for each in log.outputs):
            return RunningCall(answer, ended_stream(request.id, log.outputs), self.metrics, tab=tab)
        tokens = tuple(token for each in log.outputs for token in each.tokens)
        stream = self.client.open([replace(request, output_tokens=tokens, is_resumed=True)], caller.name)
        for output in log.outputs:
            stream.push(output)
        return RunningCall(answer, stream, self.metrics, tab=tab)

    async def _prepare(
        self, call: Call, prefix: str, caller: Caller, rendered: Rendered | None, arrival_s: float, request_id: str
    ) -> _Admitted:
        """All but submitting it; it has been admitted."""
        adapter = self.check_model({"model": call.model})
        ready = await self.wait_ready(caller)
        require_tokens(ready)
        width = call.sampling.n if call.beams is None else call.beams.beam_width
        self.limits.check_possible(max(1, len(call.prompts)) * width)
        self.limits.check_quota(caller)
        since_s = self.clock.now() - arrival_s
        least = _least_tokens(call)
        terms = terms_of(caller, self.objectives, call.slo, least, call.priority_class)
        self.limits.admit(Newcomer(caller.name, call.priority, least, terms=terms, since_s=since_s))
        prompts = await self.encoder.encode_call(call, context_limit(ready), rendered=rendered, caller=caller)
        room = context_limit(ready) if ready.num_speculative_tokens else 0
        prediction = await self.encoder.encode_prediction(call, room, caller)
        constraint = constraint_of(call, self.text.chat_format, prompts[0].text)
        if constraint is not None:
            grammar = await self.grammars.compile(constraint, caller)
            call = replace(call, sampling=replace(call.sampling, grammar=grammar))
        root_id = self.new_id(prefix[:-1])
        given_id = self._mask(call.request_id or request_id)
        digest = "" if adapter is None else adapter.digest
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        recognised = ""
        if call.priority < IDLE_PRIORITY:
            recognised = self.scorer.came(caller.tenant, caller.name, arrival_s, call.stream)
        terms = terms_of(caller, self.objectives, call.slo, longest, call.priority_class, recognised)
        terms = bounded(terms, caller, self.config, self.objectives.alone(longest).ttft_s if terms.ttft_s else 0.0)
        terms = with_drafts(terms, call.drafts)
        requests = make_requests(
            text_call(call, self.text, digest, terms, caller.tenant.salt_with(call.cache_salt), prediction),
            [prompt.tokens for prompt in prompts],
            ready,
            root_id=root_id,
            arrival_s=arrival_s,
            new_seed=self._new_seed,
        )
        requests = await routed(self.client.gateway.router, requests, ready, caller.request)
        await self.limits.take_quota(caller, requests, call.prompt_field)
        with self.limits.dropping_quota(requests):
            name = prefix + (given_id or root_id[len(prefix) :])
            return self._admit(name, call, caller, prompts, requests, adapter, ready)

    def _admit(
        self,
        name: str,
        call: Call,
        caller: Caller,
        prompts: list[Encoded],
        requests: list[Request],
        adapter: ServedAdapter | None,
        ready: Ready,
    ) -> _Admitted:
        """The answer of a call, which is let in or refused at once: nobody else comes between this and its opening."""
        terms = requests[0].terms
        kept = None
        if self._results is not None and call.beams is None:
            kept = self._results.find(requests, ready)
        headers: list[tuple[bytes, bytes]] = []
        if call.ignored:
            names = list(dict.fromkeys(map(_plain, call.ignored)))
            headers.append((IGNORED, ", ".join(names)[:_MAX_IGNORED].encode()))
            self._log_once(names, "Ignoring what a request asks for and nothing here can do: %s.")
        verdict = ENTERS
        if kept is None:
            verdict = self.limits.admit(newcomer(caller.name, requests, self.clock.now()))
        else:
            headers.append(HIT)
        if kept is None and terms.shorten_to and self.client.request_queue.pressure.level(self.clock.now()):
            wanted, requests = requests, shortened(requests)
            if any(one.max_tokens < other.max_tokens for one, other in zip(requests, wanted, strict=True)):
                headers.append((SHORTENED, str(max(each.max_tokens for each in requests)).encode()))
                self.metrics.overload.shortened()
        answer, tab = self._shaped(name, call, caller, prompts, requests, adapter, ready)
        return _Admitted(answer, headers, verdict, kept, tab)

    def _shaped(
        self,
        name: str,
        call: Call,
        caller: Caller,
        prompts: list[Encoded],
        requests: list[Request],
        adapter: ServedAdapter | None,
        ready: Ready,
    ) -> tuple[Answer, Tab | None]:
        """The answer of a call that has been let in, and the tab on which it is counted."""
        digest = "" if adapter is None else adapter.digest
        tokenizer, chat_format = self.text.tokenizer, self.text.chat_format
        shown = chat_format.shown(call.tool_use, call.reasoning)
        new_parser = parsers_of(call, chat_format, prompts[0].text)
        skip_special = call.sampling.skip_special_tokens
        answer = Answer(
            id=name,
            created=int(time.time()),
            model=self.config.model_names[0] if adapter is None else adapter.name,
            fingerprint=fingerprint(ready, digest),
            call=call,
            prompts=prompts,
            choices=[Choice(index, each, tokenizer, new_parser(each.id), shown) for index, each in enumerate(requests)],
            names=TokenNames(tokenizer, as_ids=call.tokens_as_ids),
            echoes=[prompt_text(self.text, prompt, skip_special) for prompt in prompts] if call.echo else (),
            draft_metrics=self.config.per_request_spec_decode_metrics,
            most_drafted=ready.num_speculative_tokens,
        )
        if caller.request is not None:
            caller.request.state.answered_by = (answer.model, answer.fingerprint)
        tab = None
        if self._meter is not None:
            account = Account(caller.tenant.id, caller.key, answer.model)
            counts_output = not call.score_only
            tab = self._meter.tab(
                account, answer.choices, call.sampling.n, counts_output=counts_output, once=caller.once
            )
        self.metrics.call_admitted(call.sampling.n)
        return answer, tab

    def check_model(self, body: dict[str, Any]) -> ServedAdapter | None:
        """The adapter that a body asks for by its model's name; None for the model itself, which no name means too.
        A name may carry the tag "latest", as Ollama's clients write it."""
        name = Fields(body).text("model")
        plain = None if name is None else name.removesuffix(":latest")
        if name is None or not {name, plain}.isdisjoint(self.config.model_names):
            return None
        adapter = self.client.adapters.get(name) or self.client.adapters.get(plain or "")
        if adapter is None and any(self.client.adapters.is_loading(each) for each in (name, plain or "")):
            raise Unavailable(f"The adapter {name[:200]!r} is still loading.", retry_after_s=1.0, param="model")
        if adapter is None:
            adapters = (each.name for each in self.client.adapters)
            known = ", ".join([*self.config.model_names, *adapters, *self.other_names()])
            hint = f"this server has: {known}."
            message = f"The model {name[:200]!r} does not exist here; {hint}"
            raise ModelNotFound(message, param="model", name=name[:200], hint=hint)
        return adapter

    def serves(self, name: str) -> bool:
        """Whether a body may name this model."""
        try:
            self.check_model({"model": name})
        except (ModelNotFound, Unavailable):
            return False
        return True

    def log_unknown(self, names: list[str]) -> None:
        self._log_once(names, "Ignoring the unknown request field %r.")

    def _log_once(self, names: list[str], text: str) -> None:
        """Each name once, and not more names than a log should hold."""
        for name in names[:_MAX_LOGGED_OF_BODY]:
            if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED:
                self._logged_fields.add(name)
                _log.warning(text, name[:100])


_CHARS = 6
"""Few texts have fewer tokens than one for so many characters."""


def _least_tokens(call: Call) -> int:
    """Tokens of a call's first prompt, before it is encoded: hardly more than it has. Most of its time may be spent on
    what this refuses already."""
    if call.conversation is not None:
        return (
            sum(len(text) for each in call.conversation.messages if isinstance(text := each.get("content"), str))
            // _CHARS
        )
    first = call.prompts[0] if call.prompts else ()
    return len(first) // _CHARS if isinstance(first, str) else len(first) if isinstance(first, tuple) else 0


def _plain(text: str) -> str:
    """What a header may hold."""
    return "".join(char if char.isascii() and char.isprintable() and char != "," else "?" for char in text)


def fingerprint(ready: Ready, adapter: str = "") -> str:
    """OpenAI's system_fingerprint: equal exactly where answers with the same seed are. `adapter`: its digest."""
    return "fp_" + hashlib.sha256(f"{ready.numerics_id} {ready.draw_version} {adapter}".encode()).hexdigest()[:16]
