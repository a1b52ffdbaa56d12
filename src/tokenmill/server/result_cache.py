"""Results that are looked up instead of computed: what the engine gave for a request is what it gives for an equal one.

A request is looked up if its tokens are determined by what it says: it is greedy, or brings a seed. The key is all that
determines them: the numerics id of the engine, the adapter, the tokens of the prompt, the sampling with its seed, the
limits; and the tenant and its salt, so that nobody learns what others have asked. What is kept is what the engine gave,
so each API shows it in its own way, whole or streamed. Bounded in bytes; what was not used longest goes first.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from ..cluster.events import Ended
from ..control.observe.observers import Observer
from ..core.events import FINISH_LENGTH, FINISH_STOP, TIMEOUT, Output, Ready, StepOutputs
from ..core.request import Request
from ..core.step import TokenLogprob
from .deltas import Stream

HEADER = (b"x-tokenmill-cache", b"hit")
_AT_ONCE = 256
"""Tokens that a reader is given before others have a turn."""
_ENTRY_BYTES = 256
_LABELS = ("model_name", "engine")


class Kept(NamedTuple):
    """What the engine gave for one request, and how that ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    error: str
    stop_token: int | None
    num_output: int
    vector: bytes


class _Recording:
    """A request under way whose result will be kept under `key`, if an engine of the same numerics gives it."""

    __slots__ = ("key", "logprobs", "numerics_id", "prompt_logprobs", "stop_token", "tokens", "vector")

    def __init__(self, key: bytes, numerics_id: str) -> None:
        self.key = key
        self.numerics_id = numerics_id
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.stop_token: int | None = None
        self.vector = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Kept).decode


class ResultCache(Observer):
    """An Observer. max_bytes: of all results together. ready: the facts of the engine there is now."""

    def __init__(
        self, max_bytes: int, model_name: str, registry: CollectorRegistry, ready: Callable[[], Ready | None]
    ) -> None:
        self._max_bytes = max_bytes
        self._ready = ready
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._recordings: dict[str, _Recording] = {}
        self._feeding: set[asyncio.Task[None]] = set()

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=registry).labels(model_name, "0")

        self._hits = counter("tokenmill:result_cache_hits", "Calls answered from the result cache")
        self._misses = counter("tokenmill:result_cache_misses", "Calls that could have been, but were not")
        size = Gauge("tokenmill:result_cache_bytes", "Bytes of results that are kept", _LABELS, registry=registry)
        size.labels(model_name, "0").set_function(lambda: self._num_bytes)

    def find(self, requests: Sequence[Request], ready: Ready) -> list[Kept] | None:
        """The results of all requests of a call; None where one is not known or not determined."""
        keys = [key for request in requests if (key := _key(request, ready)) is not None]
        if len(keys) < len(requests):
            return None
        found = [self._entries[key] for key in keys if key in self._entries]
        if len(found) < len(keys):
            self._misses.inc()
            return None
        self._hits.inc()
        for key in keys:
            self._entries.move_to_end(key)
        return [_decode(entry) for entry in found]

    def record(self, requests: Sequence[Request]) -> None:
        """Keep what comes for requests that are about to be opened, where that is determined."""
        ready = self._ready()
        for request in requests if ready is not None else ():
            assert ready is not None
            key = _key(request, ready)
            if key is not None and key not in self._entries:
                self._recordings[request.id] = _Recording(key, ready.numerics_id)

    def replay(self, kept: Sequence[Kept], requests: Sequence[Request], interval: int = 1) -> Stream:
        """A stream that gives what is kept, as if an engine did. Its interval is more than 1, so that its reader gets
        all of it: what is written past a reader is counted by the engine's messages (`usage.meter`)."""
        ids = [request.id for request in requests]
        stream = Stream(lambda request_id, reason: None, ids, max(2, interval))
        rest: list[Iterator[Output]] = []
        for one, request in zip(kept, requests, strict=True):
            outputs = _outputs(one, request)
            stream.push(next(outputs))
            rest.append(outputs)
        if any(len(one.tokens) > _AT_ONCE for one in kept):
            task = asyncio.create_task(_feed(stream, rest), name="kept-result")
            self._feeding.add(task)
            task.add_done_callback(self._feeding.discard)
        return stream

    # ---- as an Observer ----

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        recordings = self._recordings
        if not recordings:
            return
        for output in outputs:
            recording = recordings.get(output.request_id)
            if recording is not None:
                recording.tokens += output.tokens
                recording.logprobs += output.logprobs
                recording.prompt_logprobs += output.prompt_logprobs
                recording.stop_token = output.stop_token
                recording.vector = output.vector

    def ended(self, ended: Ended) -> None:
        recording = self._recordings.pop(ended.request.id, None)
        if recording is None or ended.output is None or ended.reason not in (FINISH_STOP, FINISH_LENGTH):
            return
        if ended.output.error == TIMEOUT:
            return
        ready = self._ready()
        if ready is None or ready.numerics_id != recording.numerics_id:
            return
        kept = Kept(
            tuple(recording.tokens), tuple(recording.logprobs), recording.prompt_logprobs, ended.reason,
            ended.output.error, recording.stop_token, ended.output.num_output, recording.vector,
        )  # fmt: skip
        self._keep(recording.key, _encode(kept))

    def _keep(self, key: bytes, entry: bytes) -> None:
        if key in self._entries or len(entry) > self._max_bytes // 8:
            return
        self._entries[key] = entry
        self._num_bytes += len(entry) + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= len(oldest) + _ENTRY_BYTES


def _key(request: Request, ready: Ready) -> bytes | None:
    """Of all that determines what an engine gives for the request; None where that is not determined, or where more
    than tokens is wanted."""
    sampling = request.sampling
    is_greedy = sampling.temperature == 0 and not sampling.xtc_probability
    if request.handoff or (request.pooling is None and not is_greedy and sampling.seed is None):
        return None
    said = (
        ready.numerics_id, ready.draw_version, request.terms.tenant, request.cache_salt, request.adapter,
        request.prompt_tokens, replace(sampling, seed=None), 0 if is_greedy else request.seed, request.choice,
        request.max_tokens, request.eos_token_ids, request.bad_words, request.dry_breakers, request.pooling,
        request.output_tokens, request.embeds,
    )  # fmt: skip
    return hashlib.blake2b(_encode(said), digest_size=32).digest()


def _outputs(kept: Kept, request: Request) -> Iterator[Output]:
    """As an engine would give it, but much at once. A stop string is found again where it was found before."""
    num_parts = max(1, -(-len(kept.tokens) // _AT_ONCE))
    for part in range(num_parts):
        begin, end = part * _AT_ONCE, (part + 1) * _AT_ONCE
        is_last = part == num_parts - 1
        yield Output(
            request.id,
            kept.tokens[begin:end],
            kept.logprobs[begin:end],
            kept.prompt_logprobs if part == 0 else (),
            kept.finish_reason if is_last else None,
            kept.stop_token if is_last else None,
            kept.num_output if is_last else min(end, len(kept.tokens)),
            len(request.prompt_tokens),
            error=kept.error if is_last else "",
            vector=kept.vector if is_last else b"",
        )


async def _feed(stream: Stream, rest: Sequence[Iterator[Output]]) -> None:
    """What is left, a part of each request in turn, so that other streams are served between."""
    waiting = list(rest)
    while waiting:
        await asyncio.sleep(0)
        for outputs in list(waiting):
            output = next(outputs, None)
            if output is None:
                waiting.remove(outputs)
            else:
                stream.push(output)
