"""Beam search on an engine: each step asks for one token after each running beam, as requests of their own.

What a beam has in common with the prompt and with other beams is in the prefix cache, so that a step computes at most a
block and a token of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..api.answer import Answer
from ..api.errors import from_engine
from ..core.errors import InvalidRequest, Unavailable
from ..core.events import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from ..core.request import Request, SamplingParams
from ..core.step import TokenLogprob
from ..text.beams import Beams
from ..text.choice import Piece
from .client import EngineClient
from .deltas import Delta, Stream


async def search(
    client: EngineClient, request: Request, beams: Beams, now: Callable[[], float], name: str = "", num_top: int = 0
) -> int:
    """Run `beams` to their end, on the prompt of `request`, for the client `name`; returns how many of the prompt's
    tokens were cached at first. num_top: alternatives to report of each token, if more than the search needs. Raises
    what ends a request early; a search that is cancelled leaves nothing running."""
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=max(num_top, beams.num_candidates), ignore_eos=True
    )
    num_cached = -1
    while not beams.is_done:
        length = len(beams.running[0].tokens)
        requests = [
            replace(
                request,
                id=f"{request.id}-{length}-{number}",
                prompt_tokens=request.prompt_tokens + beam.tokens,
                sampling=sampling,
                max_tokens=1,
                arrival_s=now(),
            )
            for number, beam in enumerate(beams.running)
        ]
        stream = client.open(requests, name)
        try:
            entries, cached = await _one_token(stream, requests)
        finally:
            stream.close()
        num_cached = cached if num_cached < 0 else num_cached
        beams.advance(entries)
    return max(0, num_cached)


async def _one_token(stream: Stream, requests: Sequence[Request]) -> tuple[list[TokenLogprob], int]:
    """What each request's first token could have been, and the tokens that the first one found cached."""
    found: dict[str, TokenLogprob] = {}
    num_cached = 0
    while len(found) < len(requests):
        for delta in await stream.take():
            if delta.finish_reason == FINISH_ERROR:
                raise from_engine(delta.error, delta.error_kind, delta.error_param)
            if delta.finish_reason == FINISH_ABORT:
                raise Unavailable("The server gave up this request; it may be sent again.")
            if delta.logprobs:
                found[delta.request_id] = delta.logprobs[0]
            if delta.request_id == requests[0].id:
                num_cached = delta.num_cached
    return [found[request.id] for request in requests], num_cached


async def search_call(client: EngineClient, answer: Answer, now: Callable[[], float], name: str) -> list[list[Piece]]:
    """What the choices of a call that wants a search say, a piece each; raises what ends it early."""
    call = answer.call
    assert call.beams is not None
    num_top, n = call.sampling.logprobs or 0, call.sampling.n
    firsts = [choice.request for choice in answer.choices[::n]]
    searches = [Beams(replace(call.beams, max_tokens=request.max_tokens), request.eos_token_ids) for request in firsts]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(search(client, request, beams, now, name, num_top))
                for request, beams in zip(firsts, searches, strict=True)
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    pieces = []
    for choice in answer.choices:
        number, place = divmod(choice.index, n)
        if place >= len(searches[number].ended):
            raise InvalidRequest(f"There are only {place} sequences here; give a smaller n.", param="n")
        ended = searches[number].ended[place]
        told = slice(None) if ended.stop_token is None else slice(-1)  # as an engine tells an end token: apart
        said = Delta(
            choice.request.id,
            list(ended.beam.tokens[told]),
            list(ended.beam.entries[told]) if call.sampling.logprobs is not None else [],
            finish_reason=FINISH_LENGTH if ended.stop_token is None else FINISH_STOP,
            stop_token=ended.stop_token,
            num_cached=tasks[number].result(),
        )
        pieces.append([choice.push(said)])
    return pieces
