"""Clients of a simulated service: they stand where `bench.load.http` stands live, and what they hear of an answer
becomes the same events of the same exchange. A call of the plan is one request; times are those of the virtual loop, as
the outputs reach the client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ..bench.load.plan import Call
from ..bench.load.player import OnDone
from ..bench.load.retries import GAVE_UP
from ..bench.load.stream import Exchange
from ..bench.load.timer import LoopTimer
from ..core import errors
from ..core.errors import Overloaded, TokenmillError
from ..core.events import FINISH_LENGTH, FINISH_STOP, Output, Timing
from ..core.request import Request, SamplingParams
from ..core.terms import USUAL, Terms
from .prompts import Asked

STATUSES = {
    each.kind: each.status
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, TokenmillError) and each not in (errors.KeyReused, errors.NotFound)
} | {each.kind: each.status for each in (errors.InvalidRequest, errors.Overloaded)}
"""The HTTP status of an output's `error_kind`."""


class Serves(Protocol):
    """What is needed of `sim.service.Service`."""

    def open(
        self,
        request: Request,
        client: str,
        hear: Callable[[Output], None],
        *,
        num_output: int = 0,
        refuse: Callable[[Overloaded], None] | None = None,
        hear_run: Callable[[Output, Sequence[float]], None] | None = None,
    ) -> None: ...

    def give_up(self, request_id: str) -> None: ...


REFUSAL_S = 0.001
"""After which a refusal is heard, about what one takes on a machine: whoever sends the next call at once would else be
refused for ever in one moment."""

Ended = Callable[[str, Exchange, Timing | None], None]
"""Is told of each request that has ended: its id, its exchange, and its last engine's times where there are some."""


def usual_terms(call: Call) -> Terms:
    return Terms(tenant=call.tenant) if call.tenant else USUAL


class VirtualClient:
    """Sends calls and reports each exchange when it has ended. keeps_tokens: `answered` is asked for."""

    def __init__(
        self,
        service: Serves,
        *,
        name: str = "bench",
        timeout_s: float = 600.0,
        terms_of: Callable[[Call], Terms] = usual_terms,
        keeps_tokens: bool = False,
        ended: Ended | None = None,
    ) -> None:
        self.num_bytes = 0
        self._service = service
        self._name = name
        self._timeout_s = timeout_s
        self._terms_of = terms_of
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._open: dict[int, tuple[Exchange, str, OnDone]] = {}
        self._num_sent = 0
        self._is_sending = False
        self._sampling: dict[int, SamplingParams] = {}
        self._sent: deque[tuple[float, Exchange]] = deque()
        self._timer = LoopTimer(self._loop, self._on_timeout)
        self._tokens: dict[int, list[int]] | None = {} if keeps_tokens else None

    def answered(self, index: int) -> tuple[int, ...]:
        """Tokens that call `index` was answered with."""
        assert self._tokens is not None, "they were not kept"
        return tuple(self._tokens.get(index, ()))

    def send(self, exchange: Exchange, body: Asked, on_done: OnDone) -> None:
        """on_done is called exactly once, later."""
        now, call = self._loop.time(), body.call
        number = self._num_sent = self._num_sent + 1
        request_id = f"{self._name}-{exchange.index}"
        request_id += f"-{exchange.num_refused}" if exchange.num_refused else ""
        if exchange.sent_s is None:
            exchange.sent_s = now
        exchange.input_tokens = len(body.prompt)
        most = call.output_tokens
        sampling = self._sampling.get(most)
        if sampling is None:
            sampling = self._sampling[most] = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id,
            body.prompt,
            sampling,
            most,
            number,
            arrival_s=now,
            terms=self._terms_of(call),
            session=call.session,
        )
        self._open[exchange.index] = exchange, request_id, on_done
        self._sent.append((now, exchange))
        if len(self._sent) == 1:
            self._timer.set(now + self._timeout_s)
        hear, refuse = partial(self._hear, exchange), partial(self._refused, exchange)
        self._is_sending = True
        hear_run = partial(self._hear_run, exchange)
        self._service.open(request, call.tenant or self._name, hear, refuse=refuse, hear_run=hear_run)
        self._is_sending = False

    def give_up(self, exchange: Exchange) -> None:
        self._abort(exchange, *GAVE_UP)

    async def close(self) -> None:
        """Exchanges in flight end as interrupted."""
        self._timer.close()
        for exchange, _, _ in list(self._open.values()):
            self._abort(exchange, "interrupted", "the run ended before the answer")

    def _hear(self, exchange: Exchange, output: Output) -> None:
        if exchange.index not in self._open:
            return
        if output.tokens:
            now = self._loop.time()
            exchange.event_times.append(now)
            exchange.event_tokens.append(len(output.tokens))
            if exchange.first_content_s is None:
                exchange.first_content_s = now
            if self._tokens is not None:
                self._tokens.setdefault(exchange.index, []).extend(output.tokens)
        reason = output.finish_reason
        if reason is None:
            return
        exchange.output_tokens, exchange.cached_tokens = output.num_output, output.num_cached
        if reason in (FINISH_STOP, FINISH_LENGTH):
            exchange.end(reason)
            if not exchange.event_times:
                exchange.fail("no_tokens", "the answer held no tokens")
        elif output.error and not exchange.event_times:
            exchange.fail(f"http_{STATUSES.get(output.error_kind, 500)}", output.error)
        elif output.error:
            exchange.fail("stream_error", output.error)
        else:
            exchange.fail(f"finish_{reason}", "the service ended the answer early")
        self._end(exchange, output.timing)

    def _hear_run(self, exchange: Exchange, output: Output, times: Sequence[float]) -> None:
        """As _hear of each token at its time."""
        if exchange.index not in self._open:
            return
        exchange.event_times.extend(times)
        exchange.event_tokens.extend([1] * len(times))
        if exchange.first_content_s is None:
            exchange.first_content_s = times[0]
        if self._tokens is not None:
            self._tokens.setdefault(exchange.index, []).extend(output.tokens)

    def _refused(self, exchange: Exchange, error: Overloaded) -> None:
        exchange.fail(f"http_{error.status}", error.message)
        exchange.retry_after_s = error.retry_after_s
        self._loop.call_later(REFUSAL_S, self._hear_refusal, exchange)

    def _hear_refusal(self, exchange: Exchange) -> None:
        if exchange.index in self._open:  # its client has not left meanwhile
            self._end(exchange)

    def _abort(self, exchange: Exchange, error: str, detail: str) -> None:
        self._service.give_up(self._open[exchange.index][1])
        exchange.fail(error, detail)
        self._end(exchange)

    def _end(self, exchange: Exchange, timing: Timing | None = None) -> None:
        exchange.end_s = self._loop.time()
        if self._ended is not None:
            self._ended(self._open[exchange.index][1], exchange, timing)
        _, _, on_done = self._open.pop(exchange.index)
        while self._sent and self._sent[0][1].end_s is not None:
            self._sent.popleft()
        if self._is_sending:
            self._loop.call_soon(on_done, exchange)
        else:
            on_done(exchange)

    def _on_timeout(self) -> None:
        """All wait equally long, so the first sent are the first to be given up."""
        now = self._loop.time()
        while self._sent:
            sent_s, exchange = self._sent[0]
            is_open = exchange.end_s is None and exchange.index in self._open
            if is_open and sent_s + self._timeout_s > now:
                self._timer.set(sent_s + self._timeout_s)
                return
            self._sent.popleft()
            if is_open:
                self._abort(exchange, "timeout", f"no complete answer within {self._timeout_s:g} s")
