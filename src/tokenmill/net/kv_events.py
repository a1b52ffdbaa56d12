"""KV events as vLLM writes them (vllm/distributed/kv_events.py): msgpack of [time, [event, ...], rank].

An event is a map with its "type"; before June 2026 it was an array that began with it, and both are read. What is read
counts only as far as it says that a prompt without LoRA adapter, salt and images need not be computed: of blocks of the
first group of layers, in the memory that a server computes in or in a slower one that it loads from.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..core.kv_events import CLEARED, REMOVED, STORED, TokenEvent
from ..core.tiers import DISK, HOST, REMOTE

MEDIUM = "GPU"
"""Where blocks are. Those who read events take this word for "where the server computes", whatever computes; another
one they would take for a slower tier, or not know."""

_MEDIA = {HOST: "CPU", DISK: "STORAGE", REMOTE: "STORAGE"}
_TIERS = {None: "", MEDIUM: "", "CPU": HOST, "STORAGE": DISK, "DISK": DISK}

SEQ_BYTES = 8
END_SEQ = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
_NAME_BYTES = 8

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Names = list[int | bytes]


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: _Names
    parent_block_hash: int | bytes | None
    token_ids: list[_Token]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: _Names
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredRow(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Told(msgspec.Struct):
    """As it is written: lora_id and lora_name are there also where there is none."""

    type: str
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None


_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_encode = msgspec.msgpack.Encoder().encode
_read_batch = msgspec.msgpack.Decoder(_Batch).decode
_read_map = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode
_read_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow).decode
_read_any = msgspec.msgpack.Decoder().decode


def encode_batch(time_s: float, events: tuple[TokenEvent, ...], rank: int) -> bytes:
    """time_s: since 1970. Names of blocks become 64-bit numbers, as vLLM's are."""
    return _encode((time_s, [_written(event) for event in events], rank))


def _written(event: TokenEvent) -> Any:
    if event.kind == CLEARED:
        return {"type": "AllBlocksCleared"}
    names = [_number(name) for name in event.blocks]
    medium = _MEDIA[event.tier] if event.tier else MEDIUM
    if event.kind == REMOVED:
        return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}
    parent = None if event.parent is None else _number(event.parent)
    adapter = event.adapter or None
    return _Told("BlockStored", names, parent, event.tokens, event.block_size, None, medium, adapter)


def _number(name: int | bytes) -> int:
    return int.from_bytes(name[:_NAME_BYTES], "big") if isinstance(name, bytes) else name


def decode_batch(payload: bytes) -> tuple[float, list[TokenEvent]]:
    """When it was written, and what counts of it. Types that are not known are passed over. Raises ValueError."""
    try:
        batch = _read_batch(payload)
        return batch.ts, [event for raw in batch.events if (event := _read(bytes(raw))) is not None]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _read(raw: bytes) -> TokenEvent | None:
    is_map = bool(raw) and (0x80 <= raw[0] < 0x90 or raw[0] in (0xDE, 0xDF))
    try:
        event: Any = _read_map(raw) if is_map else _read_row(raw)
    except msgspec.ValidationError:
        found = _read_any(raw)
        kind = found.get("type") if isinstance(found, dict) else found[0] if isinstance(found, list) and found else None
        if isinstance(kind, str) and kind not in _TYPES:
            return None
        raise
    if isinstance(event, _Cleared):
        return TokenEvent(CLEARED)
    tier = _TIERS.get(event.medium)
    if tier is None or event.group_idx:
        return None
    names = tuple(event.block_hashes)
    if isinstance(event, _Removed):
        return TokenEvent(REMOVED, names, tier=tier)
    if event.lora_id is not None or event.lora_name or any(event.extra_keys or ()):
        return None
    if len(event.token_ids) != len(names) * event.block_size and (event.token_ids or not tier):
        raise msgspec.ValidationError(f"{len(names)} blocks of {event.block_size} with {len(event.token_ids)} tokens")
    return TokenEvent(STORED, names, event.parent_block_hash, tuple(event.token_ids), event.block_size, tier=tier)


def replayed(frames: list[bytes]) -> tuple[int, bytes]:
    """A reply to the wish for a replay, after its empty frame: [topic, number, payload], or without a topic as older
    vLLMs wrote it. The number is -1 at the end. Raises ValueError."""
    if frames[:1] == [b""] and len(frames) > 1:
        frames = frames[1:]  # the delimiter of a request
    at = 1 if len(frames) == 3 else 0
    if not 1 <= len(frames) <= 3 or len(frames[at]) != SEQ_BYTES:
        raise ValueError("no reply to the wish for a replay")
    seq = int.from_bytes(frames[at], "big", signed=True)
    return seq, frames[at + 1] if len(frames) > at + 1 else b""
