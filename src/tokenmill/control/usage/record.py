"""What a usage journal is made of: frames of one record each, behind a mark that names the format.

    file     mark (8 bytes) | frame | frame | ...
    frame    length of the record (4) | CRC-32 of it (4) | record
    record   msgpack: [seconds since the epoch, [entry, ...], [account, ...]]
    entry    [number of the account, calls, prompt tokens, cached ones among them, output tokens] and, where the same
             work may be told again after a crash, the name by which it counts once
    account  [number, tenant, key, model], before or with the first entry that uses the number in this file

A process that is killed leaves at most one frame that is not whole, as the last.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

import msgspec

MARK = b"tmusage1"
_HEAD = Struct("<II")
_MOST_BYTES = 1 << 20


class Account(NamedTuple):
    """On whose account work is done. `key`: the API key's id, "" where none is known; `model`: as answers name it."""

    tenant: str
    key: str
    model: str


class Counts(NamedTuple):
    calls: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


class Entry(NamedTuple):
    account: int
    calls: int
    prompt: int
    cached: int
    output: int
    once: str = ""


class Record(NamedTuple):
    wall_s: float
    entries: tuple[Entry, ...]
    accounts: tuple[tuple[int, str, str, str], ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def frame(wall_s: float, entries: Iterable[Sequence[object]], accounts: Sequence[Sequence[object]] = ()) -> bytes:
    """One record as it is written."""
    body = _encode((wall_s, entries, accounts))
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


class Damaged(Exception):
    """What stands there was never written by a journal; `offset`: of its first byte."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def records(data: bytes, offset: int) -> Iterable[tuple[int, Record]]:
    """(offset behind it, record) of each whole frame of `data` from `offset` on, which is that of a frame. Raises
    Damaged; bytes at the end that are no whole frame are left for later."""
    while offset + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, offset)
        end = offset + _HEAD.size + length
        if length > _MOST_BYTES:
            raise Damaged(offset)
        if end > len(data):
            return
        body = data[offset + _HEAD.size : end]
        if zlib.crc32(body) != crc:
            raise Damaged(offset)
        try:
            record = _decode(body)
        except msgspec.DecodeError:
            raise Damaged(offset) from None
        yield end, record
        offset = end
