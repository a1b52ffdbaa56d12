"""Messages of the link as bytes: one kind byte, then msgpack of the core type.

The kind byte picks a decoder that knows the exact type, so that a message from a different version or a damaged one
fails here, loudly, and never deep inside the engine. Dataclasses travel as maps of field names and NamedTuples, which
are what there are many of, as arrays: 60 bytes an output, 0.1 us to write and 0.7 to read, and no second set of types.
Only requests are taken apart, so that the prompt and the settings that many choices share travel once and are one
object on the other side too.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..core.events import Abort, AdapterLoaded, Drain, LoadAdapter, Ready, StepOutputs, Submit, UnloadAdapter
from ..core.ports import FromEngine, ToEngine
from ..core.request import PoolingParams, Request, SamplingParams


class _Choice(NamedTuple):
    """A request; `prompt` and `sampling` are places in the lists of its message."""

    id: str
    prompt: int
    sampling: int
    max_tokens: int
    seed: int
    choice: int
    eos_token_ids: tuple[int, ...]
    output_tokens: tuple[int, ...]
    priority: int
    tenant: str
    cache_salt: str
    adapter: str
    arrival_s: float
    pooling: PoolingParams | None


class _Submitted(NamedTuple):
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    choices: tuple[_Choice, ...]


_KINDS: dict[type, bytes] = {
    Submit: b"S", Abort: b"A", Drain: b"D", LoadAdapter: b"L", UnloadAdapter: b"U",
    Ready: b"R", StepOutputs: b"O", AdapterLoaded: b"l",
}  # fmt: skip
_DECODERS: dict[int, msgspec.msgpack.Decoder[ToEngine | FromEngine | _Submitted]] = {
    kind[0]: msgspec.msgpack.Decoder(_Submitted if type_ is Submit else type_) for type_, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    body = _take_apart(message) if isinstance(message, Submit) else message
    return _KINDS[type(message)] + _ENCODER.encode(body)


def decode(data: bytes) -> ToEngine | FromEngine:
    """The message that `encode` was given. Raises ValueError for anything else."""
    if not data or data[0] not in _DECODERS:
        raise ValueError(f"Not a link message: it starts with {data[:1]!r}.")
    try:
        message = _DECODERS[data[0]].decode(memoryview(data)[1:])
        return _put_together(message) if isinstance(message, _Submitted) else message
    except (msgspec.MsgspecError, IndexError) as error:
        raise ValueError(f"Damaged link message of kind {data[:1]!r}: {error}") from error


def _take_apart(message: Submit) -> _Submitted:
    prompts = {id(request.prompt_tokens): request.prompt_tokens for request in message.requests}
    samplings = {id(request.sampling): request.sampling for request in message.requests}
    prompt_places = {key: place for place, key in enumerate(prompts)}
    sampling_places = {key: place for place, key in enumerate(samplings)}
    choices = tuple(
        _Choice(
            request.id,
            prompt_places[id(request.prompt_tokens)],
            sampling_places[id(request.sampling)],
            request.max_tokens,
            request.seed,
            request.choice,
            request.eos_token_ids,
            request.output_tokens,
            request.priority,
            request.tenant,
            request.cache_salt,
            request.adapter,
            request.arrival_s,
            request.pooling,
        )
        for request in message.requests
    )
    return _Submitted(tuple(prompts.values()), tuple(samplings.values()), choices)


def _put_together(message: _Submitted) -> Submit:
    prompts, samplings = message.prompts, message.samplings
    return Submit(
        tuple(
            Request(choice.id, prompts[choice.prompt], samplings[choice.sampling], *choice[3:])
            for choice in message.choices
        )
    )
