"""Messages of the link as bytes: one kind byte, then msgpack of the core type.

The kind byte picks a decoder that knows the exact type, so that a message from a different version or a damaged one
fails here, loudly, and never deep inside the engine. Dataclasses travel as maps of field names and NamedTuples, which
are what there are many of, as arrays: 60 bytes an output, 0.1 us to write and 0.7 to read, and no second set of types.
"""

from __future__ import annotations

import msgspec

from ..core.events import Abort, AdapterLoaded, Drain, LoadAdapter, Ready, StepOutputs, Submit, UnloadAdapter
from ..core.ports import FromEngine, ToEngine

_KINDS: dict[type, bytes] = {
    Submit: b"S", Abort: b"A", Drain: b"D", LoadAdapter: b"L", UnloadAdapter: b"U",
    Ready: b"R", StepOutputs: b"O", AdapterLoaded: b"l",
}  # fmt: skip
_DECODERS: dict[int, msgspec.msgpack.Decoder[ToEngine | FromEngine]] = {
    kind[0]: msgspec.msgpack.Decoder(type_) for type_, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    return _KINDS[type(message)] + _ENCODER.encode(message)


def decode(data: bytes) -> ToEngine | FromEngine:
    """The message that `encode` was given. Raises ValueError for anything else."""
    if not data or data[0] not in _DECODERS:
        raise ValueError(f"Not a link message: it starts with {data[:1]!r}.")
    try:
        message: ToEngine | FromEngine = _DECODERS[data[0]].decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"Damaged link message of kind {data[:1]!r}: {error}") from error
    return message
