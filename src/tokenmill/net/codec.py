"""Messages of the link as bytes: one kind byte, then msgpack of the core type.

The kind byte picks a decoder that knows the exact type, so that a message from a different version or a damaged one
fails here, loudly, and never deep inside the engine. Dataclasses travel as maps of field names and NamedTuples, which
are what there are many of, as arrays: 60 bytes an output, 0.1 us to write and 0.7 to read, and no second set of types.
Only requests are taken apart, so that the prompt and the settings that many choices share travel once and are one
object on the other side too.

Times travel as ages: seconds before the message was written. The clocks of two machines agree on how fast time passes
and on nothing else. Age and time are the same subtraction, `now - x`, so one function makes each of the other. What
never happened, -1 as a time, is infinitely old.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any, NamedTuple, cast

import msgspec

from ..core.embeds import Embeds
from ..core.errors import TokenmillError
from ..core.events import (
    Abort,
    AdapterLoaded,
    Beat,
    CacheShown,
    Drain,
    FilePart,
    ForgetTenants,
    FromEngine,
    Leaving,
    LoadAdapter,
    Output,
    PoolChanged,
    Ready,
    SetPool,
    ShowCache,
    StepOutputs,
    Submit,
    Timing,
    ToEngine,
    UnloadAdapter,
    WantPart,
)
from ..core.experts import ExpertLoad
from ..core.kv_events import KeepKV, KVEvents, PromoteKV, WatchKV
from ..core.moves import Continue, KVSource, Moved, Offer, Prefetch, Prefetched, Release, Staged, Yield
from ..core.request import PoolingParams, Request, SamplingParams
from ..core.terms import Terms
from ..core.tiers import TierEvents, WatchTiers


class _PackedRequest(NamedTuple):
    """A request; `prompt`, `keys`, `sampling`, `bad_words` and `terms` are places in the lists of its message, and
    `prediction` is one in that of prompts; `age_s` is since its arrival. Without embeds it is sent without that
    field."""

    prompt: int
    keys: int
    sampling: int
    bad_words: int
    terms: int
    prediction: int
    age_s: float
    id: str
    max_tokens: int
    seed: int
    choice: int
    eos_token_ids: tuple[int, ...]
    output_tokens: tuple[int, ...]
    is_resumed: bool
    priority: int
    cache_salt: str
    adapter: str
    pooling: PoolingParams | None
    dry_breakers: tuple[int, ...]
    handoff: str
    attempt: int
    source: KVSource | None
    yields: str
    session: str
    embeds: tuple[Embeds, ...] = ()


_OWN = _PackedRequest._fields[7:]


class _Submitted(NamedTuple):
    prompts: tuple[tuple[int, ...], ...]
    keys: tuple[bytes, ...]
    samplings: tuple[SamplingParams, ...]
    bad_words: tuple[tuple[tuple[int, ...], ...], ...]
    terms: tuple[Terms, ...]
    choices: tuple[_PackedRequest, ...]


_KINDS: dict[type, bytes] = {
    Submit: b"S", Abort: b"A", Drain: b"D", LoadAdapter: b"L", UnloadAdapter: b"U",
    Ready: b"R", StepOutputs: b"O", AdapterLoaded: b"l", Leaving: b"G",
    ShowCache: b"C", CacheShown: b"c", Beat: b"b",
    Offer: b"F", Yield: b"Y", Continue: b"N", Release: b"E", Prefetch: b"P",
    Staged: b"s", Moved: b"m", Prefetched: b"p", WatchKV: b"W", KVEvents: b"w",
    SetPool: b"Q", PoolChanged: b"q", WantPart: b"X", FilePart: b"x",
    WatchTiers: b"V", TierEvents: b"v", KeepKV: b"K", PromoteKV: b"H", ExpertLoad: b"e",
    ForgetTenants: b"T",
}  # fmt: skip
_DECODERS: dict[int, msgspec.msgpack.Decoder[ToEngine | FromEngine | _Submitted]] = {
    kind[0]: msgspec.msgpack.Decoder(_Submitted if type_ is Submit else type_) for type_, kind in _KINDS.items()
}
_NEVER = -1.0
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine, now: float) -> bytes:
    """`now`: seconds on the clock that the message's times are of."""
    body: object = message
    if isinstance(message, Submit):
        body = _take_apart(message, now)
    elif isinstance(message, StepOutputs):
        body = _turn(message, now, _NEVER, math.inf)
    return _KINDS[type(message)] + _ENCODER.encode(body)


def decode(data: bytes, now: float) -> ToEngine | FromEngine:
    """The message that `encode` was given, its times on the clock that `now` is of, later by what the way took. Raises
    ValueError for anything else."""
    if not data or data[0] not in _DECODERS:
        raise ValueError(f"Not a link message: it starts with {data[:1]!r}.")
    try:
        message = _DECODERS[data[0]].decode(memoryview(data)[1:])
        if isinstance(message, _Submitted):
            return _put_together(message, now)
    except (msgspec.MsgspecError, IndexError, AssertionError, TokenmillError) as error:
        raise ValueError(f"Damaged link message of kind {data[:1]!r}: {error}") from error
    return _turn(message, now, math.inf, _NEVER) if isinstance(message, StepOutputs) else message


def _turn(step: StepOutputs, now: float, never: float, other_never: float) -> StepOutputs:
    """Times into ages, or ages into times; each has a value for what never happened."""

    def gate(value: float) -> float:
        return other_never if value == never else now - value

    def turned(output: Output, timing: Timing) -> Output:
        gates = gate(timing.scheduled_s), gate(timing.first_token_s), gate(timing.finished_s)
        return output._replace(timing=Timing(now - timing.arrival_s, *gates, timing.num_preemptions))

    outputs = [output if output.timing is None else turned(output, output.timing) for output in step.outputs]
    return StepOutputs(tuple(outputs), step.stats, now - step.now_s)


def _take_apart(message: Submit, now: float) -> _Submitted:
    prompts, keys, samplings, bad_words, terms = _Shared(), _Shared(), _Shared(), _Shared(), _Shared()
    own = attrgetter(*_OWN)
    choices = [
        _PackedRequest(
            prompts.place(request.prompt_tokens),
            keys.place(request.keys),
            samplings.place(request.sampling),
            bad_words.place(request.bad_words),
            terms.place(request.terms),
            prompts.place(request.prediction),
            now - request.arrival_s,
            *own(request),
        )
        for request in message.requests
    ]
    return _Submitted(
        tuple(prompts.objects),
        tuple(keys.objects),
        tuple(samplings.objects),
        tuple(bad_words.objects),
        tuple(terms.objects),
        cast(Any, tuple([packed if packed.embeds else packed[:-1] for packed in choices])),
    )


class _Shared:
    """Objects, each once, by identity."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._places: dict[int, int] = {}

    def place(self, thing: object) -> int:
        place = self._places.setdefault(id(thing), len(self.objects))
        if place == len(self.objects):
            self.objects.append(thing)
        return place


def _put_together(message: _Submitted, now: float) -> Submit:
    return Submit(
        tuple(
            Request(
                prompt_tokens=message.prompts[choice.prompt],
                keys=message.keys[choice.keys],
                sampling=message.samplings[choice.sampling],
                bad_words=message.bad_words[choice.bad_words],
                terms=message.terms[choice.terms],
                prediction=message.prompts[choice.prediction],
                arrival_s=now - choice.age_s,
                **cast(dict[str, Any], dict(zip(_OWN, choice[7:], strict=True))),
            )
            for choice in message.choices
        )
    )
