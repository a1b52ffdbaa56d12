"""Messages between a KV store and its clients as bytes: one kind byte, then msgpack of the type in `core.tiers`.

The kind byte picks a decoder that knows the exact type, so that what is damaged, or of another version, fails here. On
the socket each message follows its length, 4 bytes, lowest first, as `net.framing` has it. The arena's descriptor comes
with the first byte of `Joined`.
"""

from __future__ import annotations

import msgspec

from ...core.tiers import (
    Drop,
    Fetch,
    Fetched,
    Find,
    Found,
    FromStore,
    Granted,
    Inquire,
    Join,
    Joined,
    Leased,
    NoteCosts,
    Pin,
    Promote,
    Store,
    Stored,
    TierEvents,
    Told,
    ToStore,
    WatchTiers,
    Written,
)

MAX_MESSAGE = 1 << 26
LENGTH = 4

_KINDS: dict[type, bytes] = {
    Join: b"J", Find: b"F", Fetch: b"G", Fetched: b"g", Store: b"S", Written: b"W", Promote: b"P", Drop: b"D",
    Pin: b"N", NoteCosts: b"C", WatchTiers: b"V", Inquire: b"I",
    Joined: b"j", Found: b"f", Leased: b"l", Granted: b"r", Stored: b"s", TierEvents: b"e", Told: b"t",
}  # fmt: skip
_DECODERS: dict[int, msgspec.msgpack.Decoder[ToStore | FromStore]] = {
    kind[0]: msgspec.msgpack.Decoder(type_) for type_, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToStore | FromStore) -> bytes:
    return _KINDS[type(message)] + _ENCODER.encode(message)


def decode(data: bytes) -> ToStore | FromStore:
    """The message that `encode` was given. Raises ValueError for anything else."""
    if not data or data[0] not in _DECODERS:
        raise ValueError(f"Not a message of a KV store: it starts with {data[:1]!r}.")
    try:
        return _DECODERS[data[0]].decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(f"Damaged message of kind {data[:1]!r}: {error}") from error


def framed(message: ToStore | FromStore) -> bytes:
    """With its length."""
    data = encode(message)
    return len(data).to_bytes(LENGTH, "little") + data
